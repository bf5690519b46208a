"""The preStop hook of a Ray Pod: `tapforge prestop`.

Kubernetes runs the hook, and sends SIGTERM to the container's first process only when the hook has returned. That
process is `ray start`, which kills everything without a notice (its own wait, for traffic of Ray Serve, is switched
off).

- In the driver's Pod the hook sends SIGTERM to the driver, and waits until it has made its checkpoint and exited.
- In any Pod it waits until the run's ranks, engines and rollout workers have exited: a checkpoint is written by the
  ranks, after an update that reads frames from every node; and Kubernetes ends all Pods of a cluster at the same time.
- It returns after `seconds` in any case.

The driver registers in a file in the Pod's own /tmp, which holds its process id and stays locked while it runs: an id
that was left behind is ignored. With a supervisor, it is the supervisor that registers.
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

from tapforge_api import attempt as variables

from ..run.supervisor import RESTARTS

log = logging.getLogger(__name__)

#: what Ray calls the processes of learner, engines, rollout workers, recorder and judges' models
ACTORS: Final = ("ray::RankActor", "ray::EngineActor", "ray::RolloutActor", "ray::RecorderActor", "ray::ServerActor")
#: between two polls, seconds
_POLL: Final = 0.2
#: how often the lock is tried
_TRIES: Final = 25


@contextmanager
def registered(environment: Mapping[str, str]) -> Iterator[None]:
    """Registers this process as the driver of its Pod, or as the driver's supervisor, until the block ends. Does
    nothing on a laptop."""
    if not environment.get(variables.RUN_UID) or RESTARTS in environment:
        yield
        return
    path = lock_path(environment)
    try:
        file = path.open("a+")
    except OSError as error:
        log.warning("%s can't be written (%s): the preStop hook will not find the driver", path, error)
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


def lock_path(environment: Mapping[str, str]) -> Path:
    """Not in $TAPFORGE_WORK, which several Pods may share: process ids are the Pod's own."""
    return Path(tempfile.gettempdir()) / f"tapforge-driver-{environment.get(variables.RUN_UID, '')}.lock"


def _lock(file: IO[str]) -> None:
    """A hook that polls holds it for a moment; longer than that, a driver whose Ray job has ended."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL)
        else:
            return
    log.warning("%s is held by another driver: the preStop hook will not find this one", file.name)


def prestop(environment: Mapping[str, str], seconds: float) -> bool:
    """Returns whether the driver and its actors have exited in time. `environment`: of the Pod."""
    path, uid = lock_path(environment), environment.get(variables.RUN_UID, "")
    end = time.monotonic() + seconds
    signalled = 0
    while (driver := _driver(path)) or _has_actors(uid):
        if driver not in (0, signalled):
            signalled = driver
            with suppress(ProcessLookupError):  # it has just exited
                os.kill(driver, signal.SIGTERM)
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL)
    return True


def _driver(path: Path) -> int:
    """Its process id; 0: there is none."""
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


def _has_actors(uid: str) -> bool:
    """Whether ranks, engines or rollout workers of the run are alive in this Pod."""
    import psutil

    for process in psutil.process_iter():
        try:
            if "".join(process.cmdline()[:1]).startswith(ACTORS):
                # A process that sets its title may overwrite its environment; its parent in Ray has the same.
                candidates = [process, *process.parents()[:1]]
                if any(one.environ().get(variables.RUN_UID) == uid for one in candidates):
                    return True
        except psutil.Error:
            continue  # it has just exited, or belongs to another user
    return False
