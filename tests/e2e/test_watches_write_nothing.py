"""The operator's watches leave every object as it is, also one that another operator's kopf has put its marks on."""

from __future__ import annotations

import asyncio

import pytest
from e2e.cluster import MERGE, Cluster

from tapforge_operator import names
from tapforge_operator.kube.client import Client
from tapforge_operator.kube.connection import connection
from tapforge_operator.telemetry import Telemetry
from tapforge_operator.watches import slot_reflector, watch
from tapforge_operator.world import Scope, World

FOREIGN = {"kopf.zalando.org/last-handled-configuration": "{}", "kopf.zalando.org/touch-dummy": "2026-01-01"}
FINALIZER = "kopf.zalando.org/KopfFinalizerMarker"


def lease(name: str) -> dict:
    """Of a kind that kopf watches."""
    marks = {"labels": {names.MANAGED_BY: names.OPERATOR}, "annotations": FOREIGN, "finalizers": [FINALIZER]}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name, **marks}}


class Counting(Telemetry):
    """Tells when so many events of Leases were seen."""

    def __init__(self, events: int):
        super().__init__()
        self.left, self.over = events, asyncio.Event()

    def event(self, kind: str) -> None:
        super().event(kind)
        self.left -= kind == "leases"
        if self.left <= 0:
            self.over.set()


async def test_foreign_marks_stay(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    where = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    before = await asyncio.to_thread(cluster.api, "POST", where, lease("listed"))
    seen = Counting(2)
    world = World(Scope((namespace,), nodes=False), seen, lambda uid: None)
    begun, end = asyncio.Event(), asyncio.Event()
    async with Client(connection()) as client:
        slots = slot_reflector(world, client, (namespace,), lambda: None)
        watching = asyncio.create_task(watch(world, [slots], (namespace,), begun, end))
        try:
            await asyncio.wait_for(begun.wait(), 120)
            other = await asyncio.to_thread(cluster.api, "POST", where, lease("watched"))
            await asyncio.wait_for(seen.over.wait(), 120)
            # What a watch would write it writes right after the event.
            await asyncio.sleep(1.0)
            for made in (before, other):
                now = await asyncio.to_thread(cluster.api, "GET", f"{where}/{made['metadata']['name']}")
                assert now["metadata"] == made["metadata"]
        finally:
            end.set()
            await asyncio.wait_for(watching, 120)
            for name in ("listed", "watched"):
                patch = {"metadata": {"finalizers": None}}
                await asyncio.to_thread(cluster.api, "PATCH", f"{where}/{name}", patch, MERGE)
