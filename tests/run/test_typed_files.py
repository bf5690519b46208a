"""How files and options are read that a person types: one way for all commands, through the command's own entry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from whole import SPEC

from tapforge_api import SpecError, dump_set, load
from tapforge_trainer.cli.main import cli
from tapforge_trainer.cli.reading import LOCAL_PATH
from tapforge_trainer.run.folder import check_same, read_spec, write_spec
from tapforge_trainer.run.named_paths import named_paths, with_named_paths
from tapforge_trainer.storage.local_path import PathError, expanded

#: every command that reads a run's file, as far as it gets without a cluster or a GPU
WITH_FILE = [("plan",), ("plan", "--memory"), ("run",), ("sft",), ("eval",), ("doctor",), ("agent", "show")]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with good.yaml in it; its folder `home` is the home folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "good.yaml").write_text(SPEC)
    return tmp_path


def typed(*words: str, stdin: str | bytes = "") -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(words), input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize("command", WITH_FILE, ids=" ".join)
@pytest.mark.parametrize(
    ("stdin", "words"),
    [
        pytest.param("", "standard input: 1 problem\n  is empty", id="nothing"),
        pytest.param("good.yaml", "standard input: 1 problem\n  line 1: holds no object but str", id="a file's name"),
        pytest.param(b"a: \xe4\n", "standard input: 1 problem\n  is not UTF-8 text", id="no text"),
        pytest.param("spec: [", "standard input: 1 problem\n  line 1", id="no YAML"),
    ],
)
def test_standard_input_is_a_text_whatever_it_says(command: tuple[str, ...], stdin: str | bytes, words: str) -> None:
    code, said = typed(*command, "-f", "-", stdin=stdin)
    assert code == 2 and words in said


def test_a_run_from_standard_input() -> None:
    code, said = typed("plan", "-f", "-", stdin=SPEC)
    assert code == 0 and said == typed("plan", "-f", "good.yaml")[1]


@pytest.mark.parametrize("command", WITH_FILE, ids=" ".join)
def test_a_missing_file_is_looked_for_in_a_folder_that_is_named(here: Path, command: tuple[str, ...]) -> None:
    code, said = typed(*command, "-f", "nope.yaml")
    assert (
        code == 2 and f"nope.yaml: 1 problem\n  can't be read: No such file or directory (looked for in {here})" in said
    )


@pytest.mark.parametrize("command", [*WITH_FILE[:-1], ("cluster", "submit")], ids=" ".join)
def test_a_file_without_f(command: tuple[str, ...]) -> None:
    code, said = typed(*command, "good.yaml", "--set", "spec.seed=1")
    assert code == 2 and "name the file good.yaml with -f: " in said
    assert f"tapforge {' '.join(command[:1])}" in said.replace("cli ", "tapforge ")
    assert "-f good.yaml" in said and "--set spec.seed=1" in said


@pytest.mark.parametrize(
    "words",
    [("plan", "-f", "good.yaml", "more.yaml"), ("plan", "--runs", "x.yaml"), ("plan",)],
    ids=["two files", "a value", "none"],
)
def test_what_is_no_file_without_f_is_clicks_own_error(words: tuple[str, ...]) -> None:
    code, said = typed(*words)
    assert code == 2 and "name the file" not in said


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a/b", "a/b"),
        (".", "."),
        ("~", "{home}"),
        ("~/a", "{home}/a"),
        ("a/~b", "a/~b"),
        ("$A/b", "aaa/b"),
        ("${A}b/$A", "aaab/aaa"),
        ("costs/$5", "costs/$5"),
        ("a$", "a$"),
        ("$(A)", "$(A)"),
        ("~/$A", "{home}/aaa"),
        ("a$$A", "a$A"),
        ("$$$A", "$aaa"),
    ],
)
def test_what_a_path_means(here: Path, text: str, found: str) -> None:
    assert expanded(text, {"A": "aaa"}) == found.replace("{home}", str(here / "home"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the path is empty"),
        ("  ", "the path is empty"),
        ("$B/x", "the environment variable B of '$B/x' is not set"),
        ("${EMPTY}/x", "the environment variable EMPTY of '${EMPTY}/x' is empty"),
        ("~no-such-user/x", "there is no home folder for '~no-such-user/x'"),
    ],
)
def test_a_path_that_means_nothing_is_refused(text: str, why: str) -> None:
    with pytest.raises(PathError) as caught:
        expanded(text, {"EMPTY": ""})
    assert str(caught.value).startswith(why)


#: sets each field of a run's spec that names a file or folder
NAMED = {
    "spec.model.source.path.folder": ["model.source.path.folder={}"],
    "spec.model.adapter.promptFile": ["model.adapter.promptFile={}"],
    "spec.environment.source.urls.file": ["environment.source.urls.file={}"],
    "spec.tasks.file": ["tasks.file={}"],
    "spec.evaluation.tasks.file": ["evaluation.tasks.file={}"],
    "spec.checkpoints.directory": ["checkpoints.directory={}"],
    "spec.checkpoints.resumeFrom": ["checkpoints.resumeFrom={}"],
    "spec.logging.tensorboard.directory": ["logging.tensorboard.directory={}"],
    "spec.stages[0].tasks.file": ["stages=[{{tasks: {{file: '{}'}}, stop: {{maxUpdates: 1}}}}]"],
    "spec.rewards.streams[0].judge.promptFile": [
        "rewards.streams=[{{name: judge, judge: {{promptFile: '{}', models: [{{url: 'http://a', model: m}}]}}}}]"
    ],
}
BARE = "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: x}\n"


def test_every_path_of_a_run_is_in_the_table() -> None:
    every = load(BARE, [one.format("a") for settings in NAMED.values() for one in settings])
    assert {field for field, _ in named_paths(every)} == NAMED.keys()


@pytest.mark.parametrize("field", NAMED)
def test_a_home_folder_and_variables_in_a_runs_file(here: Path, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    for written, meant in [("~/a", f"{here}/home/a"), ("${SCRATCH}/a", "/scratch/a"), ("$SCRATCH/a", "/scratch/a")]:
        run = with_named_paths(load(BARE, [one.format(written) for one in NAMED[field]]), "x.yaml")
        assert list(named_paths(run)) == [(field, meant)]
    code, said = typed("plan", "-f", "good.yaml", "--set", NAMED[field][0].format("${UNSET}/a"))
    assert code == 2 and "the environment variable UNSET" in said
    assert f"good.yaml: 1 problem\n  {field}: " in said


def test_what_a_run_wrote_down_is_not_read_a_second_time(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value of a variable may hold a dollar sign, and another process may have other variables."""
    monkeypatch.setenv("SCRATCH", "/scratch/$odd")
    run = with_named_paths(load(BARE, ["tasks.file=$SCRATCH/a"]), "x.yaml")
    write_spec(here, run)
    monkeypatch.delenv("SCRATCH")
    again = read_spec(here)
    assert again.spec.tasks.file == run.spec.tasks.file == "/scratch/$odd/a"
    check_same(dump_set(run), again, "a checkpoint")


