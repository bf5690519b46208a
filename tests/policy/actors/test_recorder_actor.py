"""The recorder in a process of its own: it writes what the driver never sees, in order, and ends with the driver."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.attempt import Attempt, EpisodeResult
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.recording import actor as recorder_actor
from tapforge_trainer.recording.actor import (
    RecorderActor,
    RecorderProcess,
    RemoteRecording,
    WrittenEpisode,
    _born,
    _packed,
)
from tapforge_trainer.recording.learner_tokens import LearnerTokenReader, LearnerTokens
from tapforge_trainer.recording.reader import Recording, RecordingError
from tapforge_trainer.recording.retention import Retention
from tapforge_trainer.records import EpisodeRecord, Generation, GroupRecord, StepRecord

pytestmark = pytest.mark.asyncio(loop_scope="session")
TASK = Task(suite="s", template="t")


def frames_of(number: int) -> dict[str, FittedFrame]:
    made = [FittedFrame.of(np.random.default_rng((number, k)).integers(0, 256, (30, 20, 3), np.uint8)) for k in (0, 1)]
    return {frame.name: frame for frame in made}


def episode(number: int, handle: Any, *, names: list[str] | None = None) -> EpisodeResult:
    name, group = f"g1-{number:06d}.0.0", f"g1-{number:06d}"
    said = Generation((1,), (2,), (-1.0,), (0,), "stop", 1)
    steps = tuple(
        StepRecord(name, i, (f,), "k", None, said, "", None, None, 0, "", 0, 0)
        for i, f in enumerate(names if names is not None else handle)
    )
    record = EpisodeRecord(name, group, TASK, 0, "p", 5, Reason.DONE, Outcome.SUCCESS, 1.0, "", steps, 1.0, 2.0)
    return EpisodeResult(Attempt(group, number, 0, 0, 0, TASK, 7), record, handle, None)


@pytest_asyncio.fixture(loop_scope="session")
async def process(ray_cluster: None):
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    process = await RecorderProcess.start()
    yield process
    await process.close()


async def test_frames_by_reference_and_at_hand_are_recorded(process: RecorderProcess, tmp_path: Path) -> None:
    import ray

    made = ray.remote(frames_of)
    writer = await process(tmp_path / "rollout", Retention())
    assert process.process != os.getpid()
    results = []
    for number in range(8):
        frames = frames_of(number)
        result = episode(number, made.remote(number) if number % 2 else frames, names=list(frames))
        writer.episode(result)
        writer.group(GroupRecord(result.record.group, number, TASK, 0, (result.record,)), None)
        results.append(result.record)
    name, numbers = results[0].id, np.array([0.5, -0.25])
    writer.learner_tokens(3, [LearnerTokens(name, ((0, 1), (1, 1)), numbers, numbers)])
    async with asyncio.timeout(60):
        await writer.flush()
    recording = Recording(tmp_path / "rollout")
    assert list(recording.episodes()) == results
    assert [group.episodes for group in recording.groups()] == [(record,) for record in results]
    for number, record in enumerate(results):
        assert {name: recording.frames.frame(name) for s in record.steps for name in s.frames} == frames_of(number)
    assert writer.in_flight == 0
    update, learner = LearnerTokenReader(tmp_path / "rollout").find(name) or (0, None)
    assert update == 3 and learner is not None and learner.of_step(1) == ([-0.25], [-0.25])
    async with asyncio.timeout(60):
        await writer.close()
        again = await process(tmp_path / "rollout", Retention("none"))
        await again.close()


async def test_the_first_failure_reaches_the_driver(process: RecorderProcess, tmp_path: Path) -> None:
    """A later attempt has taken the run's folder over."""
    errors = list[BaseException]()
    writer = await process(tmp_path / "rollout", Retention())
    writer.report_to(errors.append)
    writer.episode(episode(1, frames_of(1)))
    async with asyncio.timeout(60):
        await writer.flush()
        shutil.move(tmp_path / "rollout", tmp_path / "taken")
        writer.episode(episode(2, frames_of(2)))
        await writer.flush()
        await writer.flush()
        assert [type(error) for error in errors] == [RecordingError] and "can't be written" in str(errors[0])
        with pytest.raises(RecordingError, match="can't be written"):
            await writer.close()
    assert not (tmp_path / "rollout").exists(), "nothing comes back where the folder was"


async def test_nothing_is_written_after_a_failure(process: RecorderProcess, tmp_path: Path) -> None:
    """Also not what was on its way already: a group without its episode would make the rest unreadable."""
    import ray

    def fails() -> None:
        raise ZeroDivisionError

    errors = list[BaseException]()
    writer = await process(tmp_path / "rollout", Retention())
    writer.report_to(errors.append)
    kept, lost = episode(1, frames_of(1)), episode(2, ray.remote(fails).remote(), names=list(frames_of(2)))
    writer.episode(kept)
    for result in (lost, episode(3, frames_of(3))):
        writer.episode(result)
        writer.group(GroupRecord(result.record.group, 2, TASK, 0, (result.record,)), None)
    async with asyncio.timeout(60):
        await writer.flush()
    assert len(errors) == 1 and isinstance(errors[0], ZeroDivisionError)
    recording = Recording(tmp_path / "rollout")
    assert list(recording.episodes()) == [kept.record] and list(recording.groups()) == []


async def test_a_recording_that_can_not_be_begun(process: RecorderProcess, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match="can't be written"):
        await process(tmp_path / "file" / "rollout", Retention())


async def test_a_recorder_that_is_killed_is_a_failure_with_words(ray_cluster: None, tmp_path: Path) -> None:
    process, errors = await RecorderProcess.start(), list[BaseException]()
    writer = await process(tmp_path / "rollout", Retention())
    writer.report_to(errors.append)
    os.kill(process.process, signal.SIGKILL)
    writer.episode(episode(1, frames_of(1)))
    async with asyncio.timeout(60):
        await writer.flush()
    assert len(errors) == 1 and "the recorder's process ended" in str(errors[0])


