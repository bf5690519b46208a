"""Episodes as asyncio tasks over slots: the shell that turns the decisions of `groups.py` into running episodes.

Promises:
1. A slot that comes free begins the next episode at once; nothing waits for the slowest, but for consumption in issue
   order.
2. What is admitted and consumed when is the buffer's decision (`groups.py`); this file only carries it out.
3. A batch is handed out after its episodes are on disk.
4. What the run can't go on with (no phone left, a dead engine, a full disk, no task left) is raised where a caller
   waits for a result; every wait ends, because every call below has a deadline and drops in a row are bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tapforge_envs.protocol import Reason, Task
from tapforge_envs.slots.source import SlotSource, Verdict

from ..attempt import Attempt, AttemptRequest, EpisodeLimits, EpisodeResult, Player
from ..engine.choice import engine_of_new_episode
from ..frames.handles import FrameHandle
from ..recording.queue import RecordWriter
from ..records import EpisodeRecord, GroupRecord, Sampling
from ..rewards.budget import JudgeBudget, JudgeBudgetSpent
from ..tasks.source import TaskSource
from .evaluation_queue import EvaluationQueue
from .fault_tracker import FaultTracker
from .group import Resumed
from .groups import CompletedGroup, Dropped, GroupBuffer, GroupLimits
from .held_frames import FrameBudget, HeldFrames
from .jobs import Job, Jobs
from .rewarding import RewardCounts, Rewarding
from .stats import BusyMeter, RolloutStats, pace_of

log = logging.getLogger(__name__)


class RolloutError(RuntimeError):
    """The rollout can't go on; the message says why and what to look at."""


