"""A rule about changes says the same in Python and in CEL, and refuses what may not change."""

import json
from typing import Any

import pytest
from cel_evaluator import Cel, without_nulls
from hypothesis import given
from hypothesis import strategies as st

from tapforge_api import KINDS, forbidden_changes, from_object
from tapforge_api.base import Spec
from tapforge_api.pool import EmulatorPool, EmulatorPoolSpec
from tapforge_api.training_run import CHANGEABLE, TrainingRun, TrainingRunSpec

POD = {"spec": {"containers": [{"name": "emulator", "image": "i"}]}}
POOLS: list[dict[str, Any]] = [
    {"replicas": 1, "template": POD},
    {"scaling": {"maxReplicas": 2}, "template": POD, "protocol": "mobileworld"},
    {"replicas": 1, "template": {**POD, "metadata": {"labels": {"a": "b"}}}, "port": 9000},
    {"external": {"urls": ["http://a"]}},
    {"external": {"urls": ["http://b"]}, "port": 9000},
]
RUNS: list[dict[str, Any]] = [
    {},
    {"suspend": True, "stop": {"maxUpdates": 7}},
    {"seed": 2},
    {"warmStart": {}},
    {"warmStart": {"steps": 7}},
    {"environment": {"source": {"pool": {"name": "p"}}}},
]


def objects(kind: str) -> st.SearchStrategy[Any]:
    specs = POOLS if kind == "EmulatorPool" else RUNS
    statuses = [
        {},
        {"status": {}},
        *([] if kind == "EmulatorPool" else [{"status": {"startTime": "2026-01-01T00:00:00Z"}}]),
    ]
    head = {"apiVersion": "tapforge.dev/v1alpha1", "kind": kind, "metadata": {"name": "x"}}
    return st.builds(
        lambda spec, status: from_object(KINDS[kind], {**head, "spec": spec, **status}),
        st.sampled_from(specs),
        st.sampled_from(statuses),
    )


def as_stored(instance: Spec) -> Any:
    """With every default, as the API server keeps it."""
    return without_nulls(json.loads(instance.model_dump_json(by_alias=True)))


@pytest.mark.parametrize(("kind", "model"), [("EmulatorPool", EmulatorPoolSpec), ("TrainingRun", TrainingRun)])
def test_python_and_cel_agree_on_changes(kind: str, model: type[Spec]) -> None:
    seen: set[bool] = set()

    @given(objects(kind), objects(kind))
    def agree(old: Any, new: Any) -> None:
        if kind == "EmulatorPool":
            old, new = old.spec, new.spec
        for change in model.changes:
            python = change.holds(old, new)
            assert python == Cel(change.cel)({"self": as_stored(new), "oldSelf": as_stored(old)}), (change, old, new)
            seen.add(python)
        refused = forbidden_changes(old, new)
        assert bool(refused) == any(not c.holds(old, new) for c in model.changes)
        assert all("can't be" in problem.message for problem in refused)

    agree()
    assert seen == {True, False}
    assert model.changes


def test_what_may_change_and_what_may_not() -> None:
    def pool(spec: dict[str, Any]) -> EmulatorPool:
        return from_object(EmulatorPool, {**HEAD, "kind": "EmulatorPool", "spec": spec})

    assert [str(p) for p in forbidden_changes(pool(POOLS[0]), pool(POOLS[1]))] == [
        "spec.protocol: can't be changed: holders of a slot rely on its protocol; make another pool"
    ]
    assert [p.path for p in forbidden_changes(pool(POOLS[0]), pool(POOLS[4]))] == [("spec", "port"), ("spec",)]
    assert not forbidden_changes(pool(POOLS[3]), pool({"external": {"urls": ["http://c"]}}))
    other_image = {"spec": {"containers": [{"name": "emulator", "image": "j"}]}}
    assert not forbidden_changes(
        pool(POOLS[0]), pool({"scaling": {"maxReplicas": 2}, "template": other_image, "kvm": {"mode": "DevicePlugin"}})
    )


HEAD = {"apiVersion": "tapforge.dev/v1alpha1", "metadata": {"name": "x"}}


def test_a_run_keeps_from_its_start_on_all_but_what_can_reach_it() -> None:
    def run(spec: dict[str, Any], started: str) -> TrainingRun:
        return from_object(TrainingRun, {**HEAD, "kind": "TrainingRun", "spec": spec, "status": {"startTime": started}})

    changed = {"seed": 5, "learner": {"ranks": 2}, "suspend": True, "stop": {"maxUpdates": 1}}
    assert not forbidden_changes(run({}, ""), run(changed, ""))
    refused = forbidden_changes(run({}, "2026-01-01T00:00:00Z"), run(changed, ""))
    assert [p.path for p in refused] == [("spec", "seed"), ("spec", "learner")]
    assert "only suspend and stop can" in refused[0].message
    assert {c.at for c in TrainingRun.changes} == {
        f"spec.{f.alias}" for n, f in TrainingRunSpec.model_fields.items() if n not in CHANGEABLE
    }
