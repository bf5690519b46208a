"""Results of one engine, kept for the clients that asked until they collect them. One event loop; no vLLM, no Ray.

- Every client sees its own results alone. Of several polls of a client the newest counts: the answers of the
  others are not read any more.
- A client that has not polled for `patience` seconds is gone: what it asked for is given back by `expire`, to be
  aborted, and its results are dropped. Should it come back, it is notified of that (None) and asks again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from .pauses import PauseMeter
from .wire import GenerateResult, engine_key

#: clients that are remembered as gone
_REMEMBERED = 4096


@dataclass(slots=True)
class _Box:
    seen: float
    #: keys without an answer
    waiting: set[str] = field(default_factory=set)
    done: list[tuple] = field(default_factory=list)
    some: asyncio.Event = field(default_factory=asyncio.Event)
    #: polls so far, and those under way
    newest: int = 0
    polling: int = 0
    #: the last answer said that the engine stands still
    told_paused: bool = False


#: a poll's answer: rows of results, whether the engine stands still, and for how many seconds it did so far
Collected = tuple[list[tuple], bool, float]


class Mailboxes:
    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic):
        self._patience, self._clock = patience, clock
        self._boxes: dict[str, _Box] = {}
        self._gone: dict[str, None] = {}
        self._pauses = PauseMeter(clock)

    def expect(self, client: str, keys: Iterable[str]) -> set[str]:
        """Returns those that were not asked for before."""
        box = self._box(client)
        new = {key for key in keys if key not in box.waiting}
        box.waiting |= new
        return new

    def withdraw(self, client: str, keys: Iterable[str]) -> list[str]:
        """The client waits for these no longer. Returns the engine's keys of those that have no answer yet."""
        box = self._boxes.get(client)
        if box is None:
            return []
        known = box.waiting.intersection(keys)
        box.waiting -= known
        return [engine_key(client, key) for key in sorted(known)]

    def deliver(self, results: Sequence[GenerateResult]) -> None:
        """Results under the engine's keys."""
        for result in results:
            client, key = result.key.split("/", 1)
            box = self._boxes.get(client)
            if box is not None and key in box.waiting:
                box.waiting.discard(key)
                box.done.append(result.row(key))
                box.some.set()

    async def collect(self, client: str, seconds: float) -> Collected | None:
        if client in self._gone:
            del self._gone[client]
            return None
        box = self._box(client)
        box.newest += 1
        mine = box.newest
        if not box.done and box.told_paused == self._pauses.paused:
            box.some.clear()
            box.polling += 1
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(box.some.wait(), seconds)
            finally:
                box.polling -= 1
                box.seen = self._clock()
        if mine != box.newest:
            return [], self._pauses.paused, self._pauses.seconds
        box.told_paused = self._pauses.paused
        done, box.done = box.done, []
        if not box.waiting and not box.polling:
            self._boxes.pop(client, None)
        return done, self._pauses.paused, self._pauses.seconds

    def expire(self) -> list[str]:
        """The engine's keys of what clients asked for that are gone."""
        now, keys = self._clock(), []
        for client, box in list(self._boxes.items()):
            if not box.polling and now - box.seen > self._patience:
                keys += [engine_key(client, key) for key in sorted(box.waiting)]
                del self._boxes[client]
                self._gone[client] = None
        for client in list(self._gone)[:-_REMEMBERED]:
            del self._gone[client]
        return keys

    def pause(self) -> None:
        """The engine stands still for new weights; clients that poll are notified at once."""
        self._pauses.pause()
        self._tell()

    def proceed(self) -> None:
        self._pauses.proceed()
        self._tell()

    def _tell(self) -> None:
        for box in self._boxes.values():
            box.some.set()

    def _box(self, client: str) -> _Box:
        box = self._boxes.get(client)
        if box is None:
            box = self._boxes[client] = _Box(self._clock())
        box.seen = self._clock()
        return box
