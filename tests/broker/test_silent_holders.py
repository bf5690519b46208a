"""Silence is suspicion, evidence ends claims: what becomes of a holder that says nothing any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from claim_cluster import KEYS, NAMESPACE, Broker, Door, Lab, pod_path, refusal, until

from tapforge_operator import labels
from tapforge_operator.broker.evidence import CUT_OFF_SECONDS
from tapforge_operator.broker.types import ServiceTimeouts
from tapforge_operator.kube.leaderelection import NotLeading

pytestmark = pytest.mark.usefixtures("own_time")

LONG = {"ttl_seconds": 60.0, "hold_seconds": 1200.0}
#: a silent holder was looked at some times
LOOKED = 60.0 + 4 * ServiceTimeouts().holders

Start = Callable[..., Broker]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    brokers: list[Broker] = []

    def make(lab: Lab, **more: Any) -> Broker:
        brokers.append(Broker(lab, timeouts=ServiceTimeouts(), **more))
        return brokers[-1]

    yield make
    for broker in brokers:
        await broker.end()


def driver(
    lab: Lab, name: str = "driver", phase: str = "Running", node: str = "far", looks: dict[str, Any] | None = None
) -> str:
    """A holder's Pod; its name in claims. `looks`: what more its metadata, spec and status say."""
    containers = [
        {"name": "head", "state": {"terminated": {}} if phase in ("Succeeded", "Failed") else {"running": {}}}
    ]
    body = {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"nodeName": node},
        "status": {"phase": phase, "containerStatuses": containers},
    }
    for part, more in (looks or {}).items():
        body[part] |= more  # type: ignore[operator]
    if pod_path(name) in lab.cluster.objects:
        body["metadata"]["uid"] = lab.pod(name)["metadata"]["uid"]
    return f"{NAMESPACE}/{name}/{lab.cluster.put(pod_path(name), body)['metadata']['uid']}"


async def test_a_silent_holder_whose_pod_lives_keeps_its_claim(start: Start) -> None:
    broker = start(lab := Lab(1))
    (claim,) = await broker.acquire(pod=driver(lab), **LONG)
    await asyncio.sleep(LOOKED)
    assert (await broker.renew(claim))[0].state == "held"


async def test_a_silent_holder_in_no_pod_keeps_its_claim_until_its_hold_is_over(start: Start) -> None:
    broker = start(Lab(2))
    (kept,) = await broker.acquire(**LONG)
    (over,) = await broker.acquire(ttl_seconds=60.0, hold_seconds=300.0)
    assert (kept.hold_seconds, over.hold_seconds) == (1200.0, 300.0), "they are told when to stop by themselves"
    await asyncio.sleep(310.0)
    assert [said.state for said in await broker.renew(kept, over)] == ["held", "lost"]


@pytest.mark.parametrize("end", ["deleted", "replaced", "ended", "its node"])
async def test_the_claims_of_a_holder_that_is_gone_end(start: Start, end: str) -> None:
    broker = start(lab := Lab(2))
    pod = driver(lab)
    claims = await broker.acquire(slots=2, pod=pod, **LONG)
    assert [claim.hold_seconds for claim in claims] == [None, None], "in a Pod one goes on until a broker says lost"
    match end:
        case "deleted":
            lab.cluster.drop(pod_path("driver"))
        case "replaced":
            lab.cluster.drop(pod_path("driver"))
            driver(lab)
        case "ended":
            driver(lab, phase="Failed")
        case _:
            broker.lost_nodes.add("far")
    await until(lambda: broker.claims.counts(lab.pool_uid).free == 2, LOOKED)
    assert [said.state for said in await broker.renew(*claims)] == ["lost", "lost"]
    assert "its holder's Pod lab/driver " in (await broker.renew(*claims))[0].reason
    assert len(await broker.acquire("b", slots=2)) == 2, "phones that check fences go on to the next holder"


