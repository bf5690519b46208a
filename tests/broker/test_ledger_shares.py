"""The ledger's rules of whose turn it is, and of who is asked to give slots back to whom."""

from __future__ import annotations

from ledger_desk import Desk

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


def test_nobody_gets_more_than_it_may_have_however_it_asks():
    desk = Desk(8)
    tickets = [desk.ask("run", 2, priority, f"request-{number}", 3) for number, priority in enumerate((0, 0, 9))]
    desk.serve()
    got = [claim for ticket in tickets for claim in desk.answers.get(ticket, [])]
    assert len(got) == 3 and desk.ledger.held_by("pool", "run") == 3
    late = desk.ask("run", 4, 0, "late", 3)
    assert len(desk.take("other", 9)) == 5, "what it may not have is for the others"
    assert late not in desk.answers and desk.ledger.waiting("pool") < 4, "and no demand of the pool"
    desk.give(got[0])
    desk.give(got[1])
    waiting = [ticket for ticket in (*tickets, late) if ticket in desk.answers]
    assert len(waiting) == 4 and desk.ledger.held_by("pool", "run") <= 3


def test_nothing_is_asked_back_for_who_has_as_many_as_it_may_have():
    desk = Desk(4)
    desk.take("run", 1)
    others = desk.take("other", 3)
    desk.ask("run", 1, limit=1)
    desk.wait(20, *others)
    assert not any(claim.revoked for claim in others)
    desk.ask("third", 1, limit=1)
    desk.wait(20, *others)
    assert any(claim.revoked for claim in others)


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
    return sum(bool(c.revoked) for c in claims)


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


def test_a_revoke_that_nobody_knows_of_is_taken_back():
    desk = Desk(4)
    claims = desk.take("a", 4)
    ticket = desk.ask("b", 4)
    desk.wait(9, *claims)
    desk.now += 2
    desk.ledger.balance("pool", desk.now)
    assert yields(desk, claims) == 2
    told = next(c for c in claims if c.revoked)
    assert desk.ledger.renew(told, 0, desk.now) == "recalled"
    desk.ledger.withdraw(ticket, desk.now)
    desk.ledger.balance("pool", desk.now)
    assert [c for c in claims if c.revoked] == [told]


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
        desk.ledger.revoke(claim.record.uid, "its node is drained")
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