async def test_it_ends_with_its_driver(ray_cluster: None, tmp_path: Path) -> None:
    import ray

    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    try:
        actor = ray.remote(RecorderActor).options(num_cpus=0).remote(driver.pid, _born(driver.pid))
        recorder = await actor.process.remote()
        assert _born(recorder) is not None
        driver.kill()
        await driver.wait()
        async with asyncio.timeout(60):
            while _born(recorder) is not None:  # noqa: ASYNC110 - another process ends
                await asyncio.sleep(0.1)
    finally:
        if driver.returncode is None:
            driver.kill()
            await driver.wait()


# --- without Ray's processes ------------------------------------------------------------------------------------------


async def test_frames_that_are_lost_cost_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.exceptions import ObjectLostError

    def lost(*_: Any, **__: Any) -> None:
        raise ObjectLostError("00" * 28, None, "")

    monkeypatch.setattr(ray, "get", lost)
    actor, folder = RecorderActor(os.getpid(), None), tmp_path / "rollout"
    actor.open(folder, Retention(), frozenset)
    result = episode(1, "a reference", names=list(frames_of(1)))
    assert actor.episode(str(folder), _packed(result), ["a reference"]) == WrittenEpisode(lost=True)
    actor.close(str(folder))
    recording = Recording(folder)
    assert list(recording.episodes()) == [result.record] and not recording.is_complete(result.record)


class SlowActor:
    """Answers when it is told to, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, asyncio.Future[Any]]] = []
        for name in ("episode", "group", "sync", "close"):
            setattr(self, name, SimpleNamespace(remote=lambda *args, name=name: self._call(name)))

    def _call(self, name: str) -> asyncio.Future[Any]:
        self.calls.append((name, asyncio.get_running_loop().create_future()))
        return self.calls[-1][1]


async def test_frames_that_are_not_recorded_are_not_fetched(tmp_path: Path) -> None:
    """No network between nodes that is slow or broken ends a run for what it doesn't want."""
    actor, folder = RecorderActor(os.getpid(), None), tmp_path / "rollout"
    actor.open(folder, Retention("none"), frozenset)
    result = episode(1, object(), names=["a" * 64])
    assert actor.episode(str(folder), _packed(result), [result.frames]) == WrittenEpisode()
    actor.close(str(folder))
    assert list(Recording(folder).episodes()) == [result.record]


async def test_what_is_in_flight_is_bounded_and_flush_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = SlowActor()
    writer = RemoteRecording(actor, "folder")
    monkeypatch.setattr(recorder_actor, "IN_FLIGHT_BYTES", 5 * 2 * 128 * 1024)  # of two frames each
    for number in range(40):
        writer.episode(episode(number, frames_of(0)))
    flushed = asyncio.create_task(writer.flush())
    done = 0
    async with asyncio.timeout(60):
        while not flushed.done():
            await asyncio.sleep(0)
            assert writer.in_flight <= 5 * 2 * 128 * 1024 and len(actor.calls) - done <= 6
            if done < len(actor.calls):
                name, answer = actor.calls[done]
                answer.set_result(WrittenEpisode(2, 2 * 128 * 1024) if name == "episode" else None)
                done += 1
    assert [name for name, _ in actor.calls] == ["episode"] * 40 + ["sync"]


async def test_the_size_of_frames_is_learned_from_what_was_written() -> None:
    actor = SlowActor()
    writer = RemoteRecording(actor, "folder")
    writer.episode(episode(0, frames_of(0)))
    await asyncio.sleep(0)
    assert writer.in_flight == 2 * 128 * 1024
    actor.calls[0][1].set_result(WrittenEpisode(999, 999 * 10_000))
    async with asyncio.timeout(60):
        while writer.in_flight:  # noqa: ASYNC110 - looks at every turn
            await asyncio.sleep(0)
        writer.episode(episode(1, frames_of(0)))
        while len(actor.calls) < 2:  # noqa: ASYNC110 - looks at every turn
            await asyncio.sleep(0)
    assert 2 * 9_000 < writer.in_flight < 2 * 12_000
    actor.calls[1][1].set_result(WrittenEpisode())


async def test_others_get_a_turn_between_two_calls() -> None:
    actor = SlowActor()
    writer = RemoteRecording(actor, "folder")
    for number in range(8):
        writer.episode(episode(number, frames_of(0)))
    seen = []
    async with asyncio.timeout(60):
        while len(actor.calls) < 8:
            await asyncio.sleep(0)
            seen.append(len(actor.calls))
    assert all(after - before <= 1 for before, after in pairwise([0, *seen]))
    for _, answer in actor.calls:
        answer.set_result(WrittenEpisode())


async def test_a_call_that_can_not_be_made_is_a_failure_and_nobody_waits_for_it() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no way to {name}")

    writer, errors = RemoteRecording(Gone(), "folder"), list[BaseException]()
    writer.report_to(errors.append)
    async with asyncio.timeout(60):
        await writer.flush()
    assert [str(error) for error in errors] == ["no way to sync"]


async def test_a_recorder_that_hangs_is_a_failure_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_actor, "CALL_SECONDS", 0.05)
    writer, errors = RemoteRecording(SlowActor(), "folder"), list[BaseException]()
    writer.episode(episode(1, frames_of(1)))
    async with asyncio.timeout(60):
        await asyncio.gather(writer.flush(), writer.flush())
    writer.report_to(errors.append)
    assert len(errors) == 1 and "gave no answer within 0.05 s" in str(errors[0])
