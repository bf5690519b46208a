"""What a run does when its learner is lost: a rank died, or one waits for what never comes, as between GPUs where an
engine dies while it gets weights.

Rules:
- Ranks and engines end and are started anew, with the checkpoint that the next session would begin with
  (`run/resuming.py`). Phones, their players and the driver stay; episodes under way are cut off.
- The run goes back as a whole: update, version, tasks and groups under way are the checkpoint's. What was played since
  is played again. Its log-probabilities would hold, but the versions that sampled it are gone: from them to the
  checkpoint's no update leads, and a bound on staleness would bound nothing. It stays in the recording.
- How often is bounded, as for an engine: `engine.maxRestartsPerHour`. One more time ends the run with the last reason.
- Without a checkpoint, once a stop is requested, and after any other error, the run ends with what it met.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from ..telemetry.progress import Progress, newest_checkpoint
from .context import RunContext
from .resuming import resumed_from
from .shutdown import unless_stopped

log = logging.getLogger(__name__)


async def restart(context: RunContext, progress: Progress, error: Exception) -> None:
    """Returns when engines answer with the weights of the checkpoint, and `progress` is the checkpoint's. `error`: what
    the run met, and what is raised where it has to end. Raises also what a start raises, and Interrupted."""
    policy, telemetry = context.policy, context.telemetry
    while (why := policy.lost) is not None and not context.stop.requested.is_set():
        if await asyncio.to_thread(newest_checkpoint, policy.settings.place) is None:
            break
        if not policy.may_restart():
            allowed = context.run.spec.engine.max_restarts_per_hour
            error.add_note(
                f"{why}; learner and engines were started again {allowed} times within an hour, as often as "
                "engine.maxRestartsPerHour allows"
            )
            break
        log.warning("%s; learner and engines are started again from the last checkpoint", why)
        telemetry.event("restart", update=progress.update, why=str(why))
        telemetry.note(f"after update {progress.update}: {why}; learner and engines are started again")
        try:
            return await unless_stopped(context.stop, _restarted(context, progress))
        except Exception as again:
            if policy.lost is None:
                raise
            error = again
    raise error


async def _restarted(context: RunContext, progress: Progress) -> None:
    policy, telemetry = context.policy, context.telemetry
    await policy.restart(partial(telemetry.phase, stage="Loading"))
    saved, _ = await resumed_from(context.of_file, policy, progress.uid)
    if saved is None:
        raise FileNotFoundError(f"the checkpoint in {policy.settings.place.root} is gone")
    progress.go_back(saved)
    telemetry.view.resume(progress, await asyncio.to_thread(newest_checkpoint, policy.settings.place))
    telemetry.note(f"going on after update {progress.update}")
    await policy.sync(progress.version)
