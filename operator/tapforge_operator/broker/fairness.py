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

from .records import Party


@dataclass(frozen=True, slots=True)
class Stake:
    """What a party has, and what it wants beyond that."""

    party: Party
    held: int
    wanted: int

    @property
    def priority(self) -> int:
        return self.party[1]


def shares(capacity: int, stakes: Sequence[Stake]) -> dict[Party, int]:
    """How many of `capacity` slots each party should have."""
    result: dict[Party, int] = {}
    ordered = sorted(stakes, key=lambda s: -s.priority)
    for _, tier in groupby(ordered, key=lambda s: s.priority):
        got = _level(capacity, list(tier))
        capacity -= sum(got.values())
        result |= got
    return result


def within_reach(party: Party, wanted: int, held: Mapping[Party, int], free: int) -> int:
    """Slots that a party which wants `wanted` in all can have now: what is free and what is its own already, or its
    share of everything, which others give up at the end of their episodes."""
    mine = sum(slots for other, slots in held.items() if other[0] == party[0])
    others = [Stake(other, slots, 0) for other, slots in held.items() if other[0] != party[0]]
    everybody = [*others, Stake(party, mine, max(0, wanted - mine))]
    return max(mine + free, shares(sum(s.held for s in everybody) + free, everybody)[party])


def _level(capacity: int, tier: list[Stake]) -> dict[Party, int]:
    """Fills everybody to the same level, as water does."""
    demand = {s.party: s.held + s.wanted for s in tier}
    result: dict[Party, int] = {}
    left = capacity
    for position, party in enumerate(sorted(demand, key=lambda p: (demand[p], p))):
        if demand[party] > left // (len(demand) - position):
            break
        result[party] = demand[party]
        left -= demand[party]
    rest = [s for s in tier if s.party not in result]
    if rest:
        level, over = divmod(left, len(rest))
        for position, stake in enumerate(sorted(rest, key=lambda s: (-s.held, s.party))):
            result[stake.party] = level + (position < over)
    return result


def recalls(stakes: Sequence[Stake], coming: int) -> Mapping[Party, int]:
    """How many slots each party should be asked for, in all. `coming`: slots that are free or soon will be."""
    if not any(s.wanted for s in stakes):
        return {}
    fair = shares(sum(s.held for s in stakes) + coming, stakes)
    missing = sum(max(0, fair[s.party] - s.held) for s in stakes) - coming
    result: dict[Party, int] = {}
    surplus = [s for s in stakes if s.held > fair[s.party]]
    # One at a time from the largest surplus of the lowest priority: the sums are small, and ties are exact.
    for _, tier in groupby(sorted(surplus, key=lambda s: s.priority), key=lambda s: s.priority):
        over = {s.party: s.held - fair[s.party] for s in tier}
        while missing > 0 and over:
            party = max(over, key=lambda p: (over[p], p))
            result[party] = result.get(party, 0) + 1
            missing -= 1
            over[party] -= 1
            if not over[party]:
                del over[party]
    return result
