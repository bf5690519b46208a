"""The files of a run on its storage, and who they belong to.

    <root>/<namespace>/<run uid>/         $TAPFORGE_STORAGE: of this run alone, also among runs of the same name
      attempt-00000002-1795176000000/     everything the run keeps, while the second attempt works on it
        NAME/                             the run's folder, as on a laptop: recording, checkpoints, latest, summary, ...

A folder belongs to an attempt and its start time (milliseconds since the epoch), because a queue that takes an
attempt's machines and gives it others later starts it twice, and the first one may still run. A driver that is started
again in place keeps the time of its first start.

Rules:
1. A later holder takes over what was there by renaming the folder to its own name. From then on the former has no
   path to it: it can't move `latest`, delete a checkpoint or write one, whenever it wakes up.
2. Files that the former may hold open, and would keep writing into, are copied before the new one reads them.
3. Nothing is taken from a later attempt, or from a later start of the same one: `FencedOut`.
4. Renaming is atomic, so a crash at any moment leaves one folder, which the next start finds.

The volume has to rename folders atomically, as local and network file systems do. Clocks of nodes may differ by
less than lies between two starts of an attempt.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..judges.journal import VERDICTS
from ..learner.checkpoint_storage import FencedOut, Holder
from ..recording.learner_tokens import LEARNER
from ..recording.reader import FRAMES, RECORDS
from ..recording.segments import open_for_appending
from ..run.assembly import SetupError
from ..telemetry.telemetry import EVENTS

__all__ = ["FencedOut", "Holder", "RunStorageError", "folder_of", "newest", "take_over"]

#: files that are appended to, wherever they are below an attempt's folder; of those in segments the newest
_APPENDED: Final = (RECORDS.stem, LEARNER.stem, EVENTS, VERDICTS)
_LOCK: Final = ".lock"
#: an earlier release's has no time
_FOLDER: Final = re.compile(r"(attempt|taking)-(\d{8})(?:-(\d{13,}))?")
#: how often another attempt may be faster
_TRIES: Final = 5


class RunStorageError(SetupError):
    """The storage can't be used. The message names it and the remedy."""


def folder_of(storage: Path, holder: Holder) -> Path:
    return storage / f"attempt-{holder}"


def newest(storage: Path) -> Holder | None:
    """The last holder that began to write; None: there is none."""
    return max(_folders(storage), default=None)


def take_over(storage: Path, holder: Holder) -> Path:
    """The holder's folder, with everything that earlier ones left. It takes the place of the folder of all runs."""
    own = folder_of(storage, holder)
    taking = storage / f"taking-{holder}"
    with _explained(storage):
        storage.mkdir(parents=True, exist_ok=True)
        for _ in range(_TRIES):
            found = _folders(storage)
            before = max(found, default=holder)
            if before.attempt > holder.attempt:
                raise FencedOut(f"attempt {before.attempt} of the run has taken over from attempt {holder.attempt}")
            if before > holder:
                raise FencedOut(f"attempt {holder.attempt} was started once more, later, and that one has taken over")
            if not found:
                own.mkdir()
            if before == holder and own.is_dir():
                _check(own)
                return own
            try:
                if found[before] != taking:
                    found[before].rename(taking)
                _detach(taking)
                taking.rename(own)
            except FileNotFoundError:  # a later one was faster
                continue
            for other, folder in found.items():
                if other < before:  # made by one that was superseded and did not know yet
                    shutil.rmtree(folder, ignore_errors=True)
    raise RunStorageError(
        f"{storage} was taken over by other attempts {_TRIES} times in a row; is there only one operator?"
    )


def _folders(storage: Path) -> dict[Holder, Path]:
    try:
        entries = list(storage.iterdir())
    except FileNotFoundError:
        return {}
    named = [(match, path) for path in entries if (match := _FOLDER.fullmatch(path.name))]
    return {Holder(int(match[2]), int(match[3] or 0)): path for match, path in named}


def _detach(folder: Path) -> None:
    """Gives the files that are appended to, and the lock, to those that open them from now on."""
    for place, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if name != FRAMES]  # each attempt begins packs of its own
        appended = open_for_appending(name for name in files if name.startswith(_APPENDED))
        for name in files:
            path = Path(place, name)
            if name == _LOCK:
                path.unlink()
            elif name in appended:
                copy = path.with_name(f".{name}.copy")
                shutil.copyfile(path, copy)
                copy.rename(path)


def _check(folder: Path) -> None:
    """Whether anything can be written. On a full volume a name can be, and no byte."""
    probe = folder / ".probe"
    try:
        with probe.open("wb", buffering=0) as file:
            file.write(b"\0" * 4096)
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def _explained(storage: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunStorageError(f"the run's storage {storage} can't be written: {_why(error)}") from error


def _why(error: OSError) -> str:
    words = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{words}; make room on the volume of spec.checkpoints.storage, or enlarge its claim"
    if error.errno == errno.EROFS:
        return f"{words}; the volume of spec.checkpoints.storage is mounted read-only: its claim must allow writing"
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"{words} for user {os.getuid()}, group {os.getgid()}; set securityContext.fsGroup in the templates of "
            "spec.cluster, or give the folder of the volume to that user"
        )
    return words
