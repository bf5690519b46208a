"""The keys for claims are a list: they are replaced, lost and found again without the loss of a claim."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from claim_cluster import LEASES, NAMESPACE, POOL, TIMEOUTS, Broker, Lab, pod_path, until

from tapforge_operator import labels
from tapforge_operator.broker import external
from tapforge_operator.broker.claim_record import ClaimRecord, Keys
from tapforge_operator.kube.types import Slot, observe, observe_pool

pytestmark = pytest.mark.usefixtures("own_time")

OLD, NEW = b"o" * 32, b"n" * 32


def observed(lab: Lab) -> list[Slot]:
    return [slot for path, body in lab.cluster.objects.items() if "/pods/" in path and (slot := observe(body))]


async def test_a_key_is_replaced_under_claims_that_live_and_the_next_leader_knows_both() -> None:
    lab, keys = Lab(3), Keys(OLD)
    first = Broker(lab, 1, keys=keys)
    [early] = await first.acquire()
    keys.replace((NEW, OLD))
    first.claims.reread([])
    [late] = await first.acquire()
    assert [s.state for s in await first.renew(early, late)] == ["held", "held"]
    await first.die()
    second = Broker(lab, 2, keys=Keys(NEW, OLD))
    assert [s.state for s in await second.renew(early, late)] == ["held", "held"]
    guess = early.model_copy(update={"secret": late.secret})
    assert [s.state for s in await second.renew(guess)] == ["lost"]
    await second.release(early)
    await second.die()
    third = Broker(lab, 3, keys=Keys(NEW))  # no claim is signed with the old one any more
    assert [s.state for s in await third.renew(late)] == ["held"]
    assert third.claims.counts(lab.pool_uid).free == 2
    await third.end()


async def test_claims_of_a_lost_key_stay_their_holders_until_it_is_found_again() -> None:
    lab = Lab(2)
    first = Broker(lab, 1, keys=Keys(OLD))
    [claim] = await first.acquire()
    await first.die()
    keys = Keys(NEW)
    second = Broker(lab, 2, keys=keys)
    assert second.claims.is_unproved(claim.id)
    assert [s.state for s in await second.renew(claim, episodes=5)] == ["held"]
    [other] = await second.acquire("b")
    assert other.id != claim.id and await second.acquire("b", wait_seconds=0.05) == []
    [said] = await second.release(claim)
    assert "lost the key" in said.reason
    assert len(await second.renew(claim, other)) == 2 and second.claims.counts(lab.pool_uid).held == 2
    keys.replace((NEW, OLD))  # somebody put it into the Secret again
    second.claims.reread(observed(lab))
    assert not second.claims.is_unproved(claim.id)
    assert [s.state for s in await second.renew(claim.model_copy(update={"secret": "x" * 40}))] == ["lost"]
    assert [s.state for s in await second.renew(claim)] == ["held"]
    await second.release(claim)
    assert len(await second.acquire("c")) == 1
    await second.end()


async def test_a_holder_of_a_lost_key_that_is_gone_frees_its_slot() -> None:
    lab = Lab(1)
    first = Broker(lab, 1, keys=Keys(OLD))
    [claim] = await first.acquire(pod="lab/driver/uid-driver", ttl_seconds=5.0)  # a Pod that is not there
    await first.die()
    second = Broker(lab, 2, speed=20.0, keys=Keys(NEW))
    name = lab.pod("phone-0")["metadata"]["name"]
    await until(lambda: not any(path.endswith(f"/pods/{name}") for path in lab.cluster.objects))
    assert not second.claims.is_unproved(claim.id)
    await second.end()


URL = "http://10.1.0.1:7555"


async def test_a_device_whose_pool_is_seen_late_stays_the_holders_of_a_lost_key() -> None:
    """Its Lease, or its namespace, may be seen late too: that it is from before the term is what counts."""
    lab = Lab(urls=(URL,))
    first = Broker(lab, 1, keys=Keys(OLD))
    [claim] = await first.acquire()
    await first.die()
    [pool] = [path for path in lab.cluster.objects if "/emulatorpools/" in path]
    [lease] = [path for path in lab.cluster.objects if path.startswith(LEASES)]
    late = {path: lab.cluster.objects.pop(path) for path in (lease, pool)}
    second = Broker(lab, 2, keys=Keys(NEW), listed=int(late[lease]["metadata"]["resourceVersion"]))
    second.claims.observe_lease(late[lease])
    second.claims.observe_pool(observe_pool(late[pool]))
    assert second.claims.is_unproved(claim.id)
    await second.end()


async def test_a_lease_that_somebody_writes_before_its_url_is_in_the_pool_is_no_claim() -> None:
    lab = Lab(urls=(URL,))
    broker = Broker(lab, 1)
    url = external.Url(POOL, lab.pool_uid, NAMESPACE, f"{URL}/more")
    record = ClaimRecord(url.uid, 7, "user/ann", "", "request-9", 0, 3600.0, 3600.0)
    view = external.view_of(url, None, Keys(OLD))
    lab.cluster.put(external.where(view), external.claim_body(view, record, Keys(OLD), POOL))
    [path] = [path for path in lab.cluster.objects if "/emulatorpools/" in path]
    pool = lab.cluster.get(path)
    pool["spec"]["external"]["urls"].append(url.url)
    lab.cluster.put(path, pool)
    assert len(broker.claims.devices(lab.pool_uid)) == 2 and broker.claims.unproved() == 0
    assert len(await broker.acquire(slots=2)) == 2
    await broker.end()


@pytest.mark.parametrize(
    "forged",
    [
        *[{field: 10**400} for field in ("fence", "priority", "ttl", "hold", "number")],
        *[{"pod": pod} for pod in ("boom", "//", "lab/driver/", "lab/../x", "lab/a/b/c", "lab/\ud800/x")],
        {"holder": "\ud800"},
    ],
)
async def test_what_anybody_writes_as_a_record_ends_no_term(forged: dict[str, Any]) -> None:
    """Also where it is read for the first time, and when its holder is silent and looked after."""
    record = {
        "key": "x",
        "signature": "x",
        "fence": 1,
        "holder": "h",
        "run": "",
        "request": "",
        "priority": 0,
        "ttl": 1,
    }
    texts = {labels.CLAIM: json.dumps(record | forged), labels.FENCE: "1"}
    lab = Lab(2)
    lab.cluster.touch(pod_path("phone-0"), **texts)
    broker = Broker(lab, speed=100.0, keys=Keys(NEW))
    lab.cluster.touch(pod_path("phone-1"), **texts)
    await asyncio.sleep(5 * TIMEOUTS.holders)
    assert broker.claims.leading
    lab.add_slot(2)
    assert len(await broker.acquire()) == 1
    await broker.end()
