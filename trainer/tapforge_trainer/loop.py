"""The training loop: rollout -> batch -> learn -> sync, from top to bottom.

- The scheduler plays episodes in the background all the time, as far as the staleness bound allows; while the learner
  works on one batch, the next one is being played.
- An update's batch is on disk before it is learned from. A checkpoint holds what the next update needs: weights,
  optimizer, the place in the task order, and the groups under way (their finished episodes are found in the recording).
- The loop ends after `maxUpdates`, `maxSeconds` or `targetSuccess`, or when it is asked to; then it saves, also when
  the rollout can't go on. Whatever else is under way when it is asked to stop is given up: `Interrupted`.
- A measurement in between pauses the rollout; its time is not the reinforcement's.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tapforge_api import TrainingRun
from tapforge_api.learning import Stop

from . import assembly
from .batch import BatchRules, BatchStatistics, build_batch
from .evaluation import Arena, baselines, measured, play
from .frames import FittedFrame
from .policy.driver import Policy
from .progress import Progress, Saved, ended, kept, resumed
from .records import GroupRecord, Sampling
from .rollout.frames import FrameStore
from .rollout.recorder import Recorder
from .rollout.recording import FRAMES
from .rollout.scheduler import Scheduler
from .rollout.stall import StallMonitor
from .rollout.stats import RolloutStats, by_length, rate_of
from .run_folder import EVALUATION, ROLLOUT, read_events
from .shutdown import Interrupted, StopSignal, unless_stopped
from .tasks.demonstrations import demonstrate
from .tasks.source import TaskSource
from .telemetry import Telemetry

#: updates whose mean success is shown
_WINDOW = 5


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop works with. Made and closed by the session."""

    run: TrainingRun
    folder: Path
    policy: Policy
    arena: Arena
    telemetry: Telemetry
    stop: StopSignal
    #: the checkpoint of another run whose weights this one started with, in words; "" for none
    warm_started_from: str = ""


async def warm_start(parts: Parts, progress: Progress) -> None:
    """Imitates a demonstrator for a while; a later call does nothing."""
    spec = parts.run.spec
    settings = spec.warm_start
    if settings is None or progress.warm_started:
        return
    begun = time.monotonic()
    screen = spec.environment.screen
    demonstrations = await asyncio.to_thread(
        demonstrate,
        parts.arena.agent,
        assembly.demonstrated_tasks(parts.run),
        episodes=settings.demonstrations,
        error_rate=settings.error_rate,
        seed=spec.seed,
        width=screen.width,
        height=screen.height,
    )
    parts.telemetry.event(
        "demonstrations",
        episodes=demonstrations.episodes,
        samples=len(demonstrations.samples),
        success=demonstrations.success,
    )
    imitation = parts.policy.imitate(
        demonstrations.samples,
        demonstrations.frames,
        steps=settings.steps,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        seed=spec.seed,
    )
    figures = await unless_stopped(parts.stop, imitation)
    progress.warm_started = True
    progress.version += 1
    progress.seconds_sft = time.monotonic() - begun
    parts.telemetry.event("warm_start", seconds=progress.seconds_sft, learner=figures)


async def measure(parts: Parts, name: str, progress: Progress) -> dict[str, dict[str, Any]]:
    """Success of the present policy on the held-out tasks, sampled and greedy as the spec says. `name` is the folder's
    prefix."""
    evaluation = parts.run.spec.evaluation
    tasks = assembly.evaluation_tasks(parts.run).tasks
    modes = {"sampled": evaluation.sampled_temperature} if evaluation.sampled else {}
    modes |= {"greedy": 0.0} if evaluation.greedy else {}
    results = {}
    for mode, temperature in modes.items():
        parts.telemetry.phase(f"measuring {name}, {mode}: {len(tasks)} held-out tasks", "Evaluating")
        playing = play(
            parts.arena,
            tasks,
            repeats=evaluation.repeats if temperature else 1,
            temperature=temperature,
            seed=evaluation.seed,
            folder=parts.folder / EVALUATION / f"{name}-{mode}",
        )
        episodes = await unless_stopped(parts.stop, playing)
        results[mode] = measured(episodes, seed=evaluation.seed, version=progress.version)
        parts.telemetry.event("evaluation", name=name, mode=mode, update=progress.update, **results[mode])
    return results


