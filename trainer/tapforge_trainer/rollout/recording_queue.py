"""What the scheduler writes through: the recorder beside its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ..records import GroupRecord
from .attempt import EpisodeResult
from .recorder import Recorder


class RecordWriter(Protocol):
    """Takes in what is to be recorded and returns at once. Everything is written in the order in which it came. The
    first failure is reported once, in the event loop, to whoever made the writer; nothing is written after it."""

    def episode(self, result: EpisodeResult) -> None: ...

    def group(self, record: GroupRecord, dropped: str | None) -> None:
        """Its episodes came before it."""

    async def flush(self) -> None:
        """Returns when everything that came before would survive a power failure, or after the failure was reported."""


class RecordingQueue:
    """A `RecordWriter` in this process: writes are queued and done in a thread, many in one hop. The first failure goes
    to `on_error`."""

    def __init__(self, recorder: Recorder, on_error: Callable[[BaseException], None]):
        self._recorder = recorder
        self._on_error = on_error
        self._queue: list[Callable[[], object]] = []
        self._task: asyncio.Task[None] | None = None
        self._flushing: set[asyncio.Future[None]] = set()
        self._broken = False

    def episode(self, result: EpisodeResult) -> None:
        self._put(partial(self._recorder.episode, result.record, result.frames, result.ui_trees))

    def group(self, record: GroupRecord, dropped: str | None) -> None:
        self._put(partial(self._recorder.group, record, dropped))

    async def flush(self) -> None:
        if self._broken:
            return
        loop = asyncio.get_running_loop()
        flushed = loop.create_future()
        self._flushing.add(flushed)
        self._put(self._recorder.sync)
        self._put(partial(loop.call_soon_threadsafe, self._flushed, flushed))
        await flushed

    def _put(self, write: Callable[[], object]) -> None:
        if self._broken:
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
        # A full disk, a bug in a record: whatever it is, the run must hear of it and stop.
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._broken = True
            self._queue.clear()
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
