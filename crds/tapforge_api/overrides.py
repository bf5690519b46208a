"""`--set path=value` on top of a file.

- The path is in camelCase or snake_case; `spec.` may be left out.
- Lists: `[0]` or `.0`; one past the end appends. Names with dots: `["a.b/c"]`.
- The value is YAML; null unsets. Nothing at all is refused: it is what a shell makes of a variable that isn't set.
- Setting inside an exactly-one-of struct chooses that member: the others go.
- `path?=value` sets what nothing before it has said; another member of an exactly-one-of struct says it too.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel

from .base import OneOf
from .document import scalar
from .errors import Problem, SpecError, render_path, suggest
from .shapes import Path, aliases, model_at, shape_at

_PART = re.compile(r"""\.?(?:(?P<name>[^.\[\]="]+)|\[(?P<index>\d+)\]|\[(?P<quoted>"(?:[^"\\]|\\.)*")\])""")
#: what leads further into a shape
_TAKES: dict[str, tuple[type, ...]] = {"struct": (str,), "map": (str,), "list": (int,), "free": (str, int), "value": ()}
_TOP = ("apiVersion", "api_version", "kind", "metadata", "spec", "status")


def apply_override(model: type[BaseModel], data: dict[str, Any], override: str) -> Path | None:
    """Carries out one `path=value` or `path?=value` on `data` in place and returns the path in YAML's names; None where
    it was set already."""
    raw, equals, text = _split(override)
    raw = raw.removesuffix("?").strip()
    if not equals or not raw:
        raise _refuse(override, "expected PATH=VALUE, as in spec.seed=3")
    path = _path(model, raw, override)
    value = scalar(text, f"--set {override}")
    if unless_said(override) and _is_said(model, data, path):
        return None
    here: Any = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        owner = model_at(model, path[:depth])
        if isinstance(here, dict) and isinstance(part, str):
            if (
                owner is not None
                and issubclass(owner, OneOf)
                and part in aliases(owner)
                and not (last and value is None)
            ):
                for other in set(here) - {part}:
                    del here[other]
            if last and value is None:
                here.pop(part, None)
            elif last:
                here[part] = value
            else:
                if here.get(part) is None:
                    here[part] = [] if isinstance(path[depth + 1], int) else {}
                here = here[part]
        elif isinstance(here, list) and isinstance(part, int):
            if part > len(here):
                raise _refuse(override, f"{render_path(path[:depth])} has {len(here)} items; next index: {len(here)}")
            if part == len(here):
                here.append(None)
            if last:
                here[part] = value
            else:
                if here[part] is None:
                    here[part] = [] if isinstance(path[depth + 1], int) else {}
                here = here[part]
        else:
            what = "a list" if isinstance(here, list) else "a struct" if isinstance(here, dict) else "a single value"
            raise _refuse(override, f"{render_path(path[:depth])} is {what}; {part!r} can't be set in it")
    return path


def unless_said(override: str) -> bool:
    """Whether it gives way to a value that is set already: `path?=value`."""
    return _split(override)[0].endswith("?")


def is_said(model: type[BaseModel], data: dict[str, Any], override: str) -> bool:
    """Whether `data` says what an override would set. Raises SpecError."""
    return _is_said(model, data, _path(model, _split(override)[0].removesuffix("?").strip(), override))


def _is_said(model: type[BaseModel], data: dict[str, Any], path: Path) -> bool:
    here: Any = data
    for depth, part in enumerate(path):
        if isinstance(here, list) and isinstance(part, int):
            if part >= len(here):
                return False
        elif not isinstance(here, dict):
            return here is not None
        else:
            owner = model_at(model, path[:depth])
            if owner is not None and issubclass(owner, OneOf) and set(here) - {part}:
                return True
            if part not in here:
                return False
        here = here[part]
    return True


def _refuse(override: str, message: str) -> SpecError:
    return SpecError("--set", [Problem(message, place=f"--set {override}")])


def _split(override: str) -> tuple[str, str, str]:
    """At the first `=` that is not inside a quoted name."""
    match = re.match(r'((?:"(?:[^"\\]|\\.)*"|[^="])*)(=?)(.*)\Z', override, re.DOTALL)
    return (match[1].strip(), match[2], match[3]) if match else (override, "", "")


def _path(model: type[BaseModel], raw: str, override: str) -> Path:
    parts: list[str | int] = []
    position = 0
    while position < len(raw):
        match = _PART.match(raw, position)
        if match is None or (position == 0 and raw[0] == "."):
            raise _refuse(override, f"the path can't be read from {raw[position:]!r} on")
        if match["index"] is not None:
            parts.append(int(match["index"]))
        else:
            parts.append(json.loads(match["quoted"]) if match["quoted"] is not None else match["name"])
        position = match.end()
    if parts[0] not in _TOP:
        parts.insert(0, "spec")
    path: list[str | int] = []
    for part in parts:
        shape = shape_at(model, tuple(path))
        known = {} if shape.model is None else {n: f.alias or n for n, f in shape.model.model_fields.items()}
        if shape.kind == "list" and isinstance(part, str) and part.isdecimal():
            part = int(part)
        path.append(known.get(part, part) if isinstance(part, str) else part)
        if not isinstance(part, _TAKES[shape.kind]):
            what = {"value": "a single value"}.get(shape.kind, f"a {shape.kind}")
            raise _refuse(override, f"{render_path(tuple(path[:-1]))} is {what}; {part!r} can't be set in it")
        open_ended = shape.model is None or shape.model.model_config.get("extra") == "allow"
        if not open_ended and path[-1] not in known.values():
            raise _refuse(override, f"unknown field {render_path(tuple(path))}; {suggest(model, tuple(path))}")
    return tuple(path)
