"""Slots and their claims, from the record on the slot to the claim's end. Pure. Which claimant gets a slot is decided
in `ledger.py`, which also states the rules.

A claim whose record is signed with a key that is not ours (the operator's Secret was lost) is kept, unproved, when this
ledger meets its slot for the first time: the slot stays its holder's, which renews it without proof, until the holder
is gone or silent for too long. It displaces no claim that is proved, uses the quota of its slot's namespace, and can't
be given back. It is proved as soon as its key is known again (`reread`).

An external URL may name a shared device, and any client may write such a record before the URL is in a pool. So such a
record is believed only as it stood when the term began (`began`): what an earlier leader wrote is older, whenever its
pool is seen. So is the rest that a Lease records. And such a claim is over after `longest_claim`, renewed or not.

Times are seconds and only go forward.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeVar

from tapforge_api.claims import Verdict
from tapforge_operator.broker.claim_record import ClaimRecord, Clear, SlotView, claim_parts
from tapforge_operator.broker.lives import Lives
from tapforge_operator.broker.scheduling import Requests
from tapforge_operator.broker.slots import Slot, Table
from tapforge_operator.broker.types import (
    Claim,
    ClaimEvent,
    ClaimQuotas,
    Counts,
    Device,
    Held,
    LedgerTimeouts,
    QuotaUse,
    Remove,
    State,
    Work,
    namespace_of,
    unproved_holder,
)

#: ended claims whose end can still be explained, and UIDs that are known to be gone
_REMEMBERED = 20_000
_TAMPERED = "its claim annotation was changed by another client"
_EXPIRED = "it was not renewed in time"
_GIVEN_BACK = "it was given back"
_KNOWN = "its key is known again"
_UNPROVABLE = "it could not be proved for too long: its record is signed with a key that the operator lost"

V = TypeVar("V")


class SlotClaims:
    def __init__(self, timeouts: LedgerTimeouts | None = None, quotas: ClaimQuotas | None = None):
        self._timeouts = timeouts or LedgerTimeouts()
        self._table = Table(quotas)
        self._requests = Requests(self._timeouts.remember)
        self._live = Lives()
        #: (when, uid): ends of rests
        self._cooldowns: list[tuple[float, str]] = []
        self._work: list[Work] = []
        self._events: list[ClaimEvent] = []
        #: what is not a slot any more, and whether it may be one again
        self._gone: OrderedDict[str, bool] = OrderedDict()
        self._why: OrderedDict[str, str] = OrderedDict()
        self._began = math.inf

    def began(self, version: int) -> None:
        """What is written from now on is newer than that version."""
        self._began = version

    # --- what the API server said -------------------------------------------------------------------------------------

    def observe(self, view: SlotView, now: float, *, back: bool = False) -> None:
        """A slot is like this. `back`: certainly now, should it have gone out of sight before."""
        slot = self._table.get(view.uid)
        if slot is None:
            if self._gone.get(view.uid, True) and (back or view.uid not in self._gone):
                self._gone.pop(view.uid, None)
                self._meet(view, now)
        elif view.order > slot.view.order:
            self._table.see(slot, view)
            self._check(slot, now)

    def reread(self, view: SlotView, now: float) -> None:
        """The slot is as it was, and its record is read with other keys."""
        slot = self._table.get(view.uid)
        if slot is not None and view.order >= slot.view.order:
            self._table.see(slot, view)
            self._check(slot, now)

    def unproved(self) -> int:
        """Claims that are signed with a key that is not ours."""
        return sum(not claim.proved for claim in self._live)

    def forget(self, uid: str, now: float, why: str = "its Pod is gone", *, back: bool = False) -> None:
        """The slot is gone. `back`: unless it is seen again, with its label or its owner."""
        slot = self._table.get(uid)
        if slot is None:
            return
        if not slot.view.lasting:
            _keep(self._gone, uid, back and not slot.draining)
        pause = self._left_of_use(slot, now) if slot.view.lasting else 0.0
        if slot.claim is not None:
            self._end(slot, State.TERMINATING, why, now)
        if pause:
            slot.retired = slot.draining = why
            self._cool_down(slot, pause, now)
        else:
            self._table.drop(slot)

    def vanished(self, uid: str, order: int, now: float) -> None:
        """The Lease of an external URL was deleted, at that version. The URL is still there."""
        slot = self._table.get(uid)
        if slot is None or order < slot.view.order or slot.state in (State.GRANTING, State.RELEASING):
            return  # the answer to our own write decides
        self._table.see(slot, _without_lease(slot.view))
        if slot.state is State.HELD:
            pause = self._end_of_use(slot, now)
            self._end(slot, State.FREE, "its Lease was deleted by another client", now)
            self._cool_down(slot, pause, now)

    def missing(self, uid: str, order: int, now: float) -> bool:
        """A list of that version doesn't have the Lease of an external URL. True when it was there."""
        slot = self._table.get(uid)
        if slot is None or not slot.view.version or order < slot.view.order:
            return False
        self.vanished(uid, order, now)
        return True

    def retire(self, uid: str, why: str) -> None:
        """An external URL is no longer in its pool: it goes as soon as it is given back."""
        if (slot := self._table.get(uid)) is not None:
            slot.retired = slot.draining = why
            self._table.revoke(slot, why, yields=False)
            self._table.place(slot)
            self._drop_retired(slot)

    def reinstate(self, uid: str) -> None:
        """The URL is back in its pool before it was given back."""
        slot = self._table.get(uid)
        if slot is not None and slot.retired:
            slot.retired = slot.draining = ""
            if slot.claim is None or not slot.claim.yields:
                self._table.revoke(slot, "", yields=False)
            self._table.place(slot)

    def wear(self, pool: str, after: int | None) -> None:
        """Slots of the pool are not granted again after so many episodes."""
        self._table.wear(pool, after)

    def begin_clear(self, work: Clear, now: float) -> bool:
        """The write begins, and the slot is not granted before it ends. False: a grant has replaced the record."""
        if not work.replaceable:
            return True
        slot = self._table.get(work.view.uid)
        if slot is None:
            return True  # it went out of sight, and may come back as it was
        if slot.claim is not None and slot.claim.record == work.record:  # it did
            self._end(slot, State.RELEASING, _GIVEN_BACK, now)
        elif slot.clear is not work or slot.state is not State.RELEASING:
            return False
        slot.clear = replace(work, replaceable=False)
        self._table.place(slot)
        return True

    def cleared(self, uid: str, view: SlotView | None, now: float) -> None:
        """The record is off the slot. `view` is what is there now, None: nothing is."""
        slot = self._table.get(uid)
        if slot is None or slot.state is not State.RELEASING:
            return
        if view is None and not slot.view.lasting:
            self.forget(uid, now)
            return
        pause, slot.pause, slot.clear = slot.pause, 0.0, None
        self._table.move(slot, State.FREE)
        self._after_write(slot, view, now, pause)

    # --- holders ------------------------------------------------------------------------------------------------------

    def claim(self, claim_id: str) -> Claim | None:
        """The claim, while it has a holder."""
        return self._live.get(claim_id)

    def view(self, claim: Claim) -> SlotView | None:
        """The slot of a claim that has a holder."""
        return self._table[claim.record.uid].view if self._lives(claim) else None

    def why(self, claim_id: str) -> str:
        """Why the claim has no holder."""
        slot, _ = self._slot_of(claim_id)
        if claim_id in self._why:
            return self._why[claim_id]
        if slot is None:
            return "no such claim is known, or its slot is gone"
        return slot.draining or slot.view.ended or "its slot is free or has another holder"

    def ahead(self, claim_id: str) -> SlotView | None:
        """The slot, when the claim is later than all that is known of it: the slot has to be read again."""
        slot, fence = self._slot_of(claim_id)
        return slot.view if slot is not None and fence > slot.fence else None

    def renew(self, claim: Claim, episodes: int, now: float) -> Literal["held", "recalled", "lost"]:
        """Another life for a claim that `claim` found."""
        if claim.ends <= now:
            self._expire(claim, now)
            return "lost"
        self._live.renew(claim, now)
        if episodes > claim.episodes:
            claim.episodes = episodes
            self._table.note(self._table[claim.record.uid])
        if not claim.revoked:
            return "held"
        claim.told = True
        return "recalled"

    def give_back(self, claim: Claim, verdict: Verdict, episodes: int, now: float) -> None:
        """Ends a claim that `claim` found."""
        uid = claim.record.uid
        claim.episodes = max(claim.episodes, episodes)
        if claim.ends <= now:
            self._expire(claim, now)
        elif verdict == "clean":
            self._release(uid, _GIVEN_BACK, now, replaceable=True)
        else:
            broken = verdict == "broken"
            pause = 0.0 if broken else self._timeouts.step_deadline
            self._end_dirty(uid, f"it was given back {verdict}", now, pause=pause, failed=broken)

    # --- the pool's side ----------------------------------------------------------------------------------------------

    def drain(self, uid: str) -> bool:
        """True: the slot has no holder and is not granted again. False: it is claimed, or is being."""
        slot = self._table.get(uid)
        if slot is None:
            _keep(self._gone, uid, False)
            return True
        if slot.claim is not None:
            return False
        slot.draining = slot.draining or "the pool gives it up"
        self._table.place(slot)
        return True

    def revoke(self, uid: str, reason: str) -> None:
        """The pool wants the slot back at the end of the episode; it is not granted afterwards. "" takes that back."""
        if (slot := self._table.get(uid)) is not None:
            self._table.revoke(slot, reason, yields=False)

    def held(self, pool: str) -> Mapping[str, Held]:
        """Claimed slots of a pool by UID, and those that are not granted any more while their Pod is still there."""
        return self._table.held(pool)

    def waiting(self, pool: str) -> int:
        """Slots that waiting acquires want now and may have."""
        return self._table.demand(pool)

    def has_waiters(self, pool: str) -> bool:
        known = self._table.find_pool(pool)
        return known is not None and known.queue.wanted > 0

    def quota_use(self, account: str) -> QuotaUse | None:
        """None: the namespace, or the person, has no quota."""
        return self._table.quota_use(account)

    def quota_room(self, pool: str, namespace: str) -> int | None:
        """Slots of the pool that claimants of the namespace may have in all; None: any number."""
        return self._table.quota_room(pool, namespace)

    def take_used(self) -> list[str]:
        return self._table.take_used()

    def counts(self, pool: str) -> Counts:
        return self._table.counts(pool)

    def take_touched(self) -> set[str]:
        """Pools that share devices or a namespace's quota with others, where that made a difference; each is handed out
        once."""
        return self._table.take_touched()

    def devices(self, pool: str) -> list[Device]:
        """The external URLs of a pool."""
        return self._table.devices(pool)

    # --- time ---------------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> set[str]:
        """Ends what is over. Returns the pools in which something changed."""
        changed: set[str] = set()
        for claim in self._live.due(now):
            changed.add(self._table[claim.record.uid].view.pool)
            self._expire(claim, now)
        while self._cooldowns and self._cooldowns[0][0] <= now:
            _, uid = heapq.heappop(self._cooldowns)
            slot = self._table.get(uid)
            if slot is not None and slot.state is State.COOLDOWN and slot.until <= now:
                self._table.move(slot, State.FREE)
                changed.add(slot.view.pool)
                self._drop_retired(slot)
        self._requests.purge(now)
        return changed

    # --- inside -------------------------------------------------------------------------------------------------------

    def _slot_of(self, claim_id: str) -> tuple[Slot | None, int]:
        parts = claim_parts(claim_id)
        return (self._table.get(parts[0]), parts[1]) if parts else (None, 0)

    def _lives(self, claim: Claim) -> bool:
        slot = self._table.get(claim.record.uid)
        return slot is not None and slot.claim is claim and slot.state is State.HELD

    def _meet(self, view: SlotView, now: float) -> None:
        """A slot that this ledger never saw."""
        slot = self._table.add(view)
        if view.ended:
            return
        if view.record is not None:
            self._adopt(slot, view.record, now)
        elif view.lasting and view.order > self._began:
            return
        elif view.unproved is not None and (view.lasting or view.served):
            self._adopt_unproved(slot, view.unproved, now)
        elif view.rest:
            self._cool_down(slot, view.rest, now)  # how much of it is over is unknown

    def _check(self, slot: Slot, now: float) -> None:
        """What the newest view means for the slot's claim."""
        view, record = slot.view, slot.view.record
        news = record is not None and record.fence > slot.fence and not view.ended
        if slot.state is State.HELD and slot.claim is not None:
            fence = slot.claim.record.fence
            if view.ended:
                self._end(slot, State.FREE, view.ended, now)
            elif record is not None and record.fence > fence:
                self._end(slot, State.FREE, "another operator granted the slot to another holder", now)
                self._adopt(slot, record, now)
            elif not slot.claim.proved and record is not None and record.fence == fence:
                self._end(slot, State.FREE, _KNOWN, now)
                self._adopt(slot, record, now)
            elif not slot.claim.proved and view.unproved is not None and _fence(view, view.unproved) == fence:
                pass
            elif record is None or record.fence < fence:
                self._end_dirty(view.uid, _TAMPERED, now, pause=self._end_of_use(slot, now))
        elif slot.state in (State.FREE, State.COOLDOWN) and record is not None and news:
            self._adopt(slot, record, now)
        if slot.state in (State.FREE, State.COOLDOWN):
            slot.fence = max(slot.fence, view.fence)
            self._table.place(slot)

    def _adopt(self, slot: Slot, record: ClaimRecord, now: float) -> None:
        """Another operator, or this one in an earlier life, wrote the record."""
        claim = Claim(record)
        slot.fence = max(slot.fence, record.fence)
        self._table.take(slot, claim, State.HELD)
        self._live.begin(claim, now)
        self._requests.claimed((slot.view.pool, record.holder, record.request), claim)
        sharing = [(o.claim.proved, o.claim.record.fence, o) for o in self._table.sharing(slot) if o.claim is not None]
        for _, _, other in sorted(sharing, key=lambda found: found[:2])[:-1]:
            # A leader of the past wrote it at its end, with no caller answered, or didn't know that they are one.
            if other.state is State.HELD:
                self._release(other.view.uid, "its device has a later claim, through another pool", now)

    def _adopt_unproved(self, slot: Slot, said: ClaimRecord, now: float) -> None:
        """Any client may have written it: its holder is believed for its own namespace only, and no claim is longer
        than one can be."""
        longest = self._timeouts.longest_claim
        namespace = slot.view.namespace
        holder = said.holder if namespace_of(said.holder) == namespace else unproved_holder(namespace, said.holder)
        record = replace(
            said, fence=_fence(slot.view, said), holder=holder, ttl=min(said.ttl, longest), hold=min(said.hold, longest)
        )
        claim = Claim(record, proved=False, until=now + longest if slot.view.lasting else math.inf)
        slot.fence = max(slot.fence, record.fence)
        self._table.take(slot, claim, State.HELD)
        self._live.begin(claim, now)

    def _after_write(self, slot: Slot, view: SlotView | None, now: float, pause: float) -> None:
        """What a free slot is after a write: `view`, or without a Lease."""
        if view is None:
            self._table.see(slot, _without_lease(slot.view))
        elif view.order >= slot.view.order:
            self._table.see(slot, view)
        self._check(slot, now)
        if slot.state is State.FREE and pause:
            self._cool_down(slot, pause, now)
        self._drop_retired(slot)

    def _release(
        self, uid: str, why: str, now: float, pause: float = 0.0, failures: int = 0, *, replaceable: bool = False
    ) -> None:
        """Ends a claim on a slot that goes on. Its record comes off first, or (`replaceable`) a grant replaces it."""
        slot = self._table.get(uid)
        if slot is None or slot.claim is None:
            return
        claim = slot.claim
        if claim.revoked and not claim.yields:
            slot.draining = slot.draining or claim.revoked
        slot.pause, slot.failures = pause, failures
        replaceable = replaceable and not slot.view.lasting
        clear = Clear(slot.view, claim.record, slot.view.episodes + claim.episodes, failures, pause, replaceable)
        slot.clear = clear
        self._end(slot, State.RELEASING, why, now)
        if replaceable and not self._table.is_returned(slot):  # it would not be granted
            clear = slot.clear = replace(clear, replaceable=False)
        self._work.append(clear)

    def _expire(self, claim: Claim, now: float) -> None:
        why, uid = _UNPROVABLE if claim.until <= now else _EXPIRED, claim.record.uid
        self._end_dirty(uid, why, now, pause=self._end_of_use(self._table[uid], now), failed=True)

    def _end_dirty(self, uid: str, why: str, now: float, *, pause: float, failed: bool = False) -> None:
        """A claim ends badly. `pause`: seconds that its holder may still be in a call; `failed`: it speaks against the
        slot."""
        slot = self._table.get(uid)
        if slot is None or slot.claim is None:
            return
        if slot.view.lasting:
            failures = slot.failures + failed
            self._release(uid, why, now, pause + self._timeouts.pause(failures) * failed, failures)
        else:
            self._end(slot, State.FREE, why, now)
            self._terminate(slot, why)

    def _end_of_use(self, slot: Slot, now: float) -> float:
        """Seconds until the holder of an external URL has surely stopped: it learns that the claim is lost when it
        renews it, or when it no longer can."""
        return (max(0.0, slot.claim.believed - now) if slot.claim else 0.0) + self._timeouts.step_deadline

    def _left_of_use(self, slot: Slot, now: float) -> float:
        """Seconds for which a device that leaves its pool is not granted through another one."""
        match slot.state:
            case State.HELD:
                return self._end_of_use(slot, now)
            case State.RELEASING:
                return slot.pause
            case State.COOLDOWN:
                return max(0.0, slot.until - now)
            case _:
                return 0.0

    def _terminate(self, slot: Slot, why: str) -> None:
        slot.draining = why
        self._table.move(slot, State.TERMINATING)
        self._work.append(Remove(slot.view, why, slot.fence))

    def _end(self, slot: Slot, state: State, why: str, now: float) -> None:
        view, claim = slot.view, self._table.end(slot, state)
        if self._live.get(claim.id) is claim and why is not _KNOWN:
            self._events.append(ClaimEvent(claim, view, why))
        self._live.end(claim)
        _keep(self._why, claim.id, why)
        self._requests.ended((slot.view.pool, claim.record.holder, claim.record.request), claim, now)

    def _cool_down(self, slot: Slot, seconds: float, now: float) -> None:
        slot.until = now + seconds
        self._table.move(slot, State.COOLDOWN)
        heapq.heappush(self._cooldowns, (slot.until, slot.view.uid))

    def _drop_retired(self, slot: Slot) -> None:
        if slot.retired and slot.state is State.FREE:
            if slot.view.version:
                self._work.append(Remove(slot.view, slot.retired, slot.fence))
            self._table.drop(slot)


def _fence(view: SlotView, said: ClaimRecord) -> int:
    """Of a record that can't be proved; one that can't be read either has that of its slot."""
    return said.fence or view.fence


def _without_lease(view: SlotView) -> SlotView:
    return replace(view, version="", record=None, unproved=None)


def _keep(memory: OrderedDict[str, V], key: str, value: V) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > _REMEMBERED:
        memory.popitem(last=False)
