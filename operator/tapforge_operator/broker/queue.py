"""Who waits for slots of a pool, and whose turn it is.

The turn is that of the highest priority, within it of who has the fewest slots, within it of who came first. Who has as
many as it may have waits until one of them ends. A wish that was answered in part or not at all is remembered for a
moment: its caller will ask again at once, and a slot that is its turn's is kept for it meanwhile, instead of going back
to where it was recalled from.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .records import Claimant, Waiter


@dataclass(frozen=True, slots=True)
class _Memory:
    slots: int
    since: float
    until: float
    rank: int


class Queue:
    def __init__(self) -> None:
        self._waiting: dict[Claimant, deque[Waiter]] = {}
        self._memories: dict[Claimant, _Memory] = {}
        self.wanted = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Waiter]:
        for waiters in self._waiting.values():
            yield from waiters

    def enter(self, waiter: Waiter, now: float) -> None:
        """A new waiter; one that asks again keeps the age and the rank of its wish."""
        memory = self._memories.pop(waiter.claimant, None)
        if memory is not None and memory.until > now:
            waiter.since, waiter.rank = memory.since, memory.rank
        self.add(waiter)

    def add(self, waiter: Waiter) -> None:
        """Also one that comes back: waiters of a claimant are served in the order of their tickets."""
        waiters = self._waiting.setdefault(waiter.claimant, deque())
        waiters.append(waiter)
        if len(waiters) > 1 and waiters[-2].ticket > waiter.ticket:
            self._waiting[waiter.claimant] = deque(sorted(waiters, key=lambda w: w.ticket))
        self.wanted += waiter.want.slots

    def remove(self, waiter: Waiter) -> None:
        waiters = self._waiting.get(waiter.claimant)
        if waiters is None or waiter not in waiters:
            return
        waiters.remove(waiter)
        self.wanted -= waiter.want.slots
        if not waiters:
            del self._waiting[waiter.claimant]

    def remember(self, waiter: Waiter, slots: int, until: float) -> None:
        if slots > 0 and waiter.claimant not in self._waiting:
            self._memories[waiter.claimant] = _Memory(slots, waiter.since, until, waiter.rank)

    def turn(
        self, held: Mapping[Claimant, int], holders: Mapping[str, int], kept: Counter[Claimant], now: float
    ) -> tuple[Claimant, Waiter | None] | None:
        """Whose turn it is: a waiter, or (None) a claimant that a free slot is kept for. `held` and `holders` are slots
        by claimant and by holder, `kept` counts what was kept in this round."""
        best: tuple[tuple[int, int, int], Claimant, Waiter | None] | None = None
        for claimant, waiters in self._waiting.items():
            if _room(waiters[0], holders) == 0:
                continue
            rank = (-claimant[1], held.get(claimant, 0), waiters[0].rank)
            if best is None or rank < best[0]:
                best = rank, claimant, waiters[0]
        if best is None:
            return None  # for nobody in sight nothing is kept
        for claimant, memory in list(self._memories.items()):
            if memory.until <= now:
                del self._memories[claimant]
            elif claimant not in self._waiting and kept[claimant] < memory.slots:
                rank = (-claimant[1], held.get(claimant, 0) + kept[claimant], memory.rank)
                if rank < best[0]:
                    best = rank, claimant, None
        return best[1], best[2]

    def wishes(self, since: float, holders: Mapping[str, int]) -> dict[Claimant, int]:
        """Slots that are wanted by claimant, of wishes that are at least that old."""
        result: dict[Claimant, int] = {}
        for claimant, waiters in self._waiting.items():
            wanted = sum(w.want.slots for w in waiters if w.since <= since)
            if wanted := min(wanted, _room(waiters[0], holders)):
                result[claimant] = wanted
        return result


def _room(waiter: Waiter, holders: Mapping[str, int]) -> int:
    """Slots that its holder may have more."""
    limit = waiter.want.limit or sys.maxsize
    return max(0, limit - holders.get(waiter.want.holder, 0))
