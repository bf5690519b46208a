"""Whose turn it is: how much of callers that have proved nothing yet is read and checked at once.

1. Of one caller `AT_ONCE` requests are read and checked at once, and `QUEUE` more wait for their turn, at most `WAIT`
   seconds. Whoever comes then, or waited that long, is refused; nobody else is kept waiting by it.
2. A request that is refused keeps its place for `PENALTY` seconds, so that wrong ones come at a bounded rate.
3. A caller is its address. One that another operator passes on is named by it: such names share `FORWARDED` times as
   much room, so that who only pretends to pass somebody on takes no place but those of its own address.

What is proved (a token that the API server knows, the secret of a claim) has other limits, which are not these.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from .auth import Denied

AT_ONCE: Final = 4
QUEUE: Final = 1024
FORWARDED: Final = 16
WAIT: Final = 15.0
PENALTY: Final = 0.1


class Turns:
    def __init__(self) -> None:
        self._lines: dict[tuple[str, ...], _Line] = {}

    @asynccontextmanager
    async def turn(self, peer: str, behind: str = "") -> AsyncIterator[None]:
        """Waits for the turn of the caller at address `peer`, or of the one that it passes on. Raises Denied."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._place((peer, behind), 1))
            if behind:  # in this order: who waits in its own line takes no place in the one that it shares
                await stack.enter_async_context(self._place((peer,), FORWARDED))
            try:
                yield
            except Denied as error:
                if error.status < 500:
                    await asyncio.sleep(PENALTY)
                raise

    @asynccontextmanager
    async def _place(self, key: tuple[str, ...], times: int) -> AsyncIterator[None]:
        line, most = self._lines.setdefault(key, _Line(AT_ONCE * times)), (AT_ONCE + QUEUE) * times
        if line.there >= most:
            raise _crowded(f"{line.there} requests of this caller, of at most {most}, wait until they are checked")
        line.there += 1
        try:
            try:
                async with asyncio.timeout(WAIT):
                    await line.room.acquire()
            except TimeoutError as error:
                raise _crowded(f"other requests of this caller were being checked for {WAIT:g} s") from error
            try:
                yield
            finally:
                line.room.release()
        finally:
            line.there -= 1
            if not line.there:
                del self._lines[key]


class _Line:
    def __init__(self, room: int):
        self.room = asyncio.Semaphore(room)
        #: requests that are checked or wait for it
        self.there = 0


def _crowded(why: str) -> Denied:
    return Denied(429, "TooManyCalls", f"{why}; ask again later")
