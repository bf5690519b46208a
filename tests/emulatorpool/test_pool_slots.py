"""What is read off a Pod: a slot, or nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tapforge_operator import labels
from tapforge_operator.kube.types import Slot, observe

T0 = datetime(2026, 11, 20, 10, 0, 0, tzinfo=UTC)


def at(seconds: int) -> str:
    return (T0 + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(status: dict[str, Any] | None = None, *, node: str = "", **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "lab",
            "name": "phones-0",
            "uid": "u",
            "resourceVersion": "5",
            "creationTimestamp": at(0),
            "labels": {labels.POOL_UID: "pool-1", labels.ORDINAL: "3", labels.TEMPLATE: "t"},
            "ownerReferences": [{"kind": "EmulatorPool", "name": "phones", "uid": "pool-1", "controller": True}],
            **metadata,
        },
        "spec": {"nodeName": node} if node else {},
        **({"status": status} if status is not None else {}),
    }


def ready(word: str, seconds: int) -> dict[str, str]:
    return {"type": "Ready", "status": word, "lastTransitionTime": at(seconds)}


def running(seconds: int, **more: Any) -> dict[str, Any]:
    return {"name": "emulator", "state": {"running": {"startedAt": at(seconds)}}, **more}


def seen(*args: Any, **more: Any) -> Slot:
    slot = observe(pod(*args, **more))
    assert slot is not None
    return slot


def test_a_new_pod() -> None:
    slot = seen()
    assert (slot.pool, slot.pool_uid, slot.ordinal, slot.template, slot.phase) == (
        "phones",
        "pool-1",
        3,
        "t",
        "Pending",
    )
    assert slot.created == T0.timestamp()
    assert not (slot.ready or slot.ever_ready or slot.unschedulable or slot.terminal or slot.deleting or slot.retained)


@pytest.mark.parametrize(
    "metadata",
    [
        {"ownerReferences": None},
        {"ownerReferences": [{"kind": "EmulatorPool", "name": "phones", "uid": "pool-1"}]},
        {"ownerReferences": [{"kind": "ReplicaSet", "name": "phones", "uid": "pool-1", "controller": True}]},
        {"ownerReferences": [{"kind": "EmulatorPool", "name": "phones", "uid": "pool-2", "controller": True}]},
        {"labels": None},
        {"labels": {labels.POOL_UID: "pool-1"}},
        {"labels": {labels.POOL_UID: "pool-1", labels.ORDINAL: "-1"}},
        {"labels": {labels.POOL_UID: "pool-1", labels.ORDINAL: "²"}},
    ],
)
def test_what_is_no_slot(metadata: dict[str, Any]) -> None:
    assert observe(pod(**metadata)) is None


def test_times_of_a_boot() -> None:
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(7)}
    pulling = seen({"phase": "Pending", "conditions": [scheduled, ready("False", 7)]}, node="n")
    assert (pulling.scheduled, pulling.started, pulling.node) == ((T0 + timedelta(seconds=7)).timestamp(), None, "n")
    booting = seen(
        {"phase": "Running", "conditions": [scheduled, ready("False", 7)], "containerStatuses": [running(20)]}, node="n"
    )
    assert booting.started == (T0 + timedelta(seconds=20)).timestamp()
    assert not booting.ever_ready
    serving = seen(
        {"phase": "Running", "conditions": [ready("True", 80)], "containerStatuses": [running(20)]}, node="n"
    )
    assert serving.ready
    assert serving.ever_ready
    sick = seen({"phase": "Running", "conditions": [ready("False", 99)], "containerStatuses": [running(20)]}, node="n")
    assert not sick.ready
    assert sick.ever_ready
    assert sick.turned == (T0 + timedelta(seconds=99)).timestamp()


@pytest.mark.parametrize(
    ("reason", "held"), [("Unschedulable", True), ("SchedulingGated", True), ("SchedulerError", False)]
)
def test_a_pod_without_a_node(reason: str, held: bool) -> None:
    slot = seen({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": reason}]})
    assert slot.unschedulable is held
    assert slot.scheduled is None


def test_a_container_that_cannot_start() -> None:
    waiting = {"name": "emulator", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    slot = seen({"phase": "Pending", "containerStatuses": [{"name": "beside", "state": {}}, waiting]}, node="n")
    assert slot.waiting == "ImagePullBackOff"


@pytest.mark.parametrize(
    ("status", "end"),
    [
        ({"phase": "Failed", "reason": "Evicted"}, "Evicted"),
        (
            {
                "phase": "Failed",
                "containerStatuses": [{"name": "emulator", "state": {"terminated": {"reason": "OOMKilled"}}}],
            },
            "OOMKilled",
        ),
        ({"phase": "Succeeded"}, "Succeeded"),
        ({"phase": "Running"}, ""),
    ],
)
def test_why_it_ended(status: dict[str, Any], end: str) -> None:
    slot = seen(status)
    assert slot.end == end
    assert slot.terminal is bool(end)
    assert not slot.ready


@pytest.mark.parametrize(
    ("codes", "broken"),
    [
        ({}, ""),
        ({"bridge": 1}, "bridge"),
        ({"prepare": 0, "bridge": 2}, "bridge"),
        ({"prepare": 0}, ""),
        ({"emulator": 137, "bridge": 1}, ""),
    ],
)
def test_whose_log_tells(codes: dict[str, int], broken: str) -> None:
    """The emulator's, unless something beside it ended with an error and the emulator didn't."""
    ended = [{"name": name, "state": {"terminated": {"exitCode": code}}} for name, code in codes.items()]
    runs = [] if "emulator" in codes else [running(20)]
    assert seen({"phase": "Running", "containerStatuses": [*runs, *ended]}, node="n").broken == broken


def test_a_pod_that_ended_while_it_was_ready_is_not_ready() -> None:
    status = {"phase": "Failed", "conditions": [ready("True", 80)], "containerStatuses": [running(20)]}
    assert not seen(status).ready


def test_what_the_operator_wrote_on_it() -> None:
    notes = {labels.CLAIM: "mark", labels.FENCE: "17", labels.EPISODES: "4", labels.RETAINED: "Failed"}
    slot = seen(annotations=notes, deletionTimestamp=at(5))
    assert (slot.claim, slot.fence, slot.episodes, slot.retained, slot.deleting) == ("mark", 17, 4, True, True)
    forged = seen(annotations={labels.FENCE: "-3", labels.EPISODES: "many"})
    assert (forged.fence, forged.episodes) == (0, 0)


def test_an_annotation_that_somebody_else_wrote_is_never_an_error() -> None:
    forged = {labels.FENCE: "9" * 5000, labels.EPISODES: "many"}
    slot = observe(pod(annotations=forged))
    assert slot is not None
    assert (slot.fence, slot.episodes) == (0, 0)
