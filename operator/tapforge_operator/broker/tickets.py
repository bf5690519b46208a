"""Calls that wait for an answer of the ledger. Several may wait on one ticket: a request that was sent again."""

from __future__ import annotations

import asyncio
import time

from .records import Answer
from .writes import NotLeading


class Tickets:
    def __init__(self) -> None:
        self._calls: dict[int, list[asyncio.Future[Answer]]] = {}
        self._since: dict[int, float] = {}

    def wait_on(self, ticket: int) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls.setdefault(ticket, []).append(future)
        self._since.setdefault(ticket, time.monotonic())
        return future

    def answer(self, answer: Answer) -> None:
        for future in self._calls.get(answer.ticket, ()):
            if not future.done():
                future.set_result(answer)

    def leave(self, ticket: int, future: asyncio.Future[Answer]) -> bool:
        """True when nobody else waits on the ticket."""
        futures = self._calls.get(ticket, [])
        if future in futures:
            futures.remove(future)
        if not futures:
            self._calls.pop(ticket, None)
            self._since.pop(ticket, None)
        return not futures

    def waited(self, ticket: int) -> float | None:
        """Seconds since the first call."""
        since = self._since.get(ticket)
        return None if since is None else time.monotonic() - since

    def send_away(self) -> None:
        """Whoever waits is told to ask another broker."""
        calls, self._calls, self._since = self._calls, {}, {}
        for future in (f for futures in calls.values() for f in futures if not f.done()):
            future.set_exception(NotLeading())
