"""The recorder beside the event loop: whatever the moment in which something is handed over, it is written in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Outcome, Reason
from tapforge_trainer.records import EpisodeRecord
from tapforge_trainer.rollout.attempt import Attempt, EpisodeResult
from tapforge_trainer.rollout.recorder import Recorder, Recording, RecordingQueue

TASK = catalog.tasks("quickstart", "train").sample(0, 0)


def _played(name: str) -> EpisodeResult:
    record = EpisodeRecord(
        name, "g1-000004", TASK, 0, "local-0", 7, Reason.DONE, Outcome.SUCCESS, 1.0, "", (), started=1.0, ended=2.0
    )
    attempt = Attempt("g1-000004", 4, 0, 0, 0, TASK, 7)
    return EpisodeResult(attempt, record, {}, None)


async def test_what_comes_while_the_last_write_is_being_put_down_is_written_too(tmp_path: Path) -> None:
    recorder, errors = Recorder(tmp_path), list[BaseException]()
    writer = RecordingQueue(recorder, errors.append)
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
