"""An object that is stored in the cluster is read whatever release wrote it, and never by guessing."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tapforge_api import read_pool, read_run
from tapforge_api.claims import Acquire, Release, RenewedAll
from tapforge_api.pool import EmulatorPoolStatus
from tapforge_api.progress import Orders, Progress
from tapforge_api.reading import UnreadableStatus, read_json, read_status
from tapforge_api.run_status import TrainingRunStatus

POD: dict[str, Any] = {"spec": {"containers": [{"name": "emulator", "image": "i"}]}}


def pool(**spec: Any) -> dict[str, Any]:
    metadata = {
        "name": "x",
        "namespace": "n",
        "uid": "u",
        "managedFields": [{}],
        "labels": {f"l{i}": "" for i in range(99)},
    }
    return {"apiVersion": "tapforge.dev/v1alpha1", "kind": "EmulatorPool", "metadata": metadata, "spec": spec}


def test_what_a_newer_release_wrote_is_left_out_and_named() -> None:
    data = pool(
        replicas=2,
        template={**POD, "revision": 3},
        lease={"seconds": 3},
        health={"unreadyGraceSeconds": 5, "probe": "deep"},
    )
    data["status"] = {"newCounter": 1}
    read = read_pool(data)
    assert read.spec is not None
    assert (read.spec.replicas, read.spec.health.unready_grace_seconds) == (2, 5.0)
    assert read.problems == ()
    assert sorted(map(str, read.unknown)) == [
        "spec.health.probe: is not known to this release and left out",
        "spec.lease: is not known to this release and left out",
        "spec.template.revision: is not known to this release and left out",
    ]
    assert "spec.lease" in read.message
    assert "lease" in data["spec"], "the object itself is not touched"


def test_a_list_keeps_its_other_items_when_one_has_an_unknown_field() -> None:
    data = pool(external={"urls": ["http://a", "http://b"], "keys": [1]})
    read = read_pool(data)
    assert read.spec is not None and read.spec.external is not None
    assert read.spec.external.urls == ("http://a", "http://b")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, "spec: exactly one of replicas, scaling, external must be set"),
        ({"replicas": 1, "template": POD, "protocol": "braille"}, "spec.protocol: should be"),
        ({"replicas": 10**9, "template": POD}, "spec.replicas: should be less than or equal to 20000"),
        ({"replicas": "1", "template": POD}, "spec.replicas: should be a valid integer"),
        (
            {"replicas": 1, "template": {"spec": {"containers": [{"name": "emulator"}]}}},
            "image: is required and missing",
        ),
        # a newer release's way to be sized means that this one doesn't know the size
        ({"budget": {"slots": 3}, "template": POD}, "exactly one of replicas, scaling, external must be set"),
    ],
)
def test_what_can_not_be_is_not_guessed(spec: dict[str, Any], expected: str) -> None:
    read = read_pool(pool(**spec))
    assert read.spec is None
    assert expected in read.message


@pytest.mark.parametrize(
    "data",
    [{}, {"spec": None}, {"spec": []}, {"metadata": None, "spec": {}}, {"metadata": {"name": 3}}, {"metadata": []}],
)
def test_what_is_no_pool_at_all_is_a_problem_and_no_crash(data: dict[str, Any]) -> None:
    read = read_pool(data)
    assert read.spec is None and read.problems and read.message


def test_a_message_fits_into_a_condition() -> None:
    read = read_pool(pool(replicas=1, template=POD, **{f"field{i}": 0 for i in range(500)}))
    assert read.spec is not None
    assert len(read.unknown) == 500
    assert len(read.message) == 4096 and read.message.endswith("...")


def test_nothing_to_say_is_said_by_nothing() -> None:
    assert read_pool(pool(replicas=1, template=POD)).message == ""


def test_runs_are_read_alike() -> None:
    read = read_run({"metadata": {"name": "r"}, "spec": {"suspend": True, "later": 1}})
    assert read.spec is not None and read.spec.suspend
    assert [p.path for p in read.unknown] == [("spec", "later")]
    assert read_run({"metadata": {"name": "r"}, "spec": {"rollout": {"groupSize": 1}}}).spec is None
    assert read_run({"metadata": {"name": "r"}}).spec is not None, "every field of a run has a default"


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["spec", "urls", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["replicas", "scaling", "external", "template", "kvm", "port", "boot", "other"]),
        json,
        max_size=4,
    )
)
def test_reading_never_fails_and_says_why_there_is_no_spec(spec: dict[str, Any]) -> None:
    read = read_pool(pool(**spec))
    assert (read.spec is None) == bool(read.problems)
    assert "other" not in spec or any(p.path == ("spec", "other") for p in read.unknown)


def test_what_a_user_wrote_of_a_template_does_not_change_when_the_server_fills_in_defaults() -> None:
    asked = read_pool(pool(replicas=1, template=POD)).spec
    stored = read_pool(pool(replicas=1, template={**POD, "metadata": {"labels": {}, "annotations": {}}})).spec
    assert asked is not None and asked.template is not None and stored is not None and stored.template is not None
    assert asked.template.written() == stored.template.written() == POD
    labelled = {**POD, "metadata": {"labels": {"a": "b"}, "annotations": {}}}
    read = read_pool(pool(replicas=1, template=labelled)).spec
    assert read is not None and read.template is not None
    assert read.template.written() == {**POD, "metadata": {"labels": {"a": "b"}}}


# --- what is stored or sent besides specs -----------------------------------------------------------------------------

CONDITION = {
    "type": "Ready",
    "status": "False",
    "reason": "Starting",
    "message": "it starts",
    "lastTransitionTime": "2026-11-20T12:00:00Z",
    "observedGeneration": 3,
}
RUN_STATUS: dict[str, Any] = {
    "observedGeneration": 3,
    "startTime": "2026-11-20T12:00:00Z",
    "attempts": 2,
    "lostClusters": 1,
    "attempt": {"number": 2, "phase": "Active", "since": "2026-11-20T12:30:00Z"},
    "checkpoint": {"update": 7, "time": "2026-11-20T12:40:00Z", "path": "/storage/7"},
    "progress": {"update": 8, "maxUpdates": 20, "phase": "Training"},
    "leases": {"wanted": 4, "held": 3},
    "resolved": "spec: {}",
    "conditions": [CONDITION, {**CONDITION, "type": "Complete"}],
}
POOL_STATUS: dict[str, Any] = {
    "desiredReplicas": 4,
    "ready": 3,
    "replacedTotal": 812,
    "lastFailures": [{"pod": "phones-1", "reason": "Failed", "time": "2026-11-20T12:00:00Z", "logTail": "x"}],
    "sickReplacements": [{"time": "2026-11-20T11:59:00Z", "slots": 50}],
    "conditions": [CONDITION],
}
STATUSES = [(TrainingRunStatus, RUN_STATUS), (EmulatorPoolStatus, POOL_STATUS)]


def structs(value: Any) -> Iterator[dict[str, Any]]:
    """Every struct in plain data, the outermost first."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from structs(inner)


