"""The driver of an attempt up to where heavy things would start: what it says to the operator when it ends before."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_broker import NAMESPACE, Authority
from small_operator import RUN, SmallOperator

from tapforge_api import SpecError, TrainingRun, load
from tapforge_api import attempt as variables
from tapforge_api.learning import Stop
from tapforge_api.progress import Orders as Answer
from tapforge_api.rewards import Rewards
from tapforge_envs.slots.source import SlotError
from tapforge_trainer.cluster import driver
from tapforge_trainer.cluster.attempt import RunAttempt
from tapforge_trainer.cluster.driver import drive, report_killed
from tapforge_trainer.cluster.storage import Holder, RunStorageError, folder_of, newest, take_over
from tapforge_trainer.learner.checkpoint_storage import CheckpointFolder, CheckpointStore
from tapforge_trainer.run.assembly import ConfigurationError
from tapforge_trainer.run.report import holds_what_is_wanted, wanted
from tapforge_trainer.run.shutdown import StopSignal
from tapforge_trainer.telemetry.progress import Progress

SPEC = """
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: tiny, namespace: lab}
spec:
  model: {contextTokens: 256, adapter: {prompt: compact}}
  environment: {source: {urls: {list: ["%s"]}}}
  rollout: {responseTokens: 24}
  stop: {maxUpdates: 5}
"""


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def run(nobody: str) -> TrainingRun:
    return load(SPEC % nobody)


def _attempt(place: Path, number: int = 1, **more: int) -> RunAttempt:
    return RunAttempt(RUN, NAMESPACE, "uid-1", number, place / "storage" / NAMESPACE / "uid-1", **more)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator of these tests is there: it is heard and told, however long that takes."""
    monkeypatch.setattr(driver, "_FIRST_ANSWER", 240.0)
    monkeypatch.setattr(driver, "_SHORT", 240.0)


async def _drive(
    operator: SmallOperator, authority: Authority, attempt: RunAttempt, read: Callable[[], TrainingRun]
) -> int:
    return await drive(attempt, authority.access(operator.port), read, StopSignal())


def _leave_checkpoint(attempt: RunAttempt, update: int, **more: float) -> Path:
    """As if the attempt had come so far."""
    folder = take_over(attempt.storage, attempt.holder) / RUN
    root = folder / "checkpoints"
    root.mkdir(parents=True)
    driver = {"run": RUN, "uid": "uid-1", "update": update, "version": update, "episodes": 7, "success": 0.5, **more}
    document = {"format": 3, "update": update, "driver": driver}
    draft = CheckpointFolder(root).draft(update)
    CheckpointFolder(root).begin(draft, document)
    CheckpointFolder(root).publish(draft, document, {}, keep=2)
    return Path(draft.place)


# --- ends -------------------------------------------------------------------------------------------------------------


async def test_a_failure_is_told_in_the_words_that_the_person_sees(
    operator: SmallOperator, authority: Authority, run: TrainingRun, nobody: str, tmp_path: Path
) -> None:
    with pytest.raises(SlotError, match="none of the 1 phones answers") as failed:
        await _drive(operator, authority, _attempt(tmp_path), lambda: run)
    (last,) = operator.finals
    assert (last.final, last.message) == ("failed", str(failed.value))
    assert nobody in last.message


async def test_a_failure_that_is_tried_again_in_place_is_not_final(
    operator: SmallOperator, authority: Authority, run: TrainingRun, tmp_path: Path
) -> None:
    with pytest.raises(SlotError):
        await _drive(operator, authority, _attempt(tmp_path, restarts=1, restarts_left=2), lambda: run)
    assert operator.finals == []
    last = operator.reports[-1]
    assert (last.restarts, last.final) == (1, "")
    assert last.message.endswith("the driver is restarted")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metadata": {"name": "another"}}, "the run another, and this Pod of tiny"),
        ({"spec": {"tasks": {"suite": "quickstrat"}}}, "spec.tasks.*quickstrat"),
        ({"spec": {"model": {"adapter": {"name": "qwen"}}}}, "unknown agent 'qwen'"),
    ],
)
async def test_what_can_not_work_is_said_to_be_configuration(
    operator: SmallOperator, authority: Authority, tmp_path: Path, nobody: str, change: dict[str, Any], words: str
) -> None:
    document = yaml.safe_load(SPEC % nobody)

    def merge(into: dict[str, Any], what: dict[str, Any]) -> None:
        for name, value in what.items():
            if isinstance(into.get(name), dict):
                merge(into[name], value)
            else:
                into[name] = value

    merge(document, change)
    attempt = _attempt(tmp_path, restarts_left=3)
    with pytest.raises((ConfigurationError, SpecError), match=words):
        await _drive(operator, authority, attempt, lambda: load(yaml.safe_dump(document)))
    (last,) = operator.finals
    assert last.final == "configuration"


