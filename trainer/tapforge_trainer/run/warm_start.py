"""The supervised warm start: demonstrations, or the steps of a data set -> random batches -> cross-entropy."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from tapforge_api.learning import WarmStart

from ..data.folder import DataFolder
from ..data.imitation import ImitationData
from ..frames.handles import BatchFrames
from ..placement.settings import UpdateSettings
from ..policy import Policy
from ..records import Sample
from ..tasks.demonstrations import Demonstrations, demonstrate
from ..tasks.selection import demonstrated_tasks
from ..telemetry.progress import Progress
from .context import RunContext
from .shutdown import unless_stopped

#: the samples of an optimizer step, and their frames
_Batch = tuple[list[Sample], BatchFrames]
#: of each optimizer step, the next one
_Batches = Callable[[], Awaitable[_Batch]]


async def warm_start(context: RunContext, progress: Progress) -> None:
    """Imitates a demonstrator on the run's tasks, or a data set; does nothing when an earlier session has done it."""
    spec = context.run.spec
    settings = spec.warm_start
    if settings is None or progress.warm_started:
        return
    started = time.monotonic()
    if settings.data is not None:
        batches = await _of_data(context, settings)
    else:
        batches = await _of_demonstrations(context, settings)
    metrics = await unless_stopped(context.stop, _imitate(context.policy, batches, settings))
    progress.warm_started = True
    progress.version += 1
    progress.seconds_sft = time.monotonic() - started
    context.telemetry.event("warm_start", seconds=progress.seconds_sft, learner=metrics)


async def _of_demonstrations(context: RunContext, settings: WarmStart) -> _Batches:
    spec = context.run.spec
    screen = spec.environment.screen
    shown: Demonstrations = await asyncio.to_thread(
        demonstrate,
        context.rollout_setup.agent,
        demonstrated_tasks(context.run),
        episodes=settings.demonstrations,
        error_rate=settings.error_rate,
        seed=spec.seed,
        width=screen.width,
        height=screen.height,
    )
    context.telemetry.event(
        "demonstrations", episodes=shown.episodes, samples=len(shown.samples), success=shown.success
    )
    rng, size = np.random.default_rng(spec.seed), min(settings.batch_size, len(shown.samples))
    async with context.policy.learning() as learner:
        frames = await learner.keep(BatchFrames(shown.frames))

    async def batch() -> _Batch:
        return [shown.samples[k] for k in rng.choice(len(shown.samples), size=size, replace=False)], frames

    return batch


async def _of_data(context: RunContext, settings: WarmStart) -> _Batches:
    """Every step once before any comes again, in another order each time."""
    asked = settings.data
    assert asked is not None
    path, rng = Path(asked.path), np.random.default_rng(context.run.spec.seed)

    def opened() -> ImitationData:
        data = ImitationData(context.rollout_setup.agent, DataFolder(path), asked.outcomes)
        data.check(rng.permutation(len(data)).tolist())
        return data

    data = await asyncio.to_thread(opened)
    context.telemetry.event("imitation_data", episodes=data.episodes, samples=len(data), path=str(path))
    left: list[int] = []

    async def batch() -> _Batch:
        made = list[Sample]()
        frames: dict = {}
        while not made:  # of a whole batch that can't be made there is at most one in a thousand: `check`
            while len(left) < min(settings.batch_size, len(data)):
                left.extend(rng.permutation(len(data)).tolist())
            chosen, left[:] = left[: settings.batch_size], left[settings.batch_size :]
            found = await asyncio.to_thread(data.batch, chosen)
            made, frames = found.samples, found.frames
        return made, BatchFrames(frames)

    return batch


async def _imitate(policy: Policy, batches: _Batches, settings: WarmStart) -> dict[str, float]:
    """The metrics of the last step. The optimizer starts afresh afterwards: its moments of imitation would be wrong for
    what comes next."""
    metrics: dict[str, float] = {}
    for step in range(1, settings.steps + 1):
        batch, frames = await batches()
        update = UpdateSettings(learning_rate=_learning_rate(settings, step))
        async with policy.learning() as learner:
            metrics = await learner.supervised(batch, frames, update)
    await policy.forget_optimizer()
    return metrics


def _learning_rate(settings: WarmStart, step: int) -> float:
    """Warmed up linearly, decayed along a cosine. Steps count from 1."""
    warm = min(1.0, step / max(1, settings.warmup_steps))
    return settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * (step - 1) / settings.steps))
