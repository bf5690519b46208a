"""The ledger's rules one by one; `test_ledger_machine.py` has them in every order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tapforge_operator.broker.ledger import Ledger
from tapforge_operator.broker.mark import Mark
from tapforge_operator.broker.records import Answer, Clear, Grant, Pace, Remove, SlotView, Want

PACE = Pace(
    patience=10.0, linger=1.0, remember=100.0, step_deadline=60.0, first_pause=10.0, longest_pause=35.0, unproved=900.0
)
TTL = 30.0


class Desk:
    """A ledger with a clock, and the writes that it asks for."""

    def __init__(self, slots: int = 0, term: int = 1, nodes: int = 1, lasting: bool = False):
        self.ledger = Ledger(term, PACE)
        self.now = 1000.0
        self.version = 0
        self.views: dict[str, SlotView] = {}
        self.answers: dict[int, list] = {}
        self.todo: list = []
        for number in range(slots):
            self.see(f"s{number}", node=f"n{number % nodes}", ready=True, address=f"http://s{number}", lasting=lasting)

    def see(self, uid: str, **changes) -> SlotView:
        self.version += 1
        old = self.views.get(uid) or SlotView(uid, "pool", "lab", f"pod-{uid}", "")
        self.views[uid] = replace(old, version=str(self.version), **changes)
        self.ledger.observe(self.views[uid], self.now)
        return self.views[uid]

    def write(self, uid: str, **changes) -> SlotView:
        """A write of ours: the ledger hears of it by its answer."""
        self.version += 1
        self.views[uid] = replace(self.views[uid], version=str(self.version), **changes)
        return self.views[uid]

    def ask(self, holder: str, slots: int = 1, priority: int = 0, request: str = "") -> int:
        name = request or f"request-{len(self.answers)}-{holder}-{self.version}-{self.now}"
        return self.ledger.enqueue(Want("pool", holder, "", name, slots, TTL, priority), self.now)

    def collect(self) -> list:
        for work in self.ledger.take_work():
            if isinstance(work, Answer):
                self.answers[work.ticket] = list(work.claims)
                self.ledger.delivered(work.ticket)
            else:
                self.todo.append(work)
        return self.todo

    def serve(self) -> None:
        """Assigns, and carries out everything."""
        while self.ledger.assign("pool", self.now) or self.collect():
            work = self.todo.pop(0)
            if isinstance(work, Grant):
                view = self.write(work.view.uid, mark=work.mark, fence=work.mark.fence)
                self.ledger.granted(work.view.uid, work.mark.fence, view, self.now)
            elif isinstance(work, Clear):
                view = self.write(work.view.uid, mark=None, strikes=work.strikes, rest=work.rest)
                self.ledger.cleared(work.view.uid, view, self.now)
            elif isinstance(work, Remove):
                del self.views[work.view.uid]
                self.ledger.forget(work.view.uid, self.now)

    def take(self, holder: str, slots: int = 1, priority: int = 0) -> list:
        ticket = self.ask(holder, slots, priority)
        self.serve()
        return self.answers.get(ticket, [])

    def give(self, claim, verdict: str = "clean") -> None:
        self.ledger.give_back(claim, verdict, 0, self.now)
        self.serve()

    def wait(self, seconds: float, *alive) -> None:
        """Time passes; these claims are renewed meanwhile."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TTL / 3)
            for claim in alive:
                self.ledger.renew(claim, 0, self.now)
            self.ledger.expire(self.now)
            self.ledger.balance("pool", self.now)
        self.serve()

    @property
    def free(self) -> int:
        return self.ledger.counts("pool").free


# --- whose turn it is -------------------------------------------------------------------------------------------------


