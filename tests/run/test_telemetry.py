"""Events on disk: one line each, whatever happened to the one before; and the lines that a log gets."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tapforge_trainer.batch import BatchRules, build_batch
from tapforge_trainer.recording.reader import RecordingError
from tapforge_trainer.rollout.stats import RolloutStats
from tapforge_trainer.run.folder import read_events
from tapforge_trainer.telemetry.progress import Progress
from tapforge_trainer.telemetry.telemetry import EVENTS, ProgressView, Telemetry


def _telemetry(folder: Path, console: Console | None = None) -> Telemetry:
    return Telemetry(folder, ProgressView("tiny", 10), console or Console(file=io.StringIO()))


def test_a_session_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for number in (1, 2):
        with closing(_telemetry(tmp_path)) as telemetry:
            telemetry.event("update", update=number, learner={"loss": np.float32(0.5)})
    events = list(read_events(tmp_path))
    assert [(e["event"], e["update"], e["learner"]["loss"]) for e in events] == [("update", 1, 0.5), ("update", 2, 0.5)]
    assert events[0]["at"] <= events[1]["at"]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path: Path, cut: int) -> None:
    with closing(_telemetry(tmp_path)) as telemetry:
        telemetry.event("first")
        telemetry.event("second", text="x" * 30)
    path = tmp_path / EVENTS
    path.write_bytes(path.read_bytes()[:-cut])
    with closing(_telemetry(tmp_path)) as telemetry:
        telemetry.event("third")
    names = [event["event"] for event in read_events(tmp_path)]
    assert names == (["first", "second", "third"] if cut == 1 else ["first", "third"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_event_that_can_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / EVENTS).symlink_to("/dev/full")
    with closing(_telemetry(tmp_path)) as telemetry, pytest.raises(RecordingError, match="events.jsonl.*No space left"):
        telemetry.event("first")


def test_a_log_gets_a_line_per_update_however_narrow_it_is(tmp_path: Path) -> None:
    out = io.StringIO()
    with closing(_telemetry(tmp_path, Console(file=out, width=40))) as telemetry, telemetry.shown():
        progress = Progress(update=3, success=0.25)
        telemetry.updated(
            progress, build_batch([], BatchRules()).statistics, RolloutStats(), {"success": 1, "failure": 3}, {}
        )
    (line,) = out.getvalue().splitlines()
    assert "update 3/10" in line and "success 25.0 %" in line


def test_the_view_is_drawn_on_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with closing(_telemetry(tmp_path, console)) as telemetry, telemetry.shown():
        telemetry.view.update, telemetry.view.seconds_rl, telemetry.view.success = 5, 50.0, 0.25
        telemetry.phase("reinforcement")
    drawn = out.getvalue()
    for words in ("tiny", "reinforcement", "5/10", "25.0 %", "time left", "0:50"):
        assert words in drawn
