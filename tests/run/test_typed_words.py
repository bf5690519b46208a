"""What a newcomer types otherwise than it is meant: the answer names the thing, the value and what to type."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from whole import SPEC

from tapforge_api import KINDS
from tapforge_api.wording import RULES, number_meant, rule_of
from tapforge_envs.phone import catalog
from tapforge_trainer.cli.main import cli
from tapforge_trainer.cli.reading import _MEANT
from tapforge_trainer.cli.waiting import saying
from tapforge_trainer.tasks import files
from tapforge_trainer.tasks.files import read_task
from tapforge_trainer.tasks.source import FixedTasks, at_most


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(SPEC)
    return tmp_path


def typed(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def planned(*settings: str) -> tuple[int, str]:
    return typed("plan", "-f", "tiny.yaml", *(word for one in settings for word in ("--set", one)))


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "meant"),
    [("train", "run"), ("Train", "run"), ("evaluate", "eval"), ("play", "env play"), ("replay", "view")],
)
def test_a_command_that_is_called_otherwise_elsewhere(word: str, meant: str) -> None:
    code, said = typed(word, "-f", "tiny.yaml")
    assert code == 2 and f"No such command '{word}'. Did you mean `cli {meant}`?" in said


def test_a_misspelt_command_is_clicks_own_error() -> None:
    code, said = typed("plann")
    assert code == 2 and "'plan'?" in said


def test_every_command_that_is_meant_exists() -> None:
    for word, meant in _MEANT.items():
        command: click.Command = cli
        assert word not in cli.commands
        for name in (part for part in meant.split() if not part.startswith("-")):
            assert isinstance(command, click.Group)
            command = command.commands[name]


# --- numbers and names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "meant"),
    [
        ("stop.maxSeconds", "10m", "in seconds, without a unit: 600"),
        ("stop.maxSeconds", "1.5h", "in seconds, without a unit: 5400"),
        ("stop.maxSeconds", "2 days", "in seconds, without a unit: 172800"),
        ("stop.maxSeconds", '"600"', "a number of seconds without quotes: 600"),
        ("stop.maxSeconds", "10 parsecs", "in seconds, without a unit"),
        ("environment.deadlines.stepSeconds", "500ms", "in seconds, without a unit: 0.5"),
        ("recording.maxGiB", "1Gi", "in GiB, without a unit: 1"),
        ("recording.maxGiB", "512MiB", "in GiB, without a unit: 0.5"),
        ("engine.kvCacheMiB", "1Gi", "in MiB, without a unit: 1024"),
        ("engine.kvCacheMiB", "4GB", "in MiB, without a unit: 3814.7"),
        ("model.contextTokens", "8k", "written out: 8000"),
        ("model.contextTokens", '"8,192"', "a number without quotes and commas: 8192"),
        ("engine.gpuMemoryShare", "90%", "a share of 1: 0.9"),
    ],
)
def test_a_number_with_a_unit_is_answered_in_the_fields_own(field: str, value: str, meant: str) -> None:
    code, said = planned(f"spec.{field}={value}")
    assert code == 2 and f"spec.{field}: " in said and f"; write it {meant}\n" in said


@pytest.mark.parametrize("text", ["", "many", "1,2", "1.2.3", "0x10", "5 apples", "-"])
def test_what_means_no_number_is_not_guessed(text: str) -> None:
    assert number_meant("count", text) == ""


def test_a_name_is_answered_with_its_rule() -> None:
    code, said = planned("metadata.name=MyRun")
    assert code == 2 and "metadata.name: should be lower-case letters, digits and -" in said
    assert 'such as my-run, not "MyRun"' in said
    code, said = planned("model.source.huggingFace.repo=Qwen3-VL")
    assert code == 2 and 'should be OWNER/NAME, such as Qwen/Qwen3-VL-8B-Instruct, not "Qwen3-VL"' in said


def test_every_form_of_the_api_has_words_and_an_example_that_has_it() -> None:
    import re

    found = {pattern for kind in KINDS.values() for pattern in _patterns(kind.model_json_schema())}
    assert len(found) > 12 and found <= RULES.keys()
    for pattern, (_, example) in RULES.items():
        assert re.fullmatch(pattern.removeprefix("^").removesuffix("$"), example.strip('"')), pattern
    assert rule_of("^a+$") == "text of the form ^a+$"  # another package's


def _patterns(schema: Any) -> Iterator[str]:
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _patterns(part)
    if isinstance(schema, dict) and isinstance(schema.get("pattern"), str):
        yield schema["pattern"]


# --- tasks and places -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["tasks.suite=quickstrat", "tasks.templates=[opne]"])
def test_an_unknown_suite_or_template_is_said_once(setting: str) -> None:
    code, said = planned(f"spec.{setting}")
    assert code == 2 and said.count("unknown ") == 1 and "spec.tasks: unknown" in said


def test_two_unknown_suites_are_two_errors() -> None:
    code, said = planned("spec.tasks.suite=quickstrat", "spec.evaluation.tasks.suite=standrd")
    assert code == 2 and "spec.tasks: unknown suite: 'quickstrat'" in said
    assert "spec.evaluation.tasks: unknown suite: 'standrd'" in said


def test_the_example_of_a_task_exists() -> None:
    task = read_task(files._EXAMPLE, "tapforge", "example")
    assert catalog.template_of(task).name == task.template
    for protocol, example in files._EXAMPLES.items():
        assert read_task(example.partition(" or ")[0], protocol, "example").template


def test_a_million_tasks_are_not_drawn_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    sample = catalog.TaskSet.sample

    def counted(self: Any, seed: int, index: int) -> Any:
        drawn.append(index)
        return sample(self, seed, index)

    monkeypatch.setattr(catalog.TaskSet, "sample", counted)
    code, said = planned("spec.evaluation.episodes=100000")
    assert code == 0 and "100,000 tasks" in said and len(drawn) < 50_000


def test_a_list_is_passed_through_once_for_all_of_its_tasks() -> None:
    tasks = FixedTasks(tuple(catalog.tasks("quickstart", "test").sample(0, index) for index in range(3)))
    found = at_most(tasks, 0, 1_000_000_000)
    assert {task.key for task in found.tasks} == {task.key for task in tasks.tasks}


@pytest.mark.parametrize(
    ("flag", "why"), [(os.ST_RDONLY, "is on a read-only file system; name a folder"), (0, "no permission in ")]
)
def test_why_a_folder_can_not_be_written(monkeypatch: pytest.MonkeyPatch, flag: int, why: str) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=flag))
    code, said = typed("plan", "-f", "tiny.yaml", "--runs", "r")
    assert code == 2 and "--runs: r/tiny can't be written: " in said and why in said


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_command_that_takes_long_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    with saying("asking", after=0.0, always=True):
        deadline = time.monotonic() + 60
        while not (said := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said == "asking ...\n"


def test_what_is_quick_or_piped_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with saying("asking", after=600.0, always=True), saying("asking", after=0.0):
        pass
    code, said = typed("plan", "-f", "tiny.yaml", "--output", "json")
    assert code == 0 and json.loads(said)["name"] == "tiny"
    assert capsys.readouterr().err == ""
