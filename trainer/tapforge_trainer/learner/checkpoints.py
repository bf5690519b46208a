"""Checkpoints of a run: weights and moments by the ranks (rank_state.py), the driver's state as JSON beside them, in a
folder or in object storage (checkpoint_storage.py).

Rules:
- The learner stands still until its state is copied; writing goes on beside it. One is written at a time: the next save
  waits for it.
- What is saved is the state, the driver's too, of the moment of the save. Resuming from it is going on as if nothing
  had been: same weights, moments and step count, bit for bit.
- It counts when it was published: a failure before leaves the one before untouched. It is raised once, by the next save
  or by `settle`, whichever comes first.
- What the ranks still write after its deadline is left alone, and nothing new is begun before they are done.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..storage.object_storage import StorageError, is_uri
from .checkpoint_storage import (
    FORMAT,
    CheckpointBackend,
    CheckpointError,
    CheckpointFolder,
    Draft,
    checkpoint_at,
    missing_files,
    read_state,
)
from .client import Learner, LearnerError
from .rank_state import StillWriting

log = logging.getLogger(__name__)

__all__ = ["CheckpointError", "Checkpoints", "WrittenCheckpoint", "latest", "load", "read_state", "save"]

#: bytes free at which a failed write is put down to the disk
_NEARLY_FULL: Final = 1024 * 1024
_STAGE, _WRITTEN, _LOAD, _CHECK_IDLE = (
    f"tapforge_trainer.learner.rank_state:{name}" for name in ("stage", "written", "load", "check_idle")
)


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that is complete. Seconds: that the learner stood still for it, and from the save until it was
    complete. `saved`: unix seconds of the save."""

    update: int
    path: str
    seconds_stalled: float
    seconds: float
    bytes: int
    saved: float


class Checkpoints:
    """Of one learner at one place. Belongs to one event loop."""

    def __init__(self, learner: Learner, place: CheckpointBackend, keep: int = 2):
        self._learner, self._place, self._keep = learner, place, keep
        self._writing: asyncio.Task[WrittenCheckpoint] | None = None
        #: the ranks may still be writing one that was given up
        self._late = False

    async def save(
        self, update: int, state: Mapping[str, Any], report: Callable[[WrittenCheckpoint], None] = lambda _: None
    ) -> None:
        """Begins the checkpoint of `update` (an older one of the same number is replaced), and returns when the learner
        may go on. `state` is the driver's own: anything that JSON holds. `report` is called when it is complete. Raises
        CheckpointError, also for the checkpoint before."""
        started, saved = time.monotonic(), time.time()
        await self.settle()
        document = {"format": FORMAT, "update": update, "time": saved, "driver": dict(state)}
        draft = self._place.draft(update)
        try:
            if self._late:
                await self._learner.run(_CHECK_IDLE, draft.target)
                self._late = False
            await asyncio.to_thread(self._place.begin, draft, document)
            found = await self._learner.run(_STAGE, draft.target)
        except (OSError, StorageError, LearnerError) as error:
            raise await self._failed(draft, error) from error
        counters = dict(found[0])
        document |= {"base": counters.pop("base"), "counters": counters}
        stalled = time.monotonic() - started
        self._writing = asyncio.create_task(self._write(draft, document, started, stalled, report))

    async def settle(self) -> None:
        """Returns when nothing is being written. Raises CheckpointError if that failed, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                writing.cancel()
                raise

    def abandon(self) -> None:
        """What is being written will not be complete."""
        if self._writing is not None:
            self._writing.cancel()

    async def _write(
        self,
        draft: Draft,
        document: dict[str, Any],
        started: float,
        stalled: float,
        report: Callable[[WrittenCheckpoint], None],
    ) -> WrittenCheckpoint:
        try:
            seconds = self._learner.settings.update_seconds
            files: dict[str, int] = (await self._learner.run_concurrently(_WRITTEN, draft.target, seconds))[0]
            document["files"] = files
            await asyncio.to_thread(self._place.publish, draft, document, files, self._keep)
        except (OSError, StorageError, LearnerError) as error:
            failed = await self._failed(draft, error)
            log.warning("%s", failed)
            raise failed from error
        took = time.monotonic() - started
        written = WrittenCheckpoint(draft.update, draft.place, stalled, took, sum(files.values()), document["time"])
        report(written)
        return written

    async def _failed(self, draft: Draft, error: Exception) -> CheckpointError:
        why = await asyncio.to_thread(_why, error, self._place.root)
        if _may_go_on(error):
            self._late = True
        else:
            await asyncio.to_thread(self._place.discard, draft)
        try:
            newest = await asyncio.to_thread(self._place.latest)
            left = f"{Path(newest).name} is still there and complete" if newest else "there is no earlier one"
        except (OSError, StorageError, CheckpointError):
            left = "whether the one before is there can't be seen now; nothing of it was touched"
        return CheckpointError(f"checkpoint {draft.place} could not be written: {why}; {left}")


async def save(
    learner: Learner, place: CheckpointBackend | Path, update: int, state: Mapping[str, Any], *, keep: int = 2
) -> WrittenCheckpoint:
    """Writes a checkpoint, and returns when it is complete."""
    found: list[WrittenCheckpoint] = []
    checkpoints = Checkpoints(learner, CheckpointFolder(place) if isinstance(place, Path) else place, keep)
    await checkpoints.save(update, state, found.append)
    await checkpoints.settle()
    return found[0]


async def load(
    learner: Learner, place: CheckpointBackend | Path, where: str | Path | None = None, *, moments: bool = True
) -> dict[str, Any] | None:
    """Brings the learner to the state of the checkpoint `where`, a folder or URI, or of the newest one at `place`;
    returns the driver's state, or None if there is nothing to resume from. `moments`: the optimizer's as well, else it
    begins afresh."""
    if where is None:
        chosen = await asyncio.to_thread(latest, place)
    else:
        chosen = await asyncio.to_thread(checkpoint_at, str(where))
    if chosen is None:
        return None
    document = await asyncio.to_thread(read_state, chosen)
    if wrong := await asyncio.to_thread(missing_files, chosen, document.get("files", {})):
        raise CheckpointError(f"checkpoint {chosen} is damaged: {'; '.join(wrong[:3])}; name another one by resumeFrom")
    try:
        there = chosen if is_uri(chosen) else str(Path(chosen).absolute())  # a rank may be started elsewhere
        await learner.run(_LOAD, there, document, moments)
    except LearnerError as error:
        raise CheckpointError(f"checkpoint {chosen} does not fit the model or is damaged: {error}") from error
    return document["driver"]


def latest(place: CheckpointBackend | Path) -> str | None:
    """The newest complete checkpoint."""
    return CheckpointFolder(place).latest() if isinstance(place, Path) else place.latest()


def _may_go_on(error: Exception) -> bool:
    """Whether the ranks may still be writing: then what they write stays, until the next save finds them idle."""
    cause = error.__cause__
    return isinstance(cause, TimeoutError) or isinstance(getattr(cause, "cause", None), StillWriting)


def _why(error: Exception, root: str) -> str:
    if not is_uri(root) and _full(error, Path(root)):
        return f"the disk is full ({error}); make room, or enlarge the volume"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return f"the file system is read-only ({error}); see why, and mount it so that it can be written"
    return str(error)


def _full(error: Exception, root: Path) -> bool:
    """torch reports a full disk as anything but that, so the disk is asked as well."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return root.exists() and shutil.disk_usage(root).free < _NEARLY_FULL
