"""What the scheduler writes through: the recorder beside its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from ..attempt import EpisodeResult
from ..records import EpisodeRewards, GroupRecord
from .learner_tokens import LearnerTokens
from .recorder import Recorder
from .retention import Retention


class RecordWriter(Protocol):
    """Takes in what is to be recorded and returns at once. Everything is written in the order in which it came. Nothing
    is written after the first failure."""

    def report_to(self, on_error: Callable[[BaseException], None]) -> None:
        """Calls this in the event loop with the first failure, once."""

    def episode(self, result: EpisodeResult) -> None: ...

    def rewards(self, episode: str, rewards: EpisodeRewards) -> None:
        """Of an episode that came before, and awaits them."""

    def group(self, record: GroupRecord, dropped: str | None) -> None:
        """Its episodes came before it."""

    def learner_tokens(self, update: int, episodes: Sequence[LearnerTokens]) -> None:
        """Of episodes that an update trained on."""

    async def flush(self) -> None:
        """Returns when everything that came before would survive a power failure, or after the failure was reported."""

    async def close(self) -> None:
        """Flushes and ends. Raises the first failure, so that one at the very end isn't lost."""


class OpenRecording(Protocol):
    """How a recording is begun, or one that is there gone on with: in this process or another."""

    async def __call__(
        self, folder: Path, retention: Retention, spared: Callable[[], Collection[str]] = frozenset
    ) -> RecordWriter:
        """As `Recorder`. Raises RecordingError."""


async def record_here(
    folder: Path, retention: Retention, spared: Callable[[], Collection[str]] = frozenset
) -> RecordWriter:
    """Records in this process, in a thread."""
    return RecordingQueue(await asyncio.to_thread(Recorder, folder, retention, spared=spared))


class RecordingQueue:
    """A `RecordWriter` in this process: writes are queued and done in a thread, many in one hop."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._on_error: Callable[[BaseException], None] | None = None
        self._error: BaseException | None = None
        self._queue: list[Callable[[], object]] = []
        self._task: asyncio.Task[None] | None = None
        self._flushing: set[asyncio.Future[None]] = set()

    def report_to(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        if self._error is not None:
            on_error(self._error)

    def episode(self, result: EpisodeResult) -> None:
        self._put(partial(self._recorder.episode, result.record, result.frames, result.ui_trees))

    def rewards(self, episode: str, rewards: EpisodeRewards) -> None:
        self._put(partial(self._recorder.rewards, episode, rewards))

    def group(self, record: GroupRecord, dropped: str | None) -> None:
        self._put(partial(self._recorder.group, record, dropped))

    def learner_tokens(self, update: int, episodes: Sequence[LearnerTokens]) -> None:
        self._put(partial(self._recorder.learner_tokens, update, episodes))

    async def flush(self) -> None:
        if self._error is not None:
            return
        loop = asyncio.get_running_loop()
        flushed = loop.create_future()
        self._flushing.add(flushed)
        self._put(self._recorder.sync)
        self._put(partial(loop.call_soon_threadsafe, self._flushed, flushed))
        await flushed

    async def close(self) -> None:
        await self.flush()
        try:
            await asyncio.to_thread(self._recorder.close)
        finally:
            if self._error is not None:
                raise self._error

    def _put(self, write: Callable[[], object]) -> None:
        if self._error is not None:
            return
        self._queue.append(write)
        if self._task is None:
            self._begin()

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._drain(), name="recorder")
        self._task.add_done_callback(self._done)

    async def _drain(self) -> None:
        while self._queue:
            batch, self._queue = self._queue, []
            await asyncio.to_thread(_write_all, batch)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        # A full disk, a bug in a record: whatever it is, the run must get it and stop.
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._error = error
            self._queue.clear()
            if self._on_error is not None:
                self._on_error(error)
            for flushed in list(self._flushing):
                self._flushed(flushed)
        elif self._queue:  # put there after the task's last look and before this
            self._begin()

    def _flushed(self, flushed: asyncio.Future[None]) -> None:
        self._flushing.discard(flushed)
        if not flushed.done():
            flushed.set_result(None)


def _write_all(batch: list[Callable[[], object]]) -> None:
    for write in batch:
        write()
