"""What a pool's status says: counters that add up, conditions that tools and people can rely on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import (
    NEW_IMAGE,
    NOW,
    body,
    booting,
    conditions,
    decide,
    failed,
    pool,
    pulling,
    ready,
    unready,
    unschedulable,
)

from tapforge_api.pool import EmulatorPoolStatus, SickReplacements
from tapforge_api.reading import UnreadableStatus, read_pool
from tapforge_operator.broker.types import Device, Held
from tapforge_operator.emulatorpool.state import History, Plan, Pool, read_status
from tapforge_operator.emulatorpool.status import unreadable
from tapforge_operator.kube.objectmeta import timestamp
from tapforge_operator.kube.types import Slot

MAKE = [
    ready,
    booting,
    pulling,
    unschedulable,
    failed,
    lambda of, i: unready(of, i, NOW - 5),
    lambda of, i: unready(of, i, NOW - 500),
    lambda of, i: booting(of, i, started=NOW - 5000),
    lambda of, i: replace(ready(of, i), deleting=True),
    lambda of, i: replace(failed(of, i), retained=True),
    lambda of, i: ready(of, i, template="old"),
    lambda of, i: ready(of, i, node="lost"),
    lambda of, i: ready(of, i, node="cordoned"),
]


def messages(made: Plan) -> dict[str, str]:
    return {condition.type: condition.message for condition in made.status.conditions}


@given(
    kinds=st.lists(st.integers(0, len(MAKE) - 1), max_size=12),
    replicas=st.integers(0, 12),
    claims=st.sets(st.integers(0, 11)),
)
def test_counters_add_up_and_conditions_contradict_nothing(kinds: list[int], replicas: int, claims: set[int]) -> None:
    of = pool(replicas=replicas, generation=7)
    slots: list[Slot] = [MAKE[kind](of, i) for i, kind in enumerate(kinds)]
    held = {f"uid-{i}": Held("run") for i in claims}
    made = decide(of, slots, held=held, nodes={"lost": "lost", "cordoned": "cordoned"})
    status = made.status
    standing = [slot for slot in slots if not slot.deleting and not slot.retained]
    assert status.pods == len(standing)
    assert status.pods == status.ready + status.booting + status.unschedulable + status.unhealthy
    assert status.ready == sum(slot.ready for slot in standing)
    assert status.claimed == len({slot.uid for slot in standing} & set(held))
    assert status.updated == sum(slot.template == of.template for slot in standing)
    assert status.desired_replicas == replicas
    assert status.observed_generation == 7
    assert status.selector == "tapforge.dev/pool-uid=pool-1"
    found = conditions(made)
    assert set(found) == {"Ready", "Reconciling", "Stalled", "Degraded"}
    assert not (found["Reconciling"][0] == found["Stalled"][0] == "True")
    assert {word for word, _ in found.values()} <= {"True", "False"}
    assert all(reason for _, reason in found.values())
    assert all(condition.observed_generation == 7 for condition in status.conditions)
    if found["Stalled"][0] == "True":
        assert found["Degraded"][0] == "True"
    if not made.quiet and found["Stalled"][0] == "False":
        only_kept = {str(removal.reason) for removal in made.deletes} <= {"Retained", "NodeLost"}
        assert found["Reconciling"][0] == "True" or (only_kept and not made.creates)
    assert EmulatorPoolStatus.model_validate(status.model_dump(mode="json", by_alias=True)) == status


def follow(of: Pool, *stages: tuple[float, list[Slot]]) -> list[Plan]:
    history, plans = History(), []
    for at, slots in stages:
        plans.append(decide(of, slots, history, NOW + at))
        history = plans[-1].history
    return plans


def test_ready_comes_with_the_last_slot_and_goes_when_too_many_are_missing() -> None:
    of = pool(replicas=10, updateStrategy={"maxUnavailable": 2}, health={"unreadyGraceSeconds": 3600})
    stages = [
        (float(at), [ready(of, i) for i in range(n)] + [unready(of, i, NOW - 1) for i in range(n, 10)])
        for at, n in enumerate([0, 9, 10, 8, 7, 9, 10])
    ]
    words = [conditions(made)["Ready"][0] for made in follow(of, *stages)]
    assert words == ["False", "False", "True", "True", "False", "False", "True"]


def test_a_pool_without_any_ready_slot_is_not_ready_however_few_it_has() -> None:
    of = pool(replicas=1, health={"unreadyGraceSeconds": 3600})
    plans = follow(of, (0, [ready(of, 0)]), (1, [unready(of, 0, NOW)]))
    assert [conditions(made)["Ready"][0] for made in plans] == ["True", "False"]


def test_an_empty_pool_that_should_be_empty_is_ready() -> None:
    made = decide(pool(replicas=0))
    assert {kind: word for kind, (word, _) in conditions(made).items()} == {
        "Ready": "True",
        "Reconciling": "False",
        "Stalled": "False",
        "Degraded": "False",
    }


def test_a_transition_has_the_time_of_its_change_and_keeps_it_over_a_restart() -> None:
    of = pool(replicas=1)
    first, second, third = follow(of, (0, []), (60, [booting(of, 0, started=NOW)]), (90, [ready(of, 0)]))
    times = [{c.type: c.last_transition_time for c in made.status.conditions} for made in (first, second, third)]
    assert times[0]["Ready"] == times[1]["Ready"] == timestamp(NOW)
    assert times[2]["Ready"] == times[2]["Reconciling"] == timestamp(NOW + 90)
    assert times[2]["Stalled"] == timestamp(NOW)
    written = read_status(third.status.model_dump(mode="json", by_alias=True))
    later = decide(of, [ready(of, 0)], History.of(written), NOW + 5000)
    assert later.status == third.status


def test_a_pool_keeps_its_counts_and_its_budget_when_another_release_wrote_a_field_more() -> None:
    spent = SickReplacements(time=timestamp(NOW - 60), slots=50)
    before = EmulatorPoolStatus(replaced_total=812, sick_replacements=(spent,))
    written = before.model_dump(mode="json", by_alias=True)
    newer = {**written, "drained": 3, "sickReplacements": [{**r, "node": "n"} for r in written["sickReplacements"]]}
    history = History.of(read_status(newer))
    assert history == History.of(before) and history.spent == ((NOW - 60, 50),)
    of = pool(replicas=50)
    made = decide(of, [failed(of, n) for n in range(50)], history)
    assert not made.deletes and conditions(made)["Stalled"] == ("True", "ReplacementBudgetSpent")
    assert made.status.replaced_total == 812


def test_a_status_that_cannot_be_read_is_no_empty_one() -> None:
    assert read_status(None) == read_status({}) == EmulatorPoolStatus()
    with pytest.raises(UnreadableStatus, match=r"status.replacedTotal: .* not \"many\""):
        read_status({"replacedTotal": "many", "ready": 2})


def test_fields_that_this_release_does_not_know_are_said() -> None:
    data = body(replicas=1, health={"unreadyGraceSeconds": 5, "petsPerHour": 3})
    reading = read_pool(data)
    assert reading.spec is not None
    of = Pool.of(data, reading.spec, reading.message)
    made = decide(of, [ready(of, 0)])
    assert conditions(made)["Degraded"] == ("True", "UnknownFields")
    assert conditions(made)["Stalled"][0] == "False" and conditions(made)["Ready"][0] == "True"
    message = next(c.message for c in made.status.conditions if c.type == "Degraded")
    assert "spec.health.petsPerHour" in message


def test_a_spec_that_cannot_be_read_stalls_and_keeps_the_counters() -> None:
    of = pool()
    before = decide(of, [ready(of, i) for i in range(3)]).status
    status = unreadable(before, 9, "spec.replicas: too many", NOW + 60)
    assert (status.ready, status.desired_replicas, status.observed_generation) == (3, 3, 9)
    found = {c.type: (c.status, c.reason, c.message) for c in status.conditions}
    assert found["Stalled"] == ("True", "InvalidSpec", "spec.replicas: too many")
    assert found["Reconciling"][0] == "False"
    assert unreadable(status, 9, "spec.replicas: too many", NOW + 600) == status, "written once"


# --- failures ---------------------------------------------------------------------------------------------------------


def test_the_latest_failures_are_told_newest_first_with_the_end_of_their_logs() -> None:
    of = pool(replicas=10)
    slots = [failed(of, i, "OOMKilled", created=NOW - 100 + i) for i in range(7)]
    made = decide(of, slots)
    assert [f.pod for f in made.status.last_failures] == [f"pod-{i}" for i in (6, 5, 4, 3, 2)]
    assert {f.reason for f in made.status.last_failures} == {"OOMKilled"}
    assert {removal.slot.name for removal in made.deletes if removal.tail} == {f"pod-{i}" for i in range(2, 7)}
    tails = {"pod-6": "x" * 5000 + "\x00 the \x1b[31mend\n", "pod-1": "too late"}
    told = decide(of, slots, made.history, NOW + 1, tails=tails).status.last_failures
    assert told[0].log_tail.endswith(" the [31mend\n")
    assert len(told[0].log_tail) == 4096
    assert [f.log_tail for f in told[1:]] == [""] * 4
    hung = booting(of, 9, started=NOW - 5000)
    later = decide(of, [hung], made.history, NOW + 60)
    assert (later.status.last_failures[0].pod, later.status.last_failures[0].reason) == ("pod-9", "BootDeadline")
    assert len(later.status.last_failures) == 5


def test_a_slot_that_never_spoke_has_no_log_to_read() -> None:
    of = pool(replicas=1)
    made = decide(of, [replace(failed(of, 0, "UnexpectedAdmissionError"), started=None, ever_ready=False)])
    assert [removal.tail for removal in made.deletes] == [False]


def test_replaced_slots_are_counted_when_their_successor_is_there() -> None:
    of = pool(replicas=2)
    two = [ready(of, 0), ready(of, 1)]
    stages = [
        (0.0, two),
        (1.0, [two[0], failed(of, 1)]),
        (2.0, [two[0], replace(failed(of, 1), deleting=True)]),
        (3.0, [two[0]]),
        (4.0, [two[0], booting(of, 1, uid="new", started=NOW)]),
        (5.0, [two[0], ready(of, 1, uid="new")]),
        (6.0, [ready(of, 1, uid="new")]),  # somebody deleted the other one
        (7.0, [ready(of, 0, uid="newer"), ready(of, 1, uid="new")]),
        (8.0, [ready(of, 0, uid="newer"), ready(of, 1, uid="new"), ready(of, 1, uid="twin", created=NOW)]),
        (9.0, [ready(of, 0, uid="newer"), ready(of, 1, uid="new"), ready(of, 1, uid="twin", created=NOW)]),
    ]
    assert [made.status.replaced_total for made in follow(of, *stages)] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_slots_that_go_and_come_with_the_size_are_no_replacements() -> None:
    large, small = pool(replicas=2), pool(replicas=1)
    two = [ready(large, 0), ready(large, 1, created=NOW - 60)]
    history = History()
    for of, slots in (
        (large, two),
        (small, two),
        (small, two),  # not carried out yet
        (small, [two[0], replace(two[1], deleting=True)]),
        (small, two[:1]),
        (large, two[:1]),
        (large, [two[0], ready(large, 1, uid="again")]),
    ):
        made = decide(of, slots, history)
        history = made.history
    assert made.status.replaced_total == 0


def test_what_is_remembered_of_slots_is_bounded_by_the_pool() -> None:
    large, small = pool(replicas=500), pool(replicas=2)
    slots = [ready(large, i) for i in range(500)]
    held = {slot.uid: Held("run") for slot in slots}
    made = decide(large, slots)
    for i in range(10):
        made = decide(small, slots[: 500 - 50 * i], made.history, NOW + i, held=held)
    made = decide(small, slots[:2], made.history, NOW + 60)
    assert len(made.history.last) < 10


# --- what people read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot", "reason", "says"),
    [
        (lambda of: unschedulable(of, 0, created=NOW - 301), "Unschedulable", "autoscaler"),
        (lambda of: pulling(of, 0, created=NOW - 1801), "ImagePullSlow", "imagePullSecrets"),
        (lambda of: pulling(of, 0, created=NOW - 9000, scheduled=NOW - 1801), "ImagePullSlow", "1800 s"),
        (lambda of: pulling(of, 0, waiting="ImagePullBackOff"), "ContainerNotStarting", "ImagePullBackOff"),
        (lambda of: pulling(of, 0, waiting="CreateContainerConfigError"), "ContainerNotStarting", "kubectl describe"),
    ],
)
def test_what_keeps_a_pool_from_its_aim_is_said(slot: object, reason: str, says: str) -> None:
    made = decide(pool(replicas=1), [slot(pool(replicas=1))])  # type: ignore[operator]
    assert made.quiet, "it only degrades"
    assert conditions(made)["Degraded"] == ("True", reason)
    assert says in messages(made)["Degraded"]
    assert "pod-0" in messages(made)["Degraded"]


@pytest.mark.parametrize(
    "slot",
    [
        lambda of: unschedulable(of, 0, created=NOW - 299),
        lambda of: pulling(of, 0, created=NOW - 9000, scheduled=NOW - 1799),
        lambda of: pulling(of, 0, created=NOW - 60, waiting="ContainerCreating"),
    ],
)
def test_what_takes_its_usual_time_is_no_trouble_yet(slot: object) -> None:
    made = decide(pool(replicas=1), [slot(pool(replicas=1))])  # type: ignore[operator]
    assert conditions(made)["Degraded"][0] == "False"
    assert conditions(made)["Reconciling"][0] == "True"
    assert made.requeue_after is not None, "and it will be looked at"


def test_a_roll_out_that_waits_for_claims_says_so() -> None:
    old, of = pool(replicas=2), pool(replicas=2, template=NEW_IMAGE)
    held = {f"uid-{i}": Held("run", revoked="OldTemplate") for i in range(2)}
    made = decide(of, [ready(old, 0), ready(old, 1)], held=held)
    assert made.quiet
    assert conditions(made)["Reconciling"] == ("True", "RollingOut")
    assert "2 OldTemplate; 2 of them are claimed" in messages(made)["Reconciling"]


def test_no_message_grows_without_bound() -> None:
    of = pool(replicas=1000)
    made = decide(of, [unschedulable(of, i, created=NOW - 3600) for i in range(1000)])
    assert max(len(condition.message) for condition in made.status.conditions) < 1000


# --- external devices -------------------------------------------------------------------------------------------------


def test_external_devices_are_counted_and_nothing_is_made_for_them() -> None:
    urls = [f"http://phone-{i}:8000" for i in range(4)]
    of = pool(external={"urls": urls})
    devices = [
        Device(urls[0], "ready", claimed=True),
        Device(urls[1], "ready"),
        Device(urls[2], "quarantined", reason="no answer"),
        Device(urls[3]),
    ]
    made = decide(of, devices=devices)
    assert made.quiet
    status = made.status
    assert (status.desired_replicas, status.pods, status.ready, status.claimed) == (4, 0, 2, 1)
    assert (status.booting, status.unhealthy) == (1, 1)
    assert conditions(made)["Degraded"] == ("True", "DevicesUnavailable")
    assert urls[2] in messages(made)["Degraded"]
    refused = decide(of, history=made.history, devices=[Device(urls[0], "refused"), *devices[1:]])
    assert conditions(refused)["Degraded"] == ("True", "DevicesRefused")
    assert urls[0] in messages(refused)["Degraded"] and "--external-device" in messages(refused)["Degraded"]
    fine = decide(of, history=made.history, devices=[Device(u, "ready") for u in urls])
    assert {kind: word for kind, (word, _) in conditions(fine).items()} == {
        "Ready": "True",
        "Reconciling": "False",
        "Stalled": "False",
        "Degraded": "False",
    }