async def test_a_programming_error_is_told_too(operator: SmallOperator, authority: Authority, tmp_path: Path) -> None:
    def read() -> TrainingRun:
        raise ZeroDivisionError("by nought")

    with pytest.raises(ZeroDivisionError):
        await _drive(operator, authority, _attempt(tmp_path), read)
    (last,) = operator.finals
    assert last.final == "failed" and "ZeroDivisionError: by nought" in last.message


async def test_a_suspended_run_starts_nothing(
    operator: SmallOperator, authority: Authority, run: TrainingRun, tmp_path: Path
) -> None:
    operator.orders = Answer(stop="suspend", grace_seconds=60)
    assert await _drive(operator, authority, _attempt(tmp_path), lambda: run) == 75
    (last,) = operator.finals
    assert (last.final, last.checkpoint) == ("stopped", None)
    assert "starts from the beginning" in last.message


@pytest.mark.parametrize("who", ["the operator", "the storage", "a later start"])
async def test_an_attempt_that_is_over_ends_without_a_word(
    operator: SmallOperator, authority: Authority, run: TrainingRun, tmp_path: Path, who: str
) -> None:
    if who == "the operator":
        operator.orders = Answer(stop="superseded")
    else:
        take_over(_attempt(tmp_path).storage, Holder(2) if who == "the storage" else Holder(1, 7))
    assert await _drive(operator, authority, _attempt(tmp_path), lambda: run) == 75
    assert operator.finals == []


@pytest.mark.parametrize("later", [Holder(2), Holder(1, 8)])
async def test_what_fails_because_another_one_took_over_is_no_failure(
    operator: SmallOperator, authority: Authority, tmp_path: Path, later: Holder
) -> None:
    attempt = _attempt(tmp_path, started=7)

    def read() -> TrainingRun:
        take_over(attempt.storage, later)
        raise FileNotFoundError("checkpoints")

    assert await _drive(operator, authority, attempt, read) == 75
    assert operator.finals == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can write")
async def test_a_storage_that_can_not_be_written(
    operator: SmallOperator, authority: Authority, run: TrainingRun
) -> None:
    attempt = RunAttempt(RUN, NAMESPACE, "uid-1", 1, Path("/proc/self/storage"))
    with pytest.raises(RunStorageError):
        await _drive(operator, authority, attempt, lambda: run)
    (last,) = operator.finals
    assert last.final == "failed" and "/proc/self/storage can't be written" in last.message


def _complete(attempt: RunAttempt, run: TrainingRun) -> None:
    """Leaves what a run that is complete leaves."""
    folder = folder_of(attempt.storage, attempt.holder) / RUN
    result = {"success": 0.5, "interval": None, "episodes": 4}
    summary = {
        "success_before": {"greedy": result},
        "success_after": {"greedy": result},
        "baselines": {},
        "ended_after": "5 updates",
        **{f"seconds_{part}": 1.0 for part in ("total", "start", "sft", "rl")},
        **wanted(run),
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "export").mkdir()
    (folder / "export" / "config.json").write_text("{}")


async def test_a_run_that_is_complete_says_so_again(
    operator: SmallOperator, authority: Authority, run: TrainingRun, tmp_path: Path
) -> None:
    """Its driver may have been killed before the operator had the last report."""
    place = _leave_checkpoint(_attempt(tmp_path), 5)
    _complete(_attempt(tmp_path), run)
    assert await _drive(operator, authority, _attempt(tmp_path, 2), lambda: run) == 0
    (last,) = operator.finals
    assert (last.final, last.attempt, last.advance.update, last.advance.max_updates) == ("complete", 2, 5, 5)
    assert last.checkpoint is not None
    assert last.checkpoint.path == str(
        folder_of(_attempt(tmp_path).storage, Holder(2))
        / place.relative_to(folder_of(_attempt(tmp_path).storage, Holder(1)))
    )