async def test_a_phone_that_checks_no_fences_goes_with_its_holder(start: Start) -> None:
    broker = start(lab := Lab(1, protocol="androidworld"))
    await broker.acquire(pod=driver(lab), **LONG)
    lab.cluster.drop(pod_path("driver"))
    await until(lambda: pod_path("phone-0") not in lab.cluster.objects, LOOKED)


async def test_a_holder_that_speaks_is_not_looked_at(start: Start) -> None:
    """Its Pod is gone from the API while it still runs, on a node that is cut off from the API server alone."""
    broker = start(lab := Lab(1))
    (claim,) = await broker.acquire(pod=driver(lab), **LONG)
    lab.cluster.drop(pod_path("driver"))
    for _ in range(20):
        await asyncio.sleep(20.0)
        assert (await broker.renew(claim))[0].state == "held"


async def test_the_claims_of_a_run_that_is_over_end_with_its_pods(start: Start) -> None:
    broker = start(lab := Lab(1))
    (claim,) = await broker.acquire(pod=driver(lab), ttl_seconds=3600.0, hold_seconds=3600.0)
    broker.idle.add(f"run/{NAMESPACE}/a/u")
    await asyncio.sleep(LOOKED)
    assert (await broker.renew(claim))[0].state == "held", "its Pod is still there, and may be saving a checkpoint"
    lab.cluster.drop(pod_path("driver"))
    await until(lambda: broker.claims.counts(lab.pool_uid).free == 1)


async def test_an_api_server_that_does_not_answer_is_no_evidence(start: Start) -> None:
    class Deaf(Door):
        async def get(self, path: str) -> dict[str, Any]:
            raise refusal(503, path)

    lab = Lab(1)
    broker = start(lab, door=Deaf(lab.cluster))
    (claim,) = await broker.acquire(pod=driver(lab), **LONG)
    lab.cluster.drop(pod_path("driver"))
    await asyncio.sleep(LOOKED)
    assert (await broker.renew(claim))[0].state == "held"


async def test_who_has_an_external_device_may_use_it_until_its_hold_is_over(start: Start) -> None:
    """A node that is lost may go on: nothing but its own clock stops a holder there."""
    broker = start(lab := Lab(urls=("http://phone",)))
    (claim,) = await broker.acquire(pod=driver(lab), **LONG)
    assert claim.hold_seconds == 1200.0
    broker.lost_nodes.add("far")
    await asyncio.sleep(LOOKED)
    assert broker.claims.counts(lab.pool_uid).held == 1
    driver(lab, phase="Failed")  # the node is back, and says that nothing runs any more
    await until(lambda: broker.claims.counts(lab.pool_uid).free == 1)


# --- where nodes aren't watched ---------------------------------------------------------------------------------------


def conditions(ready: str, containers: str) -> dict[str, Any]:
    return {"conditions": [{"type": "Ready", "status": ready}, {"type": "ContainersReady", "status": containers}]}


#: as the node controller leaves a Pod whose node is silent, and one that is to be deleted
MARKED = {"status": conditions("False", "True")}
ENDING = {"metadata": {"deletionTimestamp": "2026-11-20T12:00:00Z", "deletionGracePeriodSeconds": 60}}


@pytest.mark.parametrize(("looks", "wait"), [(MARKED, CUT_OFF_SECONDS), (ENDING, 60.0 + CUT_OFF_SECONDS)])
async def test_a_holder_on_a_dead_node_is_found_out_by_what_its_pod_looks_like(
    start: Start, looks: dict[str, Any], wait: float
) -> None:
    broker = start(lab := Lab(1), elsewhere=lambda node: True)
    (claim,) = await broker.acquire(pod=driver(lab, looks=looks), **LONG)
    await asyncio.sleep(60.0 + wait - 1.0)
    assert broker.claims.counts(lab.pool_uid).held == 1, "not before it has looked so for long enough"
    await until(lambda: broker.claims.counts(lab.pool_uid).free == 1, 3 * ServiceTimeouts().holders)
    assert "cut off" in (await broker.renew(claim))[0].reason


