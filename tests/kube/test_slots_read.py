"""Which Pods are slots."""

from __future__ import annotations

from typing import Any

import pytest

from tapforge_operator import names
from tapforge_operator.slots import observe
from tapforge_operator.telemetry import Telemetry
from tapforge_operator.world import Scope, World


def pod(**metadata: Any) -> dict[str, Any]:
    owner = {"kind": "EmulatorPool", "name": "phones", "uid": "pool-1", "controller": True}
    own = {"namespace": "lab", "name": "phones-a", "uid": "pod-1", "resourceVersion": "7"}
    labels = {names.POOL_UID: "pool-1", names.ORDINAL: "3"}
    return {"metadata": {**own, "labels": labels, "ownerReferences": [owner], **metadata}}


def test_a_slot_says_which_it_is() -> None:
    slot = observe(pod())
    assert slot is not None and (slot.pool, slot.pool_uid, slot.ordinal) == ("phones", "pool-1", 3)


@pytest.mark.parametrize(
    "metadata",
    [
        {"labels": {}},
        {"labels": {names.POOL_UID: "pool-2", names.ORDINAL: "3"}},
        {"labels": {names.POOL_UID: "pool-1", names.ORDINAL: "three"}},
        {"labels": {names.POOL_UID: "pool-1", names.ORDINAL: "٣"}},
        {"ownerReferences": []},
        {"ownerReferences": [{"kind": "EmulatorPool", "name": "phones", "uid": "pool-1"}]},
        {"ownerReferences": [{"kind": "ReplicaSet", "name": "phones", "uid": "pool-1", "controller": True}]},
    ],
)
def test_labels_and_controller_have_to_agree(metadata: dict[str, Any]) -> None:
    assert observe(pod(**metadata)) is None


def test_an_answer_without_a_version_tells_of_a_slot_that_is_gone() -> None:
    """An API server answers so where a delete met another one."""
    world = World(Scope(), Telemetry(), lambda uid: None)
    assert world.saw_pod(pod()) is not None and len(world.slots) == 1
    last = pod(deletionTimestamp="2026-01-01T00:00:00Z")
    del last["metadata"]["resourceVersion"]
    world.saw_pod(last)
    assert len(world.slots) == 0
    world.saw_pod(pod(resourceVersion="6"))
    assert len(world.slots) == 0, "what was said earlier comes late"