def test_a_summary_of_an_earlier_release_is_complete_but_not_one_of_another_end(run: TrainingRun) -> None:
    asked = wanted(run)
    before = {
        **asked,
        "evaluation": {k: v for k, v in asked["evaluation"].items() if k not in ("judged", "otherTemplates")},
    }
    assert before["evaluation"] != asked["evaluation"] and holds_what_is_wanted(before, run)
    assert not holds_what_is_wanted({**asked, "stop": {**asked["stop"], "maxUpdates": 99}}, run)
    assert not holds_what_is_wanted({**asked, "evaluation": {**asked["evaluation"], "gone": 1}}, run)
    assert not holds_what_is_wanted({"stop": asked["stop"]}, run)


async def test_an_end_that_was_moved_counts_from_the_first_moment_on(
    operator: SmallOperator, authority: Authority, run: TrainingRun, tmp_path: Path
) -> None:
    _leave_checkpoint(_attempt(tmp_path), 5)
    _complete(_attempt(tmp_path), run)
    operator.orders = Answer(limits=Stop(max_updates=9))
    with pytest.raises(SlotError, match="none of the 1 phones"):  # it is not complete any more: it looks for phones
        await _drive(operator, authority, _attempt(tmp_path, 2), lambda: run)
    (last,) = operator.finals
    assert last.advance.max_updates == 9


async def test_a_run_whose_judges_have_spent_their_budget_starts_nothing_until_that_is_raised(
    operator: SmallOperator, authority: Authority, run: TrainingRun, tmp_path: Path
) -> None:
    """The file is that of the start; what was edited since comes with the first answer."""
    stop = Stop(max_updates=5, judge_tokens=1000)
    model = {"url": "http://127.0.0.1:9/v1", "model": "m"}
    judged = Rewards.model_validate({"streams": [{"name": "judge", "judge": {"prompt": "task", "models": [model]}}]})
    limited = run.model_copy(update={"spec": run.spec.model_copy(update={"stop": stop, "rewards": judged})})
    _leave_checkpoint(_attempt(tmp_path), 3, judge_tokens=1010)
    operator.orders = Answer(limits=stop)
    assert await _drive(operator, authority, _attempt(tmp_path, 2), lambda: limited) == 75
    (last,) = operator.finals
    assert (last.final, last.reason, last.advance.judge_tokens) == ("stopped", "JudgeBudgetSpent", 1010)
    assert last.message.startswith(
        "judges have used 1,010 tokens: raise spec.stop.judgeTokens, which is 1,000; the run"
    )
    operator.orders = Answer(limits=stop.model_copy(update={"judge_tokens": 5000}))
    with pytest.raises(SlotError, match="none of the 1 phones"):  # it goes on: it looks for phones
        await _drive(operator, authority, _attempt(tmp_path, 3), lambda: limited)


async def test_a_run_says_where_it_stands_before_anything_is_loaded(
    operator: SmallOperator, authority: Authority, run: TrainingRun, tmp_path: Path
) -> None:
    _leave_checkpoint(_attempt(tmp_path), 3)
    with pytest.raises(SlotError):
        await _drive(operator, authority, _attempt(tmp_path, 2), lambda: run)
    for report in operator.reports:
        assert (report.advance.update, report.advance.episodes, report.advance.success) == (3, 7, 0.5)
        assert report.checkpoint is not None and report.checkpoint.update == 3
    assert Progress(run=RUN, update=3).uid == "", "a laptop's checkpoint has no UID"


async def test_what_a_run_began_with_may_be_gone_once_it_has_its_own(
    operator: SmallOperator, authority: Authority, run: TrainingRun, tmp_path: Path
) -> None:
    given = run.spec.checkpoints.model_copy(update={"resume_from": str(tmp_path / "gone")})
    run = run.model_copy(update={"spec": run.spec.model_copy(update={"checkpoints": given})})
    with pytest.raises(ConfigurationError, match="resumeFrom"):
        await _drive(operator, authority, _attempt(tmp_path), lambda: run)
    _leave_checkpoint(_attempt(tmp_path), 3)
    with pytest.raises(SlotError):
        await _drive(operator, authority, _attempt(tmp_path), lambda: run)


# --- object storage ---------------------------------------------------------------------------------------------------


def _in_store(run: TrainingRun, uri: str, **more: str) -> TrainingRun:
    given = run.spec.checkpoints.model_copy(update={"uri": uri, **more})
    return run.model_copy(update={"spec": run.spec.model_copy(update={"checkpoints": given})})