@pytest.mark.parametrize(
    "looks",
    [
        {"status": conditions("True", "True")},
        {"status": conditions("False", "False")},  # its kubelet says so, and speaks
        {
            "status": conditions("False", "True"),
            "spec": {"nodeName": "far", "readinessGates": [{"conditionType": "x"}]},
        },
        {"status": conditions("Unknown", "True")},
        {"status": {"conditions": []}},
    ],
)
async def test_a_holder_whose_node_may_speak_keeps_its_claim(start: Start, looks: dict[str, Any]) -> None:
    broker = start(lab := Lab(1), elsewhere=lambda node: True)
    (claim,) = await broker.acquire(pod=driver(lab, looks=looks), **LONG)
    await asyncio.sleep(600.0)
    assert (await broker.renew(claim))[0].state == "held"


async def test_where_all_nodes_are_silent_nobody_is_cut_off(start: Start) -> None:
    alive: set[str] = set()
    broker = start(lab := Lab(1), elsewhere=lambda node: bool(alive - {node}))
    await broker.acquire(pod=driver(lab, looks=MARKED), **LONG)
    alive.add("far")
    await asyncio.sleep(600.0)
    assert broker.claims.counts(lab.pool_uid).held == 1
    alive.add("near")
    await until(lambda: broker.claims.counts(lab.pool_uid).free == 1, LOOKED)


async def test_a_hiccup_of_the_network_cuts_nobody_off(start: Start) -> None:
    """The node comes back again and again, a moment before it would count as lost; and the API server is away."""

    class Flaky(Door):
        away = False

        async def get(self, path: str) -> dict[str, Any]:
            if self.away:
                raise refusal(503, path)
            return await super().get(path)

    lab = Lab(1)
    door = Flaky(lab.cluster)
    broker = start(lab, door=door, elsewhere=lambda node: True)
    (claim,) = await broker.acquire(pod=driver(lab), **LONG)
    await asyncio.sleep(60.0)
    for _ in range(5):
        driver(lab, looks=MARKED)
        await asyncio.sleep(CUT_OFF_SECONDS - 1.0)
        driver(lab)
        await asyncio.sleep(2 * ServiceTimeouts().holders)
        driver(lab, looks=MARKED)
        await asyncio.sleep(CUT_OFF_SECONDS - 1.0)
        door.away = True
        await asyncio.sleep(2 * ServiceTimeouts().holders)
        door.away = False
    assert (await broker.renew(claim))[0].state == "held"


async def test_a_holder_whose_pod_may_not_be_read_hides_no_dead_node(start: Start) -> None:
    """Its namespace was closed to the operator, or its record is anybody's and names a Pod that isn't its own."""

    class Closed(Door):
        async def get(self, path: str) -> dict[str, Any]:
            if path == pod_path("hidden"):
                raise refusal(403, path)
            return await super().get(path)

    lab = Lab(2)
    broker = start(lab, door=Closed(lab.cluster), elsewhere=lambda node: True)
    (kept,) = await broker.acquire(pod=driver(lab, "hidden", looks=MARKED), **LONG)
    (cut_off,) = await broker.acquire("b", pod=driver(lab, looks=MARKED), **LONG)
    await until(lambda: broker.claims.counts(lab.pool_uid).free == 1, LOOKED + CUT_OFF_SECONDS)
    assert [said.state for said in await broker.renew(kept, cut_off)] == ["held", "lost"]


async def test_where_nodes_are_watched_the_pods_looks_count_for_nothing(start: Start) -> None:
    broker = start(lab := Lab(1))
    (claim,) = await broker.acquire(pod=driver(lab, looks=MARKED), **LONG)
    await asyncio.sleep(600.0)
    assert (await broker.renew(claim))[0].state == "held"


# --- sessions ---------------------------------------------------------------------------------------------------------


