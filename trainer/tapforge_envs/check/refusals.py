"""Requests that no server of a protocol can serve, and how it has to answer: not as if it had served them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

#: an error of any kind
_ERROR = range(400, 600)
_UNREADABLE = (400, 422)


@dataclass(frozen=True, slots=True)
class Refusal:
    what: str
    method: str
    path: str
    body: bytes | None
    #: statuses, one of which it has to be
    wanted: Collection[int]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


_MOBILEWORLD = (
    Refusal("a path that there isn't", "GET", "/no-such-path", None, (404,)),
    Refusal("an action without a device", "POST", "/step", _json({"action": {"action_type": "wait"}}), _UNREADABLE),
    Refusal(
        "an action that there isn't",
        "POST",
        "/step",
        _json({"device": "emulator-5554", "action": {"action_type": "no-such-action"}}),
        _UNREADABLE,
    ),
    Refusal("a body that is not JSON", "POST", "/step", b"{", _UNREADABLE),
    Refusal("a verdict without a task", "GET", "/task/eval", None, _UNREADABLE),
    Refusal(
        "a verdict on a task that there isn't",
        "GET",
        "/task/eval",
        _json({"task_name": "no-such-task", "req_device": "emulator-5554"}),
        _ERROR,
    ),
)
_ANDROIDWORLD = (
    Refusal("a path that there isn't", "GET", "/no-such-path", None, (404,)),
    Refusal("a screenshot without its parameter", "GET", "/screenshot", None, _ERROR),
    Refusal("an action that there isn't", "POST", "/execute_action", _json({"action_type": "no-such-action"}), _ERROR),
    Refusal(
        "a verdict on a task that there isn't", "GET", "/task/score?task_type=no-such-task&task_idx=0", None, _ERROR
    ),
)


def refusals_of(protocol: str) -> tuple[Refusal, ...]:
    return {"mobileworld": _MOBILEWORLD, "androidworld": _ANDROIDWORLD}.get(protocol, ())


def as_words(wanted: Collection[int]) -> str:
    """The wanted statuses, for a person."""
    return "an error" if len(wanted) > 3 else " or ".join(map(str, wanted))
