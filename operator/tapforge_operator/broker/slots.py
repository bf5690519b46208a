"""Slots, their claims and what is counted of them. Pure. The moves here keep every count right; which move is allowed
when is decided by the ledger.

1. A slot can be granted when it is free, ready, not at its end, neither draining nor withheld by its pool, and not
   worn out by episodes. A slot that was given back clean and whose claim record is still on it can be granted too.
2. An external URL can be granted only while its device has no holder through another URL, of its pool or another one,
   and until it has rested there (`devices.py`).
3. `balance` applies the fair shares of `scheduling.py`: a claim that yields goes back to the claimants that wait. One
   that the pool itself revoked (its node is drained, its template is old) serves no claim afterwards, so it counts
   neither as held nor as coming.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from tapforge_operator.broker import scheduling
from tapforge_operator.broker.claim_record import Clear, SlotView
from tapforge_operator.broker.devices import Devices, device_of
from tapforge_operator.broker.scheduling import Packing, Queue, Share, Spare, Tally, unlimited
from tapforge_operator.broker.types import (
    Claim,
    Claimant,
    ClaimQuotas,
    Counts,
    Device,
    Held,
    QuotaUse,
    State,
    account_of,
)

_BUSY = (State.GRANTING, State.HELD, State.RELEASING)
#: the device is not granted to another claimant
_TAKEN = (*_BUSY, State.COOLDOWN)
#: a larger fence was not written by us: hardly any room is left above it
_MAX_FENCE = 2**62


class Slot:
    __slots__ = (
        "claim",
        "clear",
        "device",
        "draining",
        "failures",
        "fence",
        "pause",
        "retired",
        "share",
        "state",
        "until",
        "view",
    )  # fmt: skip

    def __init__(self, view: SlotView):
        self.view = view
        self.state = State.FREE
        self.claim: Claim | None = None
        #: what several pools may name; "" for a Pod
        self.device = (view.device or device_of(view.address)) if view.lasting else ""
        #: the largest fence that was ever written on it, as far as is known
        self.fence = view.fence
        #: why it is not granted any more
        self.draining = ""
        #: why it is no longer in its pool's list of URLs
        self.retired = ""
        self.failures = view.failures
        #: how long it rests after its release
        self.pause = 0.0
        #: the write that ends its last claim, or that the present grant replaces
        self.clear: Clear | None = None
        #: end of its rest
        self.until = 0.0
        #: what it adds to its pool's counts at present
        self.share: Share | None = None


class Pool:
    __slots__ = ("asked", "changed", "closed", "held", "queue", "returned", "slots", "tally", "withheld", "worn_after")

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self.queue = Queue()
        self.tally = Tally()
        #: slots that were given back and whose record a grant may replace
        self.returned: dict[str, None] = {}
        #: claimed slots, and those that are not granted any more while their Pod is still there
        self.held: dict[str, Held] = {}
        #: slots that changed since `held` was written
        self.changed: set[str] = set()
        #: claims were asked back for claimants that wait
        self.asked = False
        #: it was deleted, or not observed: a Pod may name one that never was. The record goes with its last slot
        self.closed = True
        #: episodes after which a slot is not granted again
        self.worn_after: int | None = None
        #: UIDs of slots that are not granted for now: they are to be exchanged
        self.withheld: Set[str] = frozenset()


class Table:
    def __init__(self, quotas: ClaimQuotas | None = None) -> None:
        self._quotas = quotas or ClaimQuotas()
        #: claims that are being granted or held, of all pools, by namespace; only of namespaces with a quota
        self._used: Counter[str] = Counter()
        #: what was used when that was reported last, of namespaces where it has changed since
        self._told: dict[str, int] = {}
        self._slots: dict[str, Slot] = {}
        self._pools: dict[str, Pool] = {}
        self._devices = Devices()
        #: pools whose devices were taken or given back through another pool
        self._touched: set[str] = set()
        self.packing = Packing()

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    def get(self, uid: str) -> Slot | None:
        return self._slots.get(uid)

    def __getitem__(self, uid: str) -> Slot:
        return self._slots[uid]

    def sharing(self, slot: Slot) -> list[Slot]:
        """All slots of its device; none for a Pod."""
        return [self._slots[uid] for uid in self._devices.slots(slot.device)] if slot.device else []

    def find_pool(self, key: str) -> Pool | None:
        return self._pools.get(key)

    def pool(self, key: str) -> Pool:
        if (known := self._pools.get(key)) is None:
            known = self._pools[key] = Pool()
        return known

    # --- moves --------------------------------------------------------------------------------------------------------

    def add(self, view: SlotView) -> Slot:
        slot = self._slots[view.uid] = self.pool(view.pool).slots[view.uid] = Slot(view)
        self.place(slot)
        return slot

    def drop(self, slot: Slot) -> None:
        """Only of a slot without a claim."""
        self.move(slot, State.TERMINATING)
        pool = self.pool(slot.view.pool)
        if slot.share is not None:
            self._tally(slot.view.pool, slot.share, -1)
        if slot.device:
            self._devices.drop(slot.device, slot.view.uid)
        del self._slots[slot.view.uid], pool.slots[slot.view.uid]
        pool.held.pop(slot.view.uid, None)
        pool.returned.pop(slot.view.uid, None)
        pool.changed.discard(slot.view.uid)
        if pool.closed and not pool.slots and not pool.queue:
            del self._pools[slot.view.pool]

    def close(self, key: str) -> None:
        """The pool is gone. Only of one that no claimant waits for."""
        pool = self._pools.get(key)
        if pool is not None:
            pool.closed = True
            if not pool.slots:
                del self._pools[key]

    def see(self, slot: Slot, view: SlotView) -> None:
        """Takes over what the API server says. A slot stays with the pool in which it was first seen."""
        if view.pool != slot.view.pool:
            view = replace(view, pool=slot.view.pool, ended="its Pod was given to another pool")
        if view.node != slot.view.node:
            self.packing.withdraw(slot.view.pool, slot.view.node, slot.view.uid)
            if slot.state in _BUSY:
                self.packing.claimed(slot.view.node, -1)
                self.packing.claimed(view.node, +1)
        slot.view = view
        self.place(slot)

    def take(self, slot: Slot, claim: Claim, state: State) -> None:
        slot.claim = claim
        self.move(slot, state)

    def end(self, slot: Slot, state: State) -> Claim:
        """Ends the slot's claim."""
        claim = slot.claim
        if claim is None:
            raise ValueError(f"slot {slot.view.name} ({slot.view.uid}) is {slot.state}: it has no claim to end")
        slot.claim = None
        self.move(slot, state)
        return claim

    def revoke(self, slot: Slot, reason: str, *, yields: bool) -> None:
        """Asks the slot's claim back; "" takes that back."""
        if slot.claim is not None:
            slot.claim.revoked, slot.claim.yields = reason, yields and bool(reason)
            self.place(slot)

    def move(self, slot: Slot, state: State) -> None:
        change = (state in _BUSY) - (slot.state in _BUSY)
        slot.state = state
        if change:
            self.packing.claimed(slot.view.node, change)
        self.place(slot)

    def place(self, slot: Slot) -> None:
        """After anything changed: offers the slot or takes it back, and counts it anew."""
        view, pool, claim = slot.view, self.pool(slot.view.pool), slot.claim
        served = not slot.draining and view.uid not in pool.withheld
        open_ = slot.state is State.FREE and not view.ended and served
        if slot.device:
            for other in self._devices.note(slot.device, view.uid, slot.state in _TAKEN):
                self._touched.add(self._slots[other].view.pool)
                self.place(self._slots[other])
            open_ = open_ and not self._devices.taken_elsewhere(slot.device, view.uid)
        fit = served and view.ready and not view.ended and not self._worn(slot, pool) and slot.fence < _MAX_FENCE
        if open_ and fit:
            self.packing.offer(view.pool, view.node, view.uid)
        else:
            self.packing.withdraw(view.pool, view.node, view.uid)
        clear = slot.clear if slot.state is State.RELEASING else None
        if fit and clear is not None and clear.replaceable and view.record == clear.record:
            pool.returned[view.uid] = None
        else:
            pool.returned.pop(view.uid, None)
        share = Share(
            slot.state,
            claim.claimant if claim else None,
            yields=claim is not None and claim.yields,
            leaves=claim is not None and bool(claim.revoked) and not claim.yields,
            booting=open_ and view.booting,
            returning=slot.state is State.RELEASING and served and not slot.pause,
        )
        if share != slot.share:
            if slot.share is not None:
                self._tally(view.pool, slot.share, -1)
            self._tally(view.pool, share, +1)
            slot.share = share
        pool.changed.add(view.uid)

    def _tally(self, key: str, share: Share, sign: int) -> None:
        self._pools[key].tally.add(share, sign)
        if share.claimant is None or not self._quotas:
            return
        account = account_of(share.claimant[0])
        if self._quotas.of(account) is not None:
            self._told.setdefault(account, self._used[account])
            self._used[account] += sign
            self._touched.update(other for other, pool in self._pools.items() if pool.queue.waits(account))

    def note(self, slot: Slot) -> None:
        """The slot's episodes changed: the pool's planner is notified."""
        self.pool(slot.view.pool).changed.add(slot.view.uid)

    @staticmethod
    def _write_down(slot: Slot, held: dict[str, Held]) -> None:
        view, claim = slot.view, slot.claim
        if claim is not None:
            before = slot.clear.episodes if slot.clear is not None else view.episodes
            episodes = before + claim.episodes
            held[view.uid] = Held(claim.record.holder, False, False, claim.revoked, episodes, claim.record.priority)
        elif slot.state is State.TERMINATING:
            held[view.uid] = Held("", expired=True, episodes=view.episodes)
        elif slot.state is State.FREE and slot.draining and not view.ended:
            held[view.uid] = Held("", draining=True, episodes=view.episodes)
        elif view.uid in held:
            del held[view.uid]

    def wear(self, key: str, after: int | None) -> None:
        """Slots of the pool are not granted again after so many episodes."""
        pool = self.pool(key)
        pool.closed = False
        if pool.worn_after != after:
            pool.worn_after = after
            for slot in pool.slots.values():
                self.place(slot)

    def withhold(self, key: str, uids: Set[str]) -> bool:
        pool = self.pool(key) if uids else self._pools.get(key)
        if pool is None or pool.withheld == uids:
            return False
        changed, pool.withheld = pool.withheld ^ uids, uids
        for slot in [pool.slots[uid] for uid in changed if uid in pool.slots]:
            self.place(slot)
        return True

    @staticmethod
    def _worn(slot: Slot, pool: Pool) -> bool:
        episodes = slot.clear.episodes if slot.clear is not None else slot.view.episodes
        return pool.worn_after is not None and episodes >= pool.worn_after

    # --- quotas -------------------------------------------------------------------------------------------------------

    @property
    def spare(self) -> Spare:
        """Slots that a holder may have more by its quota."""
        return self._spare if self._quotas else unlimited

    def _spare(self, holder: str) -> int:
        use = self.quota_use(account_of(holder))
        return sys.maxsize if use is None else max(0, use.quota - use.held)

    def quota_use(self, account: str) -> QuotaUse | None:
        """None: it has no quota."""
        quota = self._quotas.of(account)
        return None if quota is None else QuotaUse(account, quota, self._used[account])

    def take_used(self) -> list[str]:
        """Namespaces and persons that use more or less of their quota than when this was asked last."""
        told, self._told = self._told, {}
        return [account for account, used in told.items() if used != self._used[account]]

    def quota_room(self, key: str, namespace: str) -> int | None:
        """Slots of the pool that claimants of the namespace may have in all; None: any number."""
        use, pool = self.quota_use(namespace), self._pools.get(key)
        if use is None:
            return None
        holders = pool.tally.holders if pool else Counter[str]()
        here = sum(slots for holder, slots in holders.items() if account_of(holder) == namespace)
        return here + max(0, use.quota - use.held)

    def demand(self, key: str) -> int:
        """Slots that waiting acquires want and may have."""
        pool = self._pools.get(key)
        if pool is None:
            return 0
        if not self._quotas:
            return pool.queue.wanted
        return sum(pool.queue.demanded(math.inf, pool.tally.holders, self._spare).values())

    # --- questions ----------------------------------------------------------------------------------------------------

    def grantable(self, key: str) -> int:
        """Slots that can be granted now."""
        return self.packing.free(key) + len(self.pool(key).returned)

    def is_returned(self, slot: Slot) -> bool:
        """It was given back, and can be granted with its old record still on it."""
        return slot.view.uid in self.pool(slot.view.pool).returned

    def next(self, key: str) -> Slot | None:
        """The slot to grant next. The one that was given back first is as good as a free one where its node is the
        fullest, and costs one write less."""
        free, returned = self.packing.next(key), self.pool(key).returned
        if not returned:
            return self._slots[free] if free is not None else None
        slot = self._slots[next(iter(returned))]
        if free is None:
            return slot
        node, other = slot.view.node, self._slots[free].view.node
        return slot if node == other or self.packing.fill(node) > self.packing.fill(other) else self._slots[free]

    def held(self, key: str) -> Mapping[str, Held]:
        """A copy: what is planned by it stays as it was."""
        pool = self._pools.get(key)
        if pool is None:
            return {}
        for uid in pool.changed:
            self._write_down(pool.slots[uid], pool.held)
        pool.changed.clear()
        return dict(pool.held)

    def counts(self, key: str) -> Counts:
        pool = self._pools.get(key)
        if pool is None:
            return Counts()
        tally = pool.tally
        return Counts(
            slots=len(pool.slots),
            free=self.packing.free(key),
            held=tally.held.total(),
            booting=tally.booting,
            cooldown=tally.states[State.COOLDOWN],
            terminating=tally.states[State.TERMINATING],
            waiting=pool.queue.wanted,
        )

    def devices(self, key: str) -> list[Device]:
        """The external URLs of a pool; not those that are no longer its own and only rest."""
        pool = self._pools.get(key)
        return [
            self._device(slot)
            for slot in (pool.slots.values() if pool else ())
            if slot.view.lasting and not (slot.retired and slot.state is State.COOLDOWN)
        ]

    def take_touched(self) -> set[str]:
        """Pools whose devices were taken or given back through another pool; each is handed out once."""
        touched, self._touched = self._touched, set()
        return touched

    def _device(self, slot: Slot) -> Device:
        """Only its holder probes a device: it counts as ready until claims of it ended badly."""
        url, claimed = slot.view.address, slot.claim is not None
        if slot.state is State.COOLDOWN:
            why = f"{slot.failures} claims in a row ended badly" if slot.failures else "rests"
            return Device(url, "quarantined", claimed, why)
        if not claimed and self._devices.taken_elsewhere(slot.device, slot.view.uid):
            return Device(url, "quarantined", claimed, "held through another pool, or another spelling of its address")
        return Device(url, "ready", claimed)