@pytest.mark.parametrize(("model", "written"), STATUSES)
def test_a_status_with_a_field_more_at_any_depth_says_the_same(model: Any, written: dict[str, Any]) -> None:
    expected = model.model_validate(written)
    for number in range(len(list(structs(written)))):
        newer = deepcopy(written)
        list(structs(newer))[number]["later"] = {"deep": [1]}
        assert read_status(model, newer) == expected


@pytest.mark.parametrize(("model", "written"), STATUSES)
def test_a_status_with_a_field_fewer_at_any_depth_keeps_the_others_or_is_refused(
    model: Any, written: dict[str, Any]
) -> None:
    expected, refused = model.model_validate(written).model_dump(), []
    for number, struct in enumerate(structs(written)):
        for name in struct:
            older = deepcopy(written)
            del list(structs(older))[number][name]
            try:
                read = read_status(model, older).model_dump()
            except UnreadableStatus:
                refused.append(name)
                continue
            assert sum(read[field] != expected[field] for field in read) == 1, name
    # What has no default has been there from the first release on.
    assert set(refused) <= {"update", "path", "pod", "reason", "time", "slots", "type", "status"}


def test_a_phase_of_a_later_release_means_that_the_ray_job_may_exist() -> None:
    newer = {**RUN_STATUS, "attempt": {"number": 2, "phase": "Draining", "since": "2026-11-20T12:30:00Z"}}
    read = read_status(TrainingRunStatus, newer)
    assert (read.attempt.number, read.attempt.phase, read.attempts) == (2, "Intended", 2)


@pytest.mark.parametrize(
    ("model", "status", "expected"),
    [
        (TrainingRunStatus, {**RUN_STATUS, "attempts": "many"}, 'status.attempts: .* not "many"'),
        (TrainingRunStatus, {**RUN_STATUS, "attempt": {"number": -1}}, "status.attempt.number: "),
        (TrainingRunStatus, {**RUN_STATUS, "attempt": {"phase": 3}}, "status.attempt.phase: "),
        (
            TrainingRunStatus,
            {"conditions": [{"type": "Complete", "status": "Perhaps"}]},
            r"status.conditions\[0\].status",
        ),
        (TrainingRunStatus, "Complete", "status: "),
        (EmulatorPoolStatus, {"sickReplacements": {}}, "status.sickReplacements: "),
    ],
)
def test_a_status_that_can_not_be_read_is_no_empty_one(model: Any, status: Any, expected: str) -> None:
    with pytest.raises(UnreadableStatus, match=expected):
        read_status(model, status)


def test_no_status_is_an_empty_one() -> None:
    assert read_status(TrainingRunStatus, None) == read_status(TrainingRunStatus, {}) == TrainingRunStatus()


@pytest.mark.parametrize(
    ("model", "text", "expected"),
    [
        (Progress, b'{"attempt": 1, "sequence": 2, "later": 1, "advance": {"update": 3, "later": 1}}', {}),
        (Progress, b'{"attempt": 1, "sequence": 2, "final": "moved"}', {"final": ""}),
        (Orders, b'{"stop": "pause", "later": {}, "limits": {"maxUpdates": 3, "later": 1}}', {"stop": "suspend"}),
        (Acquire, b'{"request": "request-1", "later": 1}', {"slots": 1}),
        (RenewedAll, b'{"claims": [{"id": "uid-1.1234", "state": "moved", "later": 1}]}', {}),
        (Release, b'{"claims": [{"id": "uid-1.1234", "secret": "%s", "verdict": "worn"}]}' % (b"s" * 16), {}),
    ],
)
def test_a_message_of_a_later_release_is_understood_as_far_as_it_goes(
    model: Any, text: bytes, expected: dict[str, Any]
) -> None:
    read = read_json(model, text)
    assert {name: getattr(read, name) for name in expected} == expected
    assert "later" not in read.model_dump_json()
    with pytest.raises(ValidationError):
        model.model_validate_json(text)  # a file, or what this release writes, is held to the letter


def test_words_of_a_later_release_about_a_claim_are_taken_with_care() -> None:
    renewed = read_json(RenewedAll, b'{"claims": [{"id": "uid-1.1234", "state": "moved"}]}')
    assert renewed.claims[0].state == "recalled"
    given_back = b'{"claims": [{"id": "uid-1.1234", "secret": "%s", "verdict": "worn"}]}' % (b"s" * 16)
    assert read_json(Release, given_back).claims[0].verdict == "dirty"
