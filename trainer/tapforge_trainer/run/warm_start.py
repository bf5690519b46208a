"""The supervised warm start: demonstrations, or the steps of a data set -> random batches -> cross-entropy.

After each pass over a data set, and at each quarter of the steps with a demonstrator, the mean loss since the last time
is said. With held-out steps their loss is measured after each pass; `after` is called then, with nothing being learned
meanwhile.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from tapforge_api.learning import ImitationData as Asked
from tapforge_api.learning import WarmStart

from ..data.episodes import DataError
from ..data.folder import DataFolder
from ..data.imitation import TRIED, ImitationData
from ..data.sets import repeated
from ..frames.handles import BatchFrames
from ..placement.settings import UpdateSettings
from ..policy import Policy
from ..records import Sample
from ..tasks.demonstrations import Demonstrations, demonstrate
from ..tasks.selection import demonstrated_tasks
from ..telemetry.progress import Progress
from .context import RunContext
from .held_out import Epoch, HeldOut
from .shutdown import unless_stopped

#: the samples of an optimizer step, and their frames
_Batch = tuple[list[Sample], BatchFrames]
#: of each optimizer step, the next one
_Batches = Callable[[], Awaitable[_Batch]]
#: what is done with an epoch
After = Callable[[Epoch], Awaitable[None]]
#: the same of a step that ends one, with the mean loss since the last one
_EpochEnded = Callable[[int, float], Awaitable[None]]
#: batches of which nothing can be made, after which a data set is given up: one in ten steps may fail, of one a batch
_EMPTY: Final = 20


@dataclass(frozen=True, slots=True)
class Schedule:
    """Optimizer steps, and those after which is said how it goes: of a data set, those that end a pass over it."""

    steps: int
    passes: frozenset[int] = frozenset()


def imitated(settings: WarmStart) -> str:
    """What is imitated, for people."""
    return "a demonstrator" if settings.data is None else f"the data set {settings.data.path}"


async def warm_start(context: RunContext, progress: Progress, after: After | None = None) -> None:
    """Imitates a demonstrator on the run's tasks, or a data set; does nothing when an earlier session has done it."""
    spec = context.run.spec
    settings = spec.warm_start
    if settings is None or progress.warm_started:
        return
    started = time.monotonic()
    data = None if settings.data is None else await _opened(context, settings.data)
    if data is not None:
        batches = _of_data(context, settings, data)
        schedule = schedule_of(settings, len(data))
    else:
        batches = await _of_demonstrations(context, settings)
        schedule = Schedule(settings.steps, frozenset(math.ceil(settings.steps * part / 4) for part in (1, 2, 3, 4)))
    epoch = await _measuring(context, settings, schedule.steps, after)
    metrics = await unless_stopped(context.stop, _imitate(context.policy, batches, settings, schedule, epoch))
    progress.warm_started = True
    progress.version += 1
    progress.seconds_sft = time.monotonic() - started
    if data is not None and data.left_out.total:
        context.telemetry.event("imitation_left_out", steps=data.left_out.total, reasons=data.left_out.as_json())
    context.telemetry.event("warm_start", seconds=progress.seconds_sft, learner=metrics)


def schedule_of(settings: WarmStart, answers: int) -> Schedule:
    """`answers`: of the data set."""
    size = min(settings.batch_size, answers)
    steps = settings.steps if settings.epochs is None else math.ceil(settings.epochs * answers / size)
    passed = (step for step in range(1, steps + 1) if step * size // answers > (step - 1) * size // answers)
    return Schedule(steps, frozenset({*passed, steps}))


async def _measuring(context: RunContext, settings: WarmStart, steps: int, after: After | None) -> _EpochEnded:
    """What is done after each pass over the data; of `steps` optimizer steps."""
    data, number, held_out = settings.data, 0, None
    if data is not None and data.held_out is not None:
        path = Path(data.held_out)
        held_out = await asyncio.to_thread(HeldOut, context.rollout_setup.agent, path, data.outcomes)
        if both := await asyncio.to_thread(repeated, Path(data.path), path):
            context.telemetry.note(f"{both}: the held-out loss says nothing of these")

    async def ended(step: int, loss: float) -> None:
        nonlocal number
        number += 1
        if held_out is None:
            where = f"step {step:,} of {steps:,}" if data is None else f"epoch {number}"
            context.telemetry.phase(f"{where}: loss {loss:.4g}")
            if data is not None:
                context.telemetry.event("imitation_epoch", number=number, steps=step, loss=loss)
            return
        async with context.policy.learning() as learner:
            epoch = Epoch(number, step, loss, await held_out.loss(learner))
        if after is None:
            context.telemetry.event("imitation_epoch", **asdict(epoch))
        else:
            await after(epoch)

    return ended


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


async def _opened(context: RunContext, asked: Asked) -> ImitationData:
    path, seed = Path(asked.path), context.run.spec.seed
    weights: dict[str, float] = asked.weights.model_dump()

    def opened() -> ImitationData:
        data = ImitationData(context.rollout_setup.agent, DataFolder(path), asked.outcomes, weights)
        data.check(np.random.default_rng(seed).permutation(len(data))[:TRIED].tolist())
        return data

    data = await asyncio.to_thread(opened)
    context.telemetry.event("imitation_data", episodes=data.episodes, samples=len(data), path=str(path))
    return data


def _of_data(context: RunContext, settings: WarmStart, data: ImitationData) -> _Batches:
    """Every step once before any comes again, in another order each time."""
    rng, size = np.random.default_rng(context.run.spec.seed), min(settings.batch_size, len(data))
    left = np.empty(0, np.int64)

    async def batch() -> _Batch:
        nonlocal left
        for _ in range(_EMPTY):
            while len(left) < size:
                left = np.concatenate([left, rng.permutation(len(data))])
            chosen, left = left[:size].tolist(), left[size:]
            made = await asyncio.to_thread(data.batch, chosen)
            if made.samples:
                return made.samples, BatchFrames(made.frames)
        raise DataError(
            f"{_EMPTY} batches in a row of {settings.data and settings.data.path} can't be made; was it changed?\n  "
            + "\n  ".join(data.left_out.lines())
        )

    return batch


async def _imitate(
    policy: Policy, batches: _Batches, settings: WarmStart, schedule: Schedule, ended: _EpochEnded
) -> dict[str, float]:
    """The metrics of the last step. The optimizer starts afresh afterwards: its moments of imitation would be wrong for
    what comes next."""
    metrics: dict[str, float] = {}
    losses: list[float] = []
    for step in range(1, schedule.steps + 1):
        batch, frames = await batches()
        update = UpdateSettings(learning_rate=_learning_rate(settings, step, schedule.steps))
        async with policy.learning() as learner:
            metrics = await learner.supervised(batch, frames, update)
        losses.append(metrics["loss"])
        if step in schedule.passes:
            await ended(step, fmean(losses))
            losses.clear()
    await policy.forget_optimizer()
    return metrics


def _learning_rate(settings: WarmStart, step: int, steps: int) -> float:
    """Warmed up linearly, decayed along a cosine. Steps count from 1."""
    warm = min(1.0, step / max(1, settings.warmup_steps))
    return settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))
