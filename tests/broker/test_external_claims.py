"""Claims of URLs that have no Pod: their Leases."""

from __future__ import annotations

import asyncio
import copy

import pytest
from claim_cluster import LEASES, NAMESPACE, POOL, Broker, Door, Lab, until

from tapforge_operator import labels
from tapforge_operator.broker import external, writer

pytestmark = pytest.mark.usefixtures("own_time")

URLS = ("http://10.1.0.1:7555/a", "http://10.1.0.2:7555/b")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_PAUSE", "_LONGEST_PAUSE", "_REFUSED_PAUSE"):
        monkeypatch.setattr(writer, name, 0.01)


@pytest.mark.parametrize("url", [URLS[0], "http://10.1.0.9:1"], ids=["listed", "not listed"])
async def test_a_lease_in_another_namespace_is_no_word_of_the_pools_owner(url: str):
    """Anybody may write one in a namespace of their own that says all that the right one says."""
    lab = Lab(urls=URLS[:1])
    broker = Broker(lab)
    [claim] = await broker.acquire("train")
    [right] = lab.leases()
    wrong = copy.deepcopy(right)
    known = external.Url(POOL, lab.pool_uid, NAMESPACE, url)
    wrong["metadata"] |= {"namespace": "elsewhere", "name": known.lease, "resourceVersion": "999999"}
    wrong["metadata"]["annotations"] = {labels.URL: url}
    devices = broker.claims.devices(lab.pool_uid)
    for deleted in (False, True):
        broker.claims.observe_lease(wrong, deleted)
        assert [said.state for said in await broker.renew(claim)] == ["held"]
    assert broker.claims.devices(lab.pool_uid) == devices
    leases = external.Leases([right, wrong])
    assert leases.get(external.url_of(right)) is right
    await broker.end()


async def test_a_lease_is_made_for_a_claim_and_belongs_to_the_pool():
    lab = Lab(urls=URLS)
    broker = Broker(lab)
    assert lab.leases() == []
    [claim] = await broker.acquire("train")
    assert claim.url in URLS
    [lease] = lab.leases()
    metadata = lease["metadata"]
    assert metadata["name"] == claim.slot
    assert len(claim.slot) <= 63
    assert metadata["ownerReferences"] == [
        {
            "apiVersion": "tapforge.dev/v1alpha1",
            "kind": "EmulatorPool",
            "name": POOL,
            "uid": lab.pool_uid,
            "controller": True,
        }
    ]
    assert metadata["labels"] == {
        labels.POOL: POOL,
        labels.POOL_UID: lab.pool_uid,
        labels.MANAGED_BY: labels.OPERATOR,
        labels.CLAIMED: "true",
        labels.RUN: "train",
    }
    assert metadata["annotations"][labels.URL] == claim.url
    assert lease["spec"]["holderIdentity"] == "run/lab/train/u"
    assert lease["spec"]["leaseTransitions"] == 1
    assert [d.claimed for d in broker.claims.devices(lab.pool_uid) if d.url == claim.url] == [True]

    await broker.release(claim, episodes=2)
    [lease] = lab.leases()
    assert "holderIdentity" not in lease["spec"]
    assert labels.CLAIM not in lease["metadata"]["annotations"]
    assert labels.REST not in lease["metadata"]["annotations"]
    both = await broker.acquire("eval", slots=5)
    assert {c.url for c in both} == set(URLS)
    again = next(c for c in both if c.slot == claim.slot)
    assert again.fence > claim.fence
    assert {lease["spec"]["leaseTransitions"] for lease in lab.leases()} == {1, 2}
    await broker.end()


async def test_a_claim_of_a_url_outlives_the_operator():
    lab = Lab(urls=URLS[:1])
    first = Broker(lab, 1)
    [claim] = await first.acquire(request="request-1")
    await first.die()
    second = Broker(lab, 2)
    assert (await second.renew(claim))[0].state == "held"
    assert [c.id for c in await second.acquire(request="request-1")] == [claim.id]
    assert await second.acquire("b", wait_seconds=0.05) == []
    await second.end()


