"""Since when this process has followed the cluster without a gap: it can't tell for how long something was so before.

1. A gap is a time longer than `gap` in which the API server said nothing: it was away, or this process was stopped. An
   age that a plan reckons with counts from `since` at the earliest, so that an outage ages nothing; in a gap nothing
   has any age.
2. Gaps are measured on a clock that can't be set and goes on while the machine sleeps. A wall clock that is set is a
   gap too: ages are differences between its time and timestamps of the cluster, and would jump with it.
3. A new leader begins anew (`begin`): what was reported was reported to somebody else.

Times are seconds; `since` is of the epoch, as the wall clock has it now.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from .kube.election import since_boot

#: the leader Lease is renewed every 3 s, and an answer to that is one
GAP: Final = 10.0
#: a step of the wall clock that counts as one: graces are longer, and clocks that are kept right make smaller ones
_STEP: Final = 5.0


class Attention:
    def __init__(
        self, gap: float = GAP, wall: Callable[[], float] = time.time, clock: Callable[[], float] = since_boot
    ):
        self._gap = gap
        self._wall = wall
        self._clock = clock
        self._began = self._heard = clock()
        self._offset = wall() - self._began

    def heard(self) -> None:
        """The API server said something, just now."""
        if self._lapsed:
            self.begin()
        self._heard = self._clock()

    def begin(self) -> None:
        """Nothing is any older than this moment."""
        self._began = self._heard = self._clock()
        self._offset = self._wall() - self._began

    @property
    def since(self) -> float:
        """Epoch time since which there was no gap; now, while there is one."""
        return self._wall() - self.watched(self._began)

    def moment(self) -> float:
        """Now, on the clock that can't be set: something was seen for the first time, to be asked for in `watched`."""
        return self._clock()

    def watched(self, moment: float) -> float:
        """For how long something has been followed that was first seen at that moment."""
        return 0.0 if self._lapsed else max(0.0, self._clock() - max(moment, self._began))

    @property
    def _lapsed(self) -> bool:
        now = self._clock()
        return now - self._heard > self._gap or abs(self._wall() - now - self._offset) > _STEP