class Scheduler:
    """Create it inside a running event loop. It owns its episodes, but neither the slots nor the recorder."""

    def __init__(
        self,
        slots: SlotSource,
        player: Player,
        sampling: Sampling,
        *,
        tasks: TaskSource | None = None,
        groups: GroupLimits | None = None,
        episodes: EpisodeLimits | None = None,
        recorder: RecordWriter | None = None,
        concurrency: int | None = None,
        acquire_seconds: float = 120.0,
        seed: int = 0,
        version: int = 0,
        order: int = 0,
        prefix: str = "g",
        resumed: Iterable[Resumed] = (),
        frames_recorded: Callable[[str], bool] = lambda group: True,
        frame_budget: FrameBudget | None = None,
        engines: Callable[[], Sequence[int]] = tuple,
        rewarded: bool = False,
        verified: bool = True,
        recorded: Callable[[EpisodeRecord], FrameHandle] = lambda episode: {},
        budget: JudgeBudget | None = None,
    ):
        """`frames_recorded`: whether the frames of a group under way can be read from the recording. `engines`: those
        that live, by index. `rewarded`: whether the player is asked for the rewards of training episodes; `verified`:
        whether environments are asked how these ended. `recorded`: the frames of an episode in the recording."""
        self._loop = asyncio.get_running_loop()
        self._slots, self._player = slots, player
        self._engines, self._tasks = engines, tasks
        self._acquire_seconds = acquire_seconds
        self._seed = seed
        self._prefix = prefix
        self._frames_recorded = frames_recorded
        self._buffer = GroupBuffer(groups or GroupLimits(), seed=seed, version=version, order=order, prefix=prefix)
        self._recording = recorder
        if recorder:
            recorder.report_to(self._fail)
        limits = episodes or EpisodeLimits()
        terms = partial(AttemptRequest, sampling=sampling, limits=limits)
        self._as_training = partial(terms, verified=verified, rewarded=rewarded)
        self._as_fixed = self._terms = terms
        self._changed = asyncio.Event()
        self._rewarding = Rewarding(player, recorder, self._fail, self._changed.set, budget)
        self._frames = HeldFrames(frame_budget or FrameBudget())
        self._jobs = Jobs(player, concurrency)
        self._tasks_alive: set[asyncio.Task[None]] = set()
        self._fixed: EvaluationQueue | None = None
        self._fixed_runs = 0
        self._training = self._paused = self._drained = self._closing = False
        self._failure: BaseException | None = None
        self._dropped_in_a_row = 0
        self.faults = FaultTracker()
        self._stats = RolloutStats()
        self._meter = BusyMeter(self._stats, self._loop.time(), slots.size)
        for settled in self._buffer.resume(list(resumed)):
            self._settle(settled)
        for attempt, record in self._buffer.awaiting():
            self._ask(self._buffer, EpisodeResult(attempt, record, recorded(record), None))
        self._unsubscribe = slots.when_changed(self._slots_changed)

    # --- what the trainer calls ---

    async def next_batch(self, n_groups: int | None = None) -> list[GroupRecord]:
        """The next groups in issue order, complete. From the first call on, episodes run in the background as far as
        the staleness bound allows; call `set_version` after the update."""
        expected = self._buffer.limits.groups_per_update
        if n_groups not in (None, expected):
            raise ValueError(f"a batch has groups_per_update = {expected} groups, not {n_groups}: the bound needs it")
        if self._tasks is None:
            raise ValueError("this scheduler has no task source: it only plays fixed lists")
        self._training = True
        self._pump()
        await self._until(self._buffer.ready, verdicts=True)
        await self._written()
        # No await from here on: a caller that is cancelled has either not consumed the batch, or has it.
        batch = self._buffer.consume()
        self._stats.consumed(batch, self._buffer.version)
        self._pump()
        return batch

    def frames(self, groups: Sequence[GroupRecord]) -> dict[str, FrameHandle]:
        """By episode, of a batch that was handed out, until the next version: the frames that are not to be read from
        the recording."""
        return self._frames.of(group.id for group in groups)

    def put_back(self, groups: Sequence[GroupRecord], lost: Collection[str]) -> None:
        """The batch can't be learned from: the frames of these episodes are lost. It comes again, after they have been
        played again."""
        self._buffer.put_back(groups, lost)
        self._frames.forget([group.id for group in groups], lost)
        self._pump()

    def set_version(self, version: int, again: Collection[str] = ()) -> None:
        """The update is over, and the engines have its weights. `again`: episodes whose frames are kept as well."""
        self._buffer.set_version(version)
        self._frames.keep(self._buffer.holds, again)
        self._pump()

    async def run_fixed(
        self,
        tasks: Sequence[Task],
        repeats: int = 1,
        sampling: Sampling | None = None,
        policy: str = "",
        judged: bool = False,
    ) -> list[EpisodeRecord]:
        """Plays every task `repeats` times, without groups; one record per place, in order, invalid ones included.
        `policy` answers. Meanwhile no training episode begins. `judged`: rewards say how episodes ended, and no
        environment is asked."""
        if self._fixed is not None:
            raise ValueError("another list of tasks is being played")
        prefix = f"{self._prefix}fixed{self._fixed_runs}-"
        self._fixed_runs += 1
        reruns = self._buffer.limits.max_reruns
        queue = EvaluationQueue(tasks, repeats, max_reruns=reruns, seed=self._seed, prefix=prefix)
        own = {"sampling": sampling} if sampling else {}
        self._fixed = queue
        self._as_fixed = partial(self._terms, **own, policy=policy, verified=not judged, rewarded=judged)
        self._jobs.stop(lambda job: not job.slot)
        try:
            self._pump()
            await self._until(lambda: queue.done, verdicts=judged)
        finally:
            self._fixed = None
            self._jobs.stop(lambda job: job.source is queue)
            self._pump()
        await self._written()
        self._stats.reruns += queue.reruns
        return queue.results()

    async def pause(self) -> None:
        """No episode begins until `resume`. Returns when the running ones have been played to their end."""
        self._paused = True
        self._jobs.stop(lambda job: not job.slot)
        await self._until(lambda: not self._jobs)
        self._measure()
        self._drained = True

    def resume(self) -> None:
        self._measure()
        self._paused = self._drained = False
        self._pump()

    def reclaim(self, slot: str) -> None:
        """The slot is wanted elsewhere: its episode ends as `reclaimed` and is played again on another."""
        self._jobs.stop(lambda job: job.slot == slot, Reason.RECLAIMED)

    async def close(self, seconds: float = 10.0) -> None:
        """Stops every episode, keeping the steps so far, and returns within about `seconds`."""
        if not self._closing:
            self._unsubscribe()
        self._closing = True
        self._jobs.stop(lambda job: True)
        if self._tasks_alive:
            await asyncio.wait(self._tasks_alive, timeout=seconds)
        rest = list(self._tasks_alive)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self._rewarding.close()  # last: an episode may have ended by itself until now
        if self._recording:
            await self._recording.flush()
        self._changed.set()

    def stats(self) -> RolloutStats:
        """A copy of the totals up to now."""
        self._measure()
        self._stats.dropped = self._buffer.counts.dropped.copy()
        self._stats.members = self._buffer.counts.members.copy()
        copy = self._stats.copy()
        copy.reruns += self._buffer.counts.reruns
        return copy

    @property
    def running(self) -> int:
        return self._jobs.running

    @property
    def waiting(self) -> int:
        """Attempts that wait for a slot."""
        return len(self._jobs) - self.running

    @property
    def rewards(self) -> RewardCounts:
        return self._rewarding.counts

    @property
    def buffer(self) -> GroupBuffer:
        """For checkpoints (`unfinished`, `next_order`) and progress; not for changing it."""
        return self._buffer

    # --- starting ---

    def _pump(self) -> None:
        """Begins episodes while there are attempts and a slot may be free."""
        room = self._jobs.room(self._slots.usable)
        halted = self._paused or self._closing or self._failure or self._rewarding.stuck
        while room > 0 and not halted and (job := self._next_job()) is not None:
            room -= not job.attempt.avoid
            self._jobs.add(job)
            job.task = self._loop.create_task(self._play(job), name=f"episode {job.attempt.episode}")
            self._tasks_alive.add(job.task)
            job.task.add_done_callback(self._ended)
        self._changed.set()

    def _slots_changed(self) -> None:
        self._measure()
        self._jobs.shrink(self._slots.usable)
        self._pump()

    def _frames_fit(self) -> bool:
        """Whether there is memory for the frames of another group; what the next update needs is begun in any case."""
        buffer, limits = self._buffer, self._buffer.limits
        needed = buffer.unfinished_episodes + limits.group_size
        return buffer.waiting < limits.groups_per_update or self._frames.room(needed)

    def _next_job(self) -> Job | None:
        if self._fixed is not None:
            return _job(self._fixed, self._fixed.next_attempt(), self._as_fixed)
        if not self._training or self._tasks is None:
            return None
        attempt = self._buffer.next_attempt()
        if attempt is None and self._buffer.room and self._frames_fit():
            try:
                task = self._tasks.next()
            except ValueError as error:
                self._fail(error)
                return None
            self._buffer.admit(task)
            attempt = self._buffer.next_attempt()
        return _job(self._buffer, attempt, self._as_training)

    # --- playing ---

    async def _play(self, job: Job) -> None:
        try:
            lease = await self._slots.acquire(self._acquire_seconds, job.attempt.avoid, job.attempt.spare)
            job.slot = lease.slot
            self._measure()
            verdict, why, pace = Verdict.DIRTY, "the episode was cut short", None
            try:
                job.engine = engine_of_new_episode(self._engines(), (other.engine for other in self._jobs))
                sampling = replace(job.request.sampling, engine=job.engine)
                result = await self._player.play(replace(job.request, sampling=sampling), lease)
                verdict, why, pace = result.verdict, result.why, pace_of(result.record)
            finally:
                await self._slots.release(lease, verdict, why, pace)
        finally:
            self._jobs.ended(job)
            self._measure()
        # The attempt of a result from another process is a copy: groups know the one that they issued.
        self._take_in(job, replace(result, attempt=job.attempt))
        self._pump()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks_alive.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    def _take_in(self, job: Job, result: EpisodeResult) -> None:
        if self._recording:
            self._recording.episode(result)
        if why := self.faults.note(result):
            self._quarantine(result.record.task.key, why)
        if not result.record.awaits_rewards:
            self._counted(job.source, result)
        elif job.source.played(job.attempt, result.record):
            self._ask(job.source, result)

    def _ask(self, source: GroupBuffer | EvaluationQueue, result: EpisodeResult) -> None:
        def done(result: EpisodeResult) -> None:
            self._counted(source, result)
            self._pump()

        self._rewarding.ask(result, done)

    def _counted(self, source: GroupBuffer | EvaluationQueue, result: EpisodeResult) -> None:
        self._stats.episode(result)
        group, kept = result.attempt.group, self._frames_recorded(result.attempt.group)
        if settled := source.ended(result.attempt, result.record, result.phone_seconds):
            self._settle(settled)
        # Those of a worker elsewhere are at hand where needed, never fetched here; those of a recording (0 bytes) stay.
        at_hand = result.frame_bytes and not (kept and isinstance(result.frames, Mapping))
        if result.record.valid and at_hand and self._buffer.holds(group):
            self._frames.put(group, result.record.id, result.frames, result.frame_bytes)

    def _quarantine(self, key: str, why: str) -> None:
        log.warning("task %s is in quarantine: %s", key, why)
        if self._tasks is not None:
            self._tasks.quarantine(key, why)
        for settled in self._buffer.drop_task(key):
            self._settle(settled)

    def _settle(self, settled: CompletedGroup) -> None:
        if settled.dropped:
            self._frames.drop(settled.group.id)
            if self._tasks is not None:
                self._tasks.dropped(settled.group)
        if self._recording:
            self._recording.group(settled.group, settled.dropped.value if settled.dropped else None)
        useless = {attempt.episode for attempt in settled.stop}
        self._rewarding.forget(useless)
        self._jobs.stop(lambda job: job.attempt.episode in useless)
        if settled.dropped is Dropped.TOO_FEW_VALID:
            self._dropped_in_a_row += 1
            log.warning("group %s is dropped: %d valid episodes", settled.group.id, len(settled.group.episodes))
            if self._dropped_in_a_row >= 4 * self._buffer.limits.groups_per_update:
                why = f"{self._dropped_in_a_row} groups in a row had too few valid episodes (reasons so far: "
                look = f"look at the phones{self._rewarding.and_at_the_judge}"
                self._fail(RolloutError(f"{why}{dict(self._stats.invalid)}): {look}"))
        elif settled.dropped is None:
            self._dropped_in_a_row = 0

    # --- waiting ---

    async def _until(self, holds: Callable[[], bool], verdicts: bool = False) -> None:
        """`verdicts`: it may take some that aren't there yet. Raises JudgeBudgetSpent where there won't be any."""
        while not holds():
            if self._failure:
                raise self._failure
            if verdicts and (spent := self._rewarding.stuck):
                raise JudgeBudgetSpent(spent)
            if self._closing:
                raise RolloutError("the rollout was closed")
            self._changed.clear()
            await self._changed.wait()

    async def _written(self) -> None:
        if self._recording:
            await self._recording.flush()
        await self._player.verdicts_written()
        if self._failure:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._changed.set()

    def _measure(self) -> None:
        if self._drained:  # slots that are lent to another run meanwhile count neither as busy nor as idle
            self._meter.skip(self._loop.time())
        else:
            self._meter.note(self._loop.time(), self._slots.size, self.running)


def _job(
    source: GroupBuffer | EvaluationQueue, attempt: Attempt | None, terms: Callable[[Attempt], AttemptRequest]
) -> Job | None:
    return None if attempt is None else Job(terms(attempt), source)
