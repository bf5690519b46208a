"""The ledger's rules for external URLs: they rest after trouble, and go when their pool lets them go."""

from __future__ import annotations

import pytest
from ledger_desk import TTL, Desk

from tapforge_operator.broker.claim_record import ClaimRecord


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
    assert desk.views["s0"].failures == 0


def test_a_rest_is_begun_anew_by_the_next_leader():
    desk = Desk()
    desk.see("u", lasting=True, ready=True, failures=2, rest=20.0)
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
    assert not desk.views, "both Leases went"
    desk.see(claim.record.uid, lasting=True, ready=True)  # and it may come back
    assert desk.free == 1


def test_a_url_whose_claim_cannot_be_proved_stays_its_holders_until_it_is_silent_for_too_long():
    desk = Desk()
    said = ClaimRecord("u", 7, "user/ann", "", "request-9", 0, TTL, hold=900.0)
    desk.see("u", lasting=True, ready=True, address="http://u", unproved=said)
    desk.wait(899.5)
    assert desk.free == 0 and desk.ledger.unproved() == 1
    assert desk.ledger.renew(desk.ledger.claim(said.id), 0, desk.now) == "held"
    desk.wait(899.5)
    assert desk.free == 0
    desk.wait(1)
    assert desk.free == 0 and desk.ledger.unproved() == 0, "it rests"
    desk.wait(70)
    assert desk.free == 1


def test_a_url_whose_claim_cannot_be_proved_is_nobodys_after_the_longest_claim_however_often_it_is_renewed():
    desk = Desk()
    said = ClaimRecord("u", 7, "user/ann", "", "request-9", 0, TTL, hold=900.0)
    desk.see("u", lasting=True, ready=True, address="http://u", unproved=said)
    claim = desk.ledger.claim(said.id)
    for _ in range(3599):
        desk.now += 1
        assert desk.ledger.renew(claim, 0, desk.now) == "held"
    desk.wait(1)
    assert desk.ledger.claim(said.id) is None and "could not be proved" in desk.ledger.why(said.id)
    desk.wait(899)
    assert desk.free == 0, "its holder may not have heard of it"
    desk.wait(72)
    assert desk.free == 1


@pytest.mark.parametrize("forged", [{"unproved": ClaimRecord("u", 7, "user/ann", "", "r", 0, TTL)}, {"rest": 7200.0}])
def test_what_a_lease_says_without_proof_is_believed_only_as_it_stood_when_the_term_began(forged):
    desk = Desk(1, lasting=True)
    desk.ledger.began(desk.version)
    desk.see("u", pool="theirs", lasting=True, ready=True, address="http://s0", fence=7, **forged)
    assert desk.free == 1 and desk.ledger.unproved() == 0
    record = ClaimRecord("v", 9, "user/ann", "", "request-8", 0, TTL)
    desk.see("v", pool="theirs", lasting=True, ready=True, address="http://s0", fence=9, record=record)
    assert desk.free == 0, "what is proved is a claim at any time"
