"""Reinforcement learning: next batch -> build batch -> update -> sync -> set version -> report -> save -> measure.

- The scheduler plays episodes in the background all the time, as far as the staleness bound allows; while the learner
  works on one batch, the next one is being played.
- An update's batch is on disk before it is learned from. A checkpoint holds what the next update needs: weights,
  optimizer, the place in the task order, and the groups under way (their finished episodes are found in the recording).
- The loop ends after `maxUpdates`, `maxSeconds` or `targetSuccess`, when a stop is requested, or when it waits for
  verdicts that judges may not give any more; then it saves, also when the rollout fails. Whatever else is under way
  when a stop is requested is cancelled.
- A measurement in between pauses the rollout; its time is not the reinforcement's.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .batch import BatchRules, answers_of, build_batch, replayed_samples
from .frames.handles import BatchFrames, FramesLost
from .learner.checkpoint_storage import FencedOut
from .recording.frames import RecordedFrames
from .recording.queue import RecordWriter
from .recording.reader import FRAMES
from .records import Facts, GroupRecord, Sample, Sampling
from .rewards.agreement import agreement, pairs_of
from .rewards.budget import JudgeBudgetSpent
from .rollout.group import Resumed
from .rollout.rewarding import RewardCounts
from .rollout.scheduler import RolloutError, Scheduler
from .rollout.stall import StallMonitor
from .rollout.success_replay import Replayed, ReplayLimits, SuccessReplay
from .run import policy_settings
from .run.context import RunContext
from .run.evaluation import measure
from .run.folder import ROLLOUT, read_events
from .run.proof_prompts import adopt
from .run.restarting import restart
from .run.saving import checkpoint_due, save
from .run.shutdown import Interrupted, StopReason, unless_stopped
from .tasks.figures import figures_of_update
from .tasks.selection import task_source
from .tasks.source import TaskSource
from .telemetry.progress import Counters, Progress, kept, needed_episodes, replayable, resumed

if TYPE_CHECKING:
    from tapforge_api.checkpoints import Checkpoints

    from .learner.client import Learner


#: times that a batch whose frames are lost comes again: where they are lost each time, object stores are too small
_PUT_BACKS = 3


async def reinforce(context: RunContext, progress: Progress) -> None:
    """From where `progress` says the run is, until a limit is reached or a stop is requested. Where learner and engines
    are lost, it goes on from the last checkpoint, as the next session would, with the phones that there are."""
    while True:
        try:
            return await _reinforce(context, progress)
        except Exception as error:  # noqa: BLE001 - raised again unless the learner is lost, whatever that led to
            await restart(context, progress, error)


async def _reinforce(context: RunContext, progress: Progress) -> None:
    spec, telemetry = context.run.spec, context.telemetry
    if context.finished(progress):
        return
    rules = BatchRules.of(spec.algorithm, spec.rewards, min_valid=spec.rollout.min_valid)
    async with _rollout(context, progress) as rollout:
        scheduler = rollout.scheduler
        while not (context.stop.requested.is_set() or context.finished(progress)):
            telemetry.view.phase, telemetry.view.stage = "reinforcement", "Training"
            waiting = time.monotonic()
            groups = await unless_stopped(context.stop, scheduler.next_batch())
            started = time.monotonic()
            metrics: dict[str, Any] = {"seconds_rollout_wait": started - waiting, "seconds_checkpoint": rollout.saving}
            replayed = rollout.replay.draw(progress.update + 1, len(groups) * spec.rollout.group_size)
            try:
                facts = await _facts(context, scheduler, groups, rules, rollout.recorded)
                batch = await asyncio.to_thread(build_batch, groups, rules, facts)
                again = await asyncio.to_thread(_learned_again, replayed, rules)
            except FramesLost as lost:
                progress.update += 1
                rollout.put_back(groups, lost)
                continue
            except ValueError as error:
                raise ValueError(f"update {progress.update + 1}: {error}") from error
            building = time.monotonic() - started
            progress.update += 1
            if samples := (*batch.samples, *again):
                settings = policy_settings.update_settings(context.run, progress.update - 1)
                held = scheduler.frames([*groups, *(one.group for one in replayed)])
                frames = BatchFrames(held, rollout.recorded)
                try:
                    async with rollout.learning() as learner:
                        keep = partial(rollout.recorder.learner_tokens, progress.update)
                        metrics |= await learner.update(samples, frames, settings, progress.version, keep)
                        progress.version += 1
                except FramesLost as lost:
                    rollout.put_back(groups, lost)
                    continue
                metrics["seconds_learn"] = time.monotonic() - started
                metrics["seconds_prepare"] = building + metrics.get("seconds_prepare", 0.0)
                await adopt(context, groups, held, rollout.recorded)
                metrics |= await rollout.sync()
            elif facts is not None:
                context.policy.wake_engines()
            practised = figures_of_update(
                rollout.tasks.learned(progress.update - progress.stage_began, groups), rollout.tasks.memory
            )
            practised["staleness"] = staleness(groups, scheduler.buffer.version)
            practised["consumed"] = {"groups": ids(groups), "replayed": ids([one.group for one in replayed])}
            if spec.rollout.replay is not None:
                practised["replay"] = replay_figures(replayed, len(again), len(samples), scheduler.buffer.version)
                rollout.replay.keep(groups, progress.version)
            scheduler.set_version(progress.version, rollout.replay.episodes)
            scheduler.resume()
            stats = scheduler.stats()
            attempts = rollout.counters.update(stats)
            stalls = asdict(rollout.stalls.stalls())
            workers = context.rollout_setup.player.metrics()
            phones = asdict(context.rollout_setup.slots.counts())
            further = {"driver_stall_seconds": stalls, "rollout_workers": workers, "phones": phones, **practised}
            if spec.rewards.asked:
                further["rewards"] = rollout.rewards(groups)
            telemetry.updated(progress, batch.statistics, stats, attempts, metrics, **further)
            rollout.check_verdicts()
            rollout.saving = 0.0
            if rollout.save_due(spec.checkpoints):
                await rollout.save()
            every = spec.evaluation.every_updates
            if every and progress.update % every == 0 and not context.complete(progress):
                async with rollout.paused():
                    await measure(context, f"update-{progress.update}", progress)


async def _facts(
    context: RunContext, scheduler: Scheduler, groups: Sequence[GroupRecord], rules: BatchRules, recorded: Path
) -> Facts | None:
    """What the learner says of the answers of these groups before they have advantages; None where nothing asks."""
    if not (rules.reads and (samples := await asyncio.to_thread(answers_of, groups, rules))):
        return None
    frames = BatchFrames(scheduler.frames(groups), recorded)
    async with context.policy.learning() as learner:
        return await learner.answers(samples, frames, context.run.spec.rollout.temperature, rules.reads)


def _learned_again(replayed: Sequence[Replayed], rules: BatchRules) -> list[Sample]:
    return [sample for one in replayed for sample in replayed_samples(one.group, one.episodes, rules)]


def ids(groups: Sequence[GroupRecord]) -> list[str]:
    return [group.id for group in groups]


def replay_figures(replayed: Sequence[Replayed], again: int, samples: int, version: int) -> dict[str, float | None]:
    """`again` of the update's `samples` were replayed. `age_mean`: policy versions, over episodes."""
    ages = [version - one.group.version for one in replayed for _ in one.episodes]
    return {
        "groups": len(replayed),
        "episodes": len(ages),
        "share": again / samples if samples else None,
        "age_mean": sum(ages) / len(ages) if ages else None,
    }


