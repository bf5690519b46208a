"""What commands that work on a run share: its file, the check of what it names, and an end when they are stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .failing import as_message
from .reading import read_run
from .waiting import saying

if TYPE_CHECKING:
    from tapforge_api import TrainingRun

    from ..run.shutdown import StopSignal


def loaded_run(file: Path, overrides: tuple[str, ...]) -> TrainingRun:
    """Ends the command with what is wrong with the file."""
    with as_message():
        return read_run(file, overrides)


def with_its_data(run: TrainingRun, runs: Path) -> TrainingRun:
    """With a folder in place of each data set that lies elsewhere; ends the command where one can't be had."""
    from ..run.data_pin import with_data

    with as_message(), saying(f"fetching what {run.metadata.name} learns from"):
        return with_data(run, runs)


def checked(run: TrainingRun, runs: Path) -> Any:
    """The plan, with what the files that the run names hold; ends the command with what is wrong with them."""
    from ..run.assembly import inspect
    from ..run.plan import plan

    with as_message(), saying(f"checking what {run.metadata.name} names"):
        return plan(run, inspect(run, runs), runs)


def stoppable(work: Callable[[StopSignal], Coroutine[Any, Any, int]], grace: float = 60.0) -> int:
    """Runs a session, which may be asked to stop. Returns its exit code."""
    from tapforge_api.progress import EXIT_STOPPED

    from ..run.shutdown import EXIT_INTERRUPTED, StopSignal, force_exit, handling_signals, run_until_aborted

    async def working() -> int:
        stop = StopSignal(grace)
        with handling_signals(stop):
            return await run_until_aborted(stop, work(stop), lambda: force_exit(stop.exit_code))

    log()
    try:
        with as_message():
            code = asyncio.run(working())
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code in (EXIT_INTERRUPTED, EXIT_STOPPED):
        click.echo("stopped", err=True)
    return code


def log() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
