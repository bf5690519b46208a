"""The slots and their holders: a pure state machine without clock or I/O, keyed by the UID of the slot.

    free -> granting -> held -> releasing -> free        given back clean
                                releasing -> granting    the same, and a claimant waits: one write instead of two
            granting -> free                             the record could not be written, and certainly is not there
            granting -> releasing                        the same, and the record that it was to replace is there
                        held -> terminating              given back dirty or broken, expired, or its record changed
                        held -> releasing -> cooldown    the same of an external URL, which can't be thrown away
                                             cooldown -> free
    cooldown: not granted for a while.  terminating: never granted again; the service deletes the Pod.

Rules:
1. A slot has at most one claim. No caller learns of a claim before its record is on the slot (`granted`).
2. A claim's fence is larger than every earlier one of its slot, in this term and all earlier ones.
3. A slot that ended, is terminating or draining is never granted again. The UID of a Pod that was deleted never comes
   back.
4. A verified record on a slot that is new to this ledger is a claim with a whole life before it: the time in which no
   operator ran ages no claim. Silence alone ends no claim before its `hold`; that its holder is gone does. On a slot
   that is known, only a record with a larger fence counts (another leader wrote it); an older one is a replay and means
   nothing.
5. What the API server said earlier (`SlotView.order`) never overrides what it said later.
6. A request that is repeated gets the claims that it got, not more.
7. A device that several pools name counts as one: it is granted through one of them at a time, and rests for all.
8. Slots go to the highest priority, then to the claimant that has the fewest, then to the one that came first; from the
   fullest node. A claimant that has as many as it may have waits until one of them ends.
9. The claimants of a namespace hold no more slots than its quota, over all pools. Claims that an earlier leader granted
   count, and are kept where they are more than that.

Any client that may patch Pods can end a claim: a record that is taken off terminates its slot. Should the operator die
in between, its successor finds a free slot: that is beyond what can be known.

What has to be done outside is collected for `take_work`. Times are seconds and only go forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Set
from dataclasses import replace

from tapforge_operator.broker.claim_record import ClaimRecord, SlotView
from tapforge_operator.broker.claims import SlotClaims
from tapforge_operator.broker.slots import Slot, balance
from tapforge_operator.broker.types import (
    Answer,
    Claim,
    Claimant,
    ClaimEvent,
    ClaimQuotas,
    Grant,
    LedgerTimeouts,
    State,
    Waiter,
    Want,
    Work,
)

_TERM_BITS = 24
_AWAY = "its caller went away before the answer"
_NEVER = "it was never granted"


class Ledger(SlotClaims):
    def __init__(self, term: int, timeouts: LedgerTimeouts | None = None, quotas: ClaimQuotas | None = None):
        """`term`: number of this leadership, larger than every earlier one's."""
        super().__init__(timeouts, quotas)
        self._term = term
        self._grants = 0
        self._tickets = 0
        self._waiters: dict[int, Waiter] = {}

    def take_work(self) -> list[Work]:
        """What is to be done outside, each piece once."""
        work, self._work = self._work, []
        return work

    def take_events(self) -> list[ClaimEvent]:
        """Claims that were granted or ended, each once, in this order."""
        events, self._events = self._events, []
        return events

    # --- claimants that want slots ------------------------------------------------------------------------------------

    def enqueue(self, want: Want, now: float) -> int:
        """Returns the ticket that an `Answer` will name; that of the waiter, where the request waits already."""
        key = (want.pool, want.holder, want.request)
        known = self._requests.find(key)
        if known is not None and known.waiter is not None and known.waiter.open:
            return known.waiter.ticket
        self._tickets += 1
        if known is not None:
            self._work.append(Answer(self._tickets, tuple(filter(self._lives, known.claims.values())), repeated=True))
            return self._tickets
        if want.limit:  # what it may not have does not count as demand
            room = want.limit - self.held_by(want.pool, want.holder)
            want = replace(want, slots=max(1, min(want.slots, room)))
        waiter = Waiter(self._tickets, want, since=now, rank=self._tickets)
        self._waiters[waiter.ticket] = waiter
        self._requests.begin(key, waiter)
        self._table.pool(want.pool).queue.enter(waiter, now)
        return waiter.ticket

    def held_by(self, pool: str, holder: str) -> int:
        """Claims of the pool that the holder has or is being granted."""
        return self._table.pool(pool).tally.holders[holder]

    def conclude(self, ticket: int, now: float) -> None:
        """Answer now, with what there is. What is still being granted is given back as soon as it is there."""
        waiter = self._waiters.get(ticket)
        if waiter is not None and waiter.open:
            self._answer(waiter, now)

    def withdraw(self, ticket: int, now: float) -> None:
        """The caller is gone: what was granted is given back. Never after `delivered`."""
        waiter = self._waiters.pop(ticket, None)
        if waiter is None:
            return
        waiter.withdrawn = True
        self._table.pool(waiter.want.pool).queue.remove(waiter)
        self._requests.drop(_key(waiter), waiter)
        for claim in filter(self._lives, waiter.got):
            self._release(claim.record.uid, _AWAY, now)

    def delivered(self, ticket: int) -> None:
        """The answer reached its caller, as far as one can know."""
        self._waiters.pop(ticket, None)

    def granting(self, ticket: int) -> bool:
        """Slots are being granted to the waiter."""
        waiter = self._waiters.get(ticket)
        return waiter is not None and waiter.open and bool(waiter.pending)

    def close(self, pool: str, now: float) -> None:
        """The pool is gone: claimants that wait for it are answered."""
        for waiter in [w for w in self._waiters.values() if w.want.pool == pool]:
            self.conclude(waiter.ticket, now)
        self._table.close(pool)

    def assign(self, pool: str, now: float) -> None:
        """Chooses slots for claimants that wait, while there are any."""
        table, known = self._table, self._table.pool(pool)
        tally = known.tally
        kept: Counter[Claimant] = Counter()
        served: dict[int, Waiter] = {}
        while table.grantable(pool) > kept.total():
            turn = known.queue.turn(tally.held, tally.holders, kept, now, table.spare)
            if turn is None:
                break
            claimant, waiter = turn
            slot = table.next(pool)
            if waiter is None or slot is None:
                kept[claimant] += 1
                continue
            self._grant(slot, waiter)
            served[waiter.ticket] = waiter
            if len(waiter.pending) == waiter.want.slots:
                known.queue.remove(waiter)
        for waiter in served.values():
            known.queue.remove(waiter)

    def balance(self, pool: str, now: float) -> bool:
        """Asks for slots back where others have waited long enough for their share. True when anything changed."""
        return balance(self._table, pool, now - self._timeouts.revoke_after)

    def withhold(self, pool: str, uids: Set[str]) -> bool:
        """These slots of the pool, and no others, are not granted for now; a holder of one keeps it. True when that
        changes."""
        return self._table.withhold(pool, uids)

    # --- what became of a Grant ---------------------------------------------------------------------------------------

    def granted(self, uid: str, fence: int, view: SlotView, now: float) -> int:
        """The record is on the slot. Returns the ticket that it was meant for."""
        slot, claim = self._granting(uid, fence)
        if slot is None or claim is None:
            return 0
        slot.fence, slot.clear = fence, None
        self._table.move(slot, State.HELD)
        self._live.begin(claim, now)
        self._events.append(ClaimEvent(claim, view))
        if view.order >= slot.view.order:
            self._table.see(slot, view)
        self._check(slot, now)
        waiter = self._waiters.get(claim.ticket)
        if self._lives(claim):
            if waiter is not None and waiter.open:
                waiter.got.append(claim)
                self._requests.claimed(_key(waiter), claim)
            else:
                self._release(uid, _AWAY, now)
        self._settle(claim, now)
        return claim.ticket

    def refused(self, uid: str, fence: int, view: SlotView | None, now: float, pause: float = 0.0) -> None:
        """The record is not on the slot, and will not be. `view` is what is there instead, None: nothing is. `pause`:
        seconds before it is tried again."""
        slot, claim = self._granting(uid, fence)
        if slot is None or claim is None:
            return
        if view is None and not slot.view.lasting:
            self.forget(uid, now)
            return
        clear, slot.clear = slot.clear, None
        if clear is not None and view is not None and view.record == clear.record:
            slot.pause = pause
            slot.clear = replace(clear, view=view, replaceable=False)
            self._work.append(slot.clear)
            self._end(slot, State.RELEASING, _NEVER, now)
        else:
            self._end(slot, State.FREE, _NEVER, now)
            self._after_write(slot, view, now, pause)
        self._settle(claim, now)

    def forget(self, uid: str, now: float, why: str = "its Pod is gone", *, back: bool = False) -> None:
        """The slot is gone."""
        slot = self._table.get(uid)
        granting = slot.claim if slot is not None and slot.state is State.GRANTING else None
        super().forget(uid, now, why, back=back)
        if granting is not None:
            self._settle(granting, now)

    # --- holders that are silent --------------------------------------------------------------------------------------

    def suspects(self, now: float, idle: Callable[[str], bool]) -> list[str]:
        """Pods to look at: of holders that are silent, or whose run wants no phones any more."""
        return self._live.suspects(now, idle)

    def holder_gone(
        self,
        pod: str,
        why: str,
        now: float,
        *,
        stopped: bool,
        idle: Callable[[str], bool],
        fenced: Callable[[str], bool],
    ) -> set[str]:
        """Nothing in the Pod speaks any more. `stopped`: nothing in it acts any more either, as its node says; without
        that, the holder of an external device may still use it until `hold` is over. Returns the pools of ended
        claims."""
        changed = set()
        for claim in self._live.of_pod(pod, now, idle):
            slot = self._table[claim.record.uid]
            if stopped or not slot.view.lasting:
                changed.add(slot.view.pool)
                self._abandon(slot, why, now, fenced)
        return changed

    def release_unlisted(
        self,
        holder: str,
        session: str,
        settled: int,
        listed: Collection[str],
        now: float,
        fenced: Callable[[str], bool],
    ) -> set[str]:
        """A holder's process named all claims that it has. Returns the pools of those that ended."""
        changed = set()
        for claim in self._live.unlisted(holder, session, settled, listed):
            slot = self._table[claim.record.uid]
            changed.add(slot.view.pool)
            self._abandon(slot, "its holder doesn't name it among its claims", now, fenced)
        return changed

    def _abandon(self, slot: Slot, why: str, now: float, fenced: Callable[[str], bool]) -> None:
        """Ends a claim whose holder left the phone as it was. A phone that checks fences refuses the late holder."""
        if slot.view.lasting:
            self._release(slot.view.uid, why, now, self._timeouts.step_deadline, slot.failures)
        elif fenced(slot.view.pool):
            self._release(slot.view.uid, why, now)
        else:
            self._end_dirty(slot.view.uid, why, now, pause=0.0)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _grant(self, slot: Slot, waiter: Waiter) -> None:
        self._grants += 1
        want = waiter.want
        fence = max((self._term << _TERM_BITS) + self._grants, slot.fence + 1)
        record = ClaimRecord(
            slot.view.uid, fence, want.holder, want.run, want.request, want.priority, want.ttl, want.hold, want.pod,
            want.session, want.number,
        )  # fmt: skip
        self._table.take(slot, Claim(record, waiter.ticket), State.GRANTING)
        self._work.append(Grant(slot.view, record, slot.clear))
        waiter.pending.add(record.uid)

    def _granting(self, uid: str, fence: int) -> tuple[Slot | None, Claim | None]:
        slot = self._table.get(uid)
        if slot is None or slot.state is not State.GRANTING or slot.claim is None or slot.claim.record.fence != fence:
            return None, None
        return slot, slot.claim

    def _settle(self, claim: Claim, now: float) -> None:
        """One of the waiter's grants has an outcome."""
        waiter = self._waiters.get(claim.ticket)
        if waiter is None:
            return
        waiter.pending.discard(claim.record.uid)
        if waiter.pending or not waiter.open:
            return
        if any(map(self._lives, waiter.got)):
            self._answer(waiter, now)
        else:
            self._table.pool(waiter.want.pool).queue.add(waiter)

    def _answer(self, waiter: Waiter, now: float) -> None:
        waiter.answered = True
        queue = self._table.pool(waiter.want.pool).queue
        queue.remove(waiter)
        claims = tuple(filter(self._lives, waiter.got))
        queue.remember(waiter, waiter.want.slots - len(claims), now + self._timeouts.linger)
        if not claims:
            self._requests.drop(_key(waiter), waiter)
        self._work.append(Answer(waiter.ticket, claims))


def _key(waiter: Waiter) -> tuple[str, str, str]:
    return (waiter.want.pool, waiter.want.holder, waiter.want.request)
