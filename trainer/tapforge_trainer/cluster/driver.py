"""The driver of an attempt on a cluster: where its files are, what it reports, and how it ends.

- It reports from its first second on. Nothing heavy starts before the operator has answered, or `_FIRST_ANSWER` has
  passed without: a request to stop, or edited limits, come with the first answer.
- Everything is in the attempt's folder (`storage`); spec.checkpoints.directory counts on a laptop only.
- However it ends, it reports that first, and waits until the report is answered: complete, stopped, configuration, and
  a failure after which it is not restarted in place. Only a driver that was superseded reports nothing more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tapforge_api import TrainingRun
from tapforge_api.progress import EXIT_FAILED, EXIT_STOPPED, FINAL_SECONDS
from tapforge_api.stages import updates_at_most
from tapforge_envs.slots.broker_calls import Access
from tapforge_envs.slots.source import SlotError

from ..learner.checkpoint_storage import CheckpointError, CheckpointFolder, place_of
from ..run.assembly import ConfigurationError, inspect
from ..run.data_pin import with_data
from ..run.local_files import checkpoint_uri, checkpoints_of, folder_of
from ..run.shutdown import Interrupted, StopReason, StopSignal, failure_of, run_until_aborted
from ..session import run_session
from ..storage.object_storage import uri_error
from ..telemetry.progress import Progress, finished, newest_checkpoint, progress_of
from ..telemetry.telemetry import ProgressView
from . import storage
from .attempt import RunAttempt
from .reporter import Reporter
from .status_report import ending

log = logging.getLogger(__name__)

NEED: Final = "a run on a cluster"
#: timeout for the operator's first answer, seconds
_FIRST_ANSWER: Final = 10.0
#: for the last report when there is little time, or when the driver is restarted, seconds
_SHORT: Final = 5.0


async def drive(
    attempt: RunAttempt,
    access: Access,
    read: Callable[[], TrainingRun],
    stop: StopSignal,
    on_abort: Callable[[], None] = lambda: None,
) -> int:
    """The exit code. Raises what the run fails with, after it was reported."""
    view = ProgressView(attempt.run, 0)
    _show_checkpoint(attempt, view)
    async with Reporter(access, attempt, view, stop) as reporter:
        try:
            work = _train(attempt, read, stop, view, reporter)
            code = await run_until_aborted(stop, work, on_abort)
        except storage.FencedOut as late:
            log.warning("%s; this driver exits", late)
            return EXIT_STOPPED
        except Exception as error:
            if _superseded(attempt):
                log.warning("a later attempt has taken over; this driver fails because of that: %s", error)
                return EXIT_STOPPED
            fallback = f"{type(error).__name__}: {error}; the traceback is in the driver's log"
            code, message = failure_of(error) or (EXIT_FAILED, fallback)
            # A supervisor that forwarded a signal does not restart the driver.
            left = 0 if stop.reason in (StopReason.INTERRUPT, StopReason.TERMINATE) else attempt.restarts_left
            final, _ = ending(code, stop, view, left)
            again = "" if final else "; the driver is restarted"
            await reporter.finish(final, message + again, FINAL_SECONDS if final else _SHORT)
            raise
        if stop.reason is not StopReason.SUPERSEDED:
            final, message = ending(code, stop, view, attempt.restarts_left)
            await reporter.finish(final, message, _SHORT if stop.aborted.is_set() else FINAL_SECONDS)
        return code


async def report_killed(environment: Mapping[str, str], message: str) -> None:
    """The last report of a driver that was killed. Does nothing on a laptop. A report that fails is only logged."""
    try:
        attempt = RunAttempt.of(environment)
        if attempt is None:
            return
        view = ProgressView(attempt.run, 0, stage="Failed")
        _show_checkpoint(attempt, view)
        async with Reporter(Access.of(environment, NEED), attempt, view, StopSignal()) as reporter:
            final, _ = ending(EXIT_FAILED, StopSignal(), view, attempt.restarts_left)
            await reporter.finish(final, message, FINAL_SECONDS if final else _SHORT)
    except (ConfigurationError, SlotError) as error:
        log.warning("the end of the driver is not reported: %s", error)


async def _train(
    attempt: RunAttempt, read: Callable[[], TrainingRun], stop: StopSignal, view: ProgressView, reporter: Reporter
) -> int:
    run = read()
    if run.metadata.name != attempt.run:
        raise ConfigurationError(f"the file is of the run {run.metadata.name}, and this Pod of {attempt.run}")
    view.max_updates = updates_at_most(run.spec.stop.max_updates, run.spec.stages)
    view.max_seconds = run.spec.stop.max_seconds
    runs = await asyncio.to_thread(storage.take_over, attempt.storage, attempt.holder)
    run = _placed(attempt, run, runs)
    place = place_of(checkpoints_of(run, folder_of(run, runs)), checkpoint_uri(run), attempt.holder)
    await asyncio.to_thread(place.take_over)
    saved = await asyncio.to_thread(newest_checkpoint, place)
    view.resume(Progress() if saved is None else await asyncio.to_thread(progress_of, saved), saved)
    if saved is not None:
        run = _with_checkpoints(run, resume_from=None)
    run = await asyncio.to_thread(with_data, run, runs)
    await asyncio.to_thread(inspect, run, runs)
    # The limit that ends or suspends the run by its file may have been edited since: the answer says.
    limits, done = run.spec.stop, progress_of(view.saved) if view.saved is not None else Progress()
    reached = finished(limits, run.spec.stages, done) or limits.spent_on_judges(done.judge_tokens, done.judge_money)
    if not await reporter.answered(FINAL_SECONDS if reached else _FIRST_ANSWER):
        log.warning("no answer from the operator yet; the run starts as its file says")
    if stop.requested.is_set():
        raise Interrupted("stopped")
    return await run_session(run, runs, stop, view, attempt.uid, attempt.holder)


def _placed(attempt: RunAttempt, run: TrainingRun, runs: Path) -> TrainingRun:
    """The run with its checkpoints in its own folder, or in its own part of the store; once there are any, it resumes
    only from them."""
    if run.spec.checkpoints.directory is not None:
        log.warning("spec.checkpoints.directory counts on a laptop only; on a cluster storage and uri do")
    if (uri := run.spec.checkpoints.uri) is not None:
        if why := uri_error(uri, writable=True):
            raise ConfigurationError(f"spec.checkpoints.uri: {why}")
        return _with_checkpoints(run, uri=f"{uri.rstrip('/')}/{attempt.namespace}/{attempt.uid}")
    own = CheckpointFolder(_checkpoints(folder_of(run, runs)))
    given = run.spec.checkpoints.resume_from if newest_checkpoint(own) is None else None
    return _with_checkpoints(run, directory=None, resume_from=given)


def _with_checkpoints(run: TrainingRun, **changes: str | None) -> TrainingRun:
    checkpoints = run.spec.checkpoints.model_copy(update=changes)
    return run.model_copy(update={"spec": run.spec.model_copy(update={"checkpoints": checkpoints})})


def _checkpoints(folder: Path) -> Path:
    return folder / "checkpoints"


def _superseded(attempt: RunAttempt) -> bool:
    """Whether a later attempt has taken over."""
    try:
        newest = storage.newest(attempt.storage)
    except OSError:  # not known: the failure is reported as it is
        return False
    return newest is not None and newest > attempt.holder


def _show_checkpoint(attempt: RunAttempt, view: ProgressView) -> None:
    """The newest checkpoint on the storage. A storage that can't be read is an error where it is used."""
    try:
        holder = storage.newest(attempt.storage)
        if holder is None or holder > attempt.holder:
            return
        folder = _checkpoints(storage.folder_of(attempt.storage, holder) / attempt.run)
        saved = newest_checkpoint(CheckpointFolder(folder))
        view.resume(Progress() if saved is None else progress_of(saved), saved)
    except (CheckpointError, OSError, TypeError):
        log.warning("the newest checkpoint in %s can't be read", attempt.storage, exc_info=True)
