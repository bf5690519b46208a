"""What a run is measured on, and whether it practised that: in the plan and in the summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapforge_api import TrainingRun, load
from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Task
from tapforge_trainer.placement.machine import Machine
from tapforge_trainer.run.assembly import ConfigurationError, inspect
from tapforge_trainer.run.plan import plan, render
from tapforge_trainer.run.report import summarize
from tapforge_trainer.tasks.contamination import contamination
from tapforge_trainer.tasks.selection import evaluation_tasks, training_tasks
from tapforge_trainer.telemetry.progress import Progress

HEAD = "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: x}\n"
MAIL = Task(suite="s", template="open", params={"app": "mail"}, seed=1, goal="Open the mail app.")


def run(*overrides: str) -> TrainingRun:
    return load(HEAD, overrides)


def changed(**fields: Any) -> Task:
    return MAIL.model_copy(update=fields)


@pytest.mark.parametrize(
    ("measured", "shared"),
    [
        (MAIL, (1, 1, 1)),
        (changed(seed=2), (0, 1, 1)),
        (changed(seed=2, goal="Start mail."), (0, 0, 1)),
        (changed(template="start", params={}, goal="  open the MAIL app. "), (0, 1, 0)),
        (changed(suite="other", goal=""), (0, 0, 0)),
        (changed(params={"app": "clock"}, goal="Open the clock app."), (0, 0, 0)),
        # Tasks of others often have a name and a goal, and no parameters.
        (changed(template="free", params={}, goal="Send a mail."), (0, 0, 0)),
    ],
)
def test_what_two_tasks_share(measured: Task, shared: tuple[int, int, int]) -> None:
    free = Task(suite="s", template="free", goal="Call somebody.")
    found = contamination([measured, measured], [MAIL, free, Task(suite="s", template="silent")])
    assert (found.same_task, found.same_goal, found.same_parameters) == shared
    assert (found.measured, found.practised) == (1, 3)
    assert found.clean is not any(shared)
    assert found.clean or measured.key in str(found)


def write(path: Path, split: str, count: int, seed: int = 0) -> list[Task]:
    tasks = [catalog.tasks("quickstart", split).sample(seed, number) for number in range(count)]
    path.write_text("\n".join(task.model_dump_json() for task in tasks) + "\n")
    return tasks


def summary_of(measured: TrainingRun, drawn: int) -> dict[str, Any]:
    nothing: dict[str, Any] = {"before": {}, "after": {}, "baselines": {}}
    progress = Progress(tasks=drawn)
    return summarize(measured, progress, seconds_total=1.0, machine=Machine(2, 0), **nothing)["held_out"]


def test_a_run_with_a_task_file_is_measured_on_another_one(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train", "train", 20), write(tmp_path / "test", "test", 12)
    apart = run(f"tasks.file={tmp_path / 'train'}", f"evaluation.tasks.file={tmp_path / 'test'}")
    assert {task.key for task in evaluation_tasks(apart).tasks} == {task.key for task in test}
    assert training_tasks(apart).sample(0, 3) in train
    p = plan(apart, inspect(apart, tmp_path / "runs"))
    assert p.notes == () and p.held_out == "none of 12 measured tasks is among 20 that are practised"
    assert (p.evaluation_episodes, f"the tasks in {tmp_path / 'test'}, 12 tasks" in render(p)) == (24, True)
    assert summary_of(apart, 20)["held_out"] == p.held_out


def test_measuring_on_what_is_practised_is_said(tmp_path: Path) -> None:
    write(tmp_path / "train", "train", 20)
    same = run(f"tasks.file={tmp_path / 'train'}")
    p = plan(same, inspect(same, tmp_path / "runs"))
    assert len(p.notes) == 1 and "of 20 measured tasks 20 are practised" in p.notes[0]
    held_out = summary_of(same, 40)
    assert held_out["held_out"].startswith("nothing: of 20 measured tasks 20 are practised")
    assert (held_out["tasks"], held_out["practised"], held_out["same_task"]) == (20, 20, 20)
    # What was not drawn yet was not practised.
    assert summary_of(same, 5)["same_task"] == 5


def test_a_summary_is_written_though_the_imitated_data_set_is_gone(tmp_path: Path) -> None:
    gone = run(f"warmStart.data.path={tmp_path / 'gone'}")
    assert summary_of(gone, 5)["held_out"].startswith(f"not known: {tmp_path / 'gone'} has no data.json")


def test_a_file_that_holds_words_of_the_suite_that_is_practised(tmp_path: Path) -> None:
    write(tmp_path / "test", "train", 30, seed=5)
    other = run("evaluation.tasks.suite=null", f"evaluation.tasks.file={tmp_path / 'test'}", "stop.maxUpdates=50")
    (note,) = plan(other, inspect(other, tmp_path / "runs")).notes
    assert "have the words of a practised one" in note and "template and parameters" in note


def test_a_suite_is_measured_on_its_own_held_out_part(tmp_path: Path) -> None:
    p = plan(run(), inspect(run(), tmp_path))
    assert p.notes == () and p.held_out == "none of 200 measured tasks is among 1,600 that are practised"
    other = run("evaluation.tasks={suite: standard, split: validation}", "tasks.templates=[open]")
    assert {task.suite for task in evaluation_tasks(other).tasks} == {"standard"}
    assert "suite standard, split validation, 200 tasks" in render(plan(other, inspect(other, tmp_path)))
    demonstrated = run("warmStart={demonstrations: 100}", "evaluation.tasks.split=train", "stop.maxUpdates=1")
    assert "such as quickstart/" in plan(demonstrated, inspect(demonstrated, tmp_path)).notes[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("evaluation.tasks.file=none", "spec.evaluation.tasks.file: the task file none can't be read"),
        (
            "evaluation.tasks.suite=standrad",
            "spec.evaluation.tasks: unknown suite: 'standrad'; did you mean",
        ),
        ("evaluation.tasks={file: FOREIGN}", "spec.evaluation.tasks.file: FOREIGN: aitw/free?#0: unknown suite"),
    ],
)
def test_what_can_not_be_measured_on_is_said_before_the_start(tmp_path: Path, override: str, words: str) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text('{"suite": "aitw", "template": "free", "goal": "Call somebody."}\n')
    wrong = run(override.replace("FOREIGN", str(foreign)))
    with pytest.raises(ConfigurationError) as refused:
        inspect(wrong, tmp_path / "runs")
    assert words.replace("FOREIGN", str(foreign)) in str(refused.value)


def test_pages_of_miniwob_are_chosen_and_no_measured_one_is_practised() -> None:
    spec = run(
        "spec.environment.source.processes.environment=miniwob",
        "spec.environment.screen={width: 160, height: 210}",
        "spec.tasks={suite: miniwob, templates: [click-test, click-dialog]}",
        "spec.evaluation.episodes=8",
    )
    files = inspect(spec, Path("runs"))
    assert files.contamination is not None
    assert files.contamination.clean
    assert {t.template for t in evaluation_tasks(spec).tasks} == {"click-test", "click-dialog"}
    assert training_tasks(spec).sample(1, 0).suite == "miniwob"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("spec.tasks.suite=miniwob",), "suite miniwob runs with .*environment miniwob"),
        (
            (
                "spec.environment.source.processes.environment=miniwob",
                "spec.environment.screen={width: 160, height: 210}",
            ),
            "suite quickstart runs with .*environment phone",
        ),
        (("spec.tasks={suite: miniwob, templates: [click-tset]}",), "did you mean 'click-test'"),
        (("spec.tasks.suite=minowob",), "unknown suite: 'minowob'; did you mean 'miniwob'"),
        (("spec.tasks={suite: miniwob, templates: [navigate-tree]}",), "no task in split 'train'"),
    ],
)
def test_a_suite_that_does_not_run_there_is_an_error(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        inspect(run(*overrides), Path("runs"))


def test_a_file_of_pages_is_read_by_what_pages_there_are(tmp_path: Path) -> None:
    listed = tmp_path / "tasks.jsonl"
    listed.write_text('{"suite": "miniwob", "template": "click-tset"}\n')
    spec = run(
        "spec.environment.source.processes.environment=miniwob",
        "spec.environment.screen={width: 160, height: 210}",
        f"spec.tasks.file={listed}",
    )
    with pytest.raises(ConfigurationError, match="did you mean 'click-test'"):
        inspect(spec, tmp_path)


def test_servers_of_others_are_given_tasks_by_files_alone(tmp_path: Path) -> None:
    listed = tmp_path / "tasks.txt"
    listed.write_text("OpenFlightModeTask\nSendWaiverTask,Send the waiver.\n")
    there = ("spec.environment.protocol=mobileworld", "spec.environment.source={urls: {list: ['http://127.0.0.1:1']}}")
    for more, words in (
        ((), "spec.tasks.file: with protocol mobileworld tasks come from a file"),
        (
            (f"spec.tasks.file={listed}", "spec.evaluation.tasks.suite=quickstart"),
            "spec.evaluation.tasks.suite: with protocol mobileworld tasks come from a file",
        ),
    ):
        with pytest.raises(ConfigurationError, match=words):
            inspect(run(*there, *more), tmp_path)
    spec = run(*there, f"spec.tasks.file={listed}")
    assert plan(spec, inspect(spec, tmp_path)).tasks == 2
    assert {(t.suite, t.threshold) for t in evaluation_tasks(spec).tasks} == {("mobileworld", 0.99)}
    listed.write_text("OpenFlightModeTask\ntwo words\n")
    with pytest.raises(ConfigurationError, match=r"tasks.txt:2: 'two words' is not a name of a task"):
        inspect(spec, tmp_path)
