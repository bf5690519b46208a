"""Everything a rollout produced, on disk: `FOLDER/rollout.jsonl` (append-only) and `FOLDER/frames/`.

Promises:
1. An episode is written as one block (its frames first, then the UI trees that were not written yet, its steps, its own
   line), a group after its episodes; after a group both file and frames survive a power failure (fsync).
2. Reading gives back equal records, floats bit for bit.
3. A last line that was cut off, and steps whose episode was never finished, are dropped and said (`Recording.dropped`,
   a log line when appending); they never make the rest unreadable. A broken line elsewhere is an error with its number.
4. A full disk is an error that names the path; what was written before stays readable.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tapforge_envs.protocol import Frame

from ..records import EpisodeRecord, GroupRecord, StepRecord
from .attempt import EpisodeResult
from .frames import FrameStore
from .lines import (
    decode_episode,
    decode_group,
    decode_step,
    decode_ui_tree,
    encode_episode,
    encode_group,
    encode_step,
    encode_ui_tree,
)

log = logging.getLogger(__name__)

FILE = "rollout.jsonl"
FRAMES = "frames"
#: how the lines begin that come before an episode's own
_BEFORE = (b'{"kind":"step"', b'{"kind":"ui_tree"')


class RecordingError(Exception):
    """The recording can't be written or read. The message names the path and the remedy."""


class Recorder:
    """Writes. One writer per folder; not for use from several threads at once."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.frames = FrameStore(folder / FRAMES)
        #: names of the UI trees that this recorder wrote
        self._trees: set[str] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            self._end = self._mend()
        except OSError as error:
            raise self._failure(error) from error

    @property
    def offset(self) -> int:
        """Bytes written: for a checkpoint's manifest."""
        return self._end

    def episode(
        self, record: EpisodeRecord, frames: Mapping[str, Frame], ui_trees: Mapping[str, str] | None = None
    ) -> None:
        """`ui_trees`: those that the steps name, by the sha256 of their text."""
        try:
            for frame in frames.values():
                self.frames.put(frame)
        except OSError as error:
            raise self._failure(error) from error
        trees = {name: tree for name, tree in (ui_trees or {}).items() if name not in self._trees}
        lines = [encode_ui_tree(name, tree) for name, tree in trees.items()]
        self._append(b"".join([*lines, *map(encode_step, record.steps), encode_episode(record)]))
        self._trees.update(trees)

    def group(self, record: GroupRecord, dropped: str | None = None) -> None:
        self._append(encode_group(record, dropped))
        self.sync()

    def sync(self) -> None:
        """Waits until all that was written would survive a power failure."""
        if self._file < 0:
            return
        try:
            self.frames.sync()
            os.fsync(self._file)
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file = -1

    def _append(self, block: bytes) -> None:
        if self._file < 0:
            raise RecordingError(f"{self.path} is closed, by close() or by an error that was raised before")
        try:
            written = 0
            while written < len(block):
                written += os.pwrite(self._file, memoryview(block)[written:], self._end + written)
        except OSError as error:
            # Half a block would make the next one unreadable. Where cutting it off fails too, the next opening does it.
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            os.close(self._file)
            self._file = -1
            raise self._failure(error) from error
        self._end += len(block)

    def _mend(self) -> int:
        """Cuts off what an interrupted writer left at the end: half a line, steps without their episode. Returns the
        length."""
        size = os.fstat(self._file).st_size
        end = self._last_line_end(size)
        while end > 0:
            begin = self._last_line_end(end - 1)
            if not os.pread(self._file, max(map(len, _BEFORE)), begin).startswith(_BEFORE):
                break
            end = begin
        if end < size:
            log.warning("%s ends in the middle of an episode: its last %d bytes are dropped", self.path, size - end)
            os.ftruncate(self._file, end)
        return end

    def _last_line_end(self, end: int) -> int:
        """The offset after the last newline before `end`; 0 when there is none."""
        while end > 0:
            begin = max(0, end - (1 << 16))
            found = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0

    def _failure(self, error: OSError) -> RecordingError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.path.parent).free >> 20
            return RecordingError(
                f"no space left for {self.path} ({free} MiB free): nothing recorded so far is lost; make room, or give "
                "another folder, and run again"
            )
        return RecordingError(f"{self.path} can't be written: {error}")


class RecordingQueue:
    """The recorder beside the event loop: writes are queued and done in order in a thread, many in one hop. `flush`
    returns when everything queued before is on disk. The first failure is reported once through `on_error`; nothing is
    written after it."""

    def __init__(self, recorder: Recorder, on_error: Callable[[BaseException], None]):
        self._recorder = recorder
        self._on_error = on_error
        self._queue: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._broken = False

    def episode(self, result: EpisodeResult) -> None:
        self._put(partial(self._recorder.episode, result.record, result.frames, result.ui_trees))

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


class Recording:
    """Reads. `frames` gives the images; `dropped` says what was cut off, once the end has been read."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.frames = FrameStore(folder / FRAMES)
        self.dropped: str | None = None

    def episodes(self) -> Iterator[EpisodeRecord]:
        """In the order in which they ended."""
        for record, _ in self._records():
            if isinstance(record, EpisodeRecord):
                yield record

    def groups(self, dropped: bool = False) -> Iterator[GroupRecord]:
        """In the order in which they were settled; those that were dropped only on demand."""
        for record, why in self._records():
            if isinstance(record, GroupRecord) and (dropped or why is None):
                yield record

    def ui_trees(self) -> Iterator[tuple[str, str]]:
        """Name (sha256) and text of every UI tree that a step names."""
        for number, line in self._lines():
            if line.get("kind") == "ui_tree":
                try:
                    yield decode_ui_tree(line)
                except (KeyError, ValueError, zlib.error) as error:
                    raise RecordingError(f"{self.path}:{number}: broken UI tree: {error}") from error

    def _records(self) -> Iterator[tuple[EpisodeRecord | GroupRecord, str | None]]:
        steps: dict[str, list[StepRecord]] = {}
        groups: dict[str, GroupRecord] = {}
        by_id: dict[str, EpisodeRecord] = {}
        for number, line in self._lines():
            try:
                kind = line["kind"]
                if kind == "step":
                    steps.setdefault(line["episode"], []).append(decode_step(line))
                elif kind == "episode":
                    own = tuple(steps.pop(line["id"], ()))
                    if len(own) != line["steps"]:
                        raise ValueError(f"episode {line['id']} has {len(own)} steps, its line says {line['steps']}")
                    episode = by_id[line["id"]] = decode_episode(line, own)
                    yield episode, None
                elif kind == "group":
                    group = decode_group(line, tuple(by_id[i] for i in line["episodes"]))
                    # A run that was taken up again writes down once more what it had at hand.
                    if groups.get(group.id) != group:
                        groups[group.id] = group
                        yield group, line["dropped"]
                elif kind != "ui_tree":
                    raise ValueError(f"unknown kind {kind!r}")
            except (KeyError, TypeError, ValueError) as error:
                raise RecordingError(f"{self.path}:{number}: broken record: {error}") from error
        if steps and self.dropped is None:
            self.dropped = f"{self.path}: steps of {', '.join(steps)}, whose end was never written"

    def _lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        self.dropped = None
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise RecordingError(f"the recording {self.path} can't be read: {error}") from error
        with file:
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    self.dropped = f"{self.path}:{number}: the last line was cut off after {len(raw)} bytes"
                    log.warning("%s; it is left out", self.dropped)
                    return
                try:
                    yield number, json.loads(raw)
                except ValueError as error:
                    raise RecordingError(f"{self.path}:{number}: not JSON: {error}") from error
