"""When reinforcement is over, what a checkpoint keeps, and what is given up at a stop."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from tapforge_api.learning import Stop
from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Outcome, Reason
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.recording.lines import encode_episode
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.recording.retention import Retention
from tapforge_trainer.records import EpisodeRecord, Generation, StepRecord
from tapforge_trainer.rollout.group import Resumed
from tapforge_trainer.run.shutdown import Interrupted, StopReason, StopSignal, unless_stopped
from tapforge_trainer.telemetry.progress import Progress, belongs, ended, kept, needed_episodes, resumed


@pytest.mark.parametrize(
    ("state", "run", "uid", "own"),
    [
        (asdict(Progress(run="tiny", update=7)), "tiny", "", True),
        (asdict(Progress(run="tiny")), "heir", "", False),
        (asdict(Progress()), "tiny", "", False),
        ({"update": 7}, "tiny", "", False),
        (asdict(Progress()), "", "", False),
        (asdict(Progress(run="tiny", uid="a")), "tiny", "a", True),
        (asdict(Progress(run="tiny", uid="a")), "tiny", "b", False),
        (asdict(Progress(run="tiny")), "tiny", "a", False),
        ({"run": "tiny"}, "tiny", "", True),
    ],
)
def test_whose_checkpoint_it_is(state: dict[str, object], run: str, uid: str, own: bool) -> None:
    """A run that is made again under its name is another one."""
    assert belongs(state, run, uid) is own


@pytest.mark.parametrize(
    "stop, progress, why",
    [
        (Stop(max_updates=3), Progress(update=2), ""),
        (Stop(max_updates=3), Progress(update=3), "3 updates"),
        (Stop(max_updates=3), Progress(update=9), "9 updates"),
        (Stop(max_seconds=10), Progress(seconds_rl=9.9, seconds_sft=99), ""),
        (Stop(max_seconds=10), Progress(seconds_rl=10), "10 s of reinforcement"),
        (Stop(target_success=0.5), Progress(success=None), ""),
        (Stop(target_success=0.5), Progress(success=0.49), ""),
        (Stop(target_success=0.5), Progress(success=0.5), "50% success over all attempts of an update"),
    ],
)
def test_a_run_ends_at_the_first_limit_that_it_reaches(stop: Stop, progress: Progress, why: str) -> None:
    assert ended(stop, progress) == why


TASK = catalog.tasks("quickstart", "train").sample(0, 0)


def _episode(name: str) -> EpisodeRecord:
    return EpisodeRecord(
        name, "g1-000004", TASK, 0, "local-0", 7, Reason.DONE, Outcome.SUCCESS, 1.0, "", (), started=1.0, ended=2.0
    )


def test_groups_under_way_survive_a_checkpoint_and_the_recording(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    first, second = _episode("g1-000004-0"), _episode("g1-000004-1")
    recorder.episode(first, {})
    recorder.episode(second, {})
    recorder.close()
    group = Resumed(4, TASK, 2, (first, second))
    empty = Resumed(5, TASK, 2, ())
    progress = Progress(update=3, unfinished=kept([group, empty]))
    again = Progress.of(json.loads(json.dumps(asdict(progress))))
    assert again == progress
    assert resumed(again, tmp_path) == [group, empty]


def test_a_checkpoint_with_fields_more_and_fewer_is_resumed_as_far_as_it_goes(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.episode(_episode("g1-000004-0"), {})
    recorder.close()
    group = Resumed(4, TASK, 2, (_episode("g1-000004-0"),))
    state = json.loads(json.dumps(asdict(Progress(update=3, episodes=5, unfinished=kept([group])))))
    state["unfinished"][0]["task"]["later"] = state["unfinished"][0]["later"] = state["later"] = 1
    del state["members"]
    again = Progress.of(state, resumed_from="here")
    assert (again.update, again.episodes, again.resumed_from, again.members) == (3, 5, "here", {})
    assert resumed(again, tmp_path) == [group]


def test_episodes_that_never_reached_the_disk_are_played_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.episode(_episode("g1-000004-0"), {})
    recorder.close()
    group = Resumed(4, TASK, 2, (_episode("g1-000004-0"), _episode("g1-000004-1")))
    progress = Progress(unfinished=kept([group]))
    assert resumed(progress, tmp_path) == [replace(group, episodes=group.episodes[:1])]
    assert resumed(progress, tmp_path / "of another run") == [replace(group, episodes=())]


def test_what_is_resumed_is_read_by_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path, segment_bytes=3000)
    episodes = [_episode(f"g1-{order:06d}-{member}") for order in range(10) for member in range(4)]
    for episode in episodes:
        recorder.episode(episode, {})
    recorder.close()
    wanted = [episodes[5], episodes[33], episodes[34]]
    progress = Progress(unfinished=kept([Resumed(1, TASK, 0, (wanted[0],)), Resumed(8, TASK, 0, tuple(wanted[1:]))]))
    read, pread = list[int](), os.pread

    def counted(file: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(file, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert [episode for group in resumed(progress, tmp_path) for episode in group.episodes] == wanted
    assert read == [len(encode_episode(episode)) for episode in (*wanted[1:], wanted[0])]


def test_episodes_whose_frames_were_not_recorded_are_played_again(tmp_path: Path) -> None:
    frame = FittedFrame.of(np.zeros((4, 4, 3), np.uint8))
    step = StepRecord(
        "e", 0, (frame.name,), None, None, Generation((1,), (2,), (0.0,), (0,), "stop", 1), "", None, None, 0, "", 0, 0
    )
    whole, without = (replace(_episode(f"g1-000004-{member}"), steps=(step,)) for member in range(2))
    for retention in (Retention("none"), Retention(encoding="webp"), Retention()):
        place = tmp_path / f"{retention.frames}-{retention.encoding}"
        recorder = Recorder(place, retention)
        recorder.episode(whole, {frame.name: frame})
        recorder.close()
        progress = Progress(unfinished=kept([Resumed(4, TASK, 2, (whole, without))]))
        expected = (whole,) if retention == Retention() else ()
        assert resumed(progress, place) == [Resumed(4, TASK, 2, expected)]


def test_what_any_checkpoint_needs_is_kept_in_the_recording(tmp_path: Path) -> None:
    def checkpoint(update: int, *names: str, folder: str = "") -> None:
        progress = Progress(update=update, unfinished=kept([Resumed(4, TASK, 2, tuple(map(_episode, names)))]))
        place = tmp_path / (folder or f"update-{update:08d}")
        place.mkdir()
        state = {"format": 2, "update": update, "counters": {}, "driver": asdict(progress)}
        (place / "state.json").write_text(json.dumps(state))

    assert needed_episodes(tmp_path / "nowhere") == set()
    checkpoint(1, "a", "b")
    checkpoint(2, "b", "c")
    checkpoint(3, "d", folder=".replaced-update-00000003")
    (tmp_path / ".partial-update-00000004").mkdir()
    (tmp_path / "latest").write_text("update-00000002")
    assert needed_episodes(tmp_path) == {"a", "b", "c", "d"}


async def test_work_is_given_up_when_a_stop_is_asked_for() -> None:
    stop, cleaned = StopSignal(), []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    asyncio.get_running_loop().call_soon(stop.request, StopReason.SUSPEND)
    with pytest.raises(Interrupted):
        await unless_stopped(stop, work())
    assert cleaned == [True]


async def test_what_work_returns_or_raises_comes_through() -> None:
    async def returns() -> int:
        return 3

    async def fails() -> int:
        raise ZeroDivisionError

    assert await unless_stopped(StopSignal(), returns()) == 3
    with pytest.raises(ZeroDivisionError):
        await unless_stopped(StopSignal(), fails())
