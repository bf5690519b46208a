"""The ledger believes the newest news of a slot, however late or forged what it hears is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ledger_desk import TTL, Desk

from tapforge_operator.broker.claim_record import ClaimRecord
from tapforge_operator.broker.types import Remove


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
    answer = desk.write("s0", record=grant.record, fence=grant.record.fence)
    desk.see("s0", ended="its Pod ended: OOMKilled")
    desk.ledger.granted("s0", grant.record.fence, answer, desk.now)
    desk.collect()
    assert desk.answers == {}
    assert desk.ledger.claim(grant.record.id) is None
    assert desk.ledger.waiting("pool") == 1
    assert desk.ledger.drain("s0")


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
    desk.see("s0", record=claim.record, fence=0)
    assert desk.free == 1
    [after] = desk.take("b")
    desk.see("s0", record=claim.record)
    desk.collect()
    assert isinstance(desk.todo[-1], Remove)
    assert "changed by another client" in desk.ledger.why(after.id)


def test_a_later_mark_is_another_leaders_claim():
    desk = Desk(1)
    record = ClaimRecord("s0", 5 << 24, "run/other", "", "request-9", 0, 20.0)
    desk.see("s0", record=record)
    assert desk.free == 0
    assert desk.ledger.held("pool")["s0"].holder == "run/other"
    assert desk.ledger.claim(record.id)
    newer = replace(record, fence=6 << 24, holder="run/third")
    desk.see("s0", record=newer)
    assert desk.ledger.claim(record.id) is None
    assert desk.ledger.claim(newer.id)


@pytest.mark.parametrize("fence", [1, 5 << 24])
def test_a_grant_that_another_leader_was_faster_with(fence):
    desk = Desk(1, term=3)
    ticket = desk.ask("a")
    desk.ledger.assign("pool", desk.now)
    [grant] = desk.collect()
    desk.todo.clear()
    record = ClaimRecord("s0", fence, "run/other", "", "request-9", 0, 20.0)
    desk.ledger.refused("s0", grant.record.fence, desk.write("s0", record=record, fence=fence), desk.now)
    assert desk.ledger.claim(record.id)
    desk.see("s1", ready=True)
    desk.serve()
    assert desk.answers[ticket][0].record.uid == "s1"


def unproved(uid: str, **fields) -> ClaimRecord:
    """As another key signed it, or anybody wrote it."""
    return ClaimRecord(uid, 7, "run/lab/a/u", "a", "request-9", 0, TTL, **fields)


def test_a_record_of_another_key_keeps_a_slot_that_served_and_no_other():
    desk = Desk()
    desk.see("used", node="n0", ready=True, unproved=unproved("used"))
    desk.see("new", node="n0", booting=True, unproved=unproved("new"))
    assert not desk.collect()
    assert (desk.ledger.unproved(), desk.ledger.held("pool")["used"].holder) == (1, "run/lab/a/u")
    desk.see("new", ready=True, booting=False)
    assert desk.free == 1
    desk.see("later", node="n0", ready=True)
    desk.see("later", unproved=unproved("later"))  # known to be free: somebody scribbles
    assert desk.free == 2
    desk.wait(TTL)
    assert "used" not in desk.views, "its Pod goes when nobody renewed it"


@pytest.mark.parametrize(("then", "proved"), [({"record": unproved("s")}, True), ({}, False)])
def test_a_record_is_proved_when_its_key_is_known_again_and_ends_when_it_was_forged(then, proved):
    desk = Desk()
    view = desk.see("s", node="n0", ready=True, unproved=unproved("s"))
    desk.ledger.reread(replace(view, unproved=None, **then), desk.now)
    assert desk.ledger.unproved() == 0
    assert bool(desk.ledger.claim(unproved("s").id)) is proved
    assert [type(work).__name__ for work in desk.collect()] == ([] if proved else ["Remove"])


def test_a_record_that_can_not_be_read_keeps_its_slot_under_the_fence_that_stands_beside_it():
    desk = Desk()
    desk.see("s", node="n0", ready=True, fence=7, unproved=replace(unproved("s"), fence=0))
    desk.see("s", ready=False)
    assert desk.ledger.renew(desk.ledger.claim("s.7"), 0, desk.now) == "held"


def test_an_unproved_record_uses_the_quota_of_its_slots_namespace_and_lasts_no_longer_than_a_claim_can():
    desk = Desk(team=1, lab=1)
    desk.see("s", node="n0", ready=True, unproved=replace(unproved("s"), holder="run/team/a/u", ttl=1e12, hold=1e12))
    assert (desk.ledger.quota_use("team").held, desk.ledger.quota_use("lab").held) == (0, 1)
    desk.wait(9000, desk.ledger.claim("s.7"))  # a Pod is its own namespace's
    desk.wait(3600)
    assert not desk.views


def test_an_unproved_claim_of_a_device_displaces_none_that_is_proved():
    desk = Desk(1, lasting=True)
    [claim] = desk.take("a")
    said = replace(unproved("other"), fence=2**60)
    desk.see("other", pool="theirs", address="http://s0", ready=True, lasting=True, unproved=said)
    assert desk.ledger.claim(claim.id) is not None
    desk.see("late", pool="third", address="http://s1", ready=True, lasting=True, unproved=replace(said, uid="late"))
    proved = ClaimRecord("s1", 8, "run/lab/b/u", "b", "request-8", 0, TTL)
    desk.see("s1", address="http://s1", ready=True, lasting=True, record=proved)
    assert desk.ledger.claim(proved.id) is not None and desk.ledger.unproved() == 1


def test_fences_grow_over_terms_and_over_what_others_wrote():
    desk = Desk(1, term=1)
    [first] = desk.take("a")
    later = Desk(term=2)
    later.see("s0", ready=True, fence=first.record.fence)
    [second] = later.take("a")
    assert second.record.fence > first.record.fence
    back = Desk(term=1)  # somebody deleted the leader Lease: terms begin anew
    back.see("s0", ready=True, fence=second.record.fence)
    [third] = back.take("a")
    assert third.record.fence > second.record.fence
    forged = Desk(term=3)
    forged.see("s0", ready=True, fence=2**63 - 1)
    assert forged.take("a") == []


def test_claims_found_at_the_start_live_a_whole_life_from_then():
    desk = Desk()
    record = ClaimRecord("s0", 3, "run/a", "", "request-1", 0, TTL)
    desk.see("s0", ready=True, record=record, fence=3)
    desk.now += TTL - 1
    assert desk.ledger.expire(desk.now) == set()
    claim = desk.ledger.claim(record.id)
    assert desk.ledger.renew(claim, 0, desk.now) == "held"
    desk.now += TTL
    assert desk.ledger.renew(claim, 0, desk.now) == "lost"
    assert isinstance(desk.collect()[0], Remove)


def test_a_slot_that_was_out_of_sight_is_granted_again_unless_it_was_given_up():
    desk = Desk(2)
    assert desk.ledger.drain("s1")
    for uid in ("s0", "s1"):
        desk.ledger.forget(uid, desk.now, back=True)
        desk.see(uid)
    assert desk.free == 0, "late news bring nothing back"
    for uid in ("s0", "s1"):
        desk.ledger.observe(desk.views[uid], desk.now, back=True)
    assert [claim.record.uid for claim in desk.take("a", 2)] == ["s0"]
    desk.ledger.forget("s0", desk.now)
    desk.ledger.observe(desk.views["s0"], desk.now, back=True)
    assert desk.ledger.counts("pool").slots == 0, "it was deleted"


def test_nothing_is_remembered_of_a_pool_that_never_was():
    """Who may create Pods may write any UID as that of a Pod's owner; each would be kept for a term."""
    desk = Desk()
    desk.ledger.wear("pool", None)  # it was told of, as every pool is
    for pool in ("pool", "never"):
        desk.see(f"of-{pool}", pool=pool, ready=True)
        desk.ledger.forget(f"of-{pool}", desk.now)
    assert [pool for pool in ("pool", "never") if desk.ledger._table.find_pool(pool)] == ["pool"]
