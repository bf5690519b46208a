"""How fast sick slots are replaced, what boots that fail and creates that are refused do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pools import (
    NEW_IMAGE,
    NOW,
    booting,
    conditions,
    decide,
    failed,
    gone,
    pool,
    pulling,
    ready,
    unready,
    unschedulable,
)

from tapforge_operator.emulatorpool.backoff import portions, refusal
from tapforge_operator.emulatorpool.state import BootFailures, History, Plan, Refusal, read_status
from tapforge_operator.kube.types import Slot

# --- budget -----------------------------------------------------------------------------------------------------------


def test_sick_slots_beyond_the_budget_wait_and_somebody_is_told() -> None:
    of = pool(replicas=20, health={"maxReplacementsPercentPerHour": 50})
    slots = [failed(of, i, created=NOW - 3600 - i) for i in range(15)] + [ready(of, i) for i in range(15, 20)]
    made = decide(of, slots)
    assert len(made.deletes) == len(made.creates) == 10
    assert conditions(made)["Degraded"] == ("True", "ReplacementBudgetSpent")
    assert conditions(made)["Stalled"] == ("True", "ReplacementBudgetSpent")
    assert conditions(made)["Reconciling"][0] == "False", "tools would wait for ever"
    assert made.requeue_after == pytest.approx(3600)
    left = [slot for slot in slots if slot.uid not in gone(made)]
    fresh = [ready(of, new.ordinal, uid=f"new-{new.ordinal}", created=NOW) for new in made.creates]
    waiting = decide(of, left + fresh, made.history, NOW + 3599)
    assert waiting.quiet
    assert waiting.status.unhealthy == 5
    later = decide(of, left + fresh, waiting.history, NOW + 3600)
    assert len(later.deletes) == 5
    assert conditions(later)["Stalled"][0] == "False"


def test_a_slot_costs_the_budget_once_however_often_its_removal_is_planned() -> None:
    of = pool(replicas=20, health={"maxReplacementsPercentPerHour": 25})
    slots = [ready(of, i) for i in range(15)] + [failed(of, i) for i in range(15, 20)]
    made = decide(of, slots)
    for _ in range(5):
        made = decide(of, slots, made.history)
        assert len(made.deletes) == 5
        assert sum(n for _, n in made.history.spent) == 5
        assert len(made.status.last_failures) == 5


def test_a_small_pool_may_replace_a_few_slots_whatever_the_percentage() -> None:
    of = pool(replicas=1, health={"maxReplacementsPercentPerHour": 1})
    history = History()
    for i in range(6):
        made = decide(of, [failed(of, 0, uid=f"uid-{i}")], history, NOW + i)
        history = made.history
        assert bool(made.deletes) == (i < 5)


def test_what_the_cluster_did_costs_nothing() -> None:
    of = pool(replicas=20, health={"maxReplacementsPercentPerHour": 1})
    made = decide(of, [failed(of, i, "Terminated") for i in range(20)])
    assert len(made.creates) == 20
    assert made.history.spent == ()
    assert made.status.last_failures == ()


def test_a_clock_that_is_set_back_makes_no_budget_wait_longer_than_an_hour() -> None:
    of = pool(replicas=20, health={"maxReplacementsPercentPerHour": 25})
    made = decide(of, [ready(of, i) for i in range(15)] + [failed(of, i) for i in range(15, 20)])
    slots = [ready(of, i) for i in range(19)] + [failed(of, 19, uid="sick")]
    waits = decide(of, slots, made.history, NOW - 1e6)
    assert waits.quiet
    assert decide(of, slots, waits.history, NOW - 1e6 + 3600).deletes


def test_failures_that_the_status_tells_of_count_after_a_restart() -> None:
    of = pool(replicas=20, health={"maxReplacementsPercentPerHour": 25})
    made = decide(of, [ready(of, i) for i in range(15)] + [failed(of, i) for i in range(15, 20)])
    slots = [ready(of, i) for i in range(19)] + [failed(of, 19, uid="sick")]
    assert decide(of, slots, History.of(made.status), NOW + 60).quiet
    assert not decide(of, slots, History(), NOW + 60).quiet


def test_a_restart_is_no_new_hour_however_many_were_replaced() -> None:
    of = pool(replicas=100, health={"maxReplacementsPercentPerHour": 50})
    history, now = History(), NOW
    for turn in range(25):  # two at a time, within 40 minutes
        slots = [ready(of, i) for i in range(98)] + [failed(of, i, uid=f"uid-{turn}-{i}") for i in (98, 99)]
        now = NOW + turn * 100
        made = decide(of, slots, history, now)
        assert len(made.deletes) == 2
        history = made.history
    said = read_status(made.status.model_dump(mode="json", by_alias=True))
    assert sum(r.slots for r in said.sick_replacements) == 50
    sick = [ready(of, i) for i in range(98)] + [failed(of, i, uid=f"uid-last-{i}") for i in (98, 99)]
    waits = decide(of, sick, History.of(said), now + 60)
    assert waits.quiet and conditions(waits)["Stalled"] == ("True", "ReplacementBudgetSpent")
    # nothing comes back earlier than it would have without the restart
    assert decide(of, sick, History.of(said), NOW + 3599).quiet
    assert decide(of, sick, History.of(said), NOW + 300 + 3600).deletes


def test_what_was_replaced_is_said_in_few_words_and_only_with_something_new() -> None:
    spent = tuple((NOW + 7.0 * i, 1) for i in range(514))  # an hour
    assert len(portions(spent)) == 12
    assert sum(n for _, n in portions(spent)) == 514
    of = pool(replicas=2)
    made = decide(of, [ready(of, 0), failed(of, 1)])
    (said,) = made.status.sick_replacements
    assert said.slots == 1
    later = decide(of, [ready(of, 0), ready(of, 1, uid="fresh")], made.history, NOW + 7200)
    assert later.status.sick_replacements == made.status.sick_replacements, "time alone writes no status"


# --- boots ------------------------------------------------------------------------------------------------------------


def never_ready(slot: Slot) -> Slot:
    return replace(slot, ever_ready=False)


def fail_boots(rounds: int, replicas: int = 10) -> tuple[list[Plan], list[float]]:
    """A pool none of whose slots ever boots; each pass as soon as time changes something. The plans that meet a
    failure, and how long it holds the creates."""
    of = pool(replicas=replicas)
    made, now, plans, waits = decide(of), NOW, [], []
    for turn in range(rounds):
        slots = [
            never_ready(failed(of, new.ordinal, uid=f"{turn}-{new.ordinal}", name=new.name, created=now))
            for new in made.creates
        ]
        now += 5
        made, met = decide(of, slots, made.history, now), now
        plans.append(made)
        while not made.creates:
            assert made.requeue_after is not None
            assert made.requeue_after > 0
            now += made.requeue_after
            made = decide(of, [], made.history, now)
        waits.append(now - met)
    return plans, waits


def test_boots_that_fail_in_a_row_come_slower_and_fewer_and_are_told_of() -> None:
    plans, waits = fail_boots(14, replicas=1000)
    assert [made.history.boots.times for made in plans] == list(range(1, 15))
    assert waits[:9] == pytest.approx([1, 2, 4, 8, 16, 32, 64, 128, 256])
    assert waits[9:] == pytest.approx([300] * 5)
    assert conditions(plans[0])["Degraded"][0] == "False", "once is no row"
    assert conditions(plans[1])["Degraded"] == ("True", "BootFailing")
    assert conditions(plans[1])["Stalled"][0] == "False", "it may pass"
    tried = [len(made.deletes) for made in plans]
    assert tried[:3] == [1000, 250, 125]
    assert tried[-1] == 1


def test_slots_that_boot_count_among_those_that_may() -> None:
    of = pool(replicas=1000)
    last = fail_boots(10, replicas=1000)[0][-1]
    assert last.requeue_after is not None
    now = last.history.boots.at + last.requeue_after
    [only] = decide(of, [], last.history, now).creates
    boots = booting(of, only.ordinal, name=only.name, created=now, started=now)
    assert not decide(of, [boots], last.history, now + 5).creates


def test_a_batch_that_fails_together_counts_once() -> None:
    of = pool(replicas=10)
    first = decide(of, [never_ready(failed(of, 0))] + [booting(of, i, started=NOW - 60) for i in range(1, 10)])
    assert first.history.boots.times == 1
    rest = [never_ready(failed(of, i)) for i in range(1, 10)]
    second = decide(of, rest, first.history, NOW + 0.5)
    assert second.history.boots.times == 1


def test_only_a_slot_as_new_as_the_newest_that_failed_is_proof() -> None:
    of = pool(replicas=9)
    first = decide(of, [never_ready(failed(of, 0, created=NOW - 90))])
    second = decide(of, [never_ready(failed(of, 1, created=NOW - 80))], first.history, NOW + 0.5)
    older = decide(of, [ready(of, 2, created=NOW - 85)], second.history, NOW + 0.7)
    assert older.history.boots.times == 1
    assert decide(of, [ready(of, 2, created=NOW - 80)], second.history, NOW + 0.7).history.boots.times == 0


def test_a_slot_that_boots_ends_the_row() -> None:
    of = pool(replicas=3)
    bad = decide(of, [never_ready(failed(of, i, created=NOW - 60)) for i in range(3)])
    assert not bad.creates
    good = decide(of, [ready(of, 0, uid="new", created=NOW + 1)], bad.history, NOW + 1)
    assert good.history.boots.times == 0
    assert len(good.creates) == 2


def test_one_bad_boot_among_good_ones_holds_nothing() -> None:
    of = pool(replicas=10)
    made = decide(of, [never_ready(failed(of, 0))] + [ready(of, i) for i in range(1, 10)])
    assert len(made.creates) == 1
    assert made.history.boots.times == 0


@pytest.mark.parametrize(
    "slot",
    [
        lambda of: failed(of, 0),
        lambda of: unready(of, 0, NOW - 3600),
        lambda of: unschedulable(of, 0),
        lambda of: pulling(of, 0, created=NOW - 86_400),
        lambda of: replace(booting(of, 0), deleting=True),
        lambda of: never_ready(failed(of, 0, "Preempting")),
        lambda of: never_ready(failed(of, 0, template="old")),
    ],
)
def test_only_slots_that_never_became_ready_slow_the_pool_down(slot: object) -> None:
    of = pool(replicas=5)
    made = decide(of, [slot(of)])  # type: ignore[operator]
    assert made.history.boots.times == 0
    assert len(made.creates) >= 4


def test_another_template_is_tried_at_once() -> None:
    of = pool(replicas=3)
    made = decide(of, [never_ready(failed(of, i)) for i in range(3)])
    assert not made.creates
    corrected = pool(replicas=3, template=NEW_IMAGE, generation=2)
    assert len(decide(corrected, [], made.history, NOW).creates) == 3


def test_a_clock_that_is_set_back_holds_no_boot_longer_than_its_back_off() -> None:
    of = pool(replicas=3)
    made = decide(of, [never_ready(failed(of, i)) for i in range(3)])
    back = decide(of, [], made.history, NOW - 1e6)
    assert back.requeue_after == pytest.approx(1)
    assert decide(of, [], back.history, NOW - 1e6 + 1).creates


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "reason", "message", "expected"),
    [
        (403, "Forbidden", 'pods "a" is forbidden: exceeded quota: q, requested: pods=1, used: 5', "QuotaExceeded"),
        (
            403,
            "Forbidden",
            'pods "a" is forbidden: violates PodSecurity "restricted:latest": privileged',
            "PodSecurity",
        ),
        (
            403,
            "Forbidden",
            "unable to create new content in namespace x because it is being terminated",
            "NamespaceTerminating",
        ),
        (
            403,
            "Forbidden",
            "ValidatingAdmissionPolicy 'p' denied request: namespace x has no label tapforge.dev/workloads=enabled",
            "NamespaceNotEnabled",
        ),
        (403, "Forbidden", 'User "x" cannot create resource "pods"', "Forbidden"),
        (422, "Invalid", 'Pod "a" is invalid: spec.containers[0].image: Required value', "Invalid"),
        (400, "BadRequest", "admission webhook denied the request", "Invalid"),
        (409, "AlreadyExists", "pods already exists", None),
        (429, "TooManyRequests", "", None),
        (500, "InternalError", "", None),
        (404, "NotFound", "namespaces not found", None),
    ],
)
def test_a_refusal_is_told_from_an_accident(status: int, reason: str, message: str, expected: str | None) -> None:
    found = refusal(status, reason, message)
    assert (found and found.reason) == expected


QUOTA = Refusal("QuotaExceeded", "exceeded quota")


def test_a_refusal_holds_all_creates_and_one_is_tried_now_and_then() -> None:
    of = pool(replicas=10)
    made, now, waits = decide(of), NOW, []
    for _ in range(9):
        made = decide(of, [], made.history, now, refusals=[QUOTA, QUOTA])
        assert not made.creates
        assert conditions(made)["Degraded"] == ("True", "QuotaExceeded")
        assert made.requeue_after is not None
        waits.append(made.requeue_after)
        now += made.requeue_after
        made = decide(of, [], made.history, now)
        assert len(made.creates) == 1
    assert waits == pytest.approx([5, 10, 20, 40, 80, 160, 300, 300, 300])
    [probe] = made.creates
    works = decide(of, [booting(of, probe.ordinal, name=probe.name, started=now)], made.history, now + 1)
    assert len(works.creates) == 9
    assert conditions(works)["Degraded"][0] == "False"


def test_a_namespace_that_may_be_labelled_at_any_moment_is_tried_again_soon() -> None:
    of, closed = pool(replicas=10), Refusal("NamespaceNotEnabled", "namespace x has no label")
    made, now, waits = decide(of), NOW, []
    for _ in range(5):
        made = decide(of, [], made.history, now, refusals=[closed])
        assert conditions(made)["Stalled"] == ("True", "NamespaceNotEnabled")
        assert made.requeue_after is not None
        waits.append(made.requeue_after)
        now += made.requeue_after
        made = decide(of, [], made.history, now)
    assert waits == pytest.approx([5, 10, 20, 30, 30])


def test_devices_that_can_not_be_claimed_stall_their_pool_and_no_other() -> None:
    refused = Refusal("DevicesNotEnabled", "the operator has no rights on Leases")
    devices = pool(external={"urls": ["http://a"]}, template=None, replicas=None)
    assert conditions(decide(devices, no_devices=refused))["Stalled"] == ("True", "DevicesNotEnabled")
    assert conditions(decide(devices))["Stalled"][0] == "False"
    assert conditions(decide(pool(), no_devices=refused))["Stalled"][0] == "False"


def test_a_try_without_an_answer_is_not_repeated_at_once() -> None:
    of = pool(replicas=10)
    held = decide(of, [], refusals=[QUOTA])
    tried = decide(of, [], held.history, NOW + 5)
    assert tried.creates
    assert not decide(of, [], tried.history, NOW + 6).creates
    assert decide(of, [], tried.history, NOW + 10).creates == tried.creates


@pytest.mark.parametrize("reason", ["PodSecurity", "Invalid", "Forbidden", "NameTaken"])
def test_what_needs_a_person_stalls(reason: str) -> None:
    of = pool(replicas=10)
    made = decide(of, [], refusals=[QUOTA, Refusal(reason, "because.")])  # type: ignore[arg-type]
    assert conditions(made)["Stalled"] == ("True", reason)
    assert conditions(made)["Reconciling"][0] == "False"


@pytest.mark.parametrize("reason", ["QuotaExceeded", "NamespaceTerminating"])
def test_what_may_pass_does_not_stall(reason: str) -> None:
    made = decide(pool(), [], refusals=[Refusal(reason, "because")])  # type: ignore[arg-type]
    assert conditions(made)["Stalled"][0] == "False"
    assert conditions(made)["Reconciling"][0] == "True"


def test_a_changed_spec_is_tried_at_once() -> None:
    made = decide(pool(), [], refusals=[QUOTA])
    assert not made.creates
    assert len(decide(pool(generation=2), [], made.history).creates) == 3


def test_a_refusal_is_no_replacement() -> None:
    of = pool(replicas=2)
    made = decide(of, [ready(of, 0), failed(of, 1)])
    refused = decide(of, [ready(of, 0)], made.history, NOW + 1, refusals=[QUOTA])
    assert refused.status.replaced_total == 0
    works = decide(of, [ready(of, 0), booting(of, 1, uid="new", started=NOW)], refused.history, NOW + 9)
    assert works.status.replaced_total == 1


def test_a_refusal_of_what_nobody_needs_is_forgotten() -> None:
    of = pool(replicas=1)
    made = decide(of, [ready(of, 0)], refusals=[QUOTA])
    assert made.history.refused is None
    assert conditions(made)["Degraded"][0] == "False"


def test_while_boots_fail_the_end_of_a_boot_is_waited_for_and_not_looked_for() -> None:
    of = pool(replicas=5)
    failing = History(boots=BootFailures(times=9, at=NOW - 400, created=NOW - 500, template=of.template))
    made = decide(of, [booting(of, 0, created=NOW - 50)], failing)
    assert not made.creates
    assert made.requeue_after is not None
    assert made.requeue_after > 60, "until its boot deadline"
    made = decide(of, [], failing)
    assert len(made.creates) == 1


def test_a_refusal_is_tried_again_in_time_also_while_boots_fail() -> None:
    of = pool(replicas=5)
    failing = History(boots=BootFailures(times=1, at=NOW - 400, created=NOW - 500, template=of.template))
    made = decide(of, [], failing, refusals=(Refusal("QuotaExceeded", "exceeded quota: pods"),))
    assert not made.creates
    assert made.requeue_after == pytest.approx(5)
    assert len(decide(of, [], made.history, NOW + 5).creates) == 1
