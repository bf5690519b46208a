"""A loop whose time stands still while there is anything to do, and jumps to the next timer when there is not.

For tests that live in memory: a second takes no second, and no machine is too slow for one. Whatever a test or the
product waits for by the loop's clock (`sleep`, `timeout`, `wait`, `call_later`) happens in the order of its times.
"""

from __future__ import annotations

import asyncio
from typing import Any


class OwnTime:
    def __init__(self, loop: Any):
        self._now = loop.time()
        self._select = loop._selector.select
        loop.time = self.now
        loop._selector.select = self._jump

    def now(self) -> float:
        return self._now

    def _jump(self, timeout: float | None = None) -> Any:
        """Instead of a wait for sockets, of which there are none but the loop's own."""
        if timeout is None:
            return self._select(None)
        events = self._select(0)
        if not events:
            self._now += timeout
        return events


def begin() -> OwnTime:
    """For the running loop, until it is closed."""
    return OwnTime(asyncio.get_running_loop())