async def test_what_a_session_does_not_list_is_released(start: Start) -> None:
    broker = start(lab := Lab(5))
    ask = {**LONG, "session": "s-1"}
    (kept,) = await broker.acquire(number=1, **ask)
    (unheard,) = await broker.acquire(number=2, **ask)
    (coming,) = await broker.acquire(number=3, **ask)
    (others,) = await broker.acquire(number=1, **{**ask, "session": "s-2"})
    (strangers,) = await broker.acquire("b", number=1, **ask)
    assert (await broker.renew(kept, session="s-1", settled=2))[0].state == "held"
    await until(lambda: broker.claims.counts(lab.pool_uid).free == 1)
    assert [said.state for said in await broker.renew(kept, unheard, coming, others, strangers)] == [
        "held", "lost", "held", "held", "held",
    ]  # fmt: skip


async def test_the_next_leader_releases_what_nobody_heard_of(start: Start) -> None:
    """A leader died between the write and the answer. What was answered lives a whole life longer."""
    first = start(lab := Lab(2))
    ask = {**LONG, "session": "s-1"}
    (kept,) = await first.acquire(number=1, **ask)
    (unheard,) = await first.acquire(number=2, **ask)
    await asyncio.sleep(1000.0)
    await first.die()
    second = start(lab, term=2)
    assert (await second.renew(kept, session="s-1", settled=2))[0].state == "held"
    await until(lambda: second.claims.counts(lab.pool_uid).free == 1)
    assert (await second.renew(unheard))[0].state == "lost"


async def test_a_forged_list_releases_nothing(start: Start) -> None:
    broker = start(Lab(3))
    ask = {**LONG, "session": "s-1", "number": 1}
    mine, other = await broker.acquire(slots=2, **ask)
    (strangers,) = await broker.acquire("b", **ask)
    guess = other.model_copy(update={"secret": "x" * 40})
    assert (await broker.renew(guess, session="s-1", settled=9))[0].state == "lost"
    assert (await broker.renew(strangers, session="s-1", settled=9))[0].state == "held"
    assert [said.state for said in await broker.renew(mine, other)] == ["held", "held"]


async def test_claims_of_a_release_without_holds_live_on(start: Start) -> None:
    """An operator of before wrote less; the signature covers what it wrote."""
    first = start(lab := Lab(1))
    (claim,) = await first.acquire(**LONG)
    await first.die()
    pod = lab.pod("phone-0")
    written = json.loads(pod["metadata"]["annotations"][labels.CLAIM])
    for name in ("hold", "pod", "session", "number", "signature"):
        del written[name]
    written["signature"] = KEYS._first.sign(written, pod["metadata"]["uid"])
    lab.cluster.touch(pod_path("phone-0"), **{labels.CLAIM: json.dumps(written)})
    second = start(lab, term=2)
    await asyncio.sleep(1000.0)
    assert (await second.renew(claim))[0].state == "held", "silent for 1,000 s of 1,200"


# --- terms ------------------------------------------------------------------------------------------------------------


async def test_an_answer_that_is_ready_after_its_term_is_none(start: Start) -> None:
    """The process may lead again by then: what the old term knew counts for nothing."""

    class Slow(Door):
        async def get(self, path: str) -> dict[str, Any]:
            await asyncio.sleep(2.0)
            return await super().get(path)

    lab = Lab(1)
    broker = start(lab, door=Slow(lab.cluster))
    (claim,) = await broker.acquire(**LONG)
    later = f"{claim.id.rpartition('.')[0]}.{claim.fence + 1}"
    asking = asyncio.create_task(broker.renew(claim.model_copy(update={"id": later, "secret": KEYS.secret(later)})))
    await asyncio.sleep(1.0)
    await broker.claims.end()
    again = Broker(lab, term=2, timeouts=ServiceTimeouts())
    broker.claims.begin(2, [], [])
    with pytest.raises(NotLeading):
        await asking
    await again.end()
