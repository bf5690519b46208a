"""`tapforge tasks walk`, as it is typed: the file that a run reads, gone on with after a kill."""

import json

import pytest
from click.testing import CliRunner

from tapforge_envs.phone import catalog
from tapforge_trainer.cli.main import cli
from tapforge_trainer.tasks.contamination import contamination
from tapforge_trainer.tasks.files import read_tasks
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


def test_what_has_no_more_tasks_ends(tmp_path):
    path = tmp_path / "few.jsonl"
    result = type_walk(path, "--count", "900", "--app", "notes", "--operations", "1", "--rollouts", "8")
    assert result.exit_code == 2 and "made no task that" in result.stderr
    assert 1 <= len(read_tasks(path).tasks) <= 3
