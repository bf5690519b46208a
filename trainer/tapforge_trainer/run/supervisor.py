"""Restarts the driver of a run in place after a crash, so that a healthy cluster is kept.

| the driver ended | then |
|---|---|
| 0 complete, 2 configuration, 75 stopped, 130 Ctrl-C | so does the supervisor, with the same code |
| otherwise, also by a signal | after a pause it is restarted and resumes from `latest`; after `restarts` times: 1 |

- SIGINT and SIGTERM are forwarded to the driver, which is not restarted afterwards.
- The driver has a session of its own, so that a signal to the process group reaches it once; and it is
  killed with its supervisor.
- The backoff grows, because what killed a driver often lasts a while.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from tapforge_api.progress import EXIT_COMPLETE, EXIT_CONFIGURATION, EXIT_FAILED, EXIT_STOPPED

from .shutdown import EXIT_INTERRUPTED

log = logging.getLogger(__name__)

_ENDINGS: Final = (EXIT_COMPLETE, EXIT_CONFIGURATION, EXIT_STOPPED, EXIT_INTERRUPTED)
#: environment variables for the driver: how often it was restarted, and how often it still would be
RESTARTS, RESTARTS_LEFT = "TAPFORGE_DRIVER_RESTARTS", "TAPFORGE_DRIVER_RESTARTS_LEFT"
#: likewise: when it was started first, milliseconds since the epoch
STARTED: Final = "TAPFORGE_DRIVER_STARTED"


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds."""

    first: float = 1.0
    cap: float = 60.0

    def after(self, restarts: int) -> float:
        return float(min(self.cap, self.first * 2 ** min(restarts, 30)))


def beginning(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the time of the first start, which is now unless it was given."""
    return {STARTED: str(int(time.time() * 1000)), **environment}


def ending(code: int, restarts_left: int, forwarded: signal.Signals | None) -> int | None:
    """What the supervisor ends with after a driver that ended with `code` (negative: a signal); None: it starts
    another one. `forwarded`: the last signal that was."""
    if code in _ENDINGS:
        return code
    if forwarded is signal.SIGINT:
        return EXIT_INTERRUPTED
    if forwarded is not None:
        return EXIT_STOPPED if code == -forwarded else EXIT_FAILED  # stopped, if it died before it could listen
    return None if restarts_left > 0 else EXIT_FAILED


def exit_message(code: int, restarts: int, restarts_left: int) -> str:
    """How the driver ended."""
    if code >= 0:
        how = f"ended with code {code}"
    else:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"was killed by {name}"
        if -code == signal.SIGKILL:
            how += ", as the kernel does when memory runs out: see whether the head's container has enough"
    if restarts_left:
        return f"the driver {how}; it is restarted ({restarts_left} more)"
    return f"the driver {how}" + (f"; it had been restarted {restarts} times" if restarts else "")


async def supervise(
    command: Sequence[str],
    restarts: int,
    environment: Mapping[str, str],
    *,
    backoff: Backoff | None = None,
    report_killed: Callable[[Mapping[str, str], str], Awaitable[None]] | None = None,
) -> int:
    """Runs `command` until it ends for good; returns the exit code. `report_killed` gets the environment of a driver
    that was killed, and so could not report it, and a message."""
    backoff, environment = backoff or Backoff(), beginning(environment)
    forwarded: signal.Signals | None = None
    awake = asyncio.Event()
    driver: asyncio.subprocess.Process | None = None

    def forward(number: signal.Signals) -> None:
        nonlocal forwarded
        forwarded = number
        awake.set()
        if driver is not None and driver.returncode is None:
            driver.send_signal(number)

    with _forwarding(forward):
        for count in itertools.count():
            left = restarts - count
            own = {**environment, RESTARTS: str(count), RESTARTS_LEFT: str(left)}
            driver = await asyncio.create_subprocess_exec(*command, env=own, start_new_session=True)
            if forwarded is not None:  # while it was being started
                driver.send_signal(forwarded)
            code = await driver.wait()
            end = ending(code, left, forwarded)
            if end is not None and end != EXIT_FAILED:
                return end
            if end is not None:
                left = 0
            message = exit_message(code, count, left)
            log.warning("%s", message)
            if code < 0 and report_killed is not None:
                await report_killed({**own, RESTARTS_LEFT: str(left)}, message)
            if end is not None:
                return end
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.after(count)):
                    await awake.wait()
            if awake.is_set():
                return EXIT_INTERRUPTED if forwarded is signal.SIGINT else EXIT_STOPPED
    raise AssertionError("counting has no end")


def driver_command(words: Sequence[str]) -> list[str]:
    """`tapforge` with these words, as a process that is killed with this one."""
    return [sys.executable, "-m", "tapforge_envs.slots.child", str(os.getpid()), "tapforge_trainer.cli.main", *words]


@contextmanager
def _forwarding(forward: Callable[[signal.Signals], None]) -> Iterator[None]:
    running = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, forward, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            running.remove_signal_handler(number)