def staleness(groups: Sequence[GroupRecord], version: int) -> dict[str, float]:
    """Policy versions that the groups of a batch lagged behind: the learner had `version` when it took them."""
    ages = [version - group.version for group in groups]
    return {"mean": sum(ages) / len(ages), "max": max(ages)}


# --- the rollout beside the loop --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rollout:
    """What plays while the loop learns, and what a checkpoint keeps of it."""

    context: RunContext
    progress: Progress
    scheduler: Scheduler
    recorder: RecordWriter
    tasks: TaskSource
    #: the recording's folder of frames
    recorded: Path
    counters: Counters
    stalls: StallMonitor
    replay: SuccessReplay
    #: the last update with a checkpoint of this session
    saved: int | None = None
    #: the weights may be those of half an update
    mid_update: bool = False
    #: how often the next batch came again because its frames were lost
    put_backs: int = 0
    #: it was noted that tokens of judges are estimated
    estimated: bool = False
    #: seconds for which a checkpoint held the learner since the last update
    saving: float = 0.0
    #: verdicts up to the last update
    rewarded: RewardCounts = field(default_factory=RewardCounts)
    #: of the last update
    verdicts: RewardCounts = field(default_factory=RewardCounts)
    #: when the last checkpoint began, or the session, on the monotonic clock
    saved_at: float = field(default_factory=time.monotonic)

    @asynccontextmanager
    async def learning(self) -> AsyncIterator[Learner]:
        """For one update. When it fails, it leaves weights that are not to be saved; but for lost frames, which are
        known before anything is learned."""
        self.mid_update = True
        try:
            async with self.context.policy.learning(self.progress.version + 1) as learner:
                yield learner
        except FramesLost:
            self.mid_update = False
            raise
        self.mid_update, self.put_backs = False, 0

    def put_back(self, groups: Sequence[GroupRecord], lost: FramesLost) -> None:
        """The batch comes again when the episodes whose frames are lost have been played again, without successes of
        earlier ones. Raises `lost` when that doesn't help."""
        self.replay.discard(lost.episodes, self.progress.update)
        self.progress.update -= 1
        self.put_backs += 1
        self.scheduler.put_back(groups, lost.episodes)
        if self.put_backs > _PUT_BACKS:
            raise lost
        self.context.telemetry.note(f"update {self.progress.update + 1} waits: {lost}")

    def rewards(self, groups: Sequence[GroupRecord]) -> dict[str, float | None]:
        """Figures of the verdicts since the last update, and how an update's judges and verifiers agree."""
        now = self.scheduler.rewards
        counts, self.rewarded = now.since(self.rewarded), now
        self.verdicts = counts
        budget = self.context.judge_budget
        used = {"judges_used_tokens": budget.tokens, "judges_used_money": budget.money}
        return {**counts.figures(), **used, **agreement(pairs_of(groups, self.context.run.spec.rewards))}

    def check_verdicts(self) -> None:
        """Once the update is written down. Raises RolloutError where too many of its verdicts are missing."""
        if self.verdicts.usage.get("estimated") and not self.estimated:
            self.estimated = True
            self.context.telemetry.note(
                "a judge's endpoint reports no usage: its tokens are estimated, for stop.judgeTokens as well"
            )
        counts, most = self.verdicts, self.context.run.spec.rewards.max_missing_share
        if counts.missing_share > most:
            raise RolloutError(
                f"{counts.missing} of {counts.answered} episodes have no verdict, more than rewards.maxMissingShare "
                f"({most:.0%}); the last one: {counts.last_missing}. Look at the endpoint of the judge"
            )

    async def sync(self) -> dict[str, Any]:
        """Gives the engines the learner's weights. Not when a stop is requested while the rollout pauses for it: no
        episode is played with them before the next start."""
        started = time.monotonic()
        try:
            if not self.context.run.spec.sync.mid_episode:
                await unless_stopped(self.context.stop, self.scheduler.pause())
        except Interrupted:
            return {}
        gap = await self.context.policy.sync(self.progress.version)
        return {"gap": gap, "seconds_sync": time.monotonic() - started, **self.context.policy.engine_metrics}

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No episode is played until the block ends, and the time is not the reinforcement's."""
        with self.counters.suspended():
            await unless_stopped(self.context.stop, self.scheduler.pause())
            yield
            self.scheduler.resume()

    def save_due(self, settings: Checkpoints) -> bool:
        last = self.context.telemetry.view.saved
        # How long one takes is not known while it is being written.
        unknown = self.saved is not None and (last is None or last.update != self.saved)
        wrote = math.inf if unknown else last.seconds if last is not None else 0.0
        return checkpoint_due(self.progress.update, time.monotonic() - self.saved_at, wrote, settings)

    async def save(self, *, wait: bool = False) -> None:
        progress, buffer = self.progress, self.scheduler.buffer
        self.counters.count(self.scheduler.stats())
        progress.unfinished, progress.next_order = kept(buffer.unfinished()), buffer.next_order
        progress.tasks, progress.practice = self.tasks.state, self.tasks.practice
        progress.quarantined = dict(self.tasks.quarantined)
        progress.replay = kept([Resumed(one.order, one.task, one.version, one.episodes) for one in self.replay.groups])
        self.saved_at = started = time.monotonic()
        await save(self.context, progress, wait=wait)
        self.saved, self.saving = progress.update, time.monotonic() - started

    async def rescue(self, error: Exception) -> None:
        """The rollout failed, the learner did not: its updates since the last checkpoint are kept if that is
        possible."""
        try:
            await self.save(wait=True)
            error.add_note(f"update {self.progress.update} is saved; started again, the run resumes from there")
        except Exception as lost:  # noqa: BLE001 - the first error is the one to be raised
            error.add_note(str(lost))


