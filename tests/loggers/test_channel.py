"""Loggers that hang, fail or die cost the run nothing, and are reported once."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tapforge_trainer.loggers.channel import Channel
from tapforge_trainer.loggers.registry import Chosen

pytestmark = pytest.mark.usefixtures("others")


def _channel(folder: Path, *names: str, **options: Any) -> tuple[Channel, list[str]]:
    reports: list[str] = []
    loggers = [Chosen(name, {"team": "a"}, plugin=True) for name in names]
    channel = Channel(loggers, name="desk", folder=folder, config={"seed": 1}, report=reports.append, **options)
    return channel, reports


def _notes(folder: Path) -> list[dict[str, Any]]:
    """Whole lines so far."""
    file = folder / "notes.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_a_logger_of_another_package_gets_start_figures_and_the_end(tmp_path: Path) -> None:
    channel, reports = _channel(tmp_path, "notes")
    channel.log(1, {"learner/loss": 0.5})
    channel.finish("complete", 30.0)
    first, second, last = _notes(tmp_path)
    assert first == {"start": "desk", "resume": "", "config": {"seed": 1}, "options": {"team": "a"}}
    assert second == {"step": 1, "figures": {"learner/loss": 0.5}} and last == {"status": "complete"}
    assert reports == []


def test_a_resumed_session_knows_the_run_and_repeats_no_step_of_any_figure(tmp_path: Path) -> None:
    for points in ([(1, "a"), (1, "b"), (2, "a")], [(2, "a"), (2, "b"), (3, "a")]):
        channel, _ = _channel(tmp_path, "notes")
        for step, name in points:
            channel.log(step, {name: 1.0})
        channel.finish("stopped", 30.0)
    notes = _notes(tmp_path)
    assert [line["resume"] for line in notes if "start" in line] == ["", "id-1"]
    logged = [(line["step"], name) for line in notes if "step" in line for name in line["figures"]]
    assert sorted(logged) == [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a")]


def _steps(folder: Path) -> list[int]:
    return [line["step"] for line in _notes(folder) if "step" in line]


def test_one_that_hangs_delays_neither_the_others_nor_the_end(tmp_path: Path) -> None:
    channel, reports = _channel(tmp_path, "deaf", "notes")
    for step in range(1, 4):
        channel.log(step, {"learner/loss": 0.5})
    # The other one gets them while this one hangs; a busy machine takes its time to start their process.
    end = time.monotonic() + 120
    while len(_steps(tmp_path)) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    channel.finish("complete", 2.0)
    assert _steps(tmp_path) == [1, 2, 3]
    (report,) = reports
    assert "deaf" in report and "did not finish in time" in report


def test_one_that_fails_is_reported_once_and_tried_again(tmp_path: Path) -> None:
    channel, reports = _channel(tmp_path, "failing", "leaving")
    for step in range(1, 4):
        channel.log(step, {"learner/loss": 0.5})
    channel.finish("complete", 30.0)
    failing, leaving = sorted(reports)
    assert "logger failing: ConnectionError: no route to the server" in failing
    assert "logger leaving: SystemExit: 3" in leaving


def test_a_process_that_stands_still_is_killed_and_what_it_does_not_read_is_dropped(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import signal; signal.pause()")
    channel, reports = _channel(tmp_path, "notes", command=command)
    started = time.monotonic()
    for step in range(5000):
        channel.log(step, {f"learner/figure-{k}": 0.5 for k in range(50)})
    logging = time.monotonic() - started
    channel.finish("complete", 0.1)
    assert logging < 30, "nobody waits for a full pipe"
    assert len(reports) == 1 and "loggers:" in reports[0]


def test_a_process_that_dies_is_reported(tmp_path: Path) -> None:
    channel, reports = _channel(tmp_path, "notes")
    channel._process.send_signal(signal.SIGKILL)
    channel._process.wait(30)
    for step in range(3):
        channel.log(step, {"learner/loss": 0.5})
    channel.finish("failed", 1.0)
    (report,) = reports
    assert "their process has ended" in report


def test_a_driver_that_dies_leaves_a_run_that_failed(tmp_path: Path) -> None:
    channel, _ = _channel(tmp_path, "notes")
    channel.log(1, {"learner/loss": 0.5})
    while channel._lines.qsize():
        time.sleep(0.01)
    time.sleep(0.2)
    assert channel._process.stdin is not None
    channel._process.stdin.close()
    channel._process.wait(30)
    assert _notes(tmp_path)[-1] == {"status": "failed"}
