"""Task order: seeded, endless, resumable; files are taken whole or not at all."""

import json
import random

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


# --- files that people have -------------------------------------------------------------------------------------------


def listed(tmp_path, protocol, text):
    path = tmp_path / "tasks.txt"
    path.write_text(text, encoding="utf-8", newline="")
    return read_tasks(path, protocol).tasks


def test_a_list_of_names_and_goals(tmp_path):
    text = (
        "\ufeff# MobileWorld\r\n\r\nOpenFlightModeTask\r\n"
        'SendWaiverTask, Write to Ann, Bob, and \u201cCarl\u201d: "fine"\n'
        'QuotedTask,"Say ""hello"", twice"\n'
        'BookTask,"Dune" is a book, find "Dune"\n'
        '淘店Task,在群发"大家好"。\n'
        "NoGoalTask,\n"
    )
    tasks = listed(tmp_path, "mobileworld", text)
    assert [(t.template, t.goal) for t in tasks] == [
        ("OpenFlightModeTask", ""),
        ("SendWaiverTask", 'Write to Ann, Bob, and \u201cCarl\u201d: "fine"'),
        ("QuotedTask", 'Say "hello", twice'),
        ("BookTask", '"Dune" is a book, find "Dune"'),
        ("淘店Task", '在群发"大家好"。'),
        ("NoGoalTask", ""),
    ]
    assert {(t.suite, t.threshold, t.max_steps, t.seed) for t in tasks} == {("mobileworld", 0.99, 50, 0)}
    assert {(t.suite, t.threshold) for t in listed(tmp_path, "androidworld", "A\nB,Do.")} == {("androidworld", 1.0)}


def test_a_table_whose_first_line_names_its_columns(tmp_path):
    text = 'Apps,Task Name,Tag,Goal\n"Mail, Maps",ATask,lang-en,"Write ""a"",\nand b"\n\n# later\nMail,BTask,,Do.\n'
    tasks = listed(tmp_path, "mobileworld", text)
    assert [(t.template, t.goal) for t in tasks] == [("ATask", 'Write "a",\nand b'), ("BTask", "Do.")]
    assert [t.template for t in listed(tmp_path, "mobileworld", "task_name\nATask\nBTask")] == ["ATask", "BTask"]


def test_lines_of_json_say_only_what_is_not_the_protocols(tmp_path):
    lines = ['{"template": "ATask"}', '{"suite": "mobileworld", "template": "BTask", "threshold": 1, "max_steps": 9}']
    tasks = listed(tmp_path, "mobileworld", "\n".join(lines))
    assert [(t.suite, t.template, t.threshold, t.max_steps) for t in tasks] == [
        ("mobileworld", "ATask", 0.99, 50),
        ("mobileworld", "BTask", 1, 9),
    ]
    line = '{"suite": "desk", "template": "x", "goal": "Do.", "params": {"check": "true"}}'
    assert listed(tmp_path, "adb", line)[0].suite == "desk"


@pytest.mark.parametrize("protocol", ["osworld", "androidlab"])
def test_lines_of_domain_and_example(tmp_path, protocol):
    lines = [
        '{"domain": "chrome", "example_id": "bb5e"}',
        '{"domain": "thunderbird", "example_id": "bb5e", "config_base_dir": "mine"}',
        '{"template": "gimp/1", "max_steps": 4}',
    ]
    tasks = listed(tmp_path, protocol, "\n".join(lines))
    assert [(t.suite, t.template, t.params) for t in tasks] == [
        (protocol, "chrome/bb5e", {}),
        (protocol, "thunderbird/bb5e", {"config_base_dir": "mine"}),
        (protocol, "gimp/1", {}),
    ]