async def test_a_broken_device_rests_and_comes_back():
    lab = Lab(urls=URLS[:1])
    broker = Broker(lab)
    [claim] = await broker.acquire()
    await broker.release(claim, verdict="broken")
    assert lab.leases()[0]["metadata"]["annotations"][labels.STRIKES] == "1"
    assert [d.state for d in broker.claims.devices(lab.pool_uid)] == ["quarantined"]
    assert await broker.acquire(wait_seconds=0) == []
    [claim] = await broker.acquire(wait_seconds=5)
    await broker.release(claim)
    assert labels.STRIKES not in lab.leases()[0]["metadata"]["annotations"]
    await broker.end()


async def test_two_leaders_that_both_make_the_lease():
    lab = Lab(urls=URLS[:1])
    old, new = Broker(lab, 1), Broker(lab, 2)
    answers = await asyncio.gather(old.acquire("a", wait_seconds=0.1), new.acquire("b", wait_seconds=0.1))
    assert sorted(map(len, answers)) == [0, 1]
    for broker in (old, new):
        await broker.end()


@pytest.mark.parametrize("fate", ["lost before", "lost after", "late", 500, 409, 404, 403])
async def test_a_lease_whose_creation_went_wrong(fate):
    lab = Lab(urls=URLS[:1])
    door = Door(lab.cluster, lambda number: fate if number == 1 else None)
    broker = Broker(lab, door=door)
    call = asyncio.create_task(broker.acquire(wait_seconds=5))
    await until(lambda: door.writes)
    door.release_late()
    [claim] = await call
    assert (await broker.renew(claim))[0].state == "held"
    await broker.release(claim)
    assert labels.CLAIM not in lab.leases()[0]["metadata"]["annotations"]
    await broker.end()


async def test_a_lease_that_somebody_deletes():
    lab = Lab(urls=URLS[:1])
    broker = Broker(lab)
    [claim] = await broker.acquire()
    await broker.release(claim)
    path = next(p for p in lab.cluster.objects if p.startswith(LEASES))
    lab.cluster.drop(path)
    [claim] = await broker.acquire()
    lab.cluster.drop(path)
    said = await broker.renew(claim)
    assert said[0].state == "lost"
    assert "Lease was deleted" in said[0].reason
    assert await broker.acquire(wait_seconds=0.05) == []
    await broker.end()


async def test_a_lease_that_vanished_unseen_is_missing_in_the_next_list():
    lab = Lab(urls=URLS)
    broker = Broker(lab)
    one, other = await broker.acquire(slots=2)
    leases = copy.deepcopy(lab.leases())
    broker.held_back = []
    lab.cluster.drop(next(p for p in lab.cluster.objects if p.endswith(one.slot)))
    broker.claims.keep_leases(leases, "", str(lab.cluster.version))
    assert [s.state for s in await broker.renew(one, other)] == ["held", "held"], "they were there"
    left = lab.leases()
    broker.claims.keep_leases(left, "elsewhere", str(lab.cluster.version))
    assert (await broker.renew(one))[0].state == "held", "that list speaks of another namespace"
    lease = next(lease for lease in leases if lease["metadata"]["name"] == one.slot)
    older = str(int(lease["metadata"]["resourceVersion"]) - 1)
    broker.claims.keep_leases(left, NAMESPACE, older)
    assert (await broker.renew(one))[0].state == "held", "the list is older than the claim"
    broker.claims.keep_leases(left, NAMESPACE, str(lab.cluster.version))
    assert [s.state for s in await broker.renew(one, other)] == ["lost", "held"]
    assert lab.pool_uid in broker.requeued
    assert await broker.acquire("b", wait_seconds=0) == [], "its holder has to hear of it first"
    await broker.end()


async def test_urls_come_and_go_with_the_spec():
    lab = Lab(urls=URLS)
    broker = Broker(lab)
    claims = await broker.acquire(slots=2)
    going = next(c for c in claims if c.url == URLS[1])
    path = next(p for p in lab.cluster.objects if "emulatorpools" in p)
    pool = lab.cluster.get(path)
    pool["spec"]["external"]["urls"] = [URLS[0], "http://10.1.0.3:7555"]
    lab.cluster.put(path, pool)
    assert [s.state for s in await broker.renew(going)] == ["recalled"]
    await broker.release(going)
    [new] = await broker.acquire("b", slots=5)
    assert new.url == "http://10.1.0.3:7555"
    lab.cluster.drop(path)
    assert {s.state for s in await broker.renew(new, *claims)} == {"lost"}
    assert broker.claims.devices(lab.pool_uid) == []
    await broker.end()


