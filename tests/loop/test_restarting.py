"""A learner that is lost: learner and engines start again beside phones that go on, from the last checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from counted import Policy, parts, updates

from tapforge_api import dump_set
from tapforge_trainer.engine.restart_budget import RestartBudget
from tapforge_trainer.learner.checkpoint_storage import FORMAT, CheckpointFolder
from tapforge_trainer.learner.client import RanksLost
from tapforge_trainer.loop import reinforce
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.run.folder import ROLLOUT, read_events
from tapforge_trainer.tasks.stages import of_stage
from tapforge_trainer.telemetry.progress import Progress

STAGES = "stages=[{stop: {maxUpdates: 3}, temperature: 0.5}, {stop: {maxUpdates: 1}}]"


class Mortal(Policy):
    """With checkpoints on disk. `dies`: before which updates, or syncs, a rank does; each time once."""

    def __init__(self, place: Path, dies: dict[str, int]):
        super().__init__()
        self.settings = replace(self.settings, place=CheckpointFolder(place))
        self.dies, self.starts, self.allowed = dict(dies), 0, RestartBudget(3)
        self.dead: list[str] = []

    def die(self, step: str) -> None:
        if self.dies.get(step, 0) > 0:
            self.dies[step] -= 1
            self.lost = RanksLost(f"a rank died during {step}")
        if self.lost is not None:
            raise self.lost

    @asynccontextmanager
    async def learning(self, version: int | None = None) -> Any:
        async with super().learning(version) as learner:
            self.die(f"update {self.version}")
            yield learner
            self.die(f"late update {self.version}")

    async def sync(self, version: int) -> float:
        self.die(f"sync {version}")
        return await super().sync(version)

    async def save(self, update: int, state: dict[str, Any], report: Callable[..., None]) -> None:
        self.die(f"save {update}")
        place = self.settings.place
        draft, document = place.draft(update), {"format": FORMAT, "update": update, "time": 1.0, "driver": state}
        place.begin(draft, document)
        place.publish(draft, document, {}, 9)
        await super().save(update, json.loads(json.dumps(state)), report)

    def may_restart(self) -> bool:
        return self.allowed.spend(0.0)

    async def restart(self, report: Callable[[str], None]) -> None:
        self.starts += 1
        self.lost = None

    async def resume(self) -> dict[str, Any]:
        _, state = self.saved[-1]
        self.version = state["version"]
        return state


@asynccontextmanager
async def mortal(folder: Path, dies: dict[str, int], *overrides: str) -> Any:
    """A run whose first checkpoint is there."""
    async with parts(folder, *overrides) as context:
        policy = Mortal(folder / "checkpoints", dies)
        policy.generator = context.policy.generator
        context = replace(context, policy=policy)
        progress = Progress(run="counted")
        await policy.save(0, asdict(progress), lambda written: None)
        yield context, policy, progress


@pytest.mark.parametrize("step", ["update 2", "late update 2", "sync 3", "sync 2"])
async def test_a_run_goes_on_from_the_last_checkpoint(tmp_path: Path, step: str) -> None:
    """A checkpoint after every second update; the same phones, none of whose leases is left behind."""
    async with mortal(tmp_path, {step: 1}, "stop.maxUpdates=4") as (context, policy, progress):
        slots = context.rollout_setup.slots
        before = slots.counts()
        progress.seconds_earlier = 7.0
        await reinforce(context, progress)
        assert slots.counts() == before
        assert (policy.starts, progress.update, progress.version, progress.starts) == (1, 4, 4, 2)
        assert progress.seconds_earlier == 7.0
        lost = [1] if step == "sync 2" else []
        assert updates(tmp_path) == [1, 2, 3, 4] if not lost else [1, 1, 2, 3, 4]
        back = 0 if lost else 2
        assert policy.synced == [*range(1, 3 - len(lost)), back, *range(back + 1, 5)]
        (event,) = [one for one in read_events(tmp_path) if one["event"] == "restart"]
        assert step.removeprefix("late ") in event["why"]
        learned = [one for one in read_events(tmp_path) if one["event"] == "update"]
        since = [one for one in learned if one["at"] >= event["at"]]
        curve = [one["success_rate_all"] for one in since]
        assert context.telemetry.view.curve == curve, "what is shown is of updates that count"
        assert all(0 <= one["staleness"]["mean"] <= one["staleness"]["max"] <= 1 for one in learned)
        assert all(one["sample_age"] >= 0 for one in learned), "no token is of a version that is gone"
        recording = Recording(tmp_path / ROLLOUT)
        names = [episode.id for episode in recording.episodes()]
        assert len(names) == len(set(names))


async def test_a_stage_goes_back_too(tmp_path: Path) -> None:
    """A checkpoint keeps the run's file, of which the stage is another run."""
    async with mortal(tmp_path, {"sync 3": 1}, "stop.maxUpdates=4", STAGES) as (context, policy, progress):
        whole = context.run
        context = replace(context, run=of_stage(whole, 0), whole=whole)
        progress.spec = dump_set(whole)
        await reinforce(context, progress)
        assert (policy.starts, progress.update, progress.stage) == (1, 3, 0)


async def test_one_death_more_than_may_be_ends_the_run_and_says_what_bounds_them(tmp_path: Path) -> None:
    async with mortal(tmp_path, {"sync 1": 9}) as (context, policy, progress):
        with pytest.raises(RanksLost, match="died during sync 1") as caught:
            await reinforce(context, progress)
        assert policy.starts == 3
        assert any("3 times within an hour, as often as engine.maxRestartsPerHour" in n for n in caught.value.__notes__)


async def test_a_death_while_all_start_again_counts_as_one_more(tmp_path: Path) -> None:
    async with mortal(tmp_path, {"sync 1": 1, "sync 0": 1}) as (context, policy, progress):
        await reinforce(context, progress)
        assert (policy.starts, progress.update) == (2, 3)


async def test_without_a_checkpoint_and_after_other_errors_the_run_ends(tmp_path: Path) -> None:
    async with mortal(tmp_path, {"sync 1": 1}) as (context, policy, progress):
        (tmp_path / "checkpoints" / "latest").unlink()
        with pytest.raises(RanksLost):
            await reinforce(context, progress)
        assert policy.starts == 0
        policy.lost, policy.dies = None, {}

        def fail() -> None:
            raise ValueError("another one")

        policy.on_sync = fail
        with pytest.raises(ValueError, match="another one"):
            await reinforce(context, Progress(run="counted"))
        assert policy.starts == 0


def test_what_is_known_of_the_run_and_the_session_stays_when_it_goes_back() -> None:
    now = Progress(run="a", update=9, version=9, seconds_earlier=5.0, seconds_rl=80.0, starts=2, judge_tokens=70)
    now.before = {"greedy": {}}
    now.go_back(Progress(update=4, version=4, seconds_earlier=2.0, seconds_rl=30.0, starts=1, judge_tokens=20))
    assert (now.update, now.version, now.seconds_rl) == (4, 4, 30.0)
    assert (now.run, now.seconds_earlier, now.starts, now.judge_tokens, now.before) == ("a", 5.0, 2, 70, {"greedy": {}})