def test_priority_then_the_fewest_then_the_first():
    desk = Desk()
    desk.see("x0", ready=True)
    desk.take("rich")
    order = {
        desk.ask("rich"): "rich",
        desk.ask("poor-1"): "poor-1",
        desk.ask("poor-2"): "poor-2",
        desk.ask("urgent", priority=9): "urgent",
    }
    served = []
    for number in range(4):
        desk.see(f"s{number}", ready=True)
        desk.serve()
        served += [name for ticket, name in order.items() if desk.answers.get(ticket) and name not in served]
    assert served == ["urgent", "poor-1", "poor-2", "rich"]


def test_slots_that_come_together_are_shared():
    desk = Desk()
    tickets = [desk.ask("a", 9), desk.ask("b", 9)]
    for number in range(6):
        desk.see(f"s{number}", ready=True)
    desk.serve()
    assert [len(desk.answers[t]) for t in tickets] == [3, 3]


def test_a_slot_waits_a_moment_for_who_was_served_in_part():
    desk = Desk(2)
    rich = desk.take("rich", 2)
    poor, greedy = desk.ask("poor", 2), desk.ask("rich", 2)
    desk.give(rich[0])
    assert len(desk.answers[poor]) == 1
    desk.see("s2", ready=True)
    desk.serve()
    assert greedy not in desk.answers  # the poor one came first, and had no time to ask for its second
    more = desk.ask("poor", 1)
    desk.serve()
    assert len(desk.answers[more]) == 1
    desk.see("s3", ready=True)
    desk.serve()
    assert len(desk.answers[greedy]) == 1


def test_what_is_kept_for_somebody_is_not_kept_for_long():
    desk = Desk(3)
    a, b = desk.take("a", 2), desk.take("b", 1)
    desk.ledger.conclude(again := desk.ask("b", 1), desk.now)  # in vain: it may ask again
    desk.serve()
    assert desk.answers[again] == []
    greedy = desk.ask("a", 1)
    desk.give(b[0])
    desk.serve()
    assert greedy not in desk.answers
    desk.now += 1.5
    desk.serve()
    assert len(desk.answers[greedy]) == 1
    assert len(a) == 2


# --- fair share -------------------------------------------------------------------------------------------------------


def yields(desk: Desk, claims: list) -> int:
    return sum(bool(c.recalled) for c in claims)


def test_nobody_is_asked_before_the_others_have_waited():
    desk = Desk(4)
    claims = desk.take("a", 4)
    desk.ask("b", 4)
    desk.wait(5, *claims)
    assert yields(desk, claims) == 0
    desk.wait(6, *claims)
    assert yields(desk, claims) == 2
    desk.wait(50, *claims)
    assert yields(desk, claims) == 2


def test_phones_that_boot_are_waited_for():
    desk = Desk(4)
    claims = desk.take("a", 4)
    for number in range(3):
        desk.see(f"new-{number}", node="n0", booting=True)
    desk.ask("b", 4)
    desk.wait(20, *claims)
    assert yields(desk, claims) == 0
    desk.see("new-0", booting=False)  # it never became ready
    desk.see("new-1", ended="its Pod ended: Error")
    desk.wait(20, *claims)
    assert yields(desk, claims) == 1


def test_a_recall_that_nobody_heard_is_taken_back():
    desk = Desk(4)
    claims = desk.take("a", 4)
    ticket = desk.ask("b", 4)
    desk.wait(9, *claims)
    desk.now += 2
    desk.ledger.balance("pool", desk.now)
    assert yields(desk, claims) == 2
    told = next(c for c in claims if c.recalled)
    assert desk.ledger.renew(told, 0, desk.now) == "recalled"
    desk.ledger.withdraw(ticket, desk.now)
    desk.ledger.balance("pool", desk.now)
    assert [c for c in claims if c.recalled] == [told]


def test_the_wish_of_who_asks_again_keeps_its_age():
    desk = Desk(2)
    claims = desk.take("a", 2)
    for _ in range(4):
        ticket = desk.ask("b")
        desk.wait(3, *claims)
        desk.ledger.conclude(ticket, desk.now)
        desk.serve()
    desk.ask("b")
    desk.ledger.balance("pool", desk.now)
    assert yields(desk, claims) == 1


