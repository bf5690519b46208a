"""How a Ray Pod is left well: `tapforge leave`, which Kubernetes runs before it ends the Pod (its preStop hook).

Kubernetes runs the hook, and only when that is over tells the container's first process to end. That is `ray start`,
which tells the driver nothing and kills everything (its own wait, for traffic of Ray Serve, is switched off).

- In the Pod of the driver the hook tells it to stop (SIGTERM), and waits until it has made its checkpoint and is gone.
- In any Pod it waits until the run's ranks and engines are gone: a checkpoint is written by the ranks, and Kubernetes
  ends all Pods of a cluster at the same time.
- It ends after `seconds` in any case.

The driver is known by a file in the Pod's own /tmp, which holds its number, and which it keeps locked as long as it
lives: a number that was left behind is nobody's. With a supervisor, that is who is told.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from tapforge_api import attempt as told

from ..supervisor import RESTARTS

log = logging.getLogger(__name__)

#: what Ray calls the processes of `policy/learner.py` and `policy/engine.py`
ACTORS: Final = ("ray::RankActor", "ray::EngineActor")
#: between two looks, seconds
_LOOK: Final = 0.2
#: so often the lock is asked for
_TRIES: Final = 25


@contextmanager
def known(environment: Mapping[str, str]) -> Iterator[None]:
    """This process is the driver of its Pod, or the driver's supervisor, until the block ends. On a laptop nothing."""
    if not environment.get(told.RUN_UID) or RESTARTS in environment:
        yield
        return
    path = place(environment)
    try:
        file = path.open("a+")
    except OSError as error:
        log.warning("%s can't be written (%s): when the Pod is ended, nobody tells the driver", path, error)
        yield
        return
    with file:
        _lock(file)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def place(environment: Mapping[str, str]) -> Path:
    """Not in $TAPFORGE_WORK, which several Pods may share: numbers of processes are the Pod's own."""
    return Path(tempfile.gettempdir()) / f"tapforge-driver-{environment.get(told.RUN_UID, '')}.lock"


def _lock(file: IO[str]) -> None:
    """Against a hook that looks just now. Whoever holds it longer is a driver whose Ray job is over."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK)
        else:
            return
    log.warning("%s is held by another driver: when the Pod is ended, this one is not told", file.name)


def leave(environment: Mapping[str, str], seconds: float) -> bool:
    """Returns whether everybody has left in time. `environment`: of the Pod."""
    path, uid = place(environment), environment.get(told.RUN_UID, "")
    end = time.monotonic() + seconds
    asked = 0
    while (driver := _driver(path)) or _acting(uid):
        if driver not in (0, asked):
            asked = driver
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(driver, signal.SIGTERM)
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK)
    return True


def _driver(path: Path) -> int:
    """Its number; 0: there is none."""
    try:
        file = path.open("r+")
    except FileNotFoundError:
        return 0
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read() or 0)
    return 0


def _acting(uid: str) -> bool:
    """Whether there are ranks or engines of the run."""
    import psutil

    for process in psutil.process_iter():
        try:
            if "".join(process.cmdline()[:1]).startswith(ACTORS):
                # Whoever gives himself another name may lose his environment by it: Ray, who started him, has the same.
                around = [process, *process.parents()[:1]]
                if any(one.environ().get(told.RUN_UID) == uid for one in around):
                    return True
        except psutil.Error:
            continue  # it has just ended, or is none of ours
    return False
