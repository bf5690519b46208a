"""What a person reads while an endpoint gives no answer: that it is waited for, why, and how long still.

The first line comes once requests have failed for a second, the next ones after pauses that double from half a minute
to ten minutes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

#: seconds without an answer after which a failed request is said, and until the next one is: first and at most
_QUIET: Final = 1.0
_AGAIN, _LONGEST = 30.0, 600.0


class Waiting:
    """Of one endpoint."""

    def __init__(self, shown: str, say: Callable[[str], None] | None):
        """`shown`: what the endpoint is called; `say`: for people, None: to none."""
        self._shown, self._say = shown, say
        #: loop time since which no request has been answered, of those that failed since the last answer
        self._since: float | None = None
        self._failures = 0
        self._not_before, self._pause = -math.inf, _AGAIN

    def answered(self) -> None:
        self._since, self._pause = None, _AGAIN

    def failed(self, why: str, now: float, left: float) -> None:
        """`left`: seconds until the question is given up."""
        if self._since is None:
            self._since, self._failures = now, 0
        self._failures += 1
        quiet = now - self._since
        if self._say is not None and quiet >= _QUIET and now >= self._not_before:
            self._not_before, self._pause = now + self._pause, min(2 * self._pause, _LONGEST)
            self._say(
                f"waiting for {self._shown}: {self._failures:,} requests failed in {quiet:.0f} s without an answer, "
                f"the last one: {why}; a question is given up in {max(0.0, left):.0f} s"
            )


class SaidOnce:
    """Passes on what several processes say while they wait for one endpoint, about as often as one of them says it."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._say, self._clock = say, clock
        #: when a line came last, until when the next ones are left out, and for how long after one of them; by what it
        #: is about, which is before its first colon with a blank
        self._about: dict[str, tuple[float, float, float]] = {}

    def __call__(self, text: str) -> None:
        about, now = text.partition(": ")[0], self._clock()
        came, not_before, pause = self._about.get(about, (-math.inf, now, _AGAIN))
        if now - came > 2 * _LONGEST:  # it had answered since
            not_before, pause = now, _AGAIN
        if said := now >= not_before:
            # A little less: a line takes up to a second to get here.
            not_before, pause = now + 0.9 * pause, min(2 * pause, _LONGEST)
        self._about[about] = now, not_before, pause
        if said:
            self._say(text)
