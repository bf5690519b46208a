"""What a run's object says about what it needs."""

from __future__ import annotations

from typing import Any

import pytest

from tapforge_operator.kube.types import observe_run

POOL = {"pool": {"name": "phones", "slots": 4}}


def run(source: dict[str, Any] | None = None, phase: str = "", suspend: bool = False, **true: str) -> dict[str, Any]:
    conditions = [{"type": kind, "status": "True", "reason": reason} for kind, reason in true.items()]
    return {
        "metadata": {"namespace": "lab", "name": "run", "uid": "u", "resourceVersion": "7"},
        "spec": {"environment": {"source": source or POOL}, "suspend": suspend},
        "status": {"conditions": conditions, "attempt": {"phase": phase}},
    }


@pytest.mark.parametrize(
    ("body", "wanted", "ended", "suspended"),
    [
        (run(), 4, False, False),
        (run({"pool": {"name": "phones"}}), 16, False, False),
        (run({"ownPool": {"slots": 2}}), 2, False, False),
        (run({"processes": {}}), 0, False, False),
        (run(Ready="Running", phase="Active"), 4, False, False),
        (run(Reconciling="WaitingForPhones"), 4, False, False),
        (run(suspend=True, Reconciling="Stopping"), 0, False, False),
        (run(suspend=True, Ready="Suspended", Suspended="Suspended"), 0, False, True),
        (run(phase="Active", Reconciling="Queued", Suspended="Queued"), 0, False, True),
        (run(Stalled="VolumeNotFound"), 0, False, False),
        (run(phase="Active", Stalled="InvalidSpec"), 4, False, False),
        (run(Ready="Complete", Complete="Complete"), 0, True, False),
        (run(Stalled="DriverFailed", Failed="DriverFailed"), 0, True, False),
    ],
)
def test_who_wants_phones(body: dict[str, Any], wanted: int, ended: bool, suspended: bool) -> None:
    seen = observe_run(body, 16)
    assert (seen.wanted, seen.ended, seen.suspended) == (wanted, ended, suspended)


@pytest.mark.parametrize(
    ("phase", "ready", "wanted"),
    [("", "", 0), ("Intended", "Starting", 0), ("", "WaitingForPhones", 4), ("Active", "WaitingForPhones", 4)],
    ids=["new", "about to be queued", "phones come first", "quota is reserved"],
)
def test_a_run_with_a_queue_wants_phones_when_its_status_says_so(phase: str, ready: str, wanted: int) -> None:
    body = run(phase=phase)
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}
    body["status"]["conditions"] = [{"type": "Ready", "status": "False", "reason": ready}] if ready else []
    assert observe_run(body, 16).wanted == wanted


def test_a_run_that_is_being_deleted_has_ended() -> None:
    body = run()
    body["metadata"]["deletionTimestamp"] = "2026-11-20T12:00:00Z"
    seen = observe_run(body, 16)
    assert (seen.wanted, seen.ended) == (0, True)


@pytest.mark.parametrize(
    ("status", "wanted", "ended"),
    [
        ("Complete", 4, False),
        ({"conditions": "none", "attempt": "the first"}, 4, False),
        ({"conditions": ["Complete", {"type": "Complete", "status": "True", "later": 1}], "attempt": 3}, 0, True),
        (
            {"conditions": [{"type": "Stalled", "status": "True"}], "attempt": {"phase": "Active", "number": "one"}},
            4,
            False,
        ),
    ],
)
def test_a_status_of_another_release_says_what_it_can(status: Any, wanted: int, ended: bool) -> None:
    seen = observe_run({**run(), "status": status}, 16)
    assert (seen.wanted, seen.ended) == (wanted, ended)
