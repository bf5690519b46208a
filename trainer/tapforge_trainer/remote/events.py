"""The driver's events.jsonl, piece by piece.

1. Each attempt writes a file of its own: a place in one says nothing of another, which is read from its beginning.
2. A line that is not an event (cut off by a crash) is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from .api import Exec

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EventOffset:
    #: of the run, in the Pod; "": an image whose program doesn't name it
    folder: str = ""
    offset: int = 0


START: Final = EventOffset()


def read_on(
    program: Callable[[Sequence[str]], AbstractContextManager[Exec]], place: EventOffset
) -> tuple[list[Event], EventOffset]:
    """From a place on. `program`: runs cluster/files.py with such words in the Pod."""
    head, data = _part(program, place.offset)
    folder = head.get("folder", "")
    if place.offset and folder != place.folder:
        head, data = _part(program, 0)
        folder = head.get("folder", "")
    found = [event for line in data.split(b"\n") if (event := _event(line)) is not None]
    return found, EventOffset(folder, head["offset"] + head["size"])


def _part(
    program: Callable[[Sequence[str]], AbstractContextManager[Exec]], offset: int
) -> tuple[dict[str, Any], bytes]:
    with program(("events", str(offset))) as answer:
        head = json.loads(answer.readline())
        data = bytearray()
        while len(data) < head["size"]:
            data += answer.read(head["size"] - len(data))
    return head, bytes(data)


def _event(line: bytes) -> Event | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found else None
