"""Task order: seeded, endless, resumable; files are taken whole or not at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import TASKS

from tapforge_envs.protocol import Task
from tapforge_trainer.tasks.files import read_tasks
from tapforge_trainer.tasks.source import FixedTasks, TaskError, TaskSource, at_most


def some(count: int) -> FixedTasks:
    return FixedTasks(tuple(Task(suite="s", template="t", seed=n) for n in range(count)))


@given(st.integers(0, 2**32), st.integers(0, 30))
def test_a_source_goes_on_where_it_stopped(seed, first):
    whole = TaskSource(some(7), seed).take(40)
    source = TaskSource(some(7), seed)
    source.take(first)
    assert TaskSource(some(7), seed, source.state).take(40 - first) == whole[first:]


@given(st.integers(0, 1000), st.integers(1, 12))
def test_each_pass_over_a_list_has_every_task_once_and_its_own_order(seed, count):
    drawn = TaskSource(some(count), seed).take(3 * count)
    for begin in range(0, 3 * count, count):
        assert len({task.key for task in drawn[begin : begin + count]}) == count


def test_seeds_give_orders():
    def order(seed):
        return [t.seed for t in TaskSource(some(20), seed).take(40)]

    assert order(1) == order(1) != order(2)
    assert order(1)[:20] != order(1)[20:]


def test_a_suite_is_a_task_set():
    a, b = (TaskSource(TASKS, 3).take(20) for _ in range(2))
    assert a == b and len({task.key for task in a}) > 10


def test_quarantine_skips_a_task_and_leaves_the_order_of_the_others():
    before = TaskSource(some(5), 1).take(10)
    source = TaskSource(some(5), 1)
    source.quarantine(before[0].key, "breaks phones")
    assert source.take(8) == [t for t in before if t != before[0]]


def test_when_every_task_is_in_quarantine_it_is_said():
    source = TaskSource(some(2), 1)
    for task in some(2).tasks:
        source.quarantine(task.key, "breaks phones")
    with pytest.raises(TaskError, match="no task is left.*breaks phones"):
        source.next()


def test_at_most():
    assert len(at_most(TASKS, 5, 3).tasks) == 3
    assert at_most(TASKS, 5, 3) == at_most(TASKS, 5, 3)
    assert len(at_most(some(4), 5, 100).tasks) == 4


# --- files ------------------------------------------------------------------------------------------------------------


def line(**fields) -> str:
    return json.dumps({"suite": "quickstart", "template": "open", **fields})


def test_a_file_of_tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(["# mine", line(seed=1), "", line(seed=2, params={"app": "mail"}, max_steps=3)]))
    tasks = read_tasks(path).tasks
    assert [(t.seed, t.params, t.max_steps) for t in tasks] == [(1, {}, 16), (2, {"app": "mail"}, 3)]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\u200b", "\u00a0"])
def test_only_a_line_feed_ends_a_line(tmp_path, separator):
    goal = f"Write a note:{separator}milk{separator}eggs"
    path = tmp_path / "tasks.jsonl"
    written = [json.dumps(json.loads(line(seed=n, goal=goal)), ensure_ascii=False) for n in (1, 2)]
    path.write_bytes("\r\n".join(written).encode())
    assert [(t.seed, t.goal) for t in read_tasks(path).tasks] == [(1, goal), (2, goal)]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([line(), "{broken"], r"tasks.jsonl:2: Invalid JSON"),
        ([line(sede=1)], r"tasks.jsonl:1: sede: Extra inputs"),
        (["", line(), '{"suite": "s"}'], r"tasks.jsonl:3: template: Field required"),
        ([line(max_steps=0)], r"tasks.jsonl:1: max_steps: .*greater than or equal to 1"),
        ([line(seed=1), line(seed=2), line(seed=1)], r"tasks.jsonl:3: the same task as in line 1"),
        (["[]"], r"tasks.jsonl:1: "),
        (["# nothing"], r"tasks.jsonl has no task: write one per line, such as"),
        ([], r"has no task"),
    ],
)
def test_a_broken_file_names_the_line_and_why(lines, words, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(TaskError, match=words):
        read_tasks(path)


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    with pytest.raises(TaskError, match=r"nowhere.jsonl can't be read"):
        read_tasks(tmp_path / "nowhere.jsonl")
    (tmp_path / "image").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(TaskError, match=r"can't be read"):
        read_tasks(tmp_path / "image")
