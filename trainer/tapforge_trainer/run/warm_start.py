"""The supervised warm start: demonstrations -> random batches -> cross-entropy."""

from __future__ import annotations

import asyncio
import math
import time

import numpy as np

from tapforge_api.learning import WarmStart

from ..frames.handles import BatchFrames
from ..placement.settings import UpdateSettings
from ..policy import Policy
from ..tasks.demonstrations import Demonstrations, demonstrate
from ..tasks.selection import demonstrated_tasks
from ..telemetry.progress import Progress
from .context import RunContext
from .shutdown import unless_stopped


async def warm_start(context: RunContext, progress: Progress) -> None:
    """Imitates a demonstrator on the run's tasks; does nothing when an earlier session has done it."""
    spec = context.run.spec
    settings = spec.warm_start
    if settings is None or progress.warm_started:
        return
    started = time.monotonic()
    screen = spec.environment.screen
    demonstrations = await asyncio.to_thread(
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
        "demonstrations",
        episodes=demonstrations.episodes,
        samples=len(demonstrations.samples),
        success=demonstrations.success,
    )
    metrics = await unless_stopped(context.stop, _imitate(context.policy, demonstrations, settings, spec.seed))
    progress.warm_started = True
    progress.version += 1
    progress.seconds_sft = time.monotonic() - started
    context.telemetry.event("warm_start", seconds=progress.seconds_sft, learner=metrics)


async def _imitate(policy: Policy, shown: Demonstrations, settings: WarmStart, seed: int) -> dict[str, float]:
    """The metrics of the last step. The optimizer starts afresh afterwards: its moments of imitation would be wrong for
    what comes next."""
    rng = np.random.default_rng(seed)
    size = min(settings.batch_size, len(shown.samples))
    metrics: dict[str, float] = {}
    async with policy.learning() as learner:
        frames = await learner.keep(BatchFrames(shown.frames))
    for step in range(1, settings.steps + 1):
        batch = [shown.samples[k] for k in rng.choice(len(shown.samples), size=size, replace=False)]
        update = UpdateSettings(learning_rate=_learning_rate(settings, step))
        async with policy.learning() as learner:
            metrics = await learner.supervised(batch, frames, update)
    await policy.forget_optimizer()
    return metrics


def _learning_rate(settings: WarmStart, step: int) -> float:
    """Warmed up linearly, decayed along a cosine. Steps count from 1."""
    warm = min(1.0, step / max(1, settings.warmup_steps))
    return settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * (step - 1) / settings.steps))