def test_slots_that_the_pool_wants_back_are_no_shares():
    desk = Desk(4)
    claims = desk.take("a", 4)
    for claim in claims[:2]:
        desk.ledger.recall(claim.mark.uid, "its node is drained")
    desk.ask("b", 4)
    desk.wait(20, *claims)
    assert sum(c.yields for c in claims) == 1
    assert not any(c.yields for c in claims[:2])


def test_priorities_take_slots_from_the_lowest_first():
    desk = Desk(4)
    low, high = desk.take("low", 2), desk.take("high", 2, priority=1)
    desk.ask("top", 2, priority=2)
    desk.wait(20, *low, *high)
    assert (yields(desk, low), yields(desk, high)) == (2, 0)


# --- news, early and late ---------------------------------------------------------------------------------------------


def test_old_news_take_nothing_back():
    desk = Desk(1)
    before = desk.views["s0"]
    [claim] = desk.take("a")
    desk.ledger.observe(before, desk.now)
    assert desk.ledger.claim(claim.id) is claim
    held = desk.views["s0"]
    desk.give(claim)
    desk.ledger.observe(held, desk.now)
    assert desk.free == 1


def test_the_answer_to_a_grant_that_comes_after_newer_news():
    desk = Desk(1)
    desk.ask("a")
    desk.ledger.assign("pool", desk.now)
    [grant] = desk.collect()
    answer = desk.write("s0", mark=grant.mark, fence=grant.mark.fence)
    desk.see("s0", ended="its Pod ended: OOMKilled")
    desk.ledger.granted("s0", grant.mark.fence, answer, desk.now)
    desk.collect()
    assert desk.answers == {}
    assert desk.ledger.claim(grant.mark.id) is None
    assert desk.ledger.waiting("pool") == 1
    assert desk.ledger.condemn("s0")


def test_a_pod_that_is_given_to_another_pool_serves_nobody():
    desk = Desk(2)
    [claim] = desk.take("a")
    for uid in ("s0", "s1"):
        desk.see(uid, pool="another")
    assert desk.ledger.claim(claim.id) is None
    assert desk.free == 0
    assert desk.ledger.counts("another").slots == 0
    desk.ledger.forget("s0", desk.now)
    assert desk.ledger.counts("pool").slots == 1


def test_a_replayed_mark_is_no_claim():
    desk = Desk(1)
    [claim] = desk.take("a")
    desk.give(claim)
    desk.see("s0", mark=claim.mark, fence=0)
    assert desk.free == 1
    [after] = desk.take("b")
    desk.see("s0", mark=claim.mark)
    desk.collect()
    assert isinstance(desk.todo[-1], Remove)
    assert "changed by somebody else" in desk.ledger.why(after.id)


def test_a_later_mark_is_another_leaders_claim():
    desk = Desk(1)
    mark = Mark("s0", 5 << 24, "run/other", "", "request-9", 0, 20.0)
    desk.see("s0", mark=mark)
    assert desk.free == 0
    assert desk.ledger.held("pool")["s0"].holder == "run/other"
    assert desk.ledger.claim(mark.id)
    newer = replace(mark, fence=6 << 24, holder="run/third")
    desk.see("s0", mark=newer)
    assert desk.ledger.claim(mark.id) is None
    assert desk.ledger.claim(newer.id)


@pytest.mark.parametrize("fence", [1, 5 << 24])
def test_a_grant_that_another_leader_was_faster_with(fence):
    desk = Desk(1, term=3)
    ticket = desk.ask("a")
    desk.ledger.assign("pool", desk.now)
    [grant] = desk.collect()
    desk.todo.clear()
    mark = Mark("s0", fence, "run/other", "", "request-9", 0, 20.0)
    desk.ledger.refused("s0", grant.mark.fence, desk.write("s0", mark=mark, fence=fence), desk.now)
    assert desk.ledger.claim(mark.id)
    desk.see("s1", ready=True)
    desk.serve()
    assert desk.answers[ticket][0].mark.uid == "s1"


