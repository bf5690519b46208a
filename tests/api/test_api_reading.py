"""An object that is stored in the cluster is read whatever release wrote it, and never by guessing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_api import read_pool, read_run

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
