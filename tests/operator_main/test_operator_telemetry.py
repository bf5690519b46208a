"""What is measured is told as Prometheus text; labels stay bounded, and a deleted pool's series go with it."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tapforge_api.pool import EmulatorPoolStatus
from tapforge_operator.kube.objectmeta import ConditionBuilder
from tapforge_operator.observability.metrics import STATES, Telemetry, slot_counts

COUNTS = {state: number for number, state in enumerate(STATES, 1)}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def samples(telemetry: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(telemetry.render().decode())
        for sample in family.samples
    }


def value(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    return samples(telemetry).get((name, tuple(sorted(labels.items()))))


def of_pool(telemetry: Telemetry, pool: str) -> set[str]:
    return {name for name, labels in samples(telemetry) if ("pool", pool) in labels}


def test_slots_of_a_pool_by_state_as_its_status_has_them():
    telemetry = Telemetry()
    status = EmulatorPoolStatus(
        desired_replicas=9,
        pods=8,
        ready=7,
        claimed=6,
        booting=5,
        updated=1,
        unschedulable=4,
        unhealthy=3,
        replaced_total=99,
    )
    telemetry.pool_state("a/phones", slot_counts(status))
    telemetry.pool_state("b/phones", COUNTS)
    expected = {
        "desired": 9,
        "pods": 8,
        "ready": 7,
        "claimed": 6,
        "booting": 5,
        "updated": 1,
        "unschedulable": 4,
        "unhealthy": 3,
    }
    for state, count in expected.items():
        assert value(telemetry, "tapforge_pool_slots", pool="a/phones", state=state) == count
        assert value(telemetry, "tapforge_pool_slots", pool="b/phones", state=state) == COUNTS[state]
    telemetry.pool_state("a/phones", dict.fromkeys(STATES, 0))
    assert value(telemetry, "tapforge_pool_slots", pool="a/phones", state="claimed") == 0


def test_conditions_that_are_true_with_their_reason():
    telemetry = Telemetry()
    telemetry.pool_state("a/phones", COUNTS)
    condition = ConditionBuilder((), 1, 0.0)
    telemetry.pool_conditions(
        "a/phones", [condition("Ready", False, "NotReady"), condition("Degraded", True, "BootFailing")]
    )
    labels = {"pool": "a/phones", "condition": "Degraded"}
    assert value(telemetry, "tapforge_pool_condition", **labels, reason="BootFailing") == 1
    assert not [labels for name, labels in samples(telemetry) if ("condition", "Ready") in labels]
    telemetry.pool_conditions("a/phones", [condition("Degraded", True, "Unschedulable")])
    assert value(telemetry, "tapforge_pool_condition", **labels, reason="Unschedulable") == 1
    assert value(telemetry, "tapforge_pool_condition", **labels, reason="BootFailing") is None


def test_who_stands_by_reports_no_pools():
    telemetry = Telemetry()
    telemetry.leading(1)
    telemetry.pool_state("a/phones", COUNTS)
    telemetry.leading(0)
    assert not of_pool(telemetry, "a/phones")


@pytest.mark.parametrize("counts", [{}, {"ready": 1}, COUNTS | {"sleeping": 1}])
def test_counts_of_other_states_are_an_error_that_names_the_pool(counts):
    with pytest.raises(ValueError, match="counts of a/phones have to be of desired, pods"):
        Telemetry().pool_state("a/phones", counts)


@pytest.mark.parametrize(
    ("method", "name", "labels"),
    [
        ("booted", "tapforge_boot_seconds", {}),
        ("replaced", "tapforge_replacement_seconds", {}),
        ("claim_granted", "tapforge_claim_seconds", {}),
        ("reconciled", "tapforge_reconcile_seconds", {}),
        ("claim_waited", "tapforge_claim_wait_seconds", {"granted": "true"}),
    ],
)
def test_a_duration_lands_in_the_buckets_from_its_own_up(method, name, labels):
    telemetry = Telemetry()
    telemetry.pool_state("a/phones", COUNTS)
    for seconds in (3.0, 4.0):
        getattr(telemetry, method)("a/phones", seconds, *([True] if labels else []))
    labels = {"pool": "a/phones", **labels}
    assert value(telemetry, f"{name}_count", **labels) == 2
    assert value(telemetry, f"{name}_sum", **labels) == 7
    assert value(telemetry, f"{name}_bucket", **labels, le="2.5") == 0
    assert value(telemetry, f"{name}_bucket", **labels, le="5.0") == 2
    assert value(telemetry, f"{name}_bucket", **labels, le="+Inf") == 2


def test_an_acquire_that_waited_in_vain_is_told_apart():
    telemetry = Telemetry()
    telemetry.pool_state("a/phones", COUNTS)
    telemetry.claim_waited("a/phones", 30.0, granted=False)
    telemetry.claims("a/phones", held=2, waiting=5)
    assert value(telemetry, "tapforge_claim_wait_seconds_count", pool="a/phones", granted="false") == 1
    assert value(telemetry, "tapforge_claims_held", pool="a/phones") == 2
    assert value(telemetry, "tapforge_claims_waiting", pool="a/phones") == 5


def test_failed_passes_are_counted_by_error_and_errors_are_bounded():
    telemetry = Telemetry()
    telemetry.reconciled("a/phones", 0.1)
    telemetry.reconciled("a/phones", 0.1, "ApiError")
    for number in range(50):
        telemetry.reconciled("a/phones", 0.1, f"Trouble{number}")
    telemetry.reconciled("a/phones", 0.1, "pod phones-x was not there: 404")
    telemetry.reconciled("a/phones", 0.1, "ApiError")
    counted = {
        dict(labels)["error"]: n for (name, labels), n in samples(telemetry).items() if name.endswith("errors_total")
    }
    assert counted["ApiError"] == 2
    assert len(counted) == 17
    assert counted["Other"] == 50 - 15 + 1
    assert value(telemetry, "tapforge_reconcile_seconds_count", pool="a/phones") == 54


@pytest.mark.parametrize(
    ("status", "said"), [(200, "2xx"), (201, "2xx"), (409, "4xx"), (429, "4xx"), (503, "5xx"), (0, "none")]
)
def test_calls_by_verb_and_class_of_answer(status, said):
    telemetry = Telemetry()
    telemetry.api_call("patch", status, 0.02)
    assert value(telemetry, "tapforge_api_call_seconds_count", verb="patch", status=said) == 1


def test_a_deleted_pool_leaves_no_series_and_a_late_word_brings_none_back():
    telemetry = Telemetry()
    for pool in ("a/phones", "b/phones"):
        telemetry.pool_state(pool, COUNTS)
        telemetry.claims(pool, 1, 1)
        telemetry.booted(pool, 3.0)
        telemetry.reconciled(pool, 3.0, "ApiError")
    whole = of_pool(telemetry, "b/phones")
    assert of_pool(telemetry, "a/phones") == whole
    telemetry.forget("a/phones")
    telemetry.forget("a/never")
    telemetry.booted("a/phones", 3.0)
    telemetry.replaced("a/phones", 3.0)
    telemetry.claim_granted("a/phones", 3.0)
    telemetry.claim_waited("a/phones", 3.0, True)
    telemetry.claims("a/phones", 1, 1)
    assert not of_pool(telemetry, "a/phones")
    assert of_pool(telemetry, "b/phones") == whole


def test_a_pool_that_was_made_again_begins_at_zero():
    telemetry = Telemetry()
    telemetry.pool_state("a/phones", COUNTS)
    telemetry.booted("a/phones", 3.0)
    telemetry.forget("a/phones")
    telemetry.pool_state("a/phones", COUNTS)
    telemetry.booted("a/phones", 3.0)
    assert value(telemetry, "tapforge_boot_seconds_count", pool="a/phones") == 1


def test_a_forgotten_pool_takes_no_memory():
    telemetry = Telemetry()
    telemetry.pool_state("a/phones", COUNTS)
    series = weakref.ref(telemetry._pools["a/phones"])
    telemetry.render()
    telemetry.forget("a/phones")
    gc.collect()
    assert series() is None


@pytest.mark.parametrize("method", ["booted", "replaced", "claim_granted"])
def test_a_pool_that_its_caller_knows_no_more_is_passed_over(method):
    telemetry = Telemetry()
    getattr(telemetry, method)("", 1.0)
    assert not of_pool(telemetry, "")


@pytest.mark.parametrize("method", ["booted", "replaced", "claim_granted", "reconciled"])
def test_a_pool_without_its_namespace_is_an_error(method):
    with pytest.raises(ValueError, match="named by namespace/name, not 'phones'"):
        getattr(Telemetry(), method)("phones", 1.0)


def test_the_age_of_events_by_kind_and_of_all():
    clock = Clock()
    telemetry = Telemetry(clock=clock)
    clock.now += 5
    assert telemetry.event_age() == 5
    telemetry.event("pods")
    clock.now += 3
    telemetry.event("leases")
    clock.now += 2
    assert telemetry.event_age() == 2
    assert telemetry.event_age("pods") == 5
    assert telemetry.event_age("nodes") == 10
    assert value(telemetry, "tapforge_watch_event_age_seconds", kind="pods") == 5
    assert value(telemetry, "tapforge_watch_event_age_seconds", kind="leases") == 2
    assert value(telemetry, "tapforge_watch_event_age_seconds", kind="nodes") is None


def test_leadership_comes_and_goes():
    telemetry = Telemetry()
    assert value(telemetry, "tapforge_leader") == 0
    telemetry.leading(7)
    assert value(telemetry, "tapforge_leader") == 1
    assert value(telemetry, "tapforge_leader_term") == 7
    telemetry.leading(0)
    assert value(telemetry, "tapforge_leader") == 0


def test_each_family_is_there_once_with_its_type_and_units_are_in_the_names():
    telemetry = Telemetry("operator-0")
    telemetry.api_call("get", 200, 0.1)
    telemetry.event("pods")
    for pool in ("a/phones", "b/phones"):
        telemetry.pool_state(pool, COUNTS)
        telemetry.booted(pool, 1.0)
        telemetry.reconciled(pool, 1.0, "ApiError")
    text = telemetry.render().decode()
    types = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len({name for name, _ in types}) == len(types)
    ours = {name: kind for name, kind in types if not name.startswith(("process_", "target_"))}
    assert ours["tapforge_boot_seconds"] == "histogram"
    assert ours["tapforge_pool_slots"] == "gauge"
    assert ours["tapforge_reconcile_errors_total"] == "counter"
    assert all(name.startswith("tapforge_") for name in ours)
    assert all(name.endswith("_seconds") for name, kind in ours.items() if kind == "histogram")
    assert 'target_info{service_instance_id="operator-0",service_name="tapforge-operator"' in text


def test_two_of_them_share_nothing():
    one, other = Telemetry(), Telemetry()
    one.pool_state("a/phones", COUNTS)
    one.api_call("get", 200, 0.1)
    assert not of_pool(other, "a/phones")
    assert value(other, "tapforge_api_call_seconds_count", verb="get", status="2xx") is None


async def test_a_loop_that_stood_still_shows() -> None:
    telemetry = Telemetry()
    measuring = asyncio.create_task(telemetry.measure_lag())
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 that is what is to be seen
    async with asyncio.timeout(60):
        while not value(telemetry, "tapforge_loop_lag_seconds_count"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    measuring.cancel()
    assert (value(telemetry, "tapforge_loop_lag_seconds_sum") or 0.0) >= 0.2