def test_a_mark_of_another_key_ends_a_slot_that_served_and_no_other():
    desk = Desk()
    desk.see("used", node="n0", ready=True, foreign=True)
    desk.see("new", node="n0", booting=True, foreign=True)
    assert [work.view.uid for work in desk.collect()] == ["used"]
    assert desk.ledger.held("pool")["used"].expired
    desk.see("new", ready=True, booting=False)
    assert desk.free == 1
    desk.see("later", node="n0", ready=True)
    desk.see("later", foreign=True)  # known to be free: somebody scribbles
    assert desk.free == 2


def test_fences_grow_over_terms_and_over_what_others_wrote():
    desk = Desk(1, term=1)
    [first] = desk.take("a")
    later = Desk(term=2)
    later.see("s0", ready=True, fence=first.mark.fence)
    [second] = later.take("a")
    assert second.mark.fence > first.mark.fence
    back = Desk(term=1)  # somebody deleted the leader Lease: terms begin anew
    back.see("s0", ready=True, fence=second.mark.fence)
    [third] = back.take("a")
    assert third.mark.fence > second.mark.fence
    forged = Desk(term=3)
    forged.see("s0", ready=True, fence=2**63 - 1)
    assert forged.take("a") == []


def test_claims_found_at_the_start_live_a_whole_life_from_then():
    desk = Desk()
    mark = Mark("s0", 3, "run/a", "", "request-1", 0, TTL)
    desk.see("s0", ready=True, mark=mark, fence=3)
    desk.now += TTL - 1
    assert desk.ledger.expire(desk.now) == set()
    claim = desk.ledger.claim(mark.id)
    assert desk.ledger.renew(claim, 0, desk.now) == "held"
    desk.now += TTL
    assert desk.ledger.renew(claim, 0, desk.now) == "lost"
    assert isinstance(desk.collect()[0], Remove)


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_the_rest_of_an_answer_that_was_given_early_is_given_back():
    desk = Desk(2)
    ticket = desk.ask("a", 2)
    desk.ledger.assign("pool", desk.now)
    first, second = desk.collect()
    desk.todo.clear()
    desk.ledger.granted("s0", first.mark.fence, desk.write("s0", mark=first.mark), desk.now)
    assert desk.ledger.granting(ticket)
    desk.ledger.conclude(ticket, desk.now)
    desk.collect()
    assert [c.mark for c in desk.answers[ticket]] == [first.mark]
    desk.ledger.granted("s1", second.mark.fence, desk.write("s1", mark=second.mark), desk.now)
    [clear] = desk.collect()
    assert (type(clear), clear.mark) == (Clear, second.mark)


def test_who_goes_away_halfway_keeps_nothing():
    desk = Desk(2)
    ticket = desk.ask("a", 2, request="request-1")
    desk.ledger.assign("pool", desk.now)
    first, _ = desk.collect()
    desk.todo.clear()
    desk.ledger.granted("s0", first.mark.fence, desk.write("s0", mark=first.mark), desk.now)
    desk.ledger.withdraw(ticket, desk.now)
    [clear] = desk.collect()
    assert (type(clear), clear.mark) == (Clear, first.mark)
    assert desk.ledger.claim(first.mark.id) is None
    # Sent again, the request is a new one.
    assert desk.ask("a", 2, request="request-1") != ticket


def test_who_was_refused_keeps_its_place():
    desk = Desk(1)
    early = desk.ask("a")
    desk.ledger.assign("pool", desk.now)
    late = desk.ask("b")
    [grant] = desk.collect()
    desk.todo.clear()
    desk.ledger.refused("s0", grant.mark.fence, desk.write("s0", episodes=1), desk.now)
    desk.serve()
    assert early in desk.answers
    assert late not in desk.answers


