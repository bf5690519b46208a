"""The operator's watches leave every object as it is, also one that another operator's kopf has put its marks on."""

from __future__ import annotations

import asyncio

import pytest
from e2e.cluster import MERGE, Cluster

from tapforge_api.base import API_VERSION
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.client import Client
from tapforge_operator.kube.credentials import Credentials
from tapforge_operator.kube.informers import Informers, Scope
from tapforge_operator.observability.metrics import Telemetry

# The first one is no JSON: what is not ours is not even read.
FOREIGN = {"kopf.zalando.org/last-handled-configuration": "{", "kopf.zalando.org/touch-dummy": "2026-01-01"}
FINALIZER = "kopf.zalando.org/KopfFinalizerMarker"


def pool(name: str) -> dict:
    """Of a kind that the operator watches."""
    metadata = {"name": name, "annotations": FOREIGN, "finalizers": [FINALIZER]}
    template = {"spec": {"containers": [{"name": "emulator", "image": "phone"}]}}
    return {
        "apiVersion": API_VERSION,
        "kind": "EmulatorPool",
        "metadata": metadata,
        "spec": {"replicas": 0, "template": template},
    }


class Counting(Telemetry):
    """Tells when so many events of pools were seen."""

    def __init__(self, events: int):
        super().__init__()
        self.left, self.begun, self.over = events, asyncio.Event(), asyncio.Event()

    def event(self, kind: str) -> None:
        super().event(kind)
        self.left -= kind == "emulatorpools"
        if kind == "emulatorpools":
            self.begun.set()
        if self.left <= 0:
            self.over.set()


async def test_foreign_marks_stay(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    where = f"/apis/{API_VERSION}/namespaces/{namespace}/emulatorpools"
    before = await asyncio.to_thread(cluster.api, "POST", where, pool("listed"))
    seen = Counting(2)
    cache = Cache(seen, lambda uid: None)
    informers = Informers(cache, Scope((namespace,), nodes=False), seen)
    credentials = await Credentials.load()
    async with Client(credentials) as client:
        watching = asyncio.create_task(informers.watch(client, namespace))
        try:
            await asyncio.wait_for(seen.begun.wait(), 120)
            other = await asyncio.to_thread(cluster.api, "POST", where, pool("watched"))
            await asyncio.wait_for(seen.over.wait(), 120)
            # What a watch would write it writes right after the event.
            await asyncio.sleep(1.0)
            for made in (before, other):
                now = await asyncio.to_thread(cluster.api, "GET", f"{where}/{made['metadata']['name']}")
                assert now["metadata"] == made["metadata"]
            assert {one.name for one in cache.pools.all()} == {"listed", "watched"}
        finally:
            watching.cancel()
            await asyncio.wait({watching}, timeout=120)
            for name in ("listed", "watched"):
                patch = {"metadata": {"finalizers": None}}
                await asyncio.to_thread(cluster.api, "PATCH", f"{where}/{name}", patch, MERGE)
