"""For every order of events, writes, crashes and late news: no slot has two holders, fences grow, nothing
terminating comes back, and nothing is lost for ever. What happens to the ledger is in `ledger_world.py`.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis.stateful import invariant
from ledger_world import POOL, QUOTA, World

from tapforge_operator.broker.claim_record import ClaimRecord
from tapforge_operator.broker.types import QuotaUse, namespace_of


class Slots(World):
    """What always holds, and what holds when everybody has left."""

    @invariant()
    def one_holder(self) -> None:
        busy: dict[str, ClaimRecord] = {}
        for use in self.in_use():
            what = self.truth.views[use.record.uid].address if self.lasting else use.record.uid
            assert what not in busy, f"{use.record} and {busy[what]} at once"
            busy[what] = use.record

    @invariant()
    def nobody_is_forgotten(self) -> None:
        if not hasattr(self, "ledger"):
            return
        granting = {g.view.uid for g in self.grants}
        queued = {w.ticket for pool in [self.ledger._table.find_pool(POOL)] if pool for w in pool.queue}
        for ticket in self.tickets:
            waiter = self.ledger._waiters[ticket]
            assert waiter.pending <= granting
            assert waiter.pending or ticket in queued
        told = {u.record for uses in self.uses.values() for u in uses}
        for slot in self.ledger._table:
            if slot.state == "held" and slot.claim.ticket:  # granted in this term: told, or about to be
                assert slot.claim.record in told or slot.claim.ticket in self.tickets

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "ledger"):
            return
        counts = self.ledger.counts(POOL)
        table = self.ledger._table
        pool = table.find_pool(POOL)
        slots = list(pool.slots.values()) if pool else []
        assert counts.held == sum(s.claim is not None for s in slots)
        served = [s for s in slots if not s.draining and s.view.uid not in self.withheld]
        open_ = [s for s in served if s.state == "free" and not s.view.ended]
        taken = Counter(
            s.device for s in slots if s.state in ("granting", "held", "releasing", "cooldown") and s.device
        )
        grantable = {s.view.uid for s in open_ if s.view.ready and not taken[s.device]}
        assert counts.free == len(grantable)
        assert counts.booting == sum(s.view.booting for s in open_)
        assert counts.cooldown == sum(s.state == "cooldown" for s in slots)
        assert counts.terminating == sum(s.state == "terminating" for s in slots)
        small = sum(namespace_of(s.claim.record.holder) == "small" for s in slots if s.claim)
        assert self.ledger.quota_use("small") == QuotaUse("small", QUOTA, small)
        wanted = sum(w.want.slots for w in pool.queue if namespace_of(w.want.holder) != "small") if pool else 0
        assert self.ledger.waiting(POOL) <= wanted + max(0, QUOTA - small)
        if pool:
            assert pool.tally.held == Counter(s.claim.claimant for s in slots if s.claim)
            assert pool.tally.holders == Counter(s.claim.claimant[0] for s in slots if s.claim)
            assert pool.tally.yielding == Counter(s.claim.claimant for s in slots if s.claim and s.claim.yields)
            leaving = [s.claim for s in slots if s.claim and s.claim.revoked and not s.claim.yields]
            assert pool.tally.leaving == Counter(claim.claimant for claim in leaving)
            assert pool.tally.returning == sum(s.state == "releasing" and not s.pause for s in served)
            told = {uid: (h.holder, h.expired, h.draining, h.revoked) for uid, h in self.ledger.held(POOL).items()}
            for s in slots:
                given_up = s.state == "free" and bool(s.draining) and not s.view.ended
                if s.claim:
                    assert told.pop(s.view.uid) == (s.claim.record.holder, False, False, s.claim.revoked)
                elif s.state == "terminating" or given_up:
                    assert told.pop(s.view.uid) == ("", not given_up, given_up, "")
            assert not told
        fill: dict[str, int] = {}
        for s in slots:
            if s.state in ("granting", "held", "releasing"):
                fill[s.view.node] = fill.get(s.view.node, 0) + 1
        assert {n: table.packing.fill(n) for n in self.nodes if table.packing.fill(n)} == fill
        if (uid := table.packing.next(POOL)) is not None:
            assert uid in grantable
            fullest = max(table.packing.fill(table[u].view.node) for u in grantable)
            assert table.packing.fill(table[uid].view.node) == fullest
        assert pool is None or pool.queue.wanted == sum(w.want.slots for w in pool.queue)

    def teardown(self) -> None:
        """When everybody leaves and every write ends, each slot is free again, terminating, or dead."""
        if not hasattr(self, "ledger"):
            return
        for ticket in list(self.tickets):
            del self.tickets[ticket]
            self.ledger.withdraw(ticket, self.now)
        self.ledger.withhold(POOL, set())
        self.pump()
        self.late = []
        for _ in range(8):
            self.now += 100.0
            self.ledger.expire(self.now)
            self.pump()
            for view in list(self.truth.views.values()):
                self.ledger.observe(view, self.now)
            self.pump()
            self.writes_end()
        counts = self.ledger.counts(POOL)
        assert counts.held == counts.waiting == counts.cooldown == counts.terminating == 0
        alive = {v.uid for v in self.truth.views.values() if v.ready and not v.ended} - self.terminating - self.draining
        revoked = {s.view.uid for s in self.ledger._table if s.draining}
        assert counts.free == len(alive - revoked)


class Urls(Slots):
    lasting = True


class SharedUrls(Urls):
    """Pools that name each other's devices; that they are several makes no difference here."""

    of_one_device = 2


SharedUrls.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, report_multiple_bugs=False
)
Slots.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None, report_multiple_bugs=False)
Urls.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None, report_multiple_bugs=False)
TestPods = Slots.TestCase
TestUrls = Urls.TestCase
TestSharedUrls = SharedUrls.TestCase
