"""The clock of group deadlines: rings when the earliest one has passed, and stands still while nobody can play.

A pause for new weights or a measurement in between is not the phones' fault: all deadlines move by its length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .groups import GroupBook


class GroupDeadlines:
    def __init__(self, book: GroupBook, ring: Callable[[], None]):
        self._loop = asyncio.get_running_loop()
        self._book = book
        self._ring = ring
        self._alarm: asyncio.TimerHandle | None = None
        self._holds = 0
        self._held_since = 0.0

    def arm(self) -> None:
        """Sets the alarm to the earliest deadline; to be called whenever the book has changed."""
        self.disarm()
        when = self._book.next_deadline()
        if when is not None and not self._holds:
            self._alarm = self._loop.call_at(when, self._ring)

    def disarm(self) -> None:
        if self._alarm:
            self._alarm.cancel()
            self._alarm = None

    def hold(self) -> None:
        """From now on no time passes, until every hold was let go."""
        if self._holds == 0:
            self._held_since = self._loop.time()
        self._holds += 1
        self.disarm()

    def let_go(self) -> None:
        self._holds -= 1
        if self._holds == 0:
            self._book.postpone(self._loop.time() - self._held_since)
            self.arm()
