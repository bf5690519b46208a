"""Which slot is next, which claimant is next, and which ones give slots back for it. Pure.

Packing: the next slot is a free one on the fullest node, so that empty nodes can be drained. A node is as full as it
has slots of ours that are claimed, whatever their pool. Among equally full nodes the one that became so first is taken,
on a node the slot that has been free the longest. Every operation is O(pools on the node) or O(different fills), never
O(slots).

Turns: the next claimant is the one with the highest priority, within it the fewest slots, within it the earliest
request. One that has as many as it may have waits until one of them ends. Demand that was met in part or not at all is
remembered for a moment: its caller will ask again at once, and a slot that is its turn's is kept for it meanwhile,
instead of going back to where it was revoked from.

Fair shares:
1. A higher priority is served whole before a lower one gets anything.
2. Within a priority every claimant gets the same number of slots (max-min fair), or less where less is wanted. What
   does not divide stays with those that have more now, so that nothing moves for it.
3. Slots are asked back only where another claimant gets them, never more than are missing after what is free or will
   soon be, and from the lowest priority and the largest surplus first.
4. Once moved, nothing moves again: applied to its own outcome, no claimant has to give slots back.

Quotas: a claimant that has as many slots as the quota of its namespace allows is passed over. What it asks for does not
count as demand: no holder is asked to give slots back for it, and no phone boots for it.

Requests: an acquire that is sent again gets the claims of the first, not more. It is known while a caller waits on it,
while one of its claims lives, and a while longer. It is found again after a restart, because each claim's record
carries it.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, TypeVar

from tapforge_operator.broker.types import Claim, Claimant, State, Waiter, account_of


class _PoolOffer:
    """Free slots of one pool, by node, and those nodes by fill."""

    __slots__ = ("by_fill", "count", "on_node")

    def __init__(self) -> None:
        self.on_node: dict[str, dict[str, None]] = {}
        self.by_fill: dict[int, dict[str, None]] = {}
        self.count = 0


class Packing:
    def __init__(self) -> None:
        self._fill: Counter[str] = Counter()
        self._pools: dict[str, _PoolOffer] = {}
        self._pools_on: dict[str, set[str]] = {}

    def free(self, pool: str) -> int:
        offer = self._pools.get(pool)
        return offer.count if offer else 0

    def fill(self, node: str) -> int:
        """Claimed slots on the node."""
        return self._fill[node]

    def next(self, pool: str) -> str | None:
        """UID of the free slot to grant next."""
        offer = self._pools.get(pool)
        if offer is None:
            return None
        node = next(iter(offer.by_fill[max(offer.by_fill)]))
        return next(iter(offer.on_node[node]))

    def offer(self, pool: str, node: str, uid: str) -> None:
        """The slot can be granted."""
        offer = self._pools.setdefault(pool, _PoolOffer())
        slots = offer.on_node.get(node)
        if slots is None:
            slots = offer.on_node[node] = {}
            offer.by_fill.setdefault(self._fill[node], {})[node] = None
            self._pools_on.setdefault(node, set()).add(pool)
        if uid not in slots:
            slots[uid] = None
            offer.count += 1

    def withdraw(self, pool: str, node: str, uid: str) -> None:
        """The slot can't be granted."""
        offer = self._pools.get(pool)
        slots = offer.on_node.get(node) if offer else None
        if offer is None or slots is None or uid not in slots:
            return
        del slots[uid]
        offer.count -= 1
        if not slots:
            del offer.on_node[node]
            self._leave(offer, node)
            self._pools_on[node].discard(pool)
            if not self._pools_on[node]:
                del self._pools_on[node]
        if not offer.count:
            del self._pools[pool]

    def claimed(self, node: str, change: int) -> None:
        """So many more (or less) slots on the node are claimed."""
        offers = [self._pools[pool] for pool in self._pools_on.get(node, ())]
        for offer in offers:
            self._leave(offer, node)
        self._fill[node] += change
        if not self._fill[node]:
            del self._fill[node]
        for offer in offers:
            offer.by_fill.setdefault(self._fill[node], {})[node] = None

    def _leave(self, offer: _PoolOffer, node: str) -> None:
        fill = self._fill[node]
        nodes = offer.by_fill[fill]
        del nodes[node]
        if not nodes:
            del offer.by_fill[fill]


# --- fair shares ------------------------------------------------------------------------------------------------------


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
    """Fills all claimants to the same level, as water does."""
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


def preemptions(demands: Sequence[Demand], coming: int) -> Mapping[Claimant, int]:
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


# --- counts -----------------------------------------------------------------------------------------------------------


K = TypeVar("K")


class Share(NamedTuple):
    """What one slot adds to the counts of its pool."""

    state: State
    #: whose claim it has
    claimant: Claimant | None
    #: the claim is asked back for a claimant that waits
    yields: bool
    #: the claim is asked back by the pool: the slot serves no claim afterwards
    leaves: bool
    booting: bool
    #: it will be free as soon as its record is off
    returning: bool


