"""A clock that runs only while the operator does.

Claims end by this clock. Where the process stood still (the machine was suspended, one core was busy with something
else), its holders' renewals are still in its sockets: that time ages nobody's claim. Wall clocks, and their jumps, have
no part in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class RunningClock:
    def __init__(self, longest_step: float = 1.0, monotonic: Callable[[], float] = time.monotonic):
        """`longest_step`: seconds; a longer time between two ticks counts as this long."""
        self._longest = longest_step
        self._monotonic = monotonic
        self._ran = 0.0
        self._ticked = monotonic()

    def now(self) -> float:
        """Seconds that the operator has run."""
        return self._ran + min(max(0.0, self._monotonic() - self._ticked), self._longest)

    def tick(self) -> float:
        """To be called more often than `longest_step`; returns `now`."""
        self._ran = self.now()
        self._ticked = self._monotonic()
        return self._ran
