"""The recorder beside the event loop: whatever the moment in which something is handed over, it is written in order."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Outcome, Reason
from tapforge_trainer.attempt import Attempt, EpisodeResult
from tapforge_trainer.recording.queue import RecordingQueue, record_here
from tapforge_trainer.recording.reader import Recording, RecordingError
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.recording.retention import Retention
from tapforge_trainer.records import EpisodeRecord, GroupRecord

TASK = catalog.tasks("quickstart", "train").sample(0, 0)


def _played(name: str) -> EpisodeResult:
    record = EpisodeRecord(
        name, "g1-000004", TASK, 0, "local-0", 7, Reason.DONE, Outcome.SUCCESS, 1.0, "", (), started=1.0, ended=2.0
    )
    attempt = Attempt("g1-000004", 4, 0, 0, 0, TASK, 7)
    return EpisodeResult(attempt, record, {}, None)


async def test_what_comes_while_the_last_write_is_being_put_down_is_written_too(tmp_path: Path) -> None:
    recorder, errors = Recorder(tmp_path), list[BaseException]()
    writer = _queue(recorder, errors)
    for name in ("first", "last"):
        writer.episode(_played(name))
        async with asyncio.timeout(60):
            while writer._task is not None and not writer._task.done():  # noqa: ASYNC110 - looks at every turn
                await asyncio.sleep(0)
        assert writer._task is not None, "it has found nothing more to write, and its end is not known yet"
    await writer.flush()
    recorder.close()
    assert [record.id for record in Recording(tmp_path).episodes()] == ["first", "last"]
    assert errors == []


async def test_flush_waits_for_what_came_before_it_alone(tmp_path: Path) -> None:
    """Episodes go on ending while a batch is handed out."""
    recorder = Recorder(tmp_path)
    writer = RecordingQueue(recorder)
    writer.episode(_played("before"))
    flushed = asyncio.create_task(writer.flush())
    number = 0
    async with asyncio.timeout(60):
        while not flushed.done():
            writer.episode(_played(f"after {number}"))
            number += 1
            await asyncio.sleep(0)
    assert next(Recording(tmp_path).episodes()).id == "before"
    await writer.flush()
    recorder.close()
    assert len(list(Recording(tmp_path).episodes())) == number + 1


async def test_what_was_flushed_was_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, synced = Recorder(tmp_path), list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    writer = RecordingQueue(recorder)
    for number in range(3):
        played = _played(f"{number}")
        writer.episode(played)
        writer.group(GroupRecord(f"{number}", number, TASK, 0, (played.record,)), None)
    await writer.flush()
    assert len(synced) == 2, "the segment, and once its name"
    recorder.close()


async def test_a_failure_is_reported_once_before_flush_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, errors = Recorder(tmp_path), list[BaseException]()
    writer = _queue(recorder, errors)

    def fails() -> None:
        raise RecordingError("full")

    monkeypatch.setattr(recorder, "sync", fails)
    async with asyncio.timeout(60):
        await asyncio.gather(writer.flush(), writer.flush())
        assert [str(error) for error in errors] == ["full"]
        writer.episode(_played("late"))
        await writer.flush()
    assert len(errors) == 1 and list(Recording(tmp_path).episodes()) == []
    monkeypatch.undo()
    recorder.close()


async def test_a_failure_at_the_very_end_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a batch any more."""
    writer = await record_here(tmp_path, Retention())
    monkeypatch.setattr(Recorder, "episode", lambda *_: 1 / 0)
    writer.episode(_played("last"))
    with pytest.raises(ZeroDivisionError):
        await writer.close()


async def test_what_failed_before_anybody_asked_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, errors = Recorder(tmp_path), list[BaseException]()
    writer = RecordingQueue(recorder)
    monkeypatch.setattr(recorder, "episode", lambda *_: 1 / 0)
    writer.episode(_played("first"))
    await writer.flush()
    writer.report_to(errors.append)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    recorder.close()


def _queue(recorder: Recorder, errors: list[BaseException]) -> RecordingQueue:
    writer = RecordingQueue(recorder)
    writer.report_to(errors.append)
    return writer
