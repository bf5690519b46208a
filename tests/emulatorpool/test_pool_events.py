"""What `kubectl describe` tells of a pool: changes, once each, and never one Event per slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from pools import NEW_IMAGE, NOW, booting, decide, failed, pool, ready, unready, unschedulable

from tapforge_operator.broker.types import Held
from tapforge_operator.emulatorpool.state import History, Plan, Refusal
from tapforge_operator.emulatorpool.status import EVENT_SECONDS
from tapforge_operator.kube.types import Slot

SERVING = pool(replicas=3)
ALL = [ready(SERVING, i) for i in range(3)]


def told(made: Plan) -> list[tuple[str, str]]:
    return [(event.type, event.reason) for event in made.events]


def message(made: Plan, reason: str) -> str:
    return next(event.message for event in made.events if event.reason == reason)


def reasons(made: Plan) -> set[str]:
    return {event.reason for event in made.events}


def at_rest(slots: Sequence[Slot] = ALL) -> History:
    """The pool serves and has told so."""
    made = decide(SERVING, slots, decide(SERVING).history)
    assert told(made) == [("Normal", "SlotsReady")]
    return made.history


def test_a_pool_that_becomes_ready_tells_so_once() -> None:
    first = decide(SERVING)
    assert first.events == (), "that it begins with nothing is no news"
    made = decide(SERVING, ALL, first.history)
    assert told(made) == [("Normal", "SlotsReady")]
    assert message(made, "SlotsReady") == "3 of 3 slots are ready"
    again = decide(SERVING, ALL, made.history, NOW + 3600)
    assert again.events == () and again.requeue_after is None


@pytest.mark.parametrize(
    "sick, kind, reason, words",
    [
        (failed(SERVING, 0, "OOMKilled"), "Warning", "SlotFailed", "1 slot ended: pod-0 (OOMKilled)"),
        (failed(SERVING, 0, "Preempting"), "Normal", "SlotDisrupted", "1 slot ended because the cluster took the Pod"),
        (unready(SERVING, 0, NOW - 3000), "Warning", "SlotUnready", "health.unreadyGraceSeconds"),
        (booting(SERVING, 0), "Warning", "SlotBootFailed", "boot.deadlineSeconds"),
    ],
)
def test_a_slot_that_is_replaced(sick: Slot, kind: str, reason: str, words: str) -> None:
    made = decide(SERVING, [sick, *ALL[1:]], at_rest())
    assert (kind, reason) in told(made)
    assert words in message(made, reason)
    # The Pod is still there: it is the same removal.
    assert decide(SERVING, [sick, *ALL[1:]], made.history, NOW + 3600).events == ()


def test_slots_on_nodes_that_are_lost_or_cordoned_and_slots_whose_claim_expired() -> None:
    for state, reason in (("lost", "SlotNodeLost"), ("cordoned", "SlotNodeCordoned")):
        slots = [replace(ALL[0], node="bad"), *ALL[1:]]
        made = decide(SERVING, slots, at_rest(), nodes={"bad": state})
        assert reason in reasons(made), state
    made = decide(SERVING, ALL, at_rest(), held={"uid-0": Held("run", expired=True)})
    assert ("Warning", "SlotClaimExpired") in told(made)


def test_recycling_and_scaling_in_are_no_news() -> None:
    of = pool(replicas=1, recycle={"afterSeconds": 600})
    made = decide(of, [ready(of, i) for i in range(3)], History())
    assert {str(r.reason) for r in made.deletes} <= {"ScaleIn", "Age"} and made.deletes
    assert made.events == ()


def test_a_storm_is_one_event_now_and_one_with_the_rest_after_a_while() -> None:
    of = pool(replicas=500, health={"maxReplacementsPercentPerHour": 100})
    slots = [ready(of, i) for i in range(500)]
    history = decide(of, slots).history
    first = decide(of, [failed(of, i) if i < 200 else slot for i, slot in enumerate(slots)], history)
    assert [event.reason for event in first.events].count("SlotFailed") == 1
    assert message(first, "SlotFailed").startswith("200 slots ended: ") and message(first, "SlotFailed").endswith(
        ", ..."
    )
    assert message(first, "SlotFailed").count("pod-") == 3
    made, now = first, NOW
    for wave in range(1, 5):
        now += 5
        gone = [slots[i] for i in range(200 + 10 * wave, 500)]
        sick = [failed(of, i) for i in range(200 + 10 * (wave - 1), 200 + 10 * wave)]
        made = decide(of, [*sick, *gone], made.history, now)
        assert "SlotFailed" not in reasons(made)
    assert made.requeue_after is not None and now + made.requeue_after <= NOW + EVENT_SECONDS
    late = decide(of, [slots[i] for i in range(240, 500)], made.history, NOW + EVENT_SECONDS)
    assert message(late, "SlotFailed").startswith("40 slots ended: ")


def test_a_pool_that_flaps_tells_of_it_once_in_a_while() -> None:
    sick = [unready(SERVING, i, NOW) for i in range(3)]
    made = decide(SERVING, sick, at_rest())
    assert told(made) == [("Warning", "SlotsMissing")]
    back = decide(SERVING, ALL, made.history, NOW + 1)
    assert back.events == () and back.requeue_after == pytest.approx(EVENT_SECONDS - 1), "it was told a moment ago"
    down = decide(SERVING, sick, back.history, NOW + 2)
    assert down.events == ()
    up = decide(SERVING, ALL, down.history, NOW + EVENT_SECONDS)
    assert told(up) == [("Normal", "SlotsReady")]
    calm = decide(SERVING, ALL, up.history, NOW + 3 * EVENT_SECONDS)
    assert calm.events == () and calm.requeue_after is None


@pytest.mark.parametrize("reason", ["QuotaExceeded", "PodSecurity"])
def test_creates_that_are_refused_and_their_end(reason: str) -> None:
    history = decide(SERVING, ALL[:2], decide(SERVING).history).history
    made = decide(SERVING, ALL[:2], history, refusals=[Refusal(reason, "no more")])  # type: ignore[arg-type]
    assert ("Warning", reason) in told(made)
    assert "no more" in message(made, reason)
    same = decide(SERVING, ALL[:2], made.history, NOW + 300)
    assert reason not in reasons(same), "it was told"
    over = decide(SERVING, ALL, same.history, NOW + 400)
    assert ("Normal", "Recovered") in told(over)
    assert reason in message(over, "Recovered")


def test_a_budget_that_is_spent() -> None:
    of = pool(replicas=20, health={"maxReplacementsPercentPerHour": 25})
    history = decide(of, [ready(of, i) for i in range(20)]).history
    made = decide(of, [failed(of, i) for i in range(10)] + [ready(of, i) for i in range(10, 20)], history)
    assert ("Warning", "ReplacementBudgetSpent") in told(made)
    assert message(made, "SlotFailed").startswith("5 slots ended")


def test_slots_without_a_node_are_told_of_when_it_takes_long() -> None:
    slots = [*ALL[:2], unschedulable(SERVING, 2, created=NOW)]
    made = decide(SERVING, slots, at_rest())
    assert "Unschedulable" not in reasons(made)
    made = decide(SERVING, slots, made.history, NOW + 301)
    assert ("Warning", "Unschedulable") in told(made)


def test_boots_that_fail_in_a_row() -> None:
    made, now = decide(SERVING), NOW
    seen: list[str] = []
    for turn in range(4):
        now += 400
        slots = [
            replace(failed(SERVING, i, uid=f"{turn}-{i}", created=now - 5), ever_ready=False, turned=None)
            for i in range(3)
        ]
        made = decide(SERVING, slots, made.history, now)
        seen += [event.reason for event in made.events]
    assert seen.count("BootFailing") == 1 and seen.count("SlotFailed") == 4


def test_a_roll_out_begins_and_ends() -> None:
    of = pool(replicas=3, template=NEW_IMAGE, generation=2)
    made = decide(of, ALL, at_rest())
    assert message(made, "RollOutStarted") == "3 of 3 slots are of an old template"
    half = decide(of, [ready(of, 0, uid="new-0"), *ALL[1:]], made.history, NOW + 100)
    assert reasons(half).isdisjoint({"RollOutStarted", "RollOutFinished"})
    done = decide(of, [ready(of, i, uid=f"new-{i}") for i in range(3)], half.history, NOW + 200)
    assert ("Normal", "RollOutFinished") in told(done)


def test_a_pool_scaled_by_demand_says_from_what_to_what() -> None:
    of = pool(scaling={"minReplicas": 1, "maxReplicas": 10, "warmSpares": 1})
    made = decide(of)
    assert made.events == () and made.status.desired_replicas == 1
    grown = decide(of, [], made.history, NOW + 1, waiting=4)
    assert message(grown, "Scaled") == "from 1 to 5 slots by demand; 0 are claimed"
    more = decide(of, [], grown.history, NOW + 2, waiting=6)
    assert "Scaled" not in reasons(more)
    later = decide(of, [], more.history, NOW + 1 + EVENT_SECONDS, waiting=8)
    assert message(later, "Scaled").startswith("from 5 to 9 slots")


def test_a_pool_that_a_person_scales_says_nothing_of_it() -> None:
    of = pool(replicas=2, generation=2)
    assert "Scaled" not in reasons(decide(of, ALL, at_rest()))


def test_after_a_restart_nothing_is_told_a_second_time() -> None:
    made = decide(SERVING, ALL[:2], decide(SERVING).history, refusals=[Refusal("PodSecurity", "no")])
    again = decide(SERVING, ALL[:2], History.of(made.status), NOW + 1, refusals=[Refusal("PodSecurity", "no")])
    assert again.events == ()
    lost = decide(SERVING, [], History.of(at_rest().status), NOW + 1)
    assert ("Warning", "SlotsMissing") in told(lost), "what changed meanwhile is told"