@pytest.mark.parametrize(
    ("protocol", "lines", "words"),
    [
        ("mobileworld", ["ATask", "two words,Do."], "tasks.txt:2: 'two words' is not a name.*looks like Open"),
        ("mobileworld", ["ATask", ",Do."], "tasks.txt:2: '' is not a name"),
        ("mobileworld", ["x" * 201], "tasks.txt:1: .* is not a name"),
        ("mobileworld", ["ATask,Do.", "# b", "ATask,Do it."], "tasks.txt:3: the same task as in line 1"),
        ("mobileworld", ['ATask,"Do.'], "tasks.txt:1: the goal begins with a quotation mark that is not closed"),
        ("mobileworld", ["name,goal", "ATask,Do.", "BTask"], "tasks.txt:3: 1 cells, the first line names 2 columns"),
        ("mobileworld", ["name,goal", "ATask,Do.", 'BTask,"Do', "on"], "tasks.txt:3: this is not a row of a table"),
        ("mobileworld", ["name,goal", "ATask,Do.", "B Task,Do."], "tasks.txt:3: 'B Task' is not a name"),
        ("mobileworld", ['{"template": "ATask"}', "BTask,Do."], "tasks.txt:2: Invalid JSON"),
        ("mobileworld", ['{"template": "A", "seed": 3}'], "tasks.txt:1: .*by name; leave params and seed out"),
        ("mobileworld", ['{"template": "A", "params": {"a": "b"}}'], "tasks.txt:1: .*leave params and seed out"),
        ("mobileworld", ['{"template": "A", "suite": "b"}'], "tasks.txt:1: suite is 'b'; .*have that suite"),
        ("mobileworld", ['{"tempalte": "A"}'], "tasks.txt:1: template: Field required"),
        ("mobileworld", ["# nothing"], "tasks.txt has no task: write one per line, such as OpenFlightModeTask"),
        ("mobileworld", ["name,goal"], "tasks.txt has no task"),
        ("osworld", ['{"domain": "a", "example_id": "1"}'] * 2, "tasks.txt:2: the same task as in line 1"),
        ("osworld", ['{"domain": "a"}'], "tasks.txt:1: example_id is None; a line looks like {\"domain\""),
        ("osworld", ['{"domain": "a/b", "example_id": "1"}'], "tasks.txt:1: domain is 'a/b'"),
        ("osworld", ['{"domain": 3, "example_id": "1"}'], "tasks.txt:1: domain is 3"),
        ("osworld", ['{"domain": "a", "example_id": "1", "vm": "x"}'], "tasks.txt:1: 'vm' is unknown beside domain"),
        ("osworld", ["chrome/1"], "tasks.txt:1: Invalid JSON"),
        ("osworld", ["[1]"], "tasks.txt:1: .1. is not an object"),
        ("osworld", ["[" * 5000], "tasks.txt:1: Invalid JSON"),
        ("adb", ["QQ,Open it"], "tasks.txt:1: 'QQ,Open it' is not JSON.*verifier ignored"),
        ("adb", ['{"template": "x", "goal": "Do."}'], "tasks.txt:1: nothing judges it: give params.check"),
        ("adb", ['{"template": "x", "params": {"check": "true"}}'], "tasks.txt:1: it has no goal"),
        ("adb", ['{"template": "x", "goal": "Do.", "params": {"chek": "true"}}'], "params.chek is unknown"),
        ("adb", ['{"template": "x", "goal": "Do.", "params": {"check": "x", "expect": "("}}'], "is not a regular"),
    ],
)  # fmt: skip
def test_a_broken_line_of_another_format_names_the_line_and_why(protocol, lines, words, tmp_path):
    with pytest.raises(TaskError, match=words):
        listed(tmp_path, protocol, "\n".join(lines))


@pytest.mark.parametrize("protocol", ["tapforge", "mobileworld", "androidworld", "osworld", "androidlab", "adb"])
def test_a_file_of_anything_is_read_or_an_error_that_names_its_line(protocol, tmp_path):
    rng = random.Random(protocol)
    words = ['{"template": "A"', '"domain": "a"', ', "seed": ', "name,goal", "1e999", "NaN", "null", "A"]
    parts = [*words, "}", "[", ",", '"', "\n", "é", " ", "#", "\x00", "\u2028"]
    for _ in range(400):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(12)))
        try:
            assert listed(tmp_path, protocol, text)
        except TaskError as error:
            assert "tasks.txt" in str(error) and len(str(error)) < 2000