async def measure_baselines(parts: Parts) -> dict[str, dict[str, Any]]:
    """The same tasks, played by policies that have learned nothing."""
    evaluation = parts.run.spec.evaluation
    results = {}
    for name in baselines(parts.arena.agent):
        folder = parts.folder / EVALUATION / f"baseline-{name}"
        tasks = assembly.evaluation_tasks(parts.run).tasks
        playing = play(parts.arena, tasks, policy=name, repeats=1, temperature=1.0, seed=evaluation.seed, folder=folder)
        episodes = await unless_stopped(parts.stop, playing)
        results[name] = measured(episodes, seed=evaluation.seed)
        parts.telemetry.event("baseline", policy=name, **results[name])
    return results


async def reinforce(parts: Parts, progress: Progress) -> None:
    """The reinforcement phase, from where `progress` says it is."""
    spec, telemetry, view = parts.run.spec, parts.telemetry, parts.telemetry.view
    if ended(_limits(parts), progress):
        return
    telemetry.phase("reinforcement", "Training")
    recorder = Recorder(parts.folder / ROLLOUT)
    progress.starts = 1 + max(progress.starts, _sessions(parts.folder))
    telemetry.event("reinforcement", update=progress.update, version=progress.version)
    tasks = TaskSource(assembly.training_tasks(parts.run), spec.seed, progress.tasks)
    tasks.quarantined.update(progress.quarantined)
    scheduler = Scheduler(
        parts.arena.slots,
        parts.arena.player,
        Sampling(max_tokens=spec.rollout.response_tokens, temperature=spec.rollout.temperature),
        tasks=tasks,
        groups=parts.arena.groups,
        episodes=parts.arena.episodes,
        recorder=recorder,
        concurrency=spec.rollout.concurrency,
        acquire_seconds=parts.arena.acquire_seconds,
        seed=spec.seed,
        version=progress.version,
        order=progress.next_order,
        prefix=f"g{progress.starts}-",
        resumed=resumed(progress, parts.folder / ROLLOUT),
    )
    rules = BatchRules.of(spec.algorithm, min_valid=spec.rollout.min_valid)
    frames = FrameStore(parts.folder / ROLLOUT / FRAMES)
    stalls = StallMonitor()
    recent: deque[float] = deque(maxlen=_WINDOW)
    base = replace(progress)
    drawn: Counter[str] = Counter()
    begun = time.monotonic()
    saved: int | None = None
    learning = False
    try:
        while not parts.stop.requested.is_set() and not ended(_limits(parts), progress):
            view.phase, view.stage = "reinforcement", "Training"
            try:
                groups = await unless_stopped(parts.stop, scheduler.next_batch())
            except Interrupted:
                break
            received = time.monotonic()
            batch = await asyncio.to_thread(build_batch, groups, rules)
            figures: dict[str, Any] = {}
            progress.update += 1
            if batch.samples:
                settings = assembly.update_settings(parts.run, progress.update - 1)
                learning = True
                figures = await parts.policy.update(batch.samples, _frames(frames, groups), settings, progress.version)
                learning = False
                progress.version += 1
                learned = time.monotonic()
                figures["seconds_learn"] = learned - received
                try:
                    if not spec.sync.mid_episode:
                        await unless_stopped(parts.stop, scheduler.pause())
                except Interrupted:
                    pass  # nobody will play with the new weights before the next start
                else:
                    gap = await parts.policy.sync(progress.version)
                    figures |= {"gap": gap, "seconds_sync": time.monotonic() - learned}
            scheduler.set_version(progress.version)
            scheduler.resume()
            stats = scheduler.stats()
            progress.seconds_rl = base.seconds_rl + time.monotonic() - begun
            attempts, drawn = stats.drawn - drawn, stats.drawn
            progress.success = rate_of(attempts)
            _count(progress, base, stats)
            _show(view, progress, batch.statistics, stats, figures, recent)
            telemetry.updated(
                {
                    "update": progress.update,
                    "seconds": progress.seconds_rl,
                    **_plain(batch.statistics),
                    "success_rate_all": progress.success,
                    "attempts": dict(attempts),
                    "sample_age": stats.mean_sample_age,
                    "members": progress.members,
                    "driver_stall_seconds": asdict(stalls.stalls()),
                    "learner": figures,
                }
            )
            if figures.get("gap_alarm"):
                telemetry.note(
                    f"update {progress.update}: engine and learner differ by {figures['gap_mean']:.2g} per token on "
                    "answers of the same weights; the importance weights can't be trusted"
                )
            if progress.update % spec.checkpoints.every_updates == 0:
                await save(parts, progress, scheduler, tasks)
                saved = progress.update
            every = spec.evaluation.every_updates
            if every and progress.update % every == 0 and not ended(_limits(parts), progress):
                paused = time.monotonic()
                try:
                    await unless_stopped(parts.stop, scheduler.pause())
                    await measure(parts, f"update-{progress.update}", progress)
                except Interrupted:
                    break
                scheduler.resume()
                begun += time.monotonic() - paused
        if saved != progress.update or parts.stop.requested.is_set():  # episodes went on since the last checkpoint
            _count(progress, base, scheduler.stats())
            await save(parts, progress, scheduler, tasks)
    except Exception as error:
        if not learning:  # else the weights may be those of half an update
            await _rescue(parts, progress, scheduler, tasks, error)
        raise
    finally:
        stalls.close()
        await scheduler.close()
        recorder.close()


