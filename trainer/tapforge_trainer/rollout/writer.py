"""The recorder beside the event loop: writes are queued and done in order in a thread, many in one hop.

`flush` returns when everything queued before is on disk. The first failure is reported once through `on_error`; nothing
is written after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from ..records import GroupRecord
from .episode import Played
from .recorder import Recorder


class Writer:
    def __init__(self, recorder: Recorder, on_error: Callable[[BaseException], None]):
        self._recorder = recorder
        self._on_error = on_error
        self._queue: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._broken = False

    def episode(self, played: Played) -> None:
        self._put(partial(self._recorder.episode, played.record, played.frames))

    def group(self, record: GroupRecord, dropped: str | None) -> None:
        self._put(partial(self._recorder.group, record, dropped))

    async def flush(self) -> None:
        while self._task is not None:
            await asyncio.wait([self._task])
            await asyncio.sleep(0)  # the task's own callback comes first

    def _put(self, write: Callable[[], None]) -> None:
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
        elif self._queue:  # put there after the task's last look and before this
            self._begin()


def _write_all(batch: list[Callable[[], None]]) -> None:
    for write in batch:
        write()
