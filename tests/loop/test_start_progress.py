"""What a run waits for at its start becomes a phase, once for each change."""

from __future__ import annotations

import asyncio
from contextlib import closing
from functools import partial
from pathlib import Path

from rich.console import Console

from tapforge_trainer.run.folder import read_events
from tapforge_trainer.telemetry.start_progress import in_words, waiting_shown
from tapforge_trainer.telemetry.telemetry import ProgressView, Telemetry


def test_equal_ones_are_counted() -> None:
    assert in_words([]) == ""
    assert in_words(["the learner", *["an engine (compiling)"] * 3]) == (
        "waiting for the learner, 3 times an engine (compiling)"
    )


async def test_each_change_is_a_phase_and_a_failure_is_nobody_s_business(tmp_path: Path) -> None:
    answers = [["an engine (loading weights)"]] * 3 + [["an engine (compiling)"], [], ["an engine (compiling)"]]
    all_asked = asyncio.Event()

    async def waiting() -> list[str]:
        if not answers:
            all_asked.set()
            raise RuntimeError("the engine died")
        return answers.pop(0)

    with closing(Telemetry(tmp_path, ProgressView("desk", 1), Console(quiet=True))) as telemetry:
        async with waiting_shown(partial(telemetry.phase, stage="Loading"), waiting, seconds=0.001):
            await asyncio.wait_for(all_asked.wait(), 30)
        assert telemetry.view.stage == "Loading"
    phases = [event["text"] for event in read_events(tmp_path) if event["event"] == "phase"]
    assert phases == ["waiting for an engine (loading weights)", "waiting for an engine (compiling)"]
