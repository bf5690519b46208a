"""Which Pods are slots."""

from __future__ import annotations

from typing import Any

import pytest

from tapforge_operator import labels as wellknown
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.types import observe
from tapforge_operator.observability.metrics import Telemetry


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


@pytest.mark.parametrize("kind", ["lease", "ray_job"])
def test_what_loses_its_label_and_has_it_again_is_seen_again(kind: str) -> None:
    """A watch that selects by the label tells of a deletion."""
    cache = Cache(Telemetry(), lambda uid: None)
    observe, index = {
        "lease": (cache.observe_lease, cache.leases),
        "ray_job": (cache.observe_ray_job, cache.ray_jobs),
    }[kind]
    owner = {"kind": "TrainingRun", "name": "run", "uid": "run-1", "controller": True}
    more: dict[str, Any] = {"labels": {wellknown.ATTEMPT: "1"}, "ownerReferences": [owner]}
    observe(pod(**more), False)
    assert len(index) == 1
    observe(pod(**more, resourceVersion="8"), True)
    observe(pod(**more, resourceVersion="7"), False)
    assert len(index) == 0
    observe(pod(**more, resourceVersion="9"), False)
    assert len(index) == 1
