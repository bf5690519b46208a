"""What the API server's audit log says about writes: user, object, when it came in and when it was answered.

The log is followed while it grows. Reads are not in it. Times are seconds since the epoch, of the API server's clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from sys import intern


@dataclass(frozen=True, slots=True)
class Write:
    user: str
    agent: str
    verb: str
    #: "pods", "pods/status", ...
    resource: str
    namespace: str
    name: str
    status: int
    began: float
    ended: float

    @property
    def done(self) -> bool:
        return 200 <= self.status < 300


def read(line: str) -> Write | None:
    """None for a line that records no finished write."""
    event = json.loads(line)
    about = event.get("objectRef")
    if event.get("stage") != "ResponseComplete" or not about:
        return None
    sub = about.get("subresource")
    return Write(
        user=intern(event["user"].get("username", "")),
        agent=intern(event.get("userAgent", "")),
        verb=intern(event["verb"]),
        resource=intern(f"{about['resource']}/{sub}" if sub else about["resource"]),
        namespace=intern(about.get("namespace", "")),
        name=about.get("name", ""),
        status=(event.get("responseStatus") or {}).get("code", 0),
        began=_seconds(event["requestReceivedTimestamp"]),
        ended=_seconds(event["stageTimestamp"]),
    )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


class Audit:
    """One log. Not to be used by several threads at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self._writes: list[Write] = []

    def mark(self) -> int:
        """A place in the log: the end of what was written so far."""
        self._follow()
        return len(self._writes)

    def since(self, mark: int) -> list[Write]:
        self._follow()
        return self._writes[mark:]

    def wait(
        self, what: str, mark: int, wanted: Callable[[Write], bool], count: int, seconds: float, poll: float = 0.2
    ) -> list[Write]:
        """The first `count` writes of different objects since `mark` that are `wanted`. Raises TimeoutError."""
        end = time.monotonic() + seconds
        found: dict[tuple[str, str, str], Write] = {}
        while True:
            new = self.since(mark)
            mark += len(new)
            for write in filter(wanted, new):
                found.setdefault((write.resource, write.namespace, write.name), write)
            if len(found) >= count:
                return list(found.values())[:count]
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: {len(found)} of {count} after {seconds:g} s")
            time.sleep(poll)

    def _follow(self) -> None:
        if self._path.exists():
            self._writes.extend(self._new())

    def _new(self) -> Iterator[Write]:
        with self._path.open("rb") as log:
            log.seek(self._offset)
            text = self._rest + log.read()
            self._offset = log.tell()
        *lines, self._rest = text.split(b"\n")
        for line in lines:
            if line and (write := read(line.decode())) is not None:
                yield write