@asynccontextmanager
async def _rollout(context: RunContext, progress: Progress) -> AsyncIterator[_Rollout]:
    """A scheduler with its recorder, until the block ends. Then everything since the last checkpoint is saved, also
    when a stop interrupts the block, and when it fails while the learner's weights are whole."""
    spec, folder = context.run.spec, context.folder / ROLLOUT
    context.telemetry.phase("reinforcement", "Training")
    gc.collect()
    gc.freeze()  # what is there now stays: full collections, which hold the event loop, need not look through it
    spared = partial(needed_episodes, context.checkpoints)
    recorder = await context.rollout_setup.record(folder, context.rollout_setup.retention, spared)
    progress.starts = 1 + max(progress.starts, _sessions(context))
    context.telemetry.alarms.replay(read_events(context.folder), progress.update, progress.stage_began)
    context.telemetry.event("reinforcement", update=progress.update, version=progress.version)
    tasks = task_source(context.run, progress.tasks, progress.practice, len(progress.unfinished))
    tasks.quarantined.update(progress.quarantined)
    recorded = (folder / FRAMES).absolute()
    scheduler = Scheduler(
        context.rollout_setup.slots,
        context.rollout_setup.player,
        Sampling(max_tokens=spec.rollout.response_tokens, temperature=spec.rollout.temperature),
        tasks=tasks,
        groups=context.rollout_setup.groups,
        episodes=context.rollout_setup.episodes,
        recorder=recorder,
        concurrency=spec.rollout.concurrency,
        acquire_seconds=context.rollout_setup.acquire_seconds,
        seed=spec.seed,
        version=progress.version,
        order=progress.next_order,
        prefix=f"g{progress.starts}-",
        resumed=resumed(progress, folder),
        engines=context.rollout_setup.engines,
        frames_recorded=context.rollout_setup.retention.rereadable,
        rewarded=bool(spec.rewards.asked),
        verified=spec.rewards.verifier == "asked",
        recorded=lambda episode: RecordedFrames(recorded, episode.frames),
        frame_budget=context.rollout_setup.frame_budget,
        budget=context.judge_budget,
    )
    limits = spec.rollout.replay
    replay = SuccessReplay(
        None if limits is None else ReplayLimits(**limits.model_dump(by_alias=False)),
        spec.seed,
        replayable(progress, folder),
    )
    counters = Counters(progress)
    rollout = _Rollout(context, progress, scheduler, recorder, tasks, recorded, counters, StallMonitor(), replay)
    try:
        try:
            with suppress(Interrupted):
                yield rollout
        except JudgeBudgetSpent as spent:
            context.stop.request(StopReason.JUDGE_BUDGET, remedy=str(spent))
        if rollout.saved != progress.update or context.stop.requested.is_set():  # episodes ended since the checkpoint
            await rollout.save(wait=True)
        await context.policy.settle()
    except Exception as error:
        if not rollout.mid_update and not isinstance(error, FencedOut) and context.policy.lost is None:
            await rollout.rescue(error)
        raise
    finally:
        rollout.stalls.close()
        await scheduler.close()
        await recorder.close()


def _sessions(context: RunContext) -> int:
    """How many sessions played for this run, those that died before a checkpoint too."""
    return sum(event["event"] == "reinforcement" for event in read_events(context.folder))