def test_a_run_of_an_earlier_release_kept_its_home_folder_unread(here: Path) -> None:
    (here / "spec.yaml").write_text(BARE + "spec: {tasks: {file: ~/a}}\n")
    assert read_spec(here).spec.tasks.file == f"{here}/home/a"


def test_a_file_for_a_cluster_may_name_what_is_in_its_pods_only() -> None:
    cluster = "cluster={image: trainer}"
    here = load(BARE, ["model.source.path.folder=$ONLY_THERE/model"])
    with pytest.raises(SpecError, match="ONLY_THERE"):
        with_named_paths(here, "x.yaml")
    there = load(BARE, ["model.source.path.folder=$ONLY_THERE/model", cluster])
    kept = with_named_paths(there, "x.yaml", elsewhere=True)
    assert list(named_paths(kept)) == [("spec.model.source.path.folder", "$ONLY_THERE/model")]


def test_a_uri_is_no_path() -> None:
    run = load(BARE, ["checkpoints.resumeFrom=s3://b/$HOME"])
    assert with_named_paths(run, "x") is not None and not list(named_paths(run))


@pytest.mark.parametrize("field", ["tasks.file", "environment.source.urls.file", "model.source.path.folder"])
def test_an_error_says_what_a_relative_path_is_relative_to(here: Path, field: str) -> None:
    code, said = typed("plan", "-f", "good.yaml", "--set", f"{field}=a/b", "--set", "spec.warmStart=null")
    assert code == 2 and f"the working directory, which is {here}, not beside the run's file" in said
    code, said = typed("plan", "-f", "good.yaml", "--set", f"{field}=/a/b", "--set", "spec.warmStart=null")
    assert code == 2 and "working directory" not in said