async def test_a_url_that_is_taken_out_and_put_back():
    lab = Lab(urls=URLS[:1])
    broker = Broker(lab)
    path = next(p for p in lab.cluster.objects if "emulatorpools" in p)

    def put(*urls: str) -> None:
        pool = lab.cluster.get(path)
        pool["spec"]["external"]["urls"] = list(urls)
        lab.cluster.put(path, pool)

    [claim] = await broker.acquire()
    put()
    assert (await broker.renew(claim))[0].state == "recalled"
    put(URLS[0])
    assert (await broker.renew(claim))[0].state == "held"
    put()
    await broker.release(claim, verdict="broken")
    assert broker.claims.devices(lab.pool_uid) == []
    put(URLS[0])  # its Lease still tells that it has to rest
    assert [d.state for d in broker.claims.devices(lab.pool_uid)] == ["quarantined"]
    assert await broker.acquire(wait_seconds=0) == []
    assert len(await broker.acquire(wait_seconds=5)) == 1
    await broker.end()


async def test_the_lease_of_a_url_that_was_taken_out_goes_when_it_is_free_and_its_rest_is_over():
    lab = Lab(urls=URLS)
    broker = Broker(lab)
    claims = await broker.acquire(slots=2)
    path = next(p for p in lab.cluster.objects if "emulatorpools" in p)
    pool = lab.cluster.get(path)
    going = next(c for c in claims if c.url == URLS[1])
    [kept] = [lease["metadata"]["name"] for lease in lab.leases() if lease["metadata"]["name"] != going.slot]
    pool["spec"]["external"]["urls"] = [URLS[0]]
    lab.cluster.put(path, pool)
    assert (await broker.renew(going))[0].state == "recalled"
    assert len(lab.leases()) == 2, "its holder has it"
    await broker.release(going)
    await until(lambda: [lease["metadata"]["name"] for lease in lab.leases()] == [kept])
    await broker.end()


async def test_a_new_leader_takes_away_what_was_taken_out_while_nobody_led():
    lab = Lab(urls=URLS)
    broker = Broker(lab)
    claims = await broker.acquire(slots=2)
    await broker.release(*claims)
    await until(lambda: all(labels.CLAIM not in lease["metadata"]["annotations"] for lease in lab.leases()))
    await broker.end()
    path = next(p for p in lab.cluster.objects if "emulatorpools" in p)
    pool = lab.cluster.get(path)
    pool["spec"]["external"]["urls"] = [URLS[0]]
    lab.cluster.put(path, pool)
    broker = Broker(lab)
    await until(lambda: len(lab.leases()) == 1)
    assert lab.leases()[0]["metadata"]["annotations"][labels.URL] == URLS[0]
    pool["spec"]["external"]["urls"] = URLS
    lab.cluster.put(path, pool)
    assert len(await broker.acquire(slots=2)) == 2, "it may come back"
    await broker.end()


async def test_a_forged_lease_is_none_of_ours():
    lab = Lab(urls=URLS[:1])
    broker = Broker(lab)
    [claim] = await broker.acquire()
    [lease] = lab.leases()
    forged = {**lease, "metadata": {**lease["metadata"], "name": "leader"}}
    assert external.slot_key(forged) is None
    assert external.slot_key({"metadata": {"name": "x", "namespace": "lab"}}) is None
    assert external.slot_key(lease) == (NAMESPACE, claim.id.rpartition(".")[0])
    lab.cluster.put(f"{LEASES}/namespaces/lab/leases/leader", forged)
    assert (await broker.renew(claim))[0].state == "held"
    await broker.end()


async def test_an_expired_device_is_left_alone_for_the_longest_call_of_its_late_holder():
    lab = Lab(urls=URLS[:1])
    broker = Broker(lab, speed=20.0)  # a claim of 5 s ends after 0.25 s
    await broker.acquire()
    await until(lambda: lab.leases() and labels.REST in lab.leases()[0]["metadata"]["annotations"])
    assert labels.CLAIM not in lab.leases()[0]["metadata"]["annotations"]
    assert len(await broker.acquire("b", wait_seconds=5)) == 1
    await broker.end()
