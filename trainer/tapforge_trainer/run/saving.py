"""Checkpoints of a run: when one is due, what it keeps of the driver, and what is reported once it is complete."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from ..telemetry.progress import Progress, Saved
from .context import RunContext

if TYPE_CHECKING:
    from tapforge_api.checkpoints import Checkpoints

    from ..learner.checkpoints import WrittenCheckpoint

#: of a stop's grace that a checkpoint may take: an update is finished before
_SHARE_OF_GRACE = 0.5
#: of a run's time that checkpoints by time may take to write
_SHARE_OF_WRITING = 0.1


def checkpoint_due(update: int, since: float, wrote: float, settings: Checkpoints) -> bool:
    """Whether there is to be a checkpoint after this update. `since`: seconds from the last one, or from the start of
    the session; `wrote`: seconds that the last one took to write, infinite while it is being written."""
    if update % settings.every_updates == 0:
        return True
    return since >= max(settings.every_seconds, wrote / _SHARE_OF_WRITING)


async def save(context: RunContext, progress: Progress, *, wait: bool = False) -> None:
    """A checkpoint from which the next update can be made. It is written while the run goes on. `wait`: until it is
    complete."""
    session = time.monotonic() - context.telemetry.started
    progress.first_proof, progress.proof_prompts = context.policy.proofs.first, context.policy.proof_prompts
    view, budget = context.telemetry.view, context.judge_budget
    view.judge_tokens, view.judge_money = progress.judge_tokens, progress.judge_money = budget.tokens, budget.money
    state = asdict(replace(progress, seconds_earlier=progress.seconds_earlier + session))
    stage, view.stage = view.stage, "Checkpointing"
    await context.policy.save(progress.update, state, partial(_saved, context))
    if wait:
        await context.policy.settle()
    view.stage = stage


def _saved(context: RunContext, written: WrittenCheckpoint) -> None:
    """The checkpoint is complete."""
    telemetry, stop = context.telemetry, context.stop
    telemetry.view.saved = Saved(written.update, written.saved, written.path, written.seconds)
    figures = {name: getattr(written, name) for name in ("seconds", "seconds_stalled", "bytes")}
    telemetry.event("checkpoint", update=written.update, path=written.path, **figures)
    if short := grace_note(written.seconds, stop.grace, stop.requested.is_set()):
        telemetry.note(short)


def grace_note(seconds: float, grace: float, stopping: bool) -> str:
    """Why the grace of a stop is too short for a checkpoint that took so long; empty: it is enough. Times are
    seconds."""
    if seconds <= grace * _SHARE_OF_GRACE:
        return ""
    said = "took" if stopping else "takes"
    return (
        f"a checkpoint {said} {seconds:.0f} s, and a stop has {grace:.0f} s for it and for the update under way: what "
        "doesn't fit is lost. Set spec.cluster.suspendGraceSeconds (on a laptop --grace) to "
        f"{seconds / _SHARE_OF_GRACE:.0f} or more"
    )