def _leave_in_store(uri: str, attempt: RunAttempt, update: int) -> str:
    place = CheckpointStore(f"{uri}/{NAMESPACE}/uid-1/{RUN}", attempt.holder)
    place.take_over()
    driver = {"run": RUN, "uid": "uid-1", "update": update, "version": update, "episodes": 7, "success": 0.5}
    draft = place.draft(update)
    place.publish(draft, {"format": 3, "update": update, "time": 1.0, "driver": driver}, {}, keep=2)
    return draft.place


async def test_an_attempt_finds_the_checkpoint_of_the_one_before_in_the_store(
    operator: SmallOperator, authority: Authority, run: TrainingRun, tmp_path: Path
) -> None:
    """Its own Pod is a new one, and has nothing; what the run began with may be gone by now."""
    uri = f"file://{tmp_path}/bucket"
    path = _leave_in_store(uri, _attempt(tmp_path), 3)
    with pytest.raises(SlotError):
        await _drive(
            operator, authority, _attempt(tmp_path, 2), lambda: _in_store(run, uri, resume_from=str(tmp_path / "gone"))
        )
    last = operator.reports[-1]
    assert last.checkpoint is not None and (last.checkpoint.update, last.checkpoint.path) == (3, path)
    assert last.advance.update == 3


async def test_an_attempt_that_another_one_took_the_store_from_ends_and_says_nothing(
    operator: SmallOperator, authority: Authority, run: TrainingRun, tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}/bucket"
    _leave_in_store(uri, _attempt(tmp_path, 3), 4)
    assert await _drive(operator, authority, _attempt(tmp_path, 2), lambda: _in_store(run, uri)) == 75
    assert operator.finals == []


async def test_a_store_without_conditional_writes_is_a_mistake_of_the_file(
    operator: SmallOperator, authority: Authority, run: TrainingRun, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"spec\.checkpoints\.uri: .*conditional writes"):
        await _drive(operator, authority, _attempt(tmp_path), lambda: _in_store(run, "https://example.org/runs"))


# --- the command ------------------------------------------------------------------------------------------------------


def _pod(operator: SmallOperator, authority: Authority, place: Path) -> dict[str, str]:
    access = authority.access(operator.port)
    return {
        variables.RUN: RUN,
        variables.NAMESPACE: NAMESPACE,
        variables.RUN_UID: "uid-1",
        variables.ATTEMPT: "1",
        variables.STORAGE: str(place / "storage"),
        variables.BROKER_URL: str(access.url),
        variables.BROKER_CA: str(access.ca),
        variables.BROKER_TOKEN_FILE: str(access.token),
    }


@pytest.mark.parametrize(
    ("words", "code", "final"), [(["--restarts", "1"], 1, "failed"), (["--set", "spec.sede=3"], 2, "configuration")]
)
async def test_the_command_in_a_pod(
    operator: SmallOperator,
    authority: Authority,
    tmp_path: Path,
    nobody: str,
    words: list[str],
    code: int,
    final: str,
) -> None:
    (tmp_path / "run.yaml").write_text(SPEC % nobody)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tapforge_trainer.cli.main", "run", "-f", "run.yaml", *words),
        cwd=tmp_path,
        env={**os.environ, **_pod(operator, authority, tmp_path)},
        stderr=subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == code, said.decode()
    assert b"Traceback" not in said
    (last,) = operator.finals
    assert last.final == final
    assert last.message.splitlines()[0] in said.decode()
    if "--restarts" in words:
        assert {report.restarts for report in operator.reports} == {0, 1}
        holder = newest(tmp_path / "storage")
        assert holder is not None and holder.attempt == 1 and holder.started > 0
        assert (folder_of(tmp_path / "storage", holder) / RUN / "spec.yaml").is_file(), "one start, and its successor"
    assert not (tmp_path / "runs").exists()


async def test_a_driver_that_was_killed_is_reported(
    operator: SmallOperator, authority: Authority, tmp_path: Path
) -> None:
    pod = _pod(operator, authority, tmp_path)
    _leave_checkpoint(RunAttempt(RUN, NAMESPACE, "uid-1", 1, tmp_path / "storage"), 4)
    await report_killed({**pod, "TAPFORGE_DRIVER_RESTARTS_LEFT": "2"}, "it was killed")
    await report_killed(pod, "it was killed again")
    await report_killed({}, "on a laptop nothing is reported")
    assert [(r.final, r.message) for r in operator.reports if r.message] == [
        ("", "it was killed"),
        ("failed", "it was killed again"),
    ]
    assert {report.advance.update for report in operator.reports} == {4}
