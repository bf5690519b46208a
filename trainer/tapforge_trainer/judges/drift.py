"""Whether a judge and the verifier part during a run: the policy learns what the judge likes. Pure.

Compared are the latest episodes of which both have spoken, in pairs. They part where the judge calls at least `OVER`
more of them a success than the verifier does, and the 95 % interval of that difference (normal, paired) is above 0.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

#: of the share of successes
OVER: Final = 0.10
#: updates whose episodes are compared
UPDATES: Final = 5
#: episodes from which on anything is said
_FEWEST: Final = 30
_Z: Final = 1.96


@dataclass(frozen=True, slots=True)
class Difference:
    """Judge less verifier, over `episodes`."""

    episodes: int
    judged: float
    verified: float
    low: float

    @property
    def parted(self) -> bool:
        return self.episodes >= _FEWEST and self.judged - self.verified >= OVER and self.low > 0

    def __str__(self) -> str:
        return (
            f"the judge calls {100 * self.judged:.0f} % of the last {self.episodes} episodes a success, the verifier "
            f"{100 * self.verified:.0f} %: the policy may be learning what the judge likes. See what it rewarded with "
            "`tapforge judge calibrate`, and use more votes, another prompt or another model"
        )


@dataclass(slots=True)
class Drift:
    """Of the latest `UPDATES` updates."""

    _updates: deque[list[tuple[bool, bool]]] = field(default_factory=lambda: deque(maxlen=UPDATES))

    def update(self, episodes: Iterable[tuple[bool, bool]]) -> Difference:
        """Judged and verified success of each episode of an update."""
        self._updates.append(list(episodes))
        return difference([pair for update in self._updates for pair in update])


def difference(pairs: list[tuple[bool, bool]]) -> Difference:
    """From judged and verified success of each episode."""
    count = len(pairs)
    if not count:
        return Difference(0, 0.0, 0.0, 0.0)
    judged, verified = (sum(pair[place] for pair in pairs) / count for place in (0, 1))
    apart = judged - verified
    variance = sum((int(one) - int(other) - apart) ** 2 for one, other in pairs) / count
    return Difference(count, judged, verified, apart - _Z * math.sqrt(variance / count))
