"""Karpenter beside the operator, on a cluster that begins without a node: `make demo-autoscaling` shows it.

Everything but the machines is real: Karpenter, KubeRay, the scheduler, the eviction API, the broker. What Karpenter did
to which Pod is read from the API server's audit log. A cluster of this file's own: in the others' nodes stand by, so
that nothing would have to come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from claiming import Caller, caller, slots_of
from e2e.bench.audit import Audit, Write
from e2e.cluster import Cluster, Options, binaries, fake, karpenter, kuberay
from live_pool import LivePool, Object, name, phone, uid, uids
from live_run import LiveRun, pool_source
from operator_process import Ground, Operator, label

from tapforge_api.claims import AUDIENCE, Claim

CRDS = sorted((Path(__file__).parents[2] / "crds").glob("*.yaml"))
SLOTS, SPARES = 200, 10
RUNS = 40
OTHERS = SLOTS - SPARES - RUNS
#: of a slot; and seconds from its container's start until it serves
REQUESTS = {"cpu": "2", "memory": "4Gi"}
BOOT = "3"
#: Karpenter looks every 10 s, and again 15 s after it found something: after so long it has nothing left to do, seconds
QUIET = 45.0
TTL = {"ttlSeconds": 900}
KVM = "devices.kubevirt.io/kvm"
TYPE: Final = "node.kubernetes.io/instance-type"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def node_autoscaler(built: None) -> None:
    """Karpenter's program."""
    binaries.ensure(of=binaries.KARPENTER)


@pytest.fixture(scope="module")
def cluster(addons: None, node_autoscaler: None) -> Iterator[Cluster]:
    with Cluster(Options(nodes=0, qps=200, audit=True)) as up:
        up.apply(*CRDS)
        up.wait_kinds()
        kuberay.start(up)
        karpenter.start(up)
        yield up


@pytest.fixture(autouse=True)
def sound(cluster: Cluster) -> Iterator[None]:
    """Karpenter was well during each test: where it is stuck, slots wait for nodes as if nobody had asked for any."""
    yield
    assert karpenter.panics(cluster) == []


