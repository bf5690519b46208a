"""A namespace's claimants hold no more slots than its quota, over all pools, whatever an earlier leader left."""

from __future__ import annotations

import pytest
from broker_house import CLAIMS, House
from claim_cluster import Broker, Lab, until
from ledger_desk import Desk

from tapforge_api.claims import Acquire
from tapforge_operator.broker.messages import why_none
from tapforge_operator.broker.types import ClaimQuotas, Counts, Holder, QuotaUse, account_of, namespace_of, run_holder
from tapforge_operator.config import claim_quotas

A, B = run_holder("small", "a", "1"), run_holder("small", "b", "2")
OTHER = run_holder("large", "c", "3")


def test_a_holder_counts_for_the_namespace_of_its_run_or_service_account() -> None:
    assert namespace_of(A) == "small"
    assert namespace_of("user/system:serviceaccount:tests:ci") == "tests"
    assert namespace_of("user/kim@example.com") == namespace_of("user/system:anonymous") == ""


def test_the_flag_names_namespaces_and_the_rest() -> None:
    assert claim_quotas(["a=3", "*=1", "b=0"]) == ClaimQuotas({"a": 3, "b": 0}, 1)
    assert [ClaimQuotas({"a": 3}, 1).of(name) for name in ("a", "b", "")] == [3, 1, None]
    assert not claim_quotas([])


def test_a_person_has_a_quota_of_their_own() -> None:
    quotas = claim_quotas(["*=1"], person=2)
    assert [quotas.of(account_of(holder)) for holder in ("user/kim", A, "unproved/small/user/kim")] == [2, 1, 1]
    assert claim_quotas([], person=0) and ClaimQuotas({"a": 1}).of("user/kim") is None
    desk = Desk(5, person=2)
    assert len(desk.take("user/kim", 3)) == 2
    assert desk.take("user/kim") == []
    assert len(desk.take("user/ann", 2)) == 2
    assert len(desk.take(A)) == 1
    assert desk.ledger.quota_use("user/kim") == QuotaUse("user/kim", 2, 2)


@pytest.mark.parametrize(
    ("account", "said"),
    [
        ("user/kim", "QuotaExceeded: kim holds 2 slots over all pools, of a quota of 2 (--person-claim-quota of"),
        ("lab", "QuotaExceeded: namespace lab holds 2 slots over all pools, of a quota of 2 (--claim-quota of"),
    ],
)
def test_who_has_used_up_a_quota_is_told_which(account: str, said: str) -> None:
    ask, use = Acquire(request="request-1"), QuotaUse(account, 2, 2)
    assert why_none(ask, Holder("user/kim"), 0, Counts(), repeated=False, use=use).startswith(said)


@pytest.mark.parametrize("given", [["a"], ["a=-1"], ["=3"], ["A=3"], ["a=x"], ["a=1", "a=2"]])
def test_what_is_no_quota_is_refused(given: list[str]) -> None:
    with pytest.raises(ValueError, match="quota"):
        claim_quotas(given)


def test_claimants_of_a_namespace_share_its_quota() -> None:
    desk = Desk(5, small=3)
    assert len(desk.take(A, 2)) == 2
    assert len(desk.take(B, 2)) == 1
    assert desk.take(A) == desk.take(B) == []
    assert len(desk.take(OTHER, 2)) == 2
    assert desk.ledger.quota_use("small") == QuotaUse("small", 3, 3)
    assert desk.ledger.quota_use("large") is None


def test_the_quota_is_over_all_pools_and_what_comes_free_in_one_serves_another() -> None:
    desk = Desk(2, small=2)
    desk.see("t0", pool="other", node="n0", ready=True, address="http://t0")
    first, _ = desk.take(A, 2)
    ticket = desk.ask(B, pool="other")
    desk.serve()
    assert ticket not in desk.answers and desk.ledger.waiting("other") == 0
    desk.ledger.take_touched()
    desk.ledger.give_back(first, "clean", 0, desk.now)
    assert "other" in desk.ledger.take_touched()  # whoever plans that pool is told of the demand
    assert desk.ledger.waiting("other") == 1
    desk.serve()
    assert len(desk.answers[ticket]) == 1