class Tally:
    __slots__ = ("booting", "held", "holders", "leaving", "returning", "states", "yielding")

    def __init__(self) -> None:
        self.states: Counter[State] = Counter()
        #: claims that are being granted or held, by claimant; and of these those that are asked back
        self.held: Counter[Claimant] = Counter()
        #: the same by holder
        self.holders: Counter[str] = Counter()
        self.yielding: Counter[Claimant] = Counter()
        self.leaving: Counter[Claimant] = Counter()
        self.booting = 0
        self.returning = 0

    def add(self, share: Share, sign: int) -> None:
        self.states[share.state] += sign
        self.booting += sign * share.booting
        self.returning += sign * share.returning
        if share.claimant is not None:
            _count(self.held, share.claimant, sign)
            _count(self.holders, share.claimant[0], sign)
            if share.yields:
                _count(self.yielding, share.claimant, sign)
            if share.leaves:
                _count(self.leaving, share.claimant, sign)


def _count(counter: Counter[K], key: K, sign: int) -> None:
    counter[key] += sign
    if not counter[key]:
        del counter[key]


# --- claimants that wait ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Memory:
    slots: int
    since: float
    until: float
    rank: int


#: slots that a holder may have more by the quota of its namespace
Spare = Callable[[str], int]


def unlimited(holder: str) -> int:
    """There are no quotas."""
    return sys.maxsize


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
        """A new waiter; one that asks again keeps the age and the rank of its demand."""
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
        self,
        held: Mapping[Claimant, int],
        holders: Mapping[str, int],
        kept: Counter[Claimant],
        now: float,
        spare: Spare = unlimited,
    ) -> tuple[Claimant, Waiter | None] | None:
        """Whose turn it is: a waiter, or (None) a claimant that a free slot is kept for. `held` and `holders` are slots
        by claimant and by holder, `kept` counts what was kept in this round, `spare` is what a quota leaves."""
        best: tuple[tuple[int, int, int], Claimant, Waiter | None] | None = None
        for claimant, waiters in self._waiting.items():
            if _room(waiters[0], holders) == 0 or spare(claimant[0]) == 0:
                continue
            rank = (-claimant[1], held.get(claimant, 0), waiters[0].rank)
            if best is None or rank < best[0]:
                best = rank, claimant, waiters[0]
        if best is None:
            return None  # nothing is kept without a known claimant
        for claimant, memory in list(self._memories.items()):
            if memory.until <= now:
                del self._memories[claimant]
            elif claimant not in self._waiting and kept[claimant] < min(memory.slots, spare(claimant[0])):
                rank = (-claimant[1], held.get(claimant, 0) + kept[claimant], memory.rank)
                if rank < best[0]:
                    best = rank, claimant, None
        return best[1], best[2]

    def demanded(self, since: float, holders: Mapping[str, int], spare: Spare = unlimited) -> dict[Claimant, int]:
        """Slots that are wanted by claimant, of demand that is at least that old: no more than may be granted. What is
        left of a namespace's quota goes to its claimants in their order."""
        result: dict[Claimant, int] = {}
        left: dict[str, int] = {}
        ordered = list(self._waiting.items())
        if spare is not unlimited:
            ordered.sort(key=lambda one: (-one[0][1], one[1][0].rank))
        for claimant, waiters in ordered:
            account = account_of(claimant[0])
            room = min(_room(waiters[0], holders), left.setdefault(account, spare(claimant[0])))
            if wanted := min(sum(w.want.slots for w in waiters if w.since <= since), room):
                result[claimant] = wanted
                left[account] -= wanted
        return result

    def waits(self, account: str) -> bool:
        """A claimant of the namespace, or that person, does."""
        return any(account_of(holder) == account for holder, _ in self._waiting)


def _room(waiter: Waiter, holders: Mapping[str, int]) -> int:
    """Slots that its holder may have more."""
    limit = waiter.want.limit or sys.maxsize
    return max(0, limit - holders.get(waiter.want.holder, 0))


# --- requests ---------------------------------------------------------------------------------------------------------


RequestKey = tuple[str, str, str]


@dataclass(slots=True, eq=False)
class Request:
    waiter: Waiter | None = None
    #: claims that live
    claims: dict[str, Claim] = field(default_factory=dict)


class Requests:
    def __init__(self, remember: float):
        self._remember = remember
        self._known: dict[RequestKey, Request] = {}
        #: requests whose last claim ended, and until when they are known, the earliest first
        self._over: dict[RequestKey, float] = {}

    def __len__(self) -> int:
        return len(self._known) + len(self._over)

    def find(self, key: RequestKey) -> Request | None:
        return self._known.get(key) or (Request() if key in self._over else None)

    def begin(self, key: RequestKey, waiter: Waiter) -> None:
        self._known[key] = Request(waiter)

    def drop(self, key: RequestKey, waiter: Waiter) -> None:
        """It ended before a claim was reported to any caller: sent again, it begins anew."""
        known = self._known.get(key)
        if known is not None and known.waiter is waiter:
            del self._known[key]

    def claimed(self, key: RequestKey, claim: Claim) -> None:
        self._known.setdefault(key, Request()).claims[claim.id] = claim

    def ended(self, key: RequestKey, claim: Claim, now: float) -> None:
        known = self._known.get(key)
        if known is None or claim.id not in known.claims:
            return
        del known.claims[claim.id]
        if not known.claims and not (known.waiter and known.waiter.open):
            del self._known[key]
            self._over.pop(key, None)
            self._over[key] = now + self._remember

    def purge(self, now: float) -> None:
        while self._over and (first := next(iter(self._over))) and self._over[first] <= now:
            del self._over[first]
