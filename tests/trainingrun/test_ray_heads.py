"""The Pods of Ray's heads, as they say what becomes of them, and what is remembered of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from runs_made import UID
from small_api import SmallApi
from test_ray_job_watch import Refusing

from tapforge_operator import labels as wellknown
from tapforge_operator.kube import reflector
from tapforge_operator.kube.cache import Heads
from tapforge_operator.kube.disruption import disruption
from tapforge_operator.kube.informers import head_reflector
from tapforge_operator.kube.types import RayHead

PODS = "/api/v1/namespaces/lab/pods"
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "evicting"}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({}, ""),
        ({"phase": "Failed", "reason": "OOMKilled"}, ""),
        ({"conditions": [{"type": "Ready", "status": "False"}]}, ""),
        ({"conditions": [EVICTED]}, "EvictionByEvictionAPI"),
        ({"conditions": [{**EVICTED, "status": "False"}]}, ""),
        *(
            ({"conditions": [{**EVICTED, "reason": reason}]}, reason)
            for reason in ("PreemptionByScheduler", "DeletionByTaintManager", "DeletionByPodGC", "TerminationByKubelet")
        ),
        *(({"phase": "Failed", "reason": word}, word) for word in ("Preempting", "NodeShutdown", "NodeLost")),
        (
            {"reason": "Evicted", "message": "The node was low on resource: memory. Container ray was using 9Gi"},
            "Evicted",
        ),
        ({"reason": "Evicted", "message": 'Usage of EmptyDir volume "tapforge-work" exceeds the limit "1Gi". '}, ""),
        ({"reason": "Evicted", "message": "Container ray exceeded its local ephemeral storage limit"}, ""),
    ],
)
def test_what_the_cluster_does_to_a_pod(status: dict[str, Any], reason: str) -> None:
    assert disruption({"metadata": {}, "status": status})[0] == reason


def head(name: str = "run-1-head", attempt: str = "1", run_uid: str = UID, **status: Any) -> dict[str, Any]:
    labels = {wellknown.RUN_UID: run_uid, wellknown.ATTEMPT: attempt, "ray.io/node-type": "head"}
    metadata = {"name": name, "namespace": "lab", "labels": labels}
    return {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": status}


class Ground:
    def __init__(self) -> None:
        self.api = SmallApi()
        self.line = Refusing(self.api)
        self.requeued: list[str] = []
        self.heads = Heads(self.requeued.append, lambda uid: uid == UID)

    def begin(self) -> asyncio.Task[None]:
        return asyncio.create_task(head_reflector(self.heads, self.line, ("lab",)).run())  # type: ignore[arg-type]

    @property
    def known(self) -> RayHead | None:
        return self.heads.of("lab", UID)

    async def until(self, probe: Any) -> None:
        async with asyncio.timeout(60):
            while not probe(self.known):  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(reflector, "_AGAIN", 0.001)


async def test_an_eviction_is_remembered_when_the_pod_is_gone() -> None:
    ground = Ground()
    ground.api.create(PODS, head())
    task = ground.begin()
    await ground.until(lambda known: known is not None)
    ground.api.patch(f"{PODS}/run-1-head/status", {"status": {"conditions": [EVICTED]}})
    ground.api.delete(f"{PODS}/run-1-head")
    await ground.until(lambda known: known.gone)
    known = ground.known
    assert known is not None and (known.disruption, known.node) == ("EvictionByEvictionAPI", "node-1")
    assert known.message == "evicting" and set(ground.requeued) == {UID}
    ground.api.create(PODS, head("run-2-head", "2"))
    await ground.until(lambda known: known.attempt == 2 and not known.disruption and not known.gone)
    task.cancel()


async def test_what_vanished_while_nobody_watched_keeps_its_last_word() -> None:
    ground = Ground()
    ground.api.create(PODS, head(conditions=[EVICTED]))
    task = ground.begin()
    await ground.until(lambda known: known is not None)
    task.cancel()
    await asyncio.wait({task})
    ground.api.delete(f"{PODS}/run-1-head")
    task = ground.begin()
    await ground.until(lambda known: known.gone)
    assert ground.known is not None and ground.known.disruption
    task.cancel()


async def test_the_watch_goes_on_through_cuts_and_refusals() -> None:
    ground = Ground()
    ground.line.refusals[PODS] = (500, "No")
    task = ground.begin()
    async with asyncio.timeout(60):
        while not ground.line.in_vain:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    ground.line.refusals.clear()
    ground.line.cuts = 2
    for number in range(1, 6):
        ground.api.create(PODS, head(f"run-{number}-head", str(number)))
        await ground.until(lambda known, number=number: known is not None and known.attempt == number)
    assert not task.done()
    task.cancel()


def test_nothing_is_kept_of_what_is_no_head_of_a_run() -> None:
    ground = Ground()
    for number, pod in enumerate((head(run_uid="nobody"), head(attempt="one"), head(run_uid=""))):
        pod["metadata"] |= {"uid": f"pod-{number}", "resourceVersion": "7"}
        ground.heads.observe(pod)
        ground.heads.observe(pod, deleted=True)
    assert ground.known is None and ground.heads.of("lab", "nobody") is None


def test_an_older_head_says_nothing_about_the_newer_one() -> None:
    ground = Ground()
    for name, attempt, version in (("b", "2", "9"), ("a", "1", "12"), ("b", "2", "8")):
        pod = head(name, attempt)
        pod["metadata"] |= {"uid": name, "resourceVersion": version}
        ground.heads.observe(pod)
    assert ground.known is not None and (ground.known.name, ground.known.version) == ("b", "9")
    ground.heads.forget(UID)
    assert ground.known is None