def test_a_changed_use_is_told_once_and_what_was_given_back_and_taken_again_is_none() -> None:
    desk = Desk(3, small=2)
    first, second = desk.take(A, 2)
    desk.take(OTHER)
    assert desk.ledger.take_used() == ["small"] and desk.ledger.take_used() == []
    desk.give(first)
    desk.take(A)
    assert desk.ledger.take_used() == []
    desk.give(second)
    assert desk.ledger.take_used() == ["small"]


async def test_pools_that_nobody_waits_for_are_told_of_the_room_too() -> None:
    told: list[str] = []
    lab = Lab(2)
    broker = Broker(lab, quotas=ClaimQuotas({"lab": 1}), on_quota=told.append)
    (claim,) = await broker.acquire("train")
    await until(lambda: told == ["lab"])
    await broker.release(claim)
    await until(lambda: told == ["lab", "lab"])
    await broker.end()


def test_what_the_quota_forbids_is_no_demand_and_nobody_gives_a_slot_back_for_it() -> None:
    desk = Desk(4, small=1)
    claims = desk.take(OTHER, 3)
    (mine,) = desk.take(A)
    desk.ask(A, 2)
    desk.ask(B, 2, priority=9)
    desk.wait(60.0, mine, *claims)
    assert [claim.revoked for claim in (*claims, mine)] == [""] * 4
    assert desk.ledger.waiting("pool") == 0 and desk.ledger.has_waiters("pool")
    # The others are asked for as much as is left, not more.
    desk = Desk(4, small=2)
    claims = desk.take(OTHER, 4)
    desk.ask(A, 2)
    desk.ask(B, 2)
    assert desk.ledger.waiting("pool") == 2
    desk.wait(60.0, *claims)
    assert sum(bool(claim.revoked) for claim in claims) == 2


def test_a_slot_is_kept_for_nobody_who_may_not_have_it() -> None:
    desk = Desk(1, small=1)
    assert len(desk.take(A)) == 1
    ticket = desk.ask(B, 1, priority=9)
    desk.ledger.conclude(ticket, desk.now)  # it will ask again, and is remembered for a moment
    desk.see("s1", node="n0", ready=True, address="http://s1")
    assert len(desk.take(OTHER)) == 1


def test_claims_of_an_earlier_leader_count_and_are_kept_beyond_the_quota() -> None:
    before = Desk(4)
    claims = before.take(A, 3)
    desk = Desk(term=2, small=2)
    desk.views, desk.version = before.views, before.version
    for view in desk.views.values():
        desk.ledger.observe(view, desk.now)
    assert desk.ledger.quota_use("small") == QuotaUse("small", 2, 3)
    ticket = desk.ask(B)
    desk.serve()
    held = [desk.ledger.claim(claim.id) for claim in claims]
    desk.wait(10.0, *held)
    assert [claim.revoked for claim in held] == [""] * 3
    desk.give(held[0])
    assert ticket not in desk.answers
    desk.give(held[1])
    assert len(desk.answers[ticket]) == 1
    assert desk.ledger.quota_use("small") == QuotaUse("small", 2, 2)
    assert desk.ledger.quota_room("pool", "small") == 2 and desk.ledger.quota_room("pool", "large") is None


async def test_a_caller_is_told_of_the_quota_and_a_new_leader_keeps_it() -> None:
    house = House(Lab(3))
    await house.broker.end()
    quotas = ClaimQuotas({"lab": 1})
    house.broker = Broker(house.lab, quotas=quotas)
    house.auth._pools = house.broker.claims.find_pool
    house.auth._api._door = house.broker.door
    await house.open()
    for request in ("request-1", "request-2"):
        status, answer, _ = await house.post(CLAIMS, {"request": request, "slots": 2, "waitSeconds": 0.05})
        assert status == 200
        if request == "request-1":
            assert len(answer["claims"]) == 1
    assert "QuotaExceeded: namespace lab holds 1 slots over all pools, of a quota of 1" in answer["waiting"]
    claims = house.broker.claims
    assert claims.quota("lab") == 1 and claims.quota("other") is None
    assert claims.quota_use() == {"lab": (1, 1)} and claims.quota_room(house.lab.pool_uid, "lab") == 1
    following = Broker(house.lab, term=2, quotas=quotas)
    assert await following.acquire("run/lab/train/uid", slots=2, wait_seconds=0.05) == []
    await following.end()
    assert following.claims.quota_use() == {}
    await house.close()
