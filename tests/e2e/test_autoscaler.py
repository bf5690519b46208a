"""A cluster autoscaler, in a few lines: it brings a node when Pods find none, and drains nodes by what is written on
their Pods. With it a pool grows onto new nodes, and gives them back, without a claimed phone being touched.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from claiming import caller
from e2e.cluster import PATIENCE, Cluster, Refused
from live_pool import LivePool, Object, name, note_of, only_on, own_nodes, phone, uid
from operator_process import Operator

from tapforge_operator import labels

ROOM = 3
TTL = {"ttlSeconds": 600}


@dataclass
class Autoscaler:
    """Of one group of nodes, each with room for `ROOM` Pods. It does what the usual ones do, and knows nothing of
    pools: only what stands on Pods, and the eviction API."""

    cluster: Cluster
    group: str
    #: nodes whose drain was begun
    drained: list[str] = field(default_factory=list)
    #: Pods whose eviction was refused
    refused: list[str] = field(default_factory=list)
    error: BaseException | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="autoscaler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    def nodes(self) -> list[str]:
        found = self.cluster.api("GET", f"/api/v1/nodes?labelSelector=group%3D{self.group}")["items"]
        return sorted(node["metadata"]["name"] for node in found)

    def _run(self) -> None:
        try:
            while not self._over.wait(0.2):
                with contextlib.suppress(OSError):  # the API server is slow
                    self._look()
        except BaseException as error:  # noqa: BLE001 the test asks for it
            self.error = error

    def _look(self) -> None:
        pods = [p for p in self.cluster.api("GET", "/api/v1/pods")["items"] if self._mine(p)]
        waiting = [pod for pod in pods if _unschedulable(pod)]
        if waiting:
            # The scheduler may not have come back to those that have room by now.
            free = sum(ROOM - self._on(pods, node) for node in self.nodes())
            if (missing := -(-(len(waiting) - free) // ROOM)) > 0:
                own_nodes(self.cluster, self.group, missing, pods=ROOM)
            return
        if any(not pod["spec"].get("nodeName") for pod in pods):
            return
        for node in self.nodes():
            there = [pod for pod in pods if pod["spec"].get("nodeName") == node]
            if node in self.drained:
                self._drain(node, there)
            elif len(there) < ROOM and all(note_of(pod, labels.SAFE_TO_EVICT) == "true" for pod in there):
                room = sum(ROOM - self._on(pods, other) for other in self.nodes() if other != node)
                if len(there) <= room and len(self.nodes()) > len(self.drained) + 1:
                    self.drained.append(node)
                    self.cluster.kubectl("cordon", node)

    def _drain(self, node: str, there: list[Object]) -> None:
        if not there:
            self.cluster.nodes.remove(node)
            self.drained.remove(node)
        for pod in there:
            if "deletionTimestamp" in pod["metadata"]:
                continue
            metadata = {"name": name(pod), "namespace": pod["metadata"]["namespace"]}
            where = f"/api/v1/namespaces/{metadata['namespace']}/pods/{name(pod)}/eviction"
            try:
                self.cluster.api("POST", where, {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata})
            except Refused as error:
                if error.status not in (404, 429):
                    raise
                if error.status == 429:
                    self.refused.append(name(pod))

    def _on(self, pods: list[Object], node: str) -> int:
        return ROOM if node in self.drained else sum(pod["spec"].get("nodeName") == node for pod in pods)

    def _mine(self, pod: Object) -> bool:
        return (pod["spec"].get("nodeSelector") or {}).get("group") == self.group


def _unschedulable(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(c["type"] == "PodScheduled" and c.get("reason") == "Unschedulable" for c in conditions)


@pytest.fixture
def autoscaler(cluster: Cluster, space: str) -> Iterator[Autoscaler]:
    one = Autoscaler(cluster, space)
    yield one
    one.close()
    for node in one.nodes():
        cluster.nodes.remove(node)
    assert one.error is None, one.error


def test_a_pool_grows_and_shrinks_with_its_nodes_and_no_claim_is_broken(
    cluster: Cluster, space: str, operator: Operator, autoscaler: Autoscaler
) -> None:
    pool = LivePool(cluster, space, replicas=8, template=phone(**only_on(space)))
    pool.wait_ready(8)
    assert len(autoscaler.nodes()) == 3, "as many as 8 slots need, and no more"
    assert pool.status()["replacedTotal"] == 0, "who waited for a node was not replaced"
    who = caller(operator, space)
    claims = who.acquire_all(4, **TTL)
    pods = {name(pod): pod for pod in pool.pods()}
    claimed_nodes = {pods[claim.slot]["spec"]["nodeName"] for claim in claims}
    assert len(claimed_nodes) == 2, "claims are packed, so that some nodes stay free of them"
    pool.edit(replicas=4)
    pool.wait("the nodes without claims to go", lambda: set(autoscaler.nodes()) == claimed_nodes)
    assert {said.state for said in who.renew(*claims)} == {"held"}
    assert {claim.id.rpartition(".")[0] for claim in claims} <= {uid(pod) for pod in pool.pods()}
    # One by one they are given back, and the slots move together until one node is enough for them.
    pool.edit(replicas=3)
    kept = list(claims)
    end = time.monotonic() + PATIENCE
    while len(autoscaler.nodes()) > 1 and time.monotonic() < end:
        states = who.renew(*kept) if kept else []
        back = [claim for claim, said in zip(kept, states, strict=True) if said.state == "recalled"] or kept[:1]
        if back:
            who.release(*back)
        kept = [claim for claim in kept if claim not in back]
        time.sleep(0.5)
    assert len(autoscaler.nodes()) == 1
    pool.wait_ready(3)
    pool.wait("the drains to be over", lambda: autoscaler.drained == [])
    assert pool.status()["lastFailures"] == []


def test_a_drain_that_pays_no_attention_to_annotations_is_stopped_by_the_budget(
    cluster: Cluster, space: str, operator: Operator, autoscaler: Autoscaler
) -> None:
    """As `kubectl drain` does it, on the node of a claimed slot: it waits until the claim is given back."""
    pool = LivePool(cluster, space, replicas=2, template=phone(**only_on(space)))
    pool.wait_ready(2)
    budget = f"/apis/policy/v1/namespaces/{space}/poddisruptionbudgets/phones-claimed"
    pool.wait("its disruption budget", lambda: cluster.exists(budget))
    who = caller(operator, space)
    claim = who.acquire_one(**TTL)
    pods = {name(pod): pod for pod in pool.pods()}
    node = pods[claim.slot]["spec"]["nodeName"]
    cluster.kubectl("cordon", node)
    autoscaler.drained.append(node)
    pool.wait("evictions to be refused", lambda: autoscaler.refused.count(claim.slot) > 2)
    pool.wait("it to be asked back", lambda: who.state(claim) == "recalled")
    assert name(pool.pod(claim.slot)) == claim.slot
    who.release(claim)
    pool.wait("the node to go", lambda: node not in autoscaler.nodes())
    pool.wait_ready(2)
    assert set(autoscaler.refused) == {claim.slot}, "nobody else was protected"
