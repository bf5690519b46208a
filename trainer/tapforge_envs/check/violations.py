"""What a check found, in words, with the request that showed it as a line for a terminal."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..wire import TOKEN_VARIABLE

#: characters of a body that a line shows
_SHOWN = 1500


@dataclass(frozen=True, slots=True)
class Violation:
    #: the rule that was broken: "health", "idempotent step", ...
    rule: str
    words: str
    #: repeats what showed it; "" where nothing was sent. Equal words are one violation whatever showed it
    request: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.rule}: {self.words}" + (f"\n    {self.request}" if self.request else "")


def curl(method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes | None = None) -> str:
    """The request as a command. A token is named, not written down."""
    parts = ["curl", "-sS", *(["-X", method] if method != "GET" or body is not None else []), shlex.quote(url)]
    for name, value in (headers or {}).items():
        if name == "Authorization":
            parts.append(f'-H "Authorization: Bearer ${TOKEN_VARIABLE}"')
        else:
            parts.append(f"-H {shlex.quote(f'{name}: {value}')}")
    if body is not None:
        text = body.decode("utf-8", "backslashreplace")
        more = f" # and {len(text) - _SHOWN} characters more" if len(text) > _SHOWN else ""
        parts.append(f"-d {shlex.quote(text[:_SHOWN])}{more}")
    return " ".join(parts)


def object_of(content: bytes) -> dict[str, Any] | None:
    """The JSON object that a body holds, or None."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def error_of(content: bytes) -> str:
    """The server's own words about a refusal, in parentheses; "" without any."""
    fields = object_of(content)
    error = fields.get("error") if fields else None
    return f" ({error})" if isinstance(error, str) and error else ""