async def save(
    parts: Parts, progress: Progress, scheduler: Scheduler | None = None, tasks: TaskSource | None = None
) -> None:
    """A checkpoint from which the next update can be made."""
    if scheduler is not None and tasks is not None:
        progress.unfinished = kept(scheduler.buffer.unfinished())
        progress.next_order = scheduler.buffer.next_order
        progress.tasks = tasks.state
        progress.quarantined = dict(tasks.quarantined)
    session = time.monotonic() - parts.telemetry.started
    state = asdict(replace(progress, seconds_earlier=progress.seconds_earlier + session))
    view = parts.telemetry.view
    stage, view.stage = view.stage, "Checkpointing"
    place = await parts.policy.save(progress.update, state)
    view.stage, view.saved = stage, Saved(progress.update, time.time(), str(place))
    parts.telemetry.event("checkpoint", update=progress.update)


# --- details ----------------------------------------------------------------------------------------------------------


def _limits(parts: Parts) -> Stop:
    """When the run is to end, as it was said last."""
    limits, view = parts.stop.limits or parts.run.spec.stop, parts.telemetry.view
    view.max_updates, view.max_seconds = limits.max_updates, limits.max_seconds
    return limits


async def _rescue(parts: Parts, progress: Progress, scheduler: Scheduler, tasks: TaskSource, error: Exception) -> None:
    """The rollout failed, the learner did not: its updates since the last checkpoint are kept if that is possible."""
    try:
        await save(parts, progress, scheduler, tasks)
        error.add_note(f"update {progress.update} is saved; started again, the run goes on from there")
    except Exception as lost:  # noqa: BLE001 - the first error is the one to be raised
        error.add_note(str(lost))


def _sessions(folder: Path) -> int:
    """How many sessions played for this run, those that died before a checkpoint too."""
    return sum(event["event"] == "reinforcement" for event in read_events(folder))


def _frames(store: FrameStore, groups: Sequence[GroupRecord]) -> dict[str, FittedFrame]:
    """Every frame that the groups' steps name, from the recording."""
    names = {name for g in groups for e in g.episodes for s in e.steps for name in s.frames}
    return {name: store.frame(name) for name in names}


def _count(progress: Progress, base: Progress, stats: RolloutStats) -> None:
    progress.episodes = base.episodes + stats.successes + stats.failures
    progress.invalid = base.invalid + sum(stats.invalid.values())
    progress.env_steps = base.env_steps + stats.env_steps
    progress.slot_seconds = base.slot_seconds + stats.slot_seconds
    progress.busy_seconds = base.busy_seconds + stats.busy_seconds
    progress.members = by_length(stats.members, base.members)


def _show(
    view: Any,
    progress: Progress,
    statistics: BatchStatistics,
    stats: RolloutStats,
    figures: dict[str, Any],
    recent: deque[float],
) -> None:
    if progress.success is not None:
        recent.append(progress.success)
        view.curve.append(progress.success)
    view.update, view.version = progress.update, progress.version
    view.success = sum(recent) / len(recent) if recent else None
    view.success_learned = statistics.success_rate
    view.dropped = sum(stats.dropped.values())
    view.episodes, view.invalid = progress.episodes, progress.invalid
    view.episodes_per_hour = stats.episodes_per_hour
    view.env_steps_per_second = stats.env_steps_per_second
    view.valid_actions = statistics.valid_action_ratio
    view.group_size = statistics.group_size_mean
    view.state_group_size = statistics.state_group_size_mean
    view.zero_variance_groups = f"{statistics.groups_zero_variance} of {statistics.groups}"
    view.busy_share, view.sample_age = stats.busy_share, stats.mean_sample_age
    view.seconds_rl = progress.seconds_rl
    view.gap = figures.get("gap", view.gap)


def _plain(statistics: BatchStatistics) -> dict[str, Any]:
    return {name: getattr(statistics, name) for name in BatchStatistics.__slots__}
