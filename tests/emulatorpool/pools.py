"""Pools and slots for the planner's tests, said in a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tapforge_api.reading import read_pool
from tapforge_operator.emulatorpool.plan import plan
from tapforge_operator.emulatorpool.state import History, Observed, Plan, Pool
from tapforge_operator.kube.types import Slot

NOW = 1_800_000_000.0
IMAGE = {"spec": {"containers": [{"name": "emulator", "image": "phone:1"}]}}
NEW_IMAGE = {"spec": {"containers": [{"name": "emulator", "image": "phone:2"}]}}


def body(*, name: str = "phones", uid: str = "pool-1", generation: int = 1, **spec: Any) -> dict[str, Any]:
    if not {"replicas", "scaling", "external"} & set(spec):
        spec["replicas"] = 3
    if "external" not in spec:
        spec.setdefault("template", IMAGE)
    return {
        "metadata": {"namespace": "lab", "name": name, "uid": uid, "generation": generation},
        "spec": spec,
    }


def pool(**spec: Any) -> Pool:
    data = body(**spec)
    reading = read_pool(data)
    assert reading.spec is not None, reading.message
    return Pool.of(data, reading.spec)


def ready(of: Pool, ordinal: int, **fields: Any) -> Slot:
    """A slot that boots in a minute and serves since then; created an hour before NOW."""
    at = fields.pop("created", NOW - 3600)
    slot = Slot(
        namespace=of.namespace,
        name=f"pod-{ordinal}",
        uid=f"uid-{ordinal}",
        resource_version="1",
        pool=of.name,
        pool_uid=of.uid,
        ordinal=ordinal,
        template=of.template,
        created=at,
        phase="Running",
        node="node-0",
        ip="10.0.0.1",
        started=at + 10,
        ready=True,
        turned=at + 60,
        ever_ready=True,
    )
    return changed(slot, **fields)


def changed(slot: Slot, *, seen: float | None = None, **fields: Any) -> Slot:
    """`seen`: when the operator saw it so, where that is not when its node's and the scheduler's clocks say."""
    slot = replace(slot, **fields)
    served = max(slot.turned or 0.0, slot.started or 0.0)
    by_others = {"ready": served, "unready": slot.turned, "booting": slot.started, "pulling": slot.scheduled}
    told = by_others.get(slot.stage[0])
    return replace(slot, since=seen if seen is not None else slot.created if told is None else told)


def booting(of: Pool, ordinal: int, *, seen: float | None = None, **fields: Any) -> Slot:
    return changed(ready(of, ordinal, **fields), seen=seen, ready=False, ever_ready=False, turned=None)


def pulling(of: Pool, ordinal: int, **fields: Any) -> Slot:
    return changed(booting(of, ordinal, **fields), started=None, phase="Pending")


def unschedulable(of: Pool, ordinal: int, **fields: Any) -> Slot:
    return changed(pulling(of, ordinal, **fields), node="", ip="", unschedulable=True)


def unready(of: Pool, ordinal: int, since: float, *, seen: float | None = None, **fields: Any) -> Slot:
    return changed(ready(of, ordinal, **fields), seen=seen, ready=False, turned=since)


def failed(of: Pool, ordinal: int, end: str = "Error", **fields: Any) -> Slot:
    return replace(ready(of, ordinal, **fields), ready=False, phase="Failed", end=end)


def decide(of: Pool, slots: Iterable[Slot] = (), history: History | None = None, now: float = NOW, **seen: Any) -> Plan:
    return plan(of, Observed(slots=tuple(slots), **seen), history or History(), now)


def gone(made: Plan) -> Mapping[str, str]:
    """Why each slot is deleted, by its uid."""
    return {removal.slot.uid: str(removal.reason) for removal in made.deletes}


def conditions(made: Plan) -> Mapping[str, tuple[str, str]]:
    return {condition.type: (condition.status, condition.reason) for condition in made.status.conditions}
