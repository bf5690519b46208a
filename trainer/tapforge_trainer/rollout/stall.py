"""How long an event loop stands still: a timer asks to be run again and again, and how much later it is run is noted.

A stall that falls between two wishes is seen shorter than it was, by at most their distance. Memory is bounded: numbers
are kept in a histogram whose classes are 5 % apart, but for the longest, which is exact.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

#: seconds between two wishes
_EVERY = 0.02
#: the upper end of the first class, and how much further that of the next one is
_LEAST, _GROWTH = 1e-4, 1.05


@dataclass(frozen=True, slots=True)
class Stalls:
    """Seconds."""

    longest: float
    #: 99.9 % are at most this long
    p999: float


class StallMonitor:
    """Watches the running loop until it is closed. By a timer, which takes less CPU than a task that sleeps."""

    def __init__(self) -> None:
        self._seen = Histogram()
        self._loop = asyncio.get_running_loop()
        self._wish()

    def stalls(self, *, anew: bool = True) -> Stalls:
        """Since the last call with `anew`."""
        seen = self._seen
        if anew:
            self._seen = Histogram()
        return Stalls(seen.longest, seen.quantile(0.999))

    def close(self) -> None:
        self._timer.cancel()

    def _wish(self) -> None:
        self._due = self._loop.time() + _EVERY
        self._timer = self._loop.call_at(self._due, self._granted)

    def _granted(self) -> None:
        self._seen.add(self._loop.time() - self._due)
        self._wish()


class Histogram:
    """Of seconds. Negative ones count as 0."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._counts: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)
        number = math.ceil(math.log(seconds / _LEAST, _GROWTH)) if seconds > _LEAST else 0
        self._counts[number] = self._counts.get(number, 0) + 1

    def quantile(self, share: float) -> float:
        """The upper end of the class below which this share lies; 0 for nothing."""
        left = share * sum(self._counts.values())
        for number in sorted(self._counts):
            left -= self._counts[number]
            if left <= 0:
                return min(self.longest, _LEAST * _GROWTH**number)
        return 0.0
