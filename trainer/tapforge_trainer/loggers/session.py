"""The loggers of a training session: they follow its events from their start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tapforge_api import TrainingRun

from ..run.assembly import ConfigurationError
from ..run.shutdown import Interrupted
from ..telemetry.telemetry import Telemetry
from .channel import FINISH_SECONDS, Channel
from .figures import figures_of, settings_of
from .logger import Status
from .registry import chosen, missing


def check_installed(run: TrainingRun) -> None:
    """Raises ConfigurationError for loggers whose libraries are not here."""
    if run.spec.logging is not None and (wrong := missing(chosen(run.spec.logging))):
        raise ConfigurationError("\n".join(wrong))


@asynccontextmanager
async def logged(
    run: TrainingRun, folder: Path, telemetry: Telemetry, finish_seconds: float = FINISH_SECONDS
) -> AsyncIterator[None]:
    """Until the block ends. `finish_seconds`: for which loggers may hold the end of the session."""
    loggers = [] if run.spec.logging is None else chosen(run.spec.logging)
    if not loggers:
        yield
        return
    loop = asyncio.get_running_loop()

    def report(text: str) -> None:
        with suppress(RuntimeError):  # the loop is closed: no receiver is left
            loop.call_soon_threadsafe(telemetry.note, text)

    asked = run.spec.logging.episodes if run.spec.logging is not None else None
    channel = Channel(
        loggers,
        name=run.metadata.name,
        folder=folder,
        config=settings_of(run),
        episodes=0 if asked is None else asked.per_update,
        report=report,
    )
    step = 0

    def follow(event: Mapping[str, Any]) -> None:
        nonlocal step
        step = event.get("update", step)
        if figures := figures_of(event):
            channel.log(step, figures)
        if asked is not None and (consumed := event.get("consumed")):
            channel.log_episodes(step, consumed["groups"])

    telemetry.follow(follow)
    status: Status = "failed"
    try:
        yield
        status = "complete"
    except (Interrupted, asyncio.CancelledError):
        status = "stopped"
        raise
    finally:
        telemetry.unfollow(follow)
        await asyncio.shield(asyncio.to_thread(channel.finish, status, finish_seconds))
        await asyncio.sleep(0)  # what was reported meanwhile
