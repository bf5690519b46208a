"""Who waits at the ledger keeps its place, is answered once, and keeps nothing when it goes away."""

from __future__ import annotations

from dataclasses import replace

from ledger_desk import Desk

from tapforge_operator.broker.claim_record import Clear


def test_the_rest_of_an_answer_that_was_given_early_is_given_back():
    desk = Desk(2)
    ticket = desk.ask("a", 2)
    desk.ledger.assign("pool", desk.now)
    first, second = desk.collect()
    desk.todo.clear()
    desk.ledger.granted("s0", first.record.fence, desk.write("s0", record=first.record), desk.now)
    assert desk.ledger.granting(ticket)
    desk.ledger.conclude(ticket, desk.now)
    desk.collect()
    assert [c.record for c in desk.answers[ticket]] == [first.record]
    desk.ledger.granted("s1", second.record.fence, desk.write("s1", record=second.record), desk.now)
    [clear] = desk.collect()
    assert (type(clear), clear.record) == (Clear, second.record)


def test_who_goes_away_halfway_keeps_nothing():
    desk = Desk(2)
    ticket = desk.ask("a", 2, request="request-1")
    desk.ledger.assign("pool", desk.now)
    first, _ = desk.collect()
    desk.todo.clear()
    desk.ledger.granted("s0", first.record.fence, desk.write("s0", record=first.record), desk.now)
    desk.ledger.withdraw(ticket, desk.now)
    [clear] = desk.collect()
    assert (type(clear), clear.record) == (Clear, first.record)
    assert desk.ledger.claim(first.record.id) is None
    # Sent again, the request is a new one.
    assert desk.ask("a", 2, request="request-1") != ticket


def test_who_was_refused_keeps_its_place():
    desk = Desk(1)
    early = desk.ask("a")
    desk.ledger.assign("pool", desk.now)
    late = desk.ask("b")
    [grant] = desk.collect()
    desk.todo.clear()
    desk.ledger.refused("s0", grant.record.fence, desk.write("s0", episodes=1), desk.now)
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
    assert desk.answers[ticket][0].record.uid == "s1"
    desk.ledger.observe(replace(desk.views["s0"], version="999"), desk.now)  # UIDs don't come back
    assert "s0" not in desk.ledger.held("pool")
    assert desk.ledger.counts("pool").slots == 1


def test_a_slot_that_could_not_be_written_rests():
    desk = Desk(1)
    ticket = desk.ask("a")
    desk.ledger.assign("pool", desk.now)
    [grant] = desk.collect()
    desk.todo.clear()
    desk.ledger.refused("s0", grant.record.fence, desk.views["s0"], desk.now, pause=5.0)
    desk.serve()
    assert ticket not in desk.answers
    desk.wait(5)
    assert desk.answers[ticket]


def test_withheld_slots_are_not_granted_and_those_who_have_one_keep_it():
    desk = Desk(3)
    [claim] = desk.take("a")
    others = {"s0", "s1", "s2"} - {claim.record.uid}
    kept, free = sorted(others)
    assert desk.ledger.withhold("pool", {claim.record.uid, kept})
    assert not desk.ledger.withhold("pool", {claim.record.uid, kept}), "no news"
    assert [c.record.uid for c in desk.take("b", 3)] == [free]
    assert desk.ledger.renew(claim, 0, desk.now) == "held"
    desk.give(claim)
    ticket = desk.ask("c", 3)
    desk.serve()
    assert ticket not in desk.answers and desk.free == 0
    desk.ledger.withhold("pool", {kept})
    desk.serve()
    assert [c.record.uid for c in desk.answers[ticket]] == [claim.record.uid]
    desk.ledger.withhold("pool", set())
    assert desk.free == 1


def test_a_slot_is_withheld_also_when_it_is_seen_later():
    desk = Desk(1)
    desk.ledger.withhold("pool", {"s1"})
    desk.see("s1", ready=True)
    assert desk.free == 1


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


def test_a_slot_is_withheld_also_when_nothing_of_its_pool_was_seen_before():
    desk = Desk()
    assert desk.ledger.withhold("pool", {"s0"})
    desk.see("s0", ready=True)
    assert desk.free == 0
