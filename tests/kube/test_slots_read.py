"""Which Pods are slots."""

from __future__ import annotations

from typing import Any

import pytest

from tapforge_api.base import API_VERSION
from tapforge_operator import labels as wellknown
from tapforge_operator.kube.cache import Cache, WatchFreshness
from tapforge_operator.kube.types import observe, observe_ray_job
from tapforge_operator.observability.metrics import Telemetry

RUN = {"apiVersion": API_VERSION, "kind": "TrainingRun", "name": "run", "uid": "run-1", "controller": True}


def pod(**metadata: Any) -> dict[str, Any]:
    owner = {"kind": "EmulatorPool", "name": "phones", "uid": "pool-1", "controller": True}
    own = {"namespace": "lab", "name": "phones-a", "uid": "pod-1", "resourceVersion": "7"}
    labels = {wellknown.POOL_UID: "pool-1", wellknown.ORDINAL: "3"}
    return {"metadata": {**own, "labels": labels, "ownerReferences": [owner], **metadata}}


def test_a_slot_says_which_it_is() -> None:
    slot = observe(pod())
    assert slot is not None and (slot.pool, slot.pool_uid, slot.ordinal) == ("phones", "pool-1", 3)


@pytest.mark.parametrize(
    "metadata",
    [
        {"labels": {}},
        {"labels": {wellknown.POOL_UID: "pool-2", wellknown.ORDINAL: "3"}},
        {"labels": {wellknown.POOL_UID: "pool-1", wellknown.ORDINAL: "three"}},
        {"labels": {wellknown.POOL_UID: "pool-1", wellknown.ORDINAL: "٣"}},
        {"ownerReferences": []},
        {"ownerReferences": [{"kind": "EmulatorPool", "name": "phones", "uid": "pool-1"}]},
        {"ownerReferences": [{"kind": "ReplicaSet", "name": "phones", "uid": "pool-1", "controller": True}]},
    ],
)
def test_labels_and_controller_have_to_agree(metadata: dict[str, Any]) -> None:
    assert observe(pod(**metadata)) is None


def test_an_answer_without_a_version_tells_of_a_slot_that_is_gone() -> None:
    """An API server answers so where a delete met another one."""
    cache = Cache(Telemetry(), lambda uid: None)
    assert cache.observe_pod(pod()) is not None and len(cache.slots) == 1
    last = pod(deletionTimestamp="2026-01-01T00:00:00Z")
    del last["metadata"]["resourceVersion"]
    cache.observe_pod(last)
    assert len(cache.slots) == 0
    cache.observe_pod(pod(resourceVersion="6"))
    assert len(cache.slots) == 0, "what was said earlier comes late"


def test_a_ray_job_of_another_namespace_is_not_the_runs() -> None:
    """Who knows a run's UID could set its attempt, and have the RayJob of that deleted."""
    told: list[str] = []
    cache = Cache(Telemetry(), lambda uid: None)
    cache.run_listeners.append(told.append)
    for namespace, attempt in (("lab", "1"), ("evil", "900")):
        labels = {wellknown.ATTEMPT: attempt}
        cache.observe_ray_job(pod(namespace=namespace, uid=namespace, labels=labels, ownerReferences=[RUN]))
    assert [job.attempt for job in cache.ray_jobs_of("lab", "run-1")] == [1] and told == ["run-1"] * 2
    stranger = {**RUN, "apiVersion": "example.org/v1"}
    assert observe_ray_job(pod(labels={wellknown.ATTEMPT: "1"}, ownerReferences=[stranger])) is None


@pytest.mark.parametrize("pool_first", [True, False])
def test_a_pod_of_another_namespace_is_no_slot_of_the_pool(pool_first: bool) -> None:
    """It would be given to whoever claims a phone there."""
    cache = Cache(Telemetry(), lambda uid: None)
    pool = {"metadata": {"namespace": "lab", "name": "phones", "uid": "pool-1", "resourceVersion": "1"}, "spec": {}}
    if pool_first:
        cache.observe_pool(pool)
    cache.observe_pod(pod())
    cache.observe_pod(pod(namespace="evil", uid="other"))
    cache.observe_pool(pool)
    assert [slot.namespace for slot in cache.slots.of("pool-1").values()] == ["lab"]


@pytest.mark.parametrize("kind", ["lease", "ray_job"])
def test_what_loses_its_label_and_has_it_again_is_seen_again(kind: str) -> None:
    """A watch that selects by the label tells of a deletion."""
    cache = Cache(Telemetry(), lambda uid: None)
    observe, index = {
        "lease": (cache.observe_lease, cache.leases),
        "ray_job": (cache.observe_ray_job, cache.ray_jobs),
    }[kind]
    more: dict[str, Any] = {"labels": {wellknown.ATTEMPT: "1"}, "ownerReferences": [RUN]}
    observe(pod(**more), False)
    assert len(index) == 1
    observe(pod(**more, resourceVersion="8"), True)
    observe(pod(**more, resourceVersion="7"), False)
    assert len(index) == 0
    observe(pod(**more, resourceVersion="9"), False)
    assert len(index) == 1


def test_a_slot_is_in_its_stage_since_this_process_saw_it_come_to_it() -> None:
    """Whatever its node's clock says, and however often it is reported meanwhile."""
    now = 1000.0
    cache = Cache(Telemetry(freshness=WatchFreshness(wall=lambda: now + 5e8, clock=lambda: now)), lambda uid: None)
    version = 0

    def seen(seconds: float, **status: Any) -> float:
        nonlocal now, version
        now, version = now + seconds, version + 1
        made = pod(resourceVersion=str(version))
        containers = [{"name": wellknown.CONTAINER, "state": {"running": {"startedAt": status.get("started")}}}]
        turned = {"type": "Ready", "status": status.get("ready", "False"), "lastTransitionTime": status.get("turned")}
        made["status"] = {"phase": "Running", "conditions": [turned] if "turned" in status else []}
        made["status"]["containerStatuses"] = containers if "started" in status else []
        made["spec"] = {"nodeName": status.get("node", "")}
        slot = cache.observe_pod(made)
        assert slot is not None
        return slot.since

    assert seen(0) == seen(5) == 1000.0
    assert seen(5, node="n") == seen(5, node="n") == 1010.0
    began = {"node": "n", "started": "2020-01-01T00:00:00Z"}
    assert seen(5, **began) == seen(5, **began) == 1020.0
    serves = {**began, "ready": "True", "turned": "2020-01-01T00:01:00Z"}
    assert seen(5, **serves) == seen(5, **serves) == 1030.0
    fell = {**began, "turned": "2020-01-01T00:02:00Z"}
    assert seen(5, **fell) == seen(5, **fell) == 1040.0
    # It was ready again in between, which no event told.
    assert seen(5, **{**fell, "turned": "2020-01-01T00:03:00Z"}) == 1050.0
    assert cache.clock_offset == 5e8