def test_a_slot_that_vanishes_while_it_is_granted_is_replaced_by_another():
    desk = Desk(1)
    ticket = desk.ask("a")
    desk.ledger.assign("pool", desk.now)
    desk.collect()
    desk.todo.clear()
    desk.ledger.forget("s0", desk.now)
    desk.see("s1", ready=True)
    desk.serve()
    assert desk.answers[ticket][0].mark.uid == "s1"
    desk.ledger.observe(replace(desk.views["s0"], version="999"), desk.now)  # UIDs don't come back
    assert "s0" not in desk.ledger.held("pool")
    assert desk.ledger.counts("pool").slots == 1


def test_a_slot_that_could_not_be_written_rests():
    desk = Desk(1)
    ticket = desk.ask("a")
    desk.ledger.assign("pool", desk.now)
    [grant] = desk.collect()
    desk.todo.clear()
    desk.ledger.refused("s0", grant.mark.fence, desk.views["s0"], desk.now, pause=5.0)
    desk.serve()
    assert ticket not in desk.answers
    desk.wait(5)
    assert desk.answers[ticket]


def test_an_old_request_is_forgotten_in_the_end():
    desk = Desk(1)
    desk.ask("a", request="request-1")
    desk.serve()
    [claim] = next(iter(desk.answers.values()))
    desk.give(claim)
    again = desk.ask("a", request="request-1")
    desk.serve()
    assert desk.answers[again] == []
    desk.now += 101
    desk.ledger.expire(desk.now)
    assert len(desk.ledger._requests) == 0
    last = desk.ask("a", request="request-1")
    desk.serve()
    assert len(desk.answers[last]) == 1


# --- external URLs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "rests"), [("clean", [0]), ("dirty", [60, 60]), ("broken", [10, 20, 35, 35]), ("expired", [70, 80, 95])]
)
def test_a_url_rests_after_a_bad_claim(verdict, rests):
    desk = Desk(1, lasting=True)
    for seconds in rests:
        [claim] = desk.take("a")
        if verdict == "expired":
            desk.wait(TTL)
        else:
            desk.give(claim, verdict)
        assert desk.ledger.claim(claim.id) is None
        if seconds:
            assert desk.views["s0"].rest == seconds
            desk.wait(seconds - 0.5)
            assert desk.free == 0
            [device] = desk.ledger.devices("pool")
            assert device.state == "quarantined"
            desk.wait(0.5)
        assert desk.free == 1
    [claim] = desk.take("a")
    desk.give(claim)
    assert desk.views["s0"].strikes == 0


def test_a_rest_is_begun_anew_by_the_next_leader():
    desk = Desk()
    desk.see("u", lasting=True, ready=True, strikes=2, rest=20.0)
    assert desk.free == 0
    desk.wait(20)
    assert desk.free == 1


def test_a_lease_that_somebody_deletes_ends_its_claim_but_not_before_the_holder_can_know():
    desk = Desk(1, lasting=True)
    [claim] = desk.take("a")
    desk.now += 10
    desk.ledger.vanished("s0", int(desk.views["s0"].version) + 1, desk.now)
    assert "Lease was deleted" in desk.ledger.why(claim.id)
    desk.wait(TTL - 10 + 60 - 0.5)
    assert desk.free == 0
    desk.wait(0.5)
    assert desk.free == 1


def test_a_url_that_leaves_its_pool_goes_when_it_is_given_back():
    desk = Desk(2, lasting=True)
    [claim] = desk.take("a")
    for uid in ("s0", "s1"):
        desk.ledger.retire(uid, "its URL is no longer in the pool")
    assert desk.ledger.counts("pool").slots == 1
    assert desk.ledger.renew(claim, 0, desk.now) == "recalled"
    desk.give(claim)
    assert desk.ledger.counts("pool").slots == 0
    desk.see(claim.mark.uid)  # and it may come back
    assert desk.free == 1


def test_a_url_whose_claim_cannot_be_proved_rests_as_long_as_a_claim_can_live():
    desk = Desk()
    desk.see("u", lasting=True, ready=True, foreign=True)
    desk.wait(899.5)
    assert desk.free == 0
    desk.wait(1)
    assert desk.free == 1
