"""How hard tasks are, as a run remembers it: decayed, of valid episodes alone, and who pauses."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.records import EpisodeRecord, GroupRecord
from tapforge_trainer.tasks.figures import figures_of_update, task_table
from tapforge_trainer.tasks.memory import MAX_TASKS, CooldownRule, DifficultyMemory, GroupResult, TaskRecord

ONE, OTHER = (Task(suite="s", template="t", seed=n) for n in (1, 2))
FRESH = Task(suite="s", template="new", seed=1)


def result(order: int, successes: int, valid: int = 4, task: Task = ONE) -> GroupResult:
    return GroupResult(order, task.key, task.template, successes, valid)


def episode(outcome: Outcome | None, number: int) -> EpisodeRecord:
    return EpisodeRecord(f"g.{number}.0", "g", ONE, 0, "a", number, Reason.CANCELLED, outcome, None, "", (), 0.0, 1.0)


def test_invalid_and_stopped_episodes_never_count():
    outcomes = [Outcome.SUCCESS, Outcome.FAILURE, Outcome.INVALID, None]
    group = GroupRecord("g", 7, ONE, 0, tuple(episode(outcome, n) for n, outcome in enumerate(outcomes)))
    assert GroupResult.of(group) == GroupResult(7, ONE.key, "t", 1, 2)
    memory = DifficultyMemory()
    memory.take(1, [result(0, 0, 0)])
    assert memory.tasks == {} and memory.rate(ONE) == 0.5


def test_a_rate_is_drawn_towards_the_templates_and_this_towards_one_half():
    memory = DifficultyMemory()
    memory.take(1, [result(0, 4)])
    template = (4 + 1) / (4 + 2)
    assert memory.rate(FRESH) == 0.5
    assert memory.rate(OTHER) == pytest.approx(template)
    assert memory.rate(ONE) == pytest.approx((4 + 2 * template) / (4 + 2))


def test_results_count_half_after_the_half_life():
    memory = DifficultyMemory(half_life=10)
    memory.take(1, [result(0, 0, 8)])
    before = memory.rate(ONE)
    memory.take(11, [])
    assert memory.attempts(ONE) == 4 and memory.age(ONE) == 10 and memory.age(OTHER) is None
    memory.take(500, [])
    assert before < 0.1 and memory.rate(ONE) == pytest.approx(0.5, abs=1e-6), "as good as unknown"


@given(st.permutations(list(range(6))))
def test_the_order_in_which_phones_finished_changes_nothing(order):
    results = [result(n, n % 3, 4, (ONE, OTHER)[n % 2]) for n in range(6)]
    memories = [DifficultyMemory(cooldown=CooldownRule(after_failed=1)) for _ in range(2)]
    memories[0].take(3, results)
    memories[1].take(3, [results[n] for n in order])
    assert memories[0].state == memories[1].state


def test_a_task_that_always_fails_pauses_and_is_tried_again():
    memory = DifficultyMemory(cooldown=CooldownRule(after_failed=2, updates=5))
    memory.take(1, [result(0, 0)])
    assert not memory.pauses(ONE)
    memory.take(2, [result(1, 0)])
    assert memory.pauses(ONE) and not memory.pauses(OTHER) and (memory.pausing, memory.paused) == (1, 1)
    memory.take(3, [result(2, 0)])  # it was under way when the pause began
    assert memory.paused == 1 and memory.retried == 0
    for update in range(4, 8):
        memory.take(update, [])
        assert memory.pauses(ONE)
    memory.take(8, [])
    assert not memory.pauses(ONE)
    memory.take(9, [result(3, 0)])
    assert memory.pauses(ONE) and (memory.paused, memory.retried) == (2, 1), "still failing: it pauses at once"
    memory.take(14, [])
    memory.take(15, [result(4, 1)])
    assert not memory.pauses(ONE) and memory.retried == 2 and memory.tasks[ONE.key].streak == 0


def test_a_success_between_failures_or_a_lonely_episode_is_no_row():
    memory = DifficultyMemory(cooldown=CooldownRule(after_failed=2))
    memory.take(1, [result(0, 0), result(1, 1), result(2, 0), result(3, 0, 1)])
    assert not memory.pauses(ONE)


def test_solved_tasks_pause_where_that_is_asked_for():
    for after, pauses in ((None, False), (3, True)):
        memory = DifficultyMemory(cooldown=CooldownRule(after_failed=3, after_solved=after))
        memory.take(1, [result(n, 4) for n in range(3)])
        assert memory.pauses(ONE) is pauses


def test_a_memory_goes_on_from_its_json():
    memory = DifficultyMemory(cooldown=CooldownRule(after_failed=1))
    memory.take(4, [result(0, 0), result(1, 3, 4, OTHER)])
    again = DifficultyMemory(cooldown=memory.cooldown)
    state = json.loads(json.dumps(memory.state))
    state["tasks"][ONE.key].append("what a later release adds")
    again.restore(state)
    assert again == memory
    empty = DifficultyMemory()
    empty.restore({})
    assert empty == DifficultyMemory(), "a checkpoint of an earlier release"


def test_of_a_suite_without_an_end_the_least_recent_tasks_are_forgotten():
    memory = DifficultyMemory()
    memory.tasks = {str(n): TaskRecord() for n in range(MAX_TASKS)}
    memory.take(1, [GroupResult(0, "0", "t", 1, 2), GroupResult(1, "new", "t", 1, 2)])
    assert len(memory.tasks) == MAX_TASKS and {"0", "new"} < memory.tasks.keys() and "1" not in memory.tasks


def test_figures_have_intervals_and_the_table_says_who_pauses():
    memory = DifficultyMemory(cooldown=CooldownRule(after_failed=1, updates=5))
    memory.take(1, [result(0, 0), result(1, 4, 4, OTHER)])
    figures = figures_of_update({"t": (4, 8), "nothing": (0, 0)}, memory)
    assert figures["tasks"] == {"known": 2, "pausing": 1, "paused": 1, "retried": 0}
    assert figures["templates"].keys() == {"t"}
    row = figures["templates"]["t"]
    assert row["success"] == 0.5 and 0.2 < row["low"] < 0.25 and 0.75 < row["high"] < 0.8 and row["episodes"] == 8
    table = task_table({"memory": memory.state})
    assert table["templates"]["t"]["attempts"] == 8 and table["tasks_known"] == 2
    assert table["tasks"][ONE.key]["pauses_until"] == 6 and "pauses_until" not in table["tasks"][OTHER.key]
    assert task_table({})["tasks"] == {}
