"""A tiny run as on a cluster, with real Ray, engine and rank: its first attempt is stopped in the way of Ray, and a
second one goes on with it to an end that was moved meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from whole import PATIENCE, SPEC, Command, Run

sys.path += [str(Path(__file__).parent.parent / room) for room in ("driver", "slots")]

from small_broker import NAMESPACE, Authority
from small_operator import RUN, SmallOperator

from tapforge_api import attempt as variables
from tapforge_api.learning import Stop
from tapforge_api.progress import EXIT_COMPLETE, EXIT_STOPPED, Orders, Progress

pytestmark = pytest.mark.long

UID = "3f2c9a54-0000-4000-8000-000000000001"
LITTLE = [
    "spec.warmStart=null",
    "spec.learner.ranks=1",
    "spec.rollout.groupsPerUpdate=2",
    'spec.evaluation={"episodes": 2, "sampled": false, "baselines": false}',
    "spec.checkpoints.export=false",
]


@contextmanager
def _beside(operator: SmallOperator, authority: Authority) -> Iterator[None]:
    """The operator in a thread of its own, while the test waits for processes."""
    ready, end = threading.Event(), threading.Event()

    async def serve() -> None:
        async with operator.serving(authority):
            ready.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield
    finally:
        end.set()
        thread.join(60)


def _driver(command: Command) -> int:
    """A child of the supervisor, which is the command: who is just being started by the driver has its words too."""
    (pid,) = [
        pid
        for pid, line in command.processes().items()
        if " tapforge_trainer.cli.main run " in line and psutil.Process(pid).ppid() == command.process.pid
    ]
    return pid


def _has_learned(report: Progress) -> bool:
    """It is in the middle of training, with figures and a checkpoint of an update."""
    learned = report.advance.success is not None and report.advance.episodes_per_hour > 0
    return report.phase == "Training" and learned and report.checkpoint is not None and report.checkpoint.update >= 1


@dataclass(frozen=True)
class Attempts:
    operator: SmallOperator
    storage: Path
    #: the run as the first attempt left it, and as the second did
    stopped: Run
    complete: Run

    def reports(self, attempt: int) -> list[Progress]:
        return [report for report in self.operator.reports if report.attempt == attempt]


@pytest.fixture(scope="session")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> Attempts:
    house = tmp_path_factory.mktemp("cluster")
    (house / "run.yaml").write_text(SPEC)
    authority, operator = Authority(house / "authority"), SmallOperator()
    storage = house / "storage" / NAMESPACE / UID

    def begin(attempt: int) -> Command:
        access = authority.access(operator.port)
        pod = {
            variables.RUN: RUN,
            variables.NAMESPACE: NAMESPACE,
            variables.RUN_UID: UID,
            variables.ATTEMPT: str(attempt),
            variables.STORAGE: str(storage),
            variables.GRACE: str(PATIENCE),
            variables.BROKER_URL: str(access.url),
            variables.BROKER_CA: str(access.ca),
            variables.BROKER_TOKEN_FILE: str(access.token),
        }
        settings = [word for setting in LITTLE for word in ("--set", setting)]
        return Command("run", "-f", "run.yaml", "--restarts", "1", *settings, place=house, environment=pod)

    def folder(attempt: int) -> Path:
        (place,) = storage.glob(f"attempt-{attempt:08d}-*")
        return place / RUN

    def said(holds: Callable[[Progress], bool]) -> Callable[[], bool]:
        return lambda: any(holds(report) for report in list(operator.reports))

    operator.orders = Orders(limits=Stop(max_updates=1000), report_seconds=1)
    with _beside(operator, authority), ExitStack() as behind:
        first = begin(1)
        behind.callback(first.kill)
        first.until(said(_has_learned))
        # `ray job stop` reaches every process of a job. The driver comes first: it may have stopped in a moment.
        os.kill(_driver(first), signal.SIGTERM)
        first.interrupt(signal.SIGTERM)
        stopped = first.wait()
        state = Run(folder(1), house / "run.yaml", stopped).copied(house / "stopped")
        last = state.state["update"]
        operator.orders = Orders(limits=Stop(max_updates=last + 1), report_seconds=1)
        complete = begin(2).wait()
    return Attempts(operator, storage, state, Run(folder(2), house / "run.yaml", complete))


def test_a_run_that_is_told_to_stop_leaves_a_checkpoint_says_so_and_ends_with_its_code(attempts: Attempts) -> None:
    finished = attempts.stopped.finished
    assert (finished.code, finished.left_behind) == (EXIT_STOPPED, []), finished.said
    assert "Traceback" not in finished.err and "SIGTERM" not in finished.err
    (last,) = [report for report in attempts.reports(1) if report.final]
    assert last.final == "stopped"
    assert last.checkpoint is not None
    assert last.checkpoint.update == last.advance.update == attempts.stopped.state["update"] >= 1
    assert f"resumes after update {last.checkpoint.update}" in last.message
    assert attempts.stopped.state["uid"] == UID


def test_the_next_attempt_goes_on_to_the_end_that_was_moved(attempts: Attempts) -> None:
    finished, begun = attempts.complete.finished, attempts.stopped.state["update"]
    assert (finished.code, finished.left_behind) == (EXIT_COMPLETE, []), finished.said
    (last,) = [report for report in attempts.reports(2) if report.final]
    assert (last.final, last.restarts) == ("complete", 0)
    assert last.advance.update == last.advance.max_updates == begun + 1 == attempts.complete.summary["updates"]
    assert all(report.advance.update >= begun for report in attempts.reports(2))
    assert last.checkpoint is not None
    assert Path(last.checkpoint.path).parent == attempts.complete.folder / "checkpoints"
    assert [path.name[:16] for path in attempts.storage.iterdir()] == ["attempt-00000002"]


def test_everything_of_the_run_is_with_its_last_attempt(attempts: Attempts) -> None:
    stopped, complete = attempts.stopped, attempts.complete
    for name in ("summary.json", "curve.png", "replay.html", "spec.yaml"):
        assert (complete.folder / name).is_file()
    updates = [event["update"] for event in complete.events("update")]
    assert updates == list(range(1, complete.summary["updates"] + 1))
    before = (stopped.folder / "rollout" / "rollout-000001.jsonl").read_bytes()
    assert (complete.folder / "rollout" / "rollout-000001.jsonl").read_bytes().startswith(before)
    names = [episode.id for episode in complete.recording("rollout").episodes()]
    assert len(names) == len(set(names))
    assert len(complete.events("evaluation")) == 2, "what was measured before is not measured again"
    reference = (stopped.folder / "reference" / "model.safetensors").read_bytes()
    assert (complete.folder / "reference" / "model.safetensors").read_bytes() == reference


def test_reports_tell_what_the_driver_does(attempts: Attempts) -> None:
    phases = [report.phase for report in attempts.operator.reports]
    assert {"Loading", "Training"} <= set(phases)
    assert attempts.operator.broken == []
    training = [report for report in attempts.operator.reports if report.phase == "Training"]
    assert {report.leases.wanted for report in training} == {12}
    assert any(report.advance.episodes_per_hour > 0 and report.advance.success is not None for report in training)
    numbers = [report.sequence for report in attempts.reports(1)]
    assert numbers == sorted(set(numbers))