def node_pool(cluster: Cluster, group: str, *requirements: Object) -> None:
    """Nodes of these types that Karpenter brings and takes away."""
    cluster.apply(
        {"apiVersion": "karpenter.kwok.sh/v1alpha1", "kind": "KWOKNodeClass", "metadata": {"name": group}, "spec": {}},
        {
            "apiVersion": "karpenter.sh/v1",
            "kind": "NodePool",
            "metadata": {"name": group},
            "spec": {
                "template": {
                    "metadata": {"labels": {"group": group}},
                    "spec": {
                        "nodeClassRef": {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": group},
                        "expireAfter": "Never",
                        "requirements": [karpenter.ON_DEMAND, *requirements],
                    },
                },
                "disruption": {
                    "consolidationPolicy": "WhenEmptyOrUnderutilized",
                    "consolidateAfter": "2s",
                    "budgets": [{"nodes": "100%"}],
                },
            },
        },
    )


def only(key: str, value: str) -> Object:
    return {"key": key, "operator": "In", "values": [value]}


# --- what is seen -----------------------------------------------------------------------------------------------------


@dataclass
class Story:
    """What happens, with the time since the test began, for a person who reads along."""

    cluster: Cluster
    pool: LivePool
    began: float = field(default_factory=time.monotonic)

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {line}", flush=True)

    def state(self) -> str:
        status, there = self.pool.status(), nodes(self.cluster)
        return (
            f"{status['pods']} slots, {status['ready']} ready, {status['claimed']} claimed, "
            f"{status['unschedulable']} without a node; {len(there)} nodes ({kinds(there)})"
        )


def nodes(cluster: Cluster) -> list[Object]:
    return list(cluster.api("GET", "/api/v1/nodes")["items"])


def kinds(there: list[Object]) -> str:
    types = sorted(node["metadata"]["labels"][TYPE] for node in there)
    return ", ".join(f"{types.count(each)} {each}" for each in dict.fromkeys(types)) or "none"


class Observer:
    """Looks all the time whether the pool calls anything sick."""

    def __init__(self, pool: LivePool) -> None:
        self.sick: list[str] = []
        self._pool = pool
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._over.wait(0.5):
            status = self._pool.status()
            degraded = [c for c in status["conditions"] if c["type"] == "Degraded" and c["status"] == "True"]
            if status["unhealthy"] or status["lastFailures"] or status["sickReplacements"] or degraded:
                self.sick.append(str({**status, "conditions": degraded}))


class Disruptions:
    """What Karpenter did to Pods, from the audit log."""

    def __init__(self, cluster: Cluster) -> None:
        self._audit = Audit(cluster.folder / "audit.log")
        self._mark = self._audit.mark()

    def all(self) -> list[Write]:
        """Every eviction, and every delete that is Karpenter's, also those that were refused."""
        return [
            write
            for write in self._audit.since(self._mark)
            if (write.resource == "pods/eviction" and write.verb == "create")
            or (write.resource == "pods" and write.verb.startswith("delete") and write.user == karpenter.KARPENTER)
        ]

    def evicted(self) -> int:
        """So many Pods: one may be asked to go several times."""
        return len({write.name for write in self.all() if write.done})

    def last(self) -> float:
        return max((write.ended for write in self.all()), default=0.0)


def settled(cluster: Cluster, disruptions: Disruptions, seconds: float) -> None:
    """Until nobody was evicted and no node came or went for `QUIET`."""
    last, since = set[str](), time.time()

    def quiet() -> bool:
        nonlocal last, since
        there = {name(node) for node in nodes(cluster)}
        if there != last:
            last, since = there, time.time()
        return time.time() - max(since, disruptions.last()) > QUIET

    cluster.wait_for("Karpenter to have nothing left to do", quiet, seconds)


def head_of(cluster: Cluster, space: str) -> Object | None:
    where = f"/api/v1/namespaces/{space}/pods?labelSelector=ray.io%2Fnode-type%3Dhead"
    return next(iter(cluster.api("GET", where)["items"]), None)


def scaling(least: int) -> Object:
    return {"minReplicas": least, "maxReplicas": SLOTS, "warmSpares": SPARES, "idleSeconds": 5}


# --- the tests --------------------------------------------------------------------------------------------------------


def test_nodes_come_for_slots_and_go_with_them_and_no_claim_is_broken(
    cluster: Cluster, space: str, operator: Operator
) -> None:
    assert nodes(cluster) == []
    node_pool(cluster, space, only("kubernetes.io/arch", "amd64"))
    container = {"name": "emulator", "image": "phone:1", "resources": {"requests": REQUESTS}}
    template = {"metadata": {"annotations": {fake.BOOT: BOOT}}, "spec": {"containers": [container]}}
    disruptions = Disruptions(cluster)
    pool = LivePool(cluster, space, scaling=scaling(0), template=template)
    story = Story(cluster, pool)
    with Observer(pool) as observer:
        # Up: a run that wants 40, whose claims lie together, and then somebody who takes 150.
        story.say(f"no node; a run that wants {RUNS} slots comes")
        run = LiveRun(cluster, space, **pool_source(slots=RUNS))
        pool.wait("slots without a node", lambda: pool.status()["unschedulable"] > 0)
        story.say(story.state())
        pool.wait("nodes", lambda: nodes(cluster))
        story.say(f"Karpenter brings nodes: {kinds(nodes(cluster))}")
        head = pool.wait("the run's head", lambda: head_of(cluster, space))
        pool.wait_ready(RUNS + SPARES)
        driver = _driver(operator, space, head)
        mine = driver.acquire_all(RUNS, **TTL)
        story.say(f"the run has its {RUNS}; a claimant that wants {OTHERS} comes: {story.state()}")
        other = caller(operator, space)
        taken = other.acquire_all(OTHERS, **TTL)
        pool.wait_ready(SLOTS)
        story.say(f"each has its slots: {story.state()}")
        most = len(nodes(cluster))
        before = {slot: uid(pool.pod(slot)) for slot in slots_of(mine)}

        # Down: the claimant keeps two on each of six nodes, and nothing may make those move.
        where = {name(pod): pod["spec"]["nodeName"] for pod in pool.pods()}
        runs = {where[claim.slot] for claim in mine}
        kept = _two_on_each([claim for claim in taken if where[claim.slot] not in runs], where)[:12]
        size = RUNS + len(kept) + SPARES
        other.release(*(claim for claim in taken if claim not in kept))
        story.say(f"the claimant gives back {len(taken) - len(kept)} and keeps two on each of six nodes")
        pool.wait_ready(size)
        story.say(f"idleSeconds later: {story.state()}")
        pool.wait("nodes without claims to go", lambda: len(nodes(cluster)) < most)
        settled(cluster, disruptions, 300)
        story.say(f"consolidated: {story.state()}; {disruptions.evicted()} slots evicted")
        assert {each.state for each in other.renew(*kept)} == {"held"}
        assert {where[claim.slot] for claim in (*kept, *mine)} <= {name(node) for node in nodes(cluster)}
        assert not _touched(disruptions, slots_of([*kept, *mine])), "who is claimed stays where it is"
        between = len(nodes(cluster))

        # It gives these back too, while the pool keeps its size: free slots on nodes that are nearly empty.
        pool.edit(scaling=scaling(size))
        known, evicted = set(uids(pool.pods())), disruptions.evicted()
        other.release(*kept)
        story.say(f"the claimant gives back the other {len(kept)}; the pool keeps {size}, {size - RUNS} of them free")
        pool.wait("free slots to move", lambda: set(uids(pool.pods())) - known)
        settled(cluster, disruptions, 300)
        pool.wait_ready(size)
        moved = len(set(uids(pool.pods())) - known)
        assert len(nodes(cluster)) < between
        evicted = disruptions.evicted() - evicted
        story.say(f"consolidated: {story.state()}; {evicted} slots evicted, {moved} free ones began anew elsewhere")
        assert 0 < moved <= size - RUNS

        # The run's claims, its head, and what was said of all this.
        assert {each.state for each in driver.renew(*mine)} == {"held"}
        assert {slot: uid(pool.pod(slot)) for slot in before} == before
        now = head_of(cluster, space)
        assert now is not None and uid(now) == uid(head), "the run's own Pods are left alone too"
        assert not _touched(disruptions, [*before, name(head)])
        story.say(f"the run's {RUNS} claims are held, by the Pods that it got; of claimed slots none was evicted")

        # Nothing left.
        driver.release(*mine)
        run.delete()
        pool.edit(scaling=scaling(0))
        pool.wait("an empty pool", lambda: pool.status()["pods"] == 0)
        story.say("the run is deleted: no slots")
        pool.wait("the nodes to go", lambda: nodes(cluster) == [])
        story.say("no nodes")
    assert observer.sick == [], "an eviction is nobody's sickness"
    assert operator.trouble() == []


def _driver(operator: Operator, space: str, head: Object) -> Caller:
    """The run's driver, as the broker knows it: by a token of its head's Pod, which KubeRay made."""
    account = head["spec"].get("serviceAccountName", "default")
    token = operator.cluster.token(space, account, AUDIENCE, pod=(name(head), uid(head)))
    return Caller(operator, space, token)


def _two_on_each(claims: list[Claim], where: dict[str, str]) -> list[Claim]:
    found: dict[str, list[Claim]] = {}
    for claim in claims:
        found.setdefault(where[claim.slot], []).append(claim)
    return [claim for there in found.values() for claim in there[:2]]


def _touched(disruptions: Disruptions, pods: list[str]) -> list[Write]:
    return [write for write in disruptions.all() if write.name in pods]


def test_slots_with_kvm_get_nodes_when_an_overlay_says_which_types_have_it(
    cluster: Cluster, ground: Ground, space: str, operator: Operator
) -> None:
    node_pool(cluster, space, only(TYPE, "metal.32"))
    template = phone(nodeSelector={"group": space})
    pool = LivePool(cluster, space, replicas=6, template=template, kvm={"mode": "DevicePlugin"})
    story = Story(cluster, pool)
    said = pool.wait("Karpenter's word", lambda: _told(cluster, space))
    assert f"{KVM}" in said and pool.status()["unschedulable"] == 6
    story.say(f"6 slots that want {KVM}. Karpenter: {said}")

    # Without the resource: nothing keeps Karpenter from it.
    open_kvm = {"mode": "HostPath", "privileged": True}
    label(cluster, ground.own, space, "privileged")
    other = LivePool(cluster, space, "privileged", replicas=2, template=template, kvm=open_kvm)
    other.wait_ready(2)
    assert pool.status()["unschedulable"] == 6
    story.say(f"2 privileged slots with the node's own /dev/kvm have a node; the 6 wait: {story.state()}")

    cluster.apply(
        {
            "apiVersion": "karpenter.sh/v1alpha1",
            "kind": "NodeOverlay",
            "metadata": {"name": "kvm"},
            "spec": {"requirements": [only(TYPE, "metal.32")], "capacity": {KVM: "4"}},
        }
    )
    story.say("a NodeOverlay says that nodes of metal.32 have 4 of it")
    pool.wait_ready(6)
    story.say(story.state())
    here = {pod["spec"]["nodeName"] for pod in pool.pods()}
    assert len(here) == 2, "4 and 2"


def _told(cluster: Cluster, space: str) -> str:
    """Why Karpenter brings no node for a Pod of the namespace."""
    events = cluster.api("GET", f"/api/v1/namespaces/{space}/events")["items"]
    mine = [
        e for e in events if e["source"].get("component") == "karpenter" or e.get("reportingComponent") == "karpenter"
    ]
    return next((e["message"] for e in mine if e["reason"] == "FailedScheduling"), "")
