"""How a command ends: when it is asked to stop, when it fails, and what becomes of the processes that it started.

Stop signal
- The first request to stop counts. The loop finishes its update and saves; whatever else is under way is cancelled
  (`Interrupted`).
- A request with a grace (seconds) is carried out within it: when the grace has expired, the work is aborted, that is
  cancelled where it stands. What is lost then is what was done since the last checkpoint. The shortest grace counts.
- A request because of a successor (`SUPERSEDED`) aborts at once: another process resumes the run, and this one must not
  write any more.
- Ctrl-C has no grace; a second one exits at once. SIGTERM has one, however often it is sent: stopping a process
  group may reach the same process twice.

Failures
- What can go wrong though the program is right ends with a message and an exit code (`failure_of`). Everything else is
  a programming error, and shows its traceback.

Subreaper
- No process that a command started outlives it. Ray's agents look for a parent now and then, and not at all while they
  try to reach a control store that is gone: a command that is stopped while Ray starts would leave them for minutes.
- On Linux the process becomes the subreaper of its descendants, so that it finds orphans; elsewhere only those are
  found whose own parents live. They are killed when the interpreter exits, after Ray's own exit handlers; not when the
  process itself is killed.

Nothing heavy is imported with this module.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from tapforge_api.learning import Stop

log = logging.getLogger(__name__)

#: seconds from a SIGTERM until the work is aborted
GRACE: Final = 60.0
#: stopped by Ctrl-C: 128 + SIGINT, as shells have it
EXIT_INTERRUPTED: Final = 130
#: how long aborted work may take to clean up, seconds
_CLEANUP: Final = 10.0
#: how long an aborted command may take to exit, its last report included, seconds
_FORCED_EXIT: Final = 30.0
_PR_SET_CHILD_SUBREAPER: Final = 36
#: how long a descendant may take to exit after SIGTERM, seconds
_DESCENDANT_GRACE: Final = 2.0

T = TypeVar("T")


# --- stop signal ------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """The run was asked to stop, and what was under way is cancelled; started again, it resumes from its last
    checkpoint."""


class StopReason(StrEnum):
    """What asked for a stop."""

    INTERRUPT = "Ctrl-C"
    TERMINATE = "SIGTERM"
    SUSPEND = "suspend"
    DEADLINE = "deadline"
    SUPERSEDED = "superseded"
    JUDGE_BUDGET = "the judges' budget"


class StopSignal:
    """Whether a run shall stop, why, and by when. Belongs to one event loop. `grace`: of a SIGTERM, seconds."""

    def __init__(self, grace: float = GRACE) -> None:
        self.grace = grace
        #: set when the run shall stop
        self.requested = asyncio.Event()
        #: set when the work shall be cancelled where it stands
        self.aborted = asyncio.Event()
        self.reason: StopReason | None = None
        #: what a person has to do before the run goes on, if anything
        self.remedy = ""
        #: spec.stop as it was edited since the run started; None: as the run's file says
        self.limits: Stop | None = None
        self._until: float | None = None

    def request(self, reason: StopReason, grace: float | None = None, remedy: str = "") -> None:
        """`grace`: how long the stop may take from now on, seconds; None: as long as it takes."""
        if self.reason is None or reason is StopReason.SUPERSEDED:
            self.reason, self.remedy = reason, remedy
        self.requested.set()
        if reason is StopReason.SUPERSEDED:
            self.aborted.set()
        elif grace is not None:
            self._abort_after(grace)

    def _abort_after(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if self._until is None or until < self._until:
            self._until = until
            loop.call_at(until, self.aborted.set)

    @property
    def exit_code(self) -> int:
        """Of a run that stopped."""
        from tapforge_api.progress import EXIT_STOPPED

        return EXIT_INTERRUPTED if self.reason in (None, StopReason.INTERRUPT) else EXIT_STOPPED


async def unless_stopped(stop: StopSignal, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when a stop is requested first: then `Interrupted`."""
    task, requested = asyncio.create_task(work), asyncio.create_task(stop.requested.wait())
    try:
        await asyncio.wait({task, requested}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Interrupted("stopped")
        return task.result()
    finally:
        task.cancel()
        requested.cancel()
        await asyncio.gather(task, requested, return_exceptions=True)


async def run_until_aborted(
    stop: StopSignal, work: Coroutine[Any, Any, int], on_abort: Callable[[], None] = lambda: None
) -> int:
    """The exit code of `work`; of work that was interrupted or aborted, the stop signal's. `on_abort` is called before
    the work is cancelled."""
    task, aborted = asyncio.create_task(work), asyncio.create_task(stop.aborted.wait())
    waits: set[asyncio.Task[Any]] = {task, aborted}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            on_abort()
            task.cancel()
            await asyncio.wait({task}, timeout=_CLEANUP)
            if not task.done() or task.cancelled() or task.exception() is not None:
                return stop.exit_code  # an error while it is cancelled is not a failure of the run
        return task.result()
    except Interrupted:
        return stop.exit_code
    finally:
        aborted.cancel()
        if not stop.aborted.is_set():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextmanager
def handling_signals(stop: StopSignal) -> Iterator[None]:
    """SIGINT and SIGTERM request a stop until the block ends."""
    running = asyncio.get_running_loop()

    def interrupt() -> None:
        stop.request(StopReason.INTERRUPT)
        running.remove_signal_handler(signal.SIGINT)  # the next one is left to Python

    def terminate() -> None:
        signal.alarm(0)  # Ray sets one while it starts, to abort the process soon
        stop.request(StopReason.TERMINATE, stop.grace)

    running.add_signal_handler(signal.SIGINT, interrupt)
    running.add_signal_handler(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        for name in (signal.SIGINT, signal.SIGTERM):
            running.remove_signal_handler(name)


# --- failures ---------------------------------------------------------------------------------------------------------


def failure_of(error: BaseException) -> tuple[int, str] | None:
    """Exit code and message of a failure; None for a programming error. Imports heavy packages."""
    from tapforge_api.progress import EXIT_CONFIGURATION, EXIT_FAILED, EXIT_STOPPED

    from ..learner.checkpoint_storage import FencedOut
    from ..rewards.budget import JudgeBudgetSpent

    # Started again, the first would only take the run from the other one, and the second use nothing but machines.
    if isinstance(error, FencedOut | JudgeBudgetSpent):
        return EXIT_STOPPED, message_of(error)
    if isinstance(error, _configuration_errors()) and not _of_the_disk(error):
        return EXIT_CONFIGURATION, message_of(error)
    return (EXIT_FAILED, message_of(error)) if isinstance(error, (*_configuration_errors(), *_other_errors())) else None


def _of_the_disk(error: BaseException) -> bool:
    """Whether data that is there could not be read: a volume that hangs may be back the next time."""
    from ..data.episodes import DataError

    wrong = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM)
    cause = error.__cause__ if isinstance(error, DataError) else None
    return isinstance(cause, OSError) and cause.errno not in wrong


def message_of(error: BaseException) -> str:
    """The message with its notes."""
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    return "\n".join([text, *getattr(error, "__notes__", ())])


def _configuration_errors() -> tuple[type[Exception], ...]:
    from tapforge_api import SpecError

    from ..agents.context import ContextError
    from ..agents.prompt_file import PromptFileError
    from ..data.episodes import DataError
    from .assembly import ConfigurationError

    return SpecError, ConfigurationError, ContextError, PromptFileError, DataError


def _other_errors() -> tuple[type[Exception], ...]:
    from tapforge_envs.phone.catalog import UnknownTask
    from tapforge_envs.slots.source import SlotError

    from ..engine.client import EngineError
    from ..frames.frame import FrameError
    from ..judges.journal import JournalError
    from ..learner.checkpoints import CheckpointError
    from ..learner.client import LearnerError
    from ..recording.reader import RecordingError
    from ..rollout.remote_players import WorkerError
    from ..rollout.scheduler import RolloutError
    from ..storage.object_storage import StorageError
    from ..sync.sync import SyncMismatch
    from ..tasks.source import TaskError
    from .assembly import SetupError
    from .calibrate import CalibrationError
    from .report import ReportError

    setup = (SetupError, SlotError, TaskError, UnknownTask)
    policy = (LearnerError, EngineError, SyncMismatch, CheckpointError)
    recorded = (RecordingError, FrameError, ReportError, JournalError, CalibrationError)
    return (*setup, *policy, *recorded, StorageError, WorkerError, RolloutError, OSError)


# --- subreaper --------------------------------------------------------------------------------------------------------


def become_subreaper() -> None:
    """Called before anything registers an exit handler of its own, it is carried out after those."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        log.warning("orphans of Ray won't be killed at exit: %s", OSError(ctypes.get_errno(), "prctl"))
    atexit.register(kill_descendants)


def kill_descendants() -> None:
    import psutil

    # A process that is sent SIGTERM may leave orphans: they are sent it too.
    for send in (psutil.Process.terminate, psutil.Process.kill, psutil.Process.kill):
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            try:
                send(process)
            except psutil.NoSuchProcess:
                continue  # it has exited
        psutil.wait_procs(left, timeout=_DESCENDANT_GRACE)


def force_exit(code: int) -> None:
    """From now on the process exits within half a minute, whatever a thread of it waits for, such as a volume that is
    gone."""

    def leave() -> None:
        try:
            kill_descendants()
        finally:
            os._exit(code)

    timer = threading.Timer(_FORCED_EXIT, leave)
    timer.daemon = True
    timer.start()


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """All of them; when one fails or this is cancelled, the others are cancelled first."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