# --- slots that are asked back for claimants that wait ----------------------------------------------------------------


def balance(table: Table, key: str, demanded_since: float) -> bool:
    """Asks for what is missing for demand that is at least as old as `demanded_since`; takes back what is asked for
    beyond need and not reported yet. True when anything changed. All slots are read only when something does."""
    pool = table.find_pool(key)
    if pool is None:
        return False
    demanded, tally = pool.queue.demanded(demanded_since, pool.tally.holders, table.spare), pool.tally
    if not demanded and not pool.asked:
        return False
    claimants = dict.fromkeys([*tally.held, *demanded])
    demands = [scheduling.Demand(p, tally.held[p] - tally.leaving[p], demanded.get(p, 0)) for p in claimants]
    due = scheduling.preemptions(demands, table.packing.free(key) + tally.booting + tally.returning)
    pool.asked = bool(due)
    missing = {p: count for p in claimants if (count := due.get(p, 0) - tally.yielding[p])}
    changed = False
    for claimant, slots in _claimed(pool, missing).items():
        reason = f"others wait for slots, and {claimant[0]} has more than its share" if missing[claimant] > 0 else ""
        for slot in _choose(table, slots, missing[claimant]):
            table.revoke(slot, reason, yields=True)
            changed = True
    return changed


def _claimed(pool: Pool, claimants: dict[Claimant, int]) -> dict[Claimant, list[Slot]]:
    """Slots that the claimants have and that serve on afterwards."""
    result: dict[Claimant, list[Slot]] = defaultdict(list)
    for slot in pool.slots.values() if claimants else ():
        claim = slot.claim
        if claim is not None and claim.claimant in claimants and (claim.yields or not claim.revoked):
            result[claim.claimant].append(slot)
    return result


def _choose(table: Table, slots: list[Slot], missing: int) -> list[Slot]:
    """Slots to ask back (or, for a negative number, no longer), those on the emptiest nodes first."""
    if missing > 0:
        able = [slot for slot in slots if slot.claim and not slot.claim.yields]
        return heapq.nsmallest(missing, able, key=lambda slot: (table.packing.fill(slot.view.node), -slot.fence))
    return [slot for slot in slots if slot.claim and slot.claim.yields and not slot.claim.told][:-missing]
