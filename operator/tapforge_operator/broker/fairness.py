"""Who has to give slots back so that everybody who wants some gets a fair share. Pure.

1. A higher priority is served whole before a lower one gets anything.
2. Within a priority everybody gets the same number of slots (max-min fair), or less where less is wanted. What does not
   divide stays with those who have more now, so that nothing moves for it.
3. Slots are asked back only where somebody else gets them, never more than are missing after what is free or will soon
   be, and from the lowest priority and the largest surplus first.
4. Once moved, nothing moves again: applied to its own outcome, the answer is "nobody".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from .records import Claimant


@dataclass(frozen=True, slots=True)
class Demand:
    """What a claimant has, and what it wants beyond that."""

    claimant: Claimant
    held: int
    wanted: int

    @property
    def priority(self) -> int:
        return self.claimant[1]


def shares(capacity: int, demands: Sequence[Demand]) -> dict[Claimant, int]:
    """How many of `capacity` slots each claimant should have."""
    result: dict[Claimant, int] = {}
    ordered = sorted(demands, key=lambda s: -s.priority)
    for _, tier in groupby(ordered, key=lambda s: s.priority):
        got = _level(capacity, list(tier))
        capacity -= sum(got.values())
        result |= got
    return result


def within_reach(claimant: Claimant, wanted: int, held: Mapping[Claimant, int], free: int) -> int:
    """Slots that a claimant which wants `wanted` in all can have now: what is free and what is its own already, or its
    share of everything, which others give up at the end of their episodes."""
    mine = sum(slots for other, slots in held.items() if other[0] == claimant[0])
    others = [Demand(other, slots, 0) for other, slots in held.items() if other[0] != claimant[0]]
    everybody = [*others, Demand(claimant, mine, max(0, wanted - mine))]
    return max(mine + free, shares(sum(s.held for s in everybody) + free, everybody)[claimant])


def _level(capacity: int, tier: list[Demand]) -> dict[Claimant, int]:
    """Fills everybody to the same level, as water does."""
    demand = {s.claimant: s.held + s.wanted for s in tier}
    result: dict[Claimant, int] = {}
    left = capacity
    for position, claimant in enumerate(sorted(demand, key=lambda p: (demand[p], p))):
        if demand[claimant] > left // (len(demand) - position):
            break
        result[claimant] = demand[claimant]
        left -= demand[claimant]
    rest = [s for s in tier if s.claimant not in result]
    if rest:
        level, over = divmod(left, len(rest))
        for position, one in enumerate(sorted(rest, key=lambda s: (-s.held, s.claimant))):
            result[one.claimant] = level + (position < over)
    return result


def recalls(demands: Sequence[Demand], coming: int) -> Mapping[Claimant, int]:
    """How many slots each claimant should be asked for, in all. `coming`: slots that are free or soon will be."""
    if not any(s.wanted for s in demands):
        return {}
    fair = shares(sum(s.held for s in demands) + coming, demands)
    missing = sum(max(0, fair[s.claimant] - s.held) for s in demands) - coming
    result: dict[Claimant, int] = {}
    surplus = [s for s in demands if s.held > fair[s.claimant]]
    # One at a time from the largest surplus of the lowest priority: the sums are small, and ties are exact.
    for _, tier in groupby(sorted(surplus, key=lambda s: s.priority), key=lambda s: s.priority):
        over = {s.claimant: s.held - fair[s.claimant] for s in tier}
        while missing > 0 and over:
            claimant = max(over, key=lambda p: (over[p], p))
            result[claimant] = result.get(claimant, 0) + 1
            missing -= 1
            over[claimant] -= 1
            if not over[claimant]:
                del over[claimant]
    return result
