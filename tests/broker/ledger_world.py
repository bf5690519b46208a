"""What can happen to a ledger, in any order: events, writes, crashes, late news, callers.

The truth is a model of the API server: versions, records, late and repeated news of both. Holders are judged from
outside, by what they were told and by their own clocks. One thing is beyond the operator: where somebody takes a record
off a slot and the operator dies before it has deleted the Pod, the next one can't know of the claim.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tapforge_operator.broker.claim_record import ClaimRecord, Clear, SlotView
from tapforge_operator.broker.ledger import Ledger
from tapforge_operator.broker.types import Answer, ClaimQuotas, Grant, LedgerTimeouts, Remove, Want, namespace_of

POOL = "pool"
TTL = 10.0
TIMEOUTS = LedgerTimeouts(
    revoke_after=3.0, linger=1.0, remember=30.0, step_deadline=5.0, first_pause=2.0, longest_pause=8.0
)
#: the last two are of a namespace with a quota
HOLDERS = ["a", "b", "c", "run/small/d/1", "run/small/e/2"]
QUOTA = 2
QUOTAS = ClaimQuotas({"small": QUOTA})


@dataclass
class Use:
    """A claim as its holder knows it."""

    record: ClaimRecord
    until: float
    over: bool = False


@dataclass
class Truth:
    """The API server."""

    views: dict[str, SlotView] = field(default_factory=dict)
    history: dict[str, list[SlotView]] = field(default_factory=dict)
    version: int = 0

    def write(self, uid: str, **changes: object) -> SlotView:
        self.version += 1
        self.views[uid] = replace(self.views[uid], version=str(self.version), **changes)
        self.history.setdefault(uid, []).append(self.views[uid])
        return self.views[uid]


class World(RuleBasedStateMachine):
    lasting = False
    #: slots of one device
    of_one_device = 1

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.term = 0
        self.truth = Truth()
        self.news: list[SlotView] = []
        self.uses: dict[str, list[Use]] = {}
        self.told_fences: dict[str, list[int]] = {}
        #: never to be granted again
        self.terminating: set[str] = set()
        #: this leader did not begin with the newest news of them
        self.behind: set[str] = set()
        #: spoiled by their holder, or by somebody who changed their record
        self.spoiled: set[str] = set()
        self.tampered: set[str] = set()
        #: the same, as long as this leader lives: nobody holds them
        self.draining: set[str] = set()
        self.withheld: set[str] = set()
        self.grants: list[Grant] = []
        self.other: list[Clear | Remove] = []
        #: writes of dead leaders that may still be carried out
        self.late: list[Grant | Clear] = []
        self.tickets: dict[int, str] = {}
        #: when the request of a ticket was first sent: from then on its holder counts
        self.asked: dict[str, float] = {}
        self.since: dict[int, float] = {}
        self.counter = 0
        self.chance = random.Random(0)

    @initialize(seed=st.integers(0, 2**16), nodes=st.integers(1, 3), claims=st.integers(0, 2))
    def begin(self, seed: int, nodes: int, claims: int) -> None:
        self.chance = random.Random(seed)
        self.nodes = [f"n{k}" for k in range(nodes)]
        self.takeover()
        for _ in range(3):
            self.add_slot(ready=True)
        for request in range(claims):
            self.acquire("a", 1, 0, 30 + request, at_once=True)

    # --- the operator -------------------------------------------------------------------------------------------------

    def takeover(self) -> None:
        self.term += 1
        self.ledger = Ledger(self.term, TIMEOUTS, QUOTAS)
        self.ledger.wear(POOL, None)  # the service tells the ledger of each pool before its slots
        self.tickets, self.draining, self.withheld, self.behind = {}, set(), set(), set()
        for uid, view in self.truth.views.items():
            # What a new leader read may be a little behind what its predecessor wrote last. Nothing that was told is:
            # it read after that one had ended. Only where a device has one slot there is another guard, the version.
            newest = self.chance.random() < 0.7 or self.of_one_device > 1
            seen = view if newest else self.chance.choice(self.truth.history[uid][-3:])
            self.ledger.observe(seen, self.now)
            if seen is not view:
                self.news.append(view)
                self.behind.add(uid)
        self.pump()

    def pump(self) -> None:
        for work in self.ledger.take_work():
            if isinstance(work, Answer):
                self.answered(work)
            elif isinstance(work, Grant):
                assert work.view.uid not in self.withheld
                if namespace_of(work.record.holder) == "small":
                    assert self.ledger.quota_use("small").held <= QUOTA
                self.grants.append(work)
            else:
                self.other.append(work)
                uid = work.view.uid
                if uid not in self.behind | self.spoiled:  # a slot goes when nobody uses it any more, or it is spoiled
                    assert not [u for u in self.in_use() if u.record.uid == uid]

    def answered(self, answer: Answer) -> None:
        if answer.ticket not in self.tickets:
            return  # its caller went away
        claims = answer.claims
        if answer.repeated:  # the shell writes on slots whose claims are an earlier leader's
            for claim in claims:
                view = self.truth.views.get(claim.record.uid)
                known = self.ledger.view(claim)
                stale = known is not None and not known.is_confirmed
                if view is not None and not claim.ticket and stale and view.record == claim.record:
                    view = self.truth.write(claim.record.uid, confirmed=str(view.fence))
                if view is not None:
                    self.ledger.observe(view, self.now)
            claims = tuple(claim for claim in claims if self.ledger.claim(claim.id))
        for claim in claims:
            record = claim.record
            assert record.holder == self.tickets[answer.ticket]
            assert self.ledger.claim(claim.id) is claim
            known = [u for u in self.uses.get(record.uid, []) if u.record == record]
            if known and answer.repeated:
                continue
            assert record.uid not in self.terminating | self.draining
            fences = self.told_fences.setdefault(record.uid, [])
            assert not fences or record.fence > fences[-1]
            fences.append(record.fence)
            # Told means written: the record is the one on the slot, or the slot is gone meanwhile.
            assert record.uid not in self.truth.views or self.truth.views[record.uid].record == record
            self.uses.setdefault(record.uid, []).append(Use(record, self.since[answer.ticket] + record.ttl))
        self.ledger.delivered(answer.ticket)
        del self.tickets[answer.ticket]
        self.pump()

    # --- the cluster --------------------------------------------------------------------------------------------------

    def say(self, view: SlotView) -> None:
        """News come late, twice, out of order, or (but for deletions) never."""
        fate = self.chance.random()
        if fate < 0.5:
            self.ledger.observe(view, self.now)
            self.pump()
        if fate > 0.3:
            self.news.append(view)

    @precondition(lambda self: len(self.truth.views) < 5)
    @rule(ready=st.booleans())
    def add_slot(self, ready: bool) -> None:
        self.counter += 1
        uid = f"uid-{self.counter}"
        self.truth.views[uid] = SlotView(
            uid, POOL, "ns", f"pod-{uid}", "", node=self.chance.choice(self.nodes), lasting=self.lasting,
            address=f"http://{self.counter // self.of_one_device}",
            booting=not (self.lasting or ready), ready=self.lasting or ready,
        )  # fmt: skip
        self.say(self.truth.write(uid))

    @precondition(lambda self: self.truth.views and not self.lasting)
    @rule(data=st.data(), ready=st.booleans())
    def turn(self, data: st.DataObject, ready: bool) -> None:
        uid = data.draw(st.sampled_from(sorted(self.truth.views)))
        self.say(self.truth.write(uid, ready=ready, booting=False))

    @precondition(lambda self: self.truth.views and not self.lasting)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.truth.views)))
        view = self.truth.write(uid, ended="its Pod ended: OOMKilled")
        self.say(view)
        slot = self.ledger._table.get(uid)
        assert slot is None or slot.view.order < view.order or slot.state != "held"

    def delete(self, uid: str) -> None:
        del self.truth.views[uid]
        for use in self.uses.get(uid, []):
            use.over = True
        self.ledger.forget(uid, self.now)
        self.pump()

    @precondition(lambda self: self.truth.views and not self.lasting)
    @rule(data=st.data())
    def somebody_deletes(self, data: st.DataObject) -> None:
        self.delete(data.draw(st.sampled_from(sorted(self.truth.views))))

    @precondition(lambda self: self.news)
    @rule(data=st.data())
    def late_news(self, data: st.DataObject) -> None:
        view = self.news.pop(data.draw(st.integers(0, len(self.news) - 1)))
        if view.uid in self.truth.views:
            self.ledger.observe(view, self.now)
            self.pump()

    # --- writes -------------------------------------------------------------------------------------------------------

    @staticmethod
    def fits(work: Grant | Clear, current: SlotView) -> bool:
        """A Lease has to be as it was seen; of a Pod what claims rest on."""
        if current.lasting:
            return current.version == work.view.version
        fence = work.view.fence if isinstance(work, Grant) else work.record.fence
        there = isinstance(work, Grant) or current.record is not None
        return there and (current.fence, current.confirmed) == (fence, work.view.confirmed)

    def carry_out(self, work: Grant | Clear) -> bool:
        uid = work.view.uid
        current = self.truth.views.get(uid)
        if current is None or not self.fits(work, current):
            return False
        if isinstance(work, Grant):
            played = {"episodes": work.replaces.episodes} if work.replaces else {}
            self.truth.write(uid, record=work.record, fence=work.record.fence, **played)
        else:
            self.truth.write(uid, record=None, episodes=work.episodes, failures=work.failures, rest=work.rest)
        return True

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def grant_outcome(self, data: st.DataObject) -> None:
        self.end_grant(self.grants.pop(data.draw(st.integers(0, len(self.grants) - 1))))

    def end_grant(self, work: Grant) -> None:
        uid, fence = work.view.uid, work.record.fence
        if self.carry_out(work):
            answer = self.truth.views[uid]
            if self.chance.random() < 0.3:
                self.ledger.observe(self.truth.write(uid, ready=True), self.now)
            self.ledger.granted(uid, fence, answer, self.now)
        else:
            self.ledger.refused(uid, fence, self.truth.views.get(uid), self.now, self.chance.choice([0.0, 1.0]))
        self.pump()

    @precondition(lambda self: self.other)
    @rule(data=st.data())
    def other_outcome(self, data: st.DataObject) -> None:
        self.end_other(self.other.pop(data.draw(st.integers(0, len(self.other) - 1))))

    def end_other(self, work: Clear | Remove) -> None:
        uid = work.view.uid
        if isinstance(work, Remove):
            self.terminating.add(uid)
            if uid in self.truth.views:
                self.delete(uid)
        elif work.replaceable:
            if self.ledger.begin_clear(work, self.now):
                self.other.append(replace(work, replaceable=False))
            self.pump()
        elif self.carry_out(work) or (current := self.truth.views.get(uid)) is None or current.record != work.record:
            self.ledger.cleared(uid, self.truth.views.get(uid), self.now)
            self.pump()
        else:
            self.other.append(replace(work, view=current))  # as the shell does

    @rule()
    def writes_end(self) -> None:
        for _ in range(3):
            for grant in [self.grants.pop() for _ in range(len(self.grants))]:
                self.end_grant(grant)
            for other in [self.other.pop() for _ in range(len(self.other))]:
                self.end_other(other)

    @precondition(lambda self: self.late)
    @rule(data=st.data(), told=st.booleans())
    def late_write_of_an_earlier_leader(self, data: st.DataObject, told: bool) -> None:
        """It died, or it was only cut off and still tells its caller."""
        work = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        if self.carry_out(work):
            view = self.truth.views[work.view.uid]
            if isinstance(work, Grant) and told and self.of_one_device == 1:
                fences = self.told_fences.setdefault(view.uid, [])
                assert not fences or work.record.fence > fences[-1]
                fences.append(work.record.fence)
                self.uses.setdefault(view.uid, []).append(Use(work.record, self.now + TTL))
            self.say(view)

    @rule(really=st.sampled_from([False, False, False, False, True]))
    def crash(self, really: bool) -> None:
        if not really:  # lives have to be long enough for something to happen
            return
        self.late += [*self.grants, *(w for w in self.other if isinstance(w, Clear))]
        self.grants, self.other, self.news = [], [], []
        self.terminating -= self.tampered
        for use in (use for uid in self.tampered for use in self.uses.get(uid, [])):
            use.over = True
        self.tampered = set()
        self.takeover()

    @precondition(lambda self: self.truth.views)
    @rule(data=st.data())
    def tamper(self, data: st.DataObject) -> None:
        """Somebody writes an old record on a slot, or takes its record off."""
        uid = data.draw(st.sampled_from(sorted(self.truth.views)))
        old = data.draw(st.sampled_from([None, *(v.record for v in self.truth.history[uid][-6:])]))
        known = self.ledger._table.get(uid)
        if (
            known
            and known.view == self.truth.views[uid]
            and old != known.view.record
            and uid not in self.terminating | self.spoiled
        ):
            self.spoiled.add(uid)
            self.tampered.add(uid)
            self.ledger.observe(self.truth.write(uid, record=old), self.now)
            self.pump()
            assert known.state != "held"

    # --- callers ------------------------------------------------------------------------------------------------------

    @rule(
        holder=st.sampled_from(HOLDERS),
        slots=st.integers(1, 3),
        priority=st.sampled_from([0, 0, 5]),
        request=st.integers(0, 20),
        at_once=st.booleans(),
    )
    def acquire(self, holder: str, slots: int, priority: int, request: int, at_once: bool) -> None:
        want = Want(POOL, holder, "", f"request-{request}", slots, TTL, priority, limit=4 if holder == "b" else 0)
        ticket = self.ledger.enqueue(want, self.now)
        self.tickets[ticket] = holder
        self.since[ticket] = self.asked.setdefault(f"{holder} {request}", self.now)
        self.ledger.assign(POOL, self.now)
        self.pump()
        if at_once:
            self.writes_end()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), gone=st.booleans())
    def stop_waiting(self, data: st.DataObject, gone: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        if gone:
            del self.tickets[ticket]
            self.ledger.withdraw(ticket, self.now)
        else:
            self.ledger.conclude(ticket, self.now)
        self.pump()
        assert ticket not in self.tickets

    def in_use(self) -> list[Use]:
        return [u for uses in self.uses.values() for u in uses if not u.over and u.until > self.now]

    @precondition(lambda self: self.in_use())
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        use = data.draw(st.sampled_from(self.in_use()))
        claim = self.ledger.claim(use.record.id)
        state = self.ledger.renew(claim, 1, self.now) if claim else "lost"
        if state == "lost" and not self.ledger.ahead(use.record.id):
            # A renewal in time is lost only with the slot.
            current = self.truth.views.get(use.record.uid)
            assert current is None or current.ended or use.record.uid in self.behind | self.spoiled
            use.over = True
        elif state == "lost":
            use.over = True  # the shell would look at the slot first
        else:
            use.until = self.now + use.record.ttl
        self.pump()

    @precondition(lambda self: self.in_use())
    @rule(data=st.data(), verdict=st.sampled_from(["clean", "clean", "dirty", "broken"]))
    def release(self, data: st.DataObject, verdict: str) -> None:
        use = data.draw(st.sampled_from(self.in_use()))
        use.over = True
        if verdict != "clean":
            self.spoiled.add(use.record.uid)
        if claim := self.ledger.claim(use.record.id):
            self.ledger.give_back(claim, verdict, 2, self.now)
            if verdict != "clean" and not self.lasting:
                self.terminating.add(use.record.uid)
        assert self.ledger.claim(use.record.id) is None
        self.pump()

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0, 15.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)
        self.ledger.balance(POOL, self.now)
        self.ledger.assign(POOL, self.now)
        self.pump()

    # --- the pool -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.truth.views and not self.lasting)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.truth.views)))
        used = [u for u in self.in_use() if u.record.uid == uid]
        if self.ledger.drain(uid):
            assert not used or all(self.ledger.ahead(u.record.id) for u in used) or self.truth.views[uid].ended or any(
                isinstance(w, Remove) and w.view.uid == uid for w in self.other
            )  # fmt: skip
            self.draining.add(uid)

    @precondition(lambda self: self.truth.views)
    @rule(data=st.data())
    def withhold(self, data: st.DataObject) -> None:
        self.withheld = data.draw(st.sets(st.sampled_from(sorted(self.truth.views))))
        self.ledger.withhold(POOL, self.withheld)

    @precondition(lambda self: self.truth.views)
    @rule(data=st.data(), reason=st.sampled_from(["its node is drained", ""]))
    def revoke(self, data: st.DataObject, reason: str) -> None:
        self.ledger.revoke(data.draw(st.sampled_from(sorted(self.truth.views))), reason)
