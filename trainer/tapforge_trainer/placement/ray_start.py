"""The Ray of this process: started once, here or in the cluster that `RAY_ADDRESS` names, and what it has."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from . import ray_environment
from .machine import missing

#: environment variable by which a cluster's job finds its Ray
RAY_ADDRESS = "RAY_ADDRESS"
#: how often Ray is started on this machine: its agents have 15 s and its node 30 s, which can't be set, and a busy
#: machine takes longer while their files are read for the first time
_RAY_STARTS: Final = 5
#: what Ray says then: of its node, and of a port that a part of it has not chosen yet
_RAY_LATE: Final = ("timed out during startup", "Timed out waiting for file")

#: between two looks at what the Ray cluster has
_GPU_LOOK_SECONDS: Final = 1.0

log = logging.getLogger(__name__)


def in_cluster() -> bool:
    """This process is a driver in a Ray cluster that it did not start."""
    return bool(os.environ.get(RAY_ADDRESS))


async def gpus_in_ray() -> int:
    """That the Ray cluster has now, on all its nodes."""
    with own_signals():
        await asyncio.to_thread(start_ray)  # once; it is there afterwards
    return int((await asyncio.to_thread(_resources)).get("GPU", 0))


async def wait_for_gpus(needed: int, report: Callable[[str], None], seconds: float) -> None:
    """Until the Ray cluster has so many GPUs, wherever they are: the head has often none, and a Pod that has some may
    just be being replaced. `report` is called with what is missing, each time that it changes. Raises TimeoutError."""
    reported, end = "", asyncio.get_running_loop().time() + seconds
    while words := missing(needed, await gpus_in_ray()):
        if words != reported:
            report(reported := words)
        if asyncio.get_running_loop().time() >= end:
            raise TimeoutError(f"{words}, after {seconds:g} s: look at the Pods of the run's workers")
        await asyncio.sleep(_GPU_LOOK_SECONDS)


@asynccontextmanager
async def ray_here() -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A function that starts Ray, for the length of the block: whatever became of it, what was started is ended."""
    starting: asyncio.Task[None] | None = None

    async def start() -> None:
        nonlocal starting
        with own_signals():
            starting = starting or asyncio.create_task(asyncio.to_thread(start_ray))
            await asyncio.shield(starting)

    try:
        yield start
    finally:
        if starting is not None:  # a thread can't be cancelled: a Ray that comes up late would be left behind
            await asyncio.gather(starting, return_exceptions=True)
            import ray

            if ray.is_initialized():
                await asyncio.to_thread(ray.shutdown)


def object_store_bytes() -> int:
    """Of all nodes of the Ray that was started."""
    return int(_resources().get("object_store_memory", 0))


def _resources() -> dict[str, float]:
    from ray import cluster_resources

    return dict(cluster_resources())


@contextmanager
def own_signals() -> Iterator[None]:
    """Handlers of signals are afterwards as they were before, whatever Ray puts in front of them while it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [(number, signal.getsignal(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            if handler is not None:
                signal.signal(number, handler)
                signal.siginterrupt(number, False)  # as asyncio has it


def _quoted(python: str) -> dict[str, str] | None:
    """What Ray's shell has to be told of a Python whose path has blanks: workers would not start."""
    return {"py_executable": word} if (word := shlex.quote(python)) != python else None


def start_ray(kept: bool = False) -> None:
    """Takes seconds; nothing in a cluster where it was started. `kept`: nor elsewhere."""
    if not (address := os.environ.get(RAY_ADDRESS)):
        ray_environment.prepare()
    import ray
    from ray._private import ray_constants

    if (address or kept) and ray.is_initialized():
        return
    # Ray's workers are nice (15) by default: on a machine without an idle core, engines and ranks would hardly run
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"):
        os.environ.setdefault(name, "0")
    # Its handler of SIGTERM prints a stack and aborts what has not ended three seconds later: no time for a checkpoint.
    # Not by the environment variable: workers would have that too, and their crashes shall leave a stack.
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    if not address:
        for tries_left in reversed(range(_RAY_STARTS)):
            try:
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env=_quoted(sys.executable),
                )
                break
            except Exception as error:  # nothing more special is raised; what is left of it ends with this process
                if not tries_left or not any(words in str(error) for words in _RAY_LATE):
                    raise
                log.warning("Ray did not come up in time on this machine; it is started again")
    else:
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ray_environment.refused(address, error) from error