def test_a_file_that_was_found_is_looked_for_nowhere_else(here: Path) -> None:
    (here / "tasks.csv").write_text("wifi,Turn Wi-Fi off.\n")
    words = ("tasks={file: tasks.csv}", "environment={protocol: adb, source: {urls: {list: [auto]}}}", "warmStart=null")
    code, said = typed("plan", "-f", "good.yaml", *(word for one in words for word in ("--set", f"spec.{one}")))
    assert code == 2 and "tasks.csv:1: 'wifi,Turn Wi-Fi off.' is not JSON" in said and "verifier ignored" in said
    assert "working directory" not in said


def _options() -> Iterator[tuple[str, click.Parameter]]:
    def below(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, click.Parameter]]:
        yield from ((" ".join(words), param) for param in command.params)
        if isinstance(command, click.Group):
            for name, child in command.commands.items():
                yield from below(child, (*words, name))

    return below(cli, ())


def test_every_option_that_names_a_file_is_read_the_same_way() -> None:
    paths = {f"{command} {param.name}" for command, param in _options() if param.type is LOCAL_PATH}
    assert not [param for _, param in _options() if isinstance(param.type, click.Path | click.File)]
    assert len(paths) > 25 and {"view folders", "cluster fetch to", "env serve tasks", "phone serve adb_keys"} <= paths


def test_options_that_name_files(here: Path) -> None:
    code, said = typed("plan", "-f", "good.yaml", "--runs=~/runs")
    assert code == 0 and f"{here}/home/runs/tiny" in said
    code, said = typed("plan", "-f", "good.yaml", "--runs", "")
    assert code == 2 and "'--runs': the path is empty" in said
    code, said = typed("plan", "-f", "")
    assert code == 2 and "the path is empty" in said
    code, said = typed("env", "play", "http://127.0.0.1:1", "--policy", "$UNSET/x")
    assert code != 0 and "the environment variable UNSET" in said


# --- --set and --output -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["", " ", "# 3"])
def test_an_empty_value_is_no_default(value: str) -> None:
    code, said = typed("plan", "-f", "good.yaml", "--set", f"spec.seed={value}")
    assert code == 2 and "has no value" in said and "or null" in said


def test_a_plan_for_programs() -> None:
    code, said = typed("plan", "-f", "good.yaml", "--output", "json")
    found = json.loads(said)
    assert code == 0 and (found["name"], found["seed"]) == ("tiny", 3)
    assert found["evaluation_episodes"] > 0 and isinstance(found["notes"], list)


@pytest.mark.parametrize(
    "words",
    [("--gpu-memory", "H100"), ("--config", "x"), ("--trace",), ("--disk-rate", "9"), ("--tokens-per-second", "9")],
    ids=lambda words: words[0],
)
def test_an_option_without_the_one_that_it_is_for(words: tuple[str, ...]) -> None:
    code, said = typed("plan", "-f", "good.yaml", *words)
    assert code == 2 and f"{words[0]} is about memory" in said and "add --memory" in said


def test_an_error_of_a_stage_says_it_too(here: Path) -> None:
    stages = "spec.stages=[{{tasks: {{file: {}}}, stop: {{maxUpdates: 1}}}}]"
    code, said = typed("plan", "-f", "good.yaml", "--set", stages.format("a/b"))
    assert code == 2 and f"the working directory, which is {here}, not beside the run's file" in said
    code, said = typed("plan", "-f", "good.yaml", "--set", stages.format("/a/b"))
    assert code == 2 and "working directory" not in said
