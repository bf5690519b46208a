"""Where phones break is counted, and only a task that breaks one slot after the other is quarantined."""

from dataclasses import replace

import pytest

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.attempt import Attempt, EpisodeResult, PhoneCall
from tapforge_trainer.records import EpisodeRecord, Generation, StepRecord
from tapforge_trainer.rollout.fault_tracker import FaultTracker, signature

TASK = Task(suite="s", template="t")
TAP = {"type": "tap", "x": 0.51, "y": 0.5}


def episode(slot, started, ended, broke=None, actions=(TAP,), task=TASK, reason=Reason.ENV_ERROR) -> EpisodeResult:
    generation = Generation((), (), (), (), "stop", 0)
    steps = tuple(
        StepRecord("e", i, (), None, None, generation, "", action, None, 0.0, "", 0.0, 0.0)
        for i, action in enumerate(actions)
    )
    outcome, score = (Outcome.INVALID, None) if broke else (Outcome.SUCCESS, 1.0)
    message = "why" if broke else ""
    record = EpisodeRecord(
        "e", "g", task, 0, slot, 0, reason if broke else Reason.DONE, outcome, score, message, steps, started, ended
    )
    return EpisodeResult(Attempt("g", 0, 0, 0, 0, task, 0), record, {}, broke)


def crash(slot, started, ended, action=TAP, **kw) -> EpisodeResult:
    return episode(slot, started, ended, PhoneCall("step", 0, action), (action,), **kw)


def faults_after_good_episodes(*slots) -> FaultTracker:
    faults = FaultTracker()
    for slot in slots:
        faults.note(episode(slot, -2, -1, task=Task(suite="s", template="harmless")))
    return faults


def test_the_same_action_on_a_second_slot_after_the_first_break_quarantines_the_task():
    faults = faults_after_good_episodes("a", "b", "c")
    assert faults.note(crash("a", 0, 1)) is None
    why = faults.note(crash("b", 1, 2, {"type": "tap", "x": 0.5, "y": 0.52}))
    assert "'tap x=8 y=8' broke a and then b" in why
    assert faults.quarantined == {TASK.key: why}
    assert faults.note(crash("c", 3, 4)) is None, "said once"


def test_a_task_that_its_environment_does_not_have_is_quarantined_at_once_and_no_phone_is_blamed():
    faults = faults_after_good_episodes("a")
    unknown = replace(episode("a", 0, 1, PhoneCall("reset"), ()), unknown_task=True)
    assert faults.note(unknown) == unknown.record.message == faults.quarantined[TASK.key]
    assert faults.note(unknown) is None, "said once"
    assert not faults.as_dict()["by_action"] and faults.by_reason["env_error"] == 2


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (crash("a", 1, 2), "the same slot is sick itself"),
        (crash("b", 0.5, 2), "both ran when the first one broke: one event, as when a host dies"),
        (crash("b", 1, 2, {"type": "tap", "x": 0.9, "y": 0.5}), "another place on the screen"),
        (crash("b", 1, 2, {"type": "home"}), "another action"),
        (crash("b", 1, 2, task=Task(suite="s", template="u")), "another task"),
        (episode("b", 1, 2, PhoneCall("reset"), ()), "another call"),
        (episode("b", 1, 2), "nothing broke"),
        (crash("b", 1, 2, reason=Reason.LEASE_LOST), "the phone was taken away, whatever was done on it"),
    ],
)
def test_what_does_not_accuse_the_task(second, why):
    faults = faults_after_good_episodes("a", "b")
    faults.note(crash("a", 0, 1))
    assert faults.note(second) is None, why


def test_phones_that_break_at_everything_accuse_nobody():
    faults = faults_after_good_episodes("b")
    assert faults.note(crash("a", 0, 1)) is None
    assert faults.note(crash("b", 1, 2)) is None, "a was never seen healthy"
    assert faults.note(crash("a", 2, 3)) is None, "and still is not"
    faults.note(episode("a", 3, 4, task=Task(suite="s", template="harmless")))
    assert faults.note(crash("a", 4, 5)), "b was proven when it broke, and a is now"


@pytest.mark.parametrize("call", [PhoneCall("reset"), PhoneCall("evaluate")])
def test_a_task_that_breaks_reset_or_judge(call):
    faults = faults_after_good_episodes("a", "b")
    faults.note(episode("a", 0, 1, call, ()))
    assert faults.note(episode("b", 2, 3, call, ()))


def test_counts_by_step_action_and_task():
    faults = FaultTracker()
    home = {"type": "home"}
    faults.note(episode("a", 0, 1, None, (TAP, home)))
    faults.note(episode("b", 0, 1, PhoneCall("step", 1, home), (TAP, home), reason=Reason.DEADLINE))
    faults.note(episode("c", 0, 1, PhoneCall("evaluate"), (home,), reason=Reason.JUDGE_ERROR))
    assert {k: (e.tried, e.broke) for k, e in faults.by_step.items()} == {0: (3, 0), 1: (2, 1)}
    assert {k: (e.tried, e.broke) for k, e in faults.by_action.items()} == {
        "reset": (3, 0),
        "tap": (2, 0),
        "home": (3, 1),
        "evaluate": (2, 1),
    }
    assert faults.by_task[TASK.key].rate == 2 / 3
    assert faults.as_dict()["by_reason"] == {"deadline": 1, "judge_error": 1}
    assert faults.as_dict()["by_step"] == {"1": {"tried": 2, "broke": 1}}


def test_signatures_look_at_the_cell_not_at_the_pixel():
    assert signature(PhoneCall("step", 0, TAP)) == signature(
        PhoneCall("step", 7, {"type": "tap", "x": 0.56, "y": 0.55})
    )
    assert signature(PhoneCall("step", 0, {"type": "tap", "x": 1.0, "y": 1.0})) == "tap x=15 y=15"
    assert signature(PhoneCall("step", 0, {"type": "type", "text": "a"})) != signature(
        PhoneCall("step", 0, {"type": "type", "text": "b"})
    )
    assert signature(PhoneCall("reset")) == "reset"
