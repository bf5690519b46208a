"""Asks for the rewards of an episode after its end: judges' verdicts, and rewards of installed packages.

- No verdict is made up. What is missing is asked for again, with growing pauses, until `deadline_seconds`; then a step
  has none, and an episode that misses a verdict on itself leaves its group (`verdict_missing`).
- An episode that ran out of steps or context, or gave no answer that is an action, has failed whatever a judge would
  say: none is asked. An answer that was not an action has the step verdict 0.
- Streams of an episode are asked for at once; how many questions an endpoint gets at once is the judge's to bound.
- What another package's reward raises ends the run: it would happen to every episode. One that gives no answer by the
  deadline is missing, as a verdict is.
- An episode without a step has nothing to be rewarded.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Protocol, TypeVar

from tapforge_api.judge import JudgeSpec
from tapforge_api.rewards import Rewards, RewardStream
from tapforge_envs.protocol import Outcome, Reason

from ..frames.frame import FittedFrame
from ..judges.endpoint import Endpoints, Served
from ..judges.journal import Verdicts
from ..judges.judge import Judge, Kind, divided, judge_of
from ..judges.usage import Usage
from ..judges.verdicts import Trajectory, Verdict, VerdictMissing
from ..records import EpisodeRecord, EpisodeRewards
from .registry import Reward, reward_of

T = TypeVar("T")

#: pauses between two questions that got no verdict, seconds
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
#: of the deadline of rewards that a judge's own may take
_OWN_SHARE = 0.9
#: how an episode ended by its own last action
_ENDED = (Reason.DONE, Reason.DECLARED_INFEASIBLE)


@dataclass(frozen=True, slots=True)
class _Values:
    """Of a stream: a value and a judge's words per step. `missing`: why the episode can't be without."""

    values: tuple[float | None, ...]
    words: tuple[str, ...] = ()
    missing: str = ""


class MakeJudge(Protocol):
    def __call__(
        self, spec: JudgeSpec, kind: Kind, *, endpoints: Endpoints, usage: Usage, journal: Verdicts | None
    ) -> Judge: ...


class Rewarder:
    """Belongs to one event loop."""

    def __init__(
        self,
        rewards: Rewards,
        processes: int = 1,
        make_judge: MakeJudge = judge_of,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        journal: Verdicts | None = None,
        say: Callable[[str], None] | None = None,
    ):
        """`processes`: that ask the same endpoints; `journal`: of verdicts, which aren't asked for again; `say`: which
        endpoint is waited for. Raises ValueError, TypeError and UnknownName for what can't be asked."""
        self._spec, self._sleep = rewards, sleep
        # Judges of one endpoint share its places, and all of them what is counted.
        self._endpoints, self._usage, self._reported = Endpoints(say), Usage(), Usage().as_json()
        self._judges: dict[str, Judge] = {}
        self._rewards: dict[str, Reward] = {}
        for stream in rewards.asked:
            if stream.judge is not None:
                # The judge gives up first: it knows which endpoint said what.
                seconds = min(stream.judge.deadline_seconds, _OWN_SHARE * rewards.deadline_seconds)
                spec = divided(stream.judge.model_copy(update={"deadline_seconds": seconds}), processes)
                kind: Kind = "task" if stream.kind == "judge" else "step"
                self._judges[stream.name] = make_judge(
                    spec, kind, endpoints=self._endpoints, usage=self._usage, journal=journal
                )
            else:
                self._rewards[stream.name] = reward_of(stream)

    async def rewards(self, episode: EpisodeRecord, frames: Mapping[str, FittedFrame]) -> EpisodeRewards:
        """`frames`: at least those of the episode. Raises what reading one raises."""
        usage: Counter[str] = Counter()  # also of fractions
        trajectory = await asyncio.to_thread(Trajectory.of, episode, frames)
        asked = self._spec.asked
        found = await asyncio.gather(*(self._stream(stream, trajectory, usage) for stream in asked))
        streams = {stream.name: one for stream, one in zip(asked, found, strict=True)}
        outcome, reason = self._outcome(episode, streams)
        lacks = [f"{name}: {one.missing}" for name, one in streams.items() if one.missing]
        usage["missing"] += sum(value is None for one in found for value in one.values)
        usage.update(self._since_the_last())
        return EpisodeRewards(
            streams={name: one.values for name, one in streams.items()},
            outcome=outcome,
            reason=reason,
            verified=episode.verified,
            words={name: one.words for name, one in streams.items() if any(one.words)},
            message="; ".join(lacks),
            usage=dict(usage),
        )

    def use_models(self, models: Mapping[str, Served]) -> None:
        """Where the run's own models answer from here on, by name."""
        self._endpoints.serve(models)

    async def close(self) -> None:
        await asyncio.gather(*(judge.close() for judge in self._judges.values()))
        await self._endpoints.close()

    # --- inside ---

    def _since_the_last(self) -> dict[str, float]:
        """What judges used since an episode's rewards were there last, also for others, and for what came to nothing:
        sums over episodes are exact."""
        now, before = self._usage.as_json(), self._reported
        self._reported = now
        return {name: number - before[name] for name, number in now.items() if name != "missing"}

    def _outcome(self, episode: EpisodeRecord, streams: Mapping[str, _Values]) -> tuple[Outcome, Reason]:
        if any(one.missing for one in streams.values()):
            return Outcome.INVALID, Reason.VERDICT_MISSING
        if self._spec.success is None:
            assert episode.verified is not None, "without `success` the environment says how an episode ended"
            return episode.verified, episode.reason
        if episode.reason not in _ENDED:
            return Outcome.FAILURE, episode.reason
        total = sum(value or 0.0 for value in streams[self._spec.success].values)
        return (Outcome.SUCCESS if total >= self._spec.threshold else Outcome.FAILURE), episode.reason

    async def _stream(self, stream: RewardStream, trajectory: Trajectory, usage: Counter[str]) -> _Values:
        judge, steps_of_it = self._judges.get(stream.name), len(trajectory.episode.steps)
        if not steps_of_it:
            return _Values(())
        if judge is None:
            return await self._of_package(stream, trajectory)
        if stream.kind == "judge":
            return await self._judged(judge, trajectory, usage)
        steps = [self._step(judge, trajectory, index, usage) for index in range(steps_of_it)]
        verdicts = await asyncio.gather(*steps)
        return _Values(tuple(value for value, _ in verdicts), tuple(words for _, words in verdicts))

    async def _of_package(self, stream: RewardStream, trajectory: Trajectory) -> _Values:
        seconds = self._spec.deadline_seconds
        try:
            async with asyncio.timeout(seconds) as alarm:
                answer = await self._rewards[stream.name](trajectory)
        except TimeoutError:
            if not alarm.expired():
                raise
            why = f"the reward {stream.kind!r} gave no answer within {seconds:g} s (spec.rewards.deadlineSeconds)"
            return _Values((None,) * len(trajectory.episode.steps), missing=why)
        return _given(stream, trajectory, answer)

    async def _judged(self, judge: Judge, trajectory: Trajectory, usage: Counter[str]) -> _Values:
        episode = trajectory.episode
        if episode.reason not in _ENDED:
            return _at_the_end(episode, 0.0, f"not asked: it ended as {episode.reason}")
        try:
            verdict = await self._insisted(lambda: judge.task(trajectory), usage)
        except VerdictMissing as why:
            return _Values((None,) * len(episode.steps), missing=str(why))
        return _at_the_end(episode, verdict.value, verdict.reason)

    async def _step(
        self, judge: Judge, trajectory: Trajectory, index: int, usage: Counter[str]
    ) -> tuple[float | None, str]:
        if trajectory.episode.steps[index].parse_error is not None:
            return 0.0, "not asked: the answer was not an action"
        try:
            verdict = await self._insisted(lambda: judge.step(trajectory, index), usage)
        except VerdictMissing as why:
            return None, str(why)
        return verdict.value, verdict.reason

    async def _insisted(self, ask: Callable[[], Awaitable[Verdict]], usage: Counter[str]) -> Verdict:
        """Raises VerdictMissing when there is none by the deadline."""
        loop = asyncio.get_running_loop()
        ends, pause, last = loop.time() + self._spec.deadline_seconds, _FIRST_PAUSE, ""
        while True:
            try:
                async with asyncio.timeout_at(ends):
                    verdict = await ask()
            except TimeoutError as error:
                why = f"no verdict within {self._spec.deadline_seconds:g} s (spec.rewards.deadlineSeconds)"
                raise VerdictMissing(f"{why}; last: {last}" if last else why) from error
            except VerdictMissing as why_not:
                last = str(why_not)
                usage["asked_again"] += 1
                pause = min(_LONGEST_PAUSE, pause * random.uniform(1.5, 2.0))
                if why_not.permanent or loop.time() + pause >= ends:
                    raise
                await self._sleep(pause)
                continue
            return verdict


def missing(episode: EpisodeRecord, why: str) -> EpisodeRewards:
    """Of an episode about which nothing can be found out."""
    return EpisodeRewards({}, Outcome.INVALID, Reason.VERDICT_MISSING, episode.verified, message=why)


def _at_the_end(episode: EpisodeRecord, value: float, words: str) -> _Values:
    before = len(episode.steps) - 1
    return _Values((*(0.0,) * before, value), (*("",) * before, words))


def _given(stream: RewardStream, trajectory: Trajectory, answer: float | Sequence[float | None]) -> _Values:
    """What a reward of another package answered. Raises ValueError for what can't be a reward."""
    episode = trajectory.episode
    if isinstance(answer, float | Real):  # also numpy's, which JSON doesn't know
        values = _at_the_end(episode, float(answer), "").values
    else:
        values = tuple(None if value is None else float(value) for value in answer)
    if len(values) != len(episode.steps):
        raise ValueError(
            f"the reward {stream.kind!r} gave {len(values)} values for episode {episode.id} of {len(episode.steps)} "
            "steps; it gives one per step, or a single number"
        )
    for index, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"the reward {stream.kind!r} gave {value} at step {index} of episode {episode.id}")
    return _Values(values)
