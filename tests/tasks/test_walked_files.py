"""`tapforge tasks walk`, as it is typed: the file that a run reads, gone on with after a kill."""

import json

import pytest
from click.testing import CliRunner

from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Task
from tapforge_trainer.cli.main import cli
from tapforge_trainer.tasks.contamination import contamination
from tapforge_trainer.tasks.files import read_tasks
from tapforge_trainer.tasks.lines import line_of
from tapforge_trainer.tasks.source import at_most


def type_walk(path, *options):
    result = CliRunner().invoke(cli, ["tasks", "walk", "-o", str(path), "--json", *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("walked") / "tasks.jsonl"
    result = type_walk(path, "--count", "12", "--seed", "7")
    assert result.exit_code == 0, result.output
    return path, json.loads(result.stdout)


def test_the_file_has_tasks_that_a_run_reads_and_none_that_the_suite_holds_out(whole):
    path, found = whole
    tasks = read_tasks(path).tasks
    assert len(tasks) == found["tasks"] == 12
    assert found["false_verdicts"] == 0 and found["probes"] > 150 and found["rollouts_judged"] >= 12 * 64
    assert len({task.goal for task in tasks}) == 12
    held_out = at_most(catalog.tasks("quickstart", "test"), 0, 300).tasks
    assert contamination(held_out, tasks).clean
    about = [json.loads(line)["about"] for line in path.read_text().splitlines()]
    assert all(one["by"] == "walk" and one["apps"] and one["number"] >= 0 for one in about)


def test_a_call_that_was_cut_off_anywhere_ends_with_the_same_file(whole, tmp_path):
    path, _ = whole
    data = path.read_bytes()
    lines = data.split(b"\n")
    for cut in (0, len(lines[0]) // 2, len(lines[0]) + 1, len(b"\n".join(lines[:5])) + 30, len(data) - 1):
        again = tmp_path / f"cut-{cut}.jsonl"
        again.write_bytes(data[:cut])
        assert type_walk(again, "--count", "12", "--seed", "7").exit_code == 0
        assert again.read_bytes() == data


def test_what_is_wrong_is_named(whole, tmp_path):
    path, _ = whole
    for options, words in (
        (["--count", "30", "--seed", "8"], "was begun with seed 7"),
        (["--seed", "7", "--suite", "standard"], "was begun with suite quickstart"),
        (["--app", "clocks"], "no walk uses the app 'clocks'"),
    ):
        result = type_walk(path, *options)
        assert result.exit_code == 2 and words in result.stderr, result.output
    result = type_walk(tmp_path / "nowhere" / "tasks.jsonl")
    assert result.exit_code == 2 and "doesn't exist" in result.stderr
    other = tmp_path / "other.jsonl"
    other.write_text('{"suite": "quickstart", "template": "open", "params": {"app": "mail"}, "seed": 7}\n')
    before = other.read_bytes()
    result = type_walk(other)
    assert result.exit_code == 2 and "other.jsonl:1" in result.stderr and other.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        "a text without a line end",
        '{"suite": "quickstart", "template": "open", "params": {"app": "mail"}, "seed": 7}',
        '{"template": "OpenFlightMo',
    ],
)
def test_a_file_that_no_such_command_wrote_stays_as_it_is(tmp_path, text):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    result = type_walk(path, "--count", "1")
    assert result.exit_code == 2 and "mine.txt:1" in result.stderr and path.read_text() == text


@pytest.mark.parametrize("suite, protocol", [("mobileworld", "mobileworld"), ("osworld", "osworld"), ("adb", "adb")])
def test_a_line_is_read_as_the_task_that_it_was_written_from(tmp_path, suite, protocol):
    path = tmp_path / "tasks.jsonl"
    tasks = [
        Task(suite=suite, template=f"a{number}", goal="Do it", **values)
        for number, values in enumerate(
            ({}, {"feasible": None}, {"feasible": False}, {"threshold": 0.99, "max_steps": 50}, {"max_steps": 4})
        )
    ]
    path.write_text("".join(line_of(task, {"by": "test"}) + "\n" for task in tasks))
    assert read_tasks(path, protocol, judged=True).tasks == tuple(tasks)


def test_what_numbers_a_proposed_task_is_no_parameter_of_its():
    one, other = (
        Task(suite="standard", template="proposed-home", params={"number": "0-0"}, seed=seed, goal=goal)
        for seed, goal in ((3, "Open Mail"), (4, "Add an alarm"))
    )
    assert contamination([one], [other]).clean
    assert contamination([one], [other.model_copy(update={"goal": "open  mail"})]).same_goal == 1


def test_what_has_no_more_tasks_ends(tmp_path):
    path = tmp_path / "few.jsonl"
    result = type_walk(path, "--count", "900", "--app", "notes", "--operations", "1", "--rollouts", "8")
    assert result.exit_code == 2 and "made no task that" in result.stderr
    assert 1 <= len(read_tasks(path).tasks) <= 3
