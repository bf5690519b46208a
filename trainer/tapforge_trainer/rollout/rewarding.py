"""Episodes that ended on their phones and await their rewards: asked for beside those that are played.

- An episode is on its way to the recording before its rewards are asked for, and they follow it there: after a crash
  they are asked for again, and nothing is played again for them.
- Their phones are free meanwhile; their groups wait, and count against the bound on age.
- An episode whose screens can't be read any more has no verdict: raised, it would end every session that takes it up.
- At most `JudgeBudget.at_once` are asked for at a time: their screens are in memory meanwhile. None is once the budget
  is spent.
- What a session leaves unanswered, the next one asks for: `close` waits for nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from ..attempt import EpisodeResult, Player
from ..frames.frame import FrameError
from ..recording.queue import RecordWriter
from ..rewards.budget import JudgeBudget
from ..rewards.rewarder import missing

#: between two looks at whether a budget was raised, seconds
_LOOK = 1.0


@dataclass(frozen=True, slots=True)
class RewardCounts:
    """Totals, of a session or of a part of one. Seconds are those that episodes waited, together."""

    asked: int = 0
    answered: int = 0
    #: without a verdict that an episode can't be without
    missing: int = 0
    seconds: float = 0.0
    #: why the last one without a verdict has none
    last_missing: str = ""
    #: requests, tokens and seconds of judges, by name
    usage: Mapping[str, float] = field(default_factory=dict)

    @property
    def missing_share(self) -> float:
        return self.missing / self.answered if self.answered else 0.0

    def with_one(self, seconds: float, usage: Mapping[str, float], missing: str) -> RewardCounts:
        """With an episode more that was answered. `missing`: why it has no verdict, if it has none."""
        added = {name: self.usage.get(name, 0.0) + usage.get(name, 0.0) for name in {**self.usage, **usage}}
        return RewardCounts(
            self.asked,
            self.answered + 1,
            self.missing + bool(missing),
            self.seconds + seconds,
            missing or self.last_missing,
            added,
        )

    def since(self, earlier: RewardCounts) -> RewardCounts:
        usage = {name: number - earlier.usage.get(name, 0.0) for name, number in self.usage.items()}
        return RewardCounts(
            self.asked - earlier.asked,
            self.answered - earlier.answered,
            self.missing - earlier.missing,
            self.seconds - earlier.seconds,
            self.last_missing,
            usage,
        )

    def figures(self) -> dict[str, float | None]:
        """As an update's event has them."""
        return {
            "answered": self.answered,
            "missing": self.missing,
            "missing_share": self.missing_share,
            "seconds_waiting_for_verdicts": self.seconds / self.answered if self.answered else None,
            **{f"judge_{name}": number for name, number in sorted(self.usage.items())},
        }


class Rewarding:
    """Belongs to one event loop."""

    def __init__(
        self,
        player: Player,
        recorder: RecordWriter | None,
        fail: Callable[[BaseException], None],
        changed: Callable[[], None] = lambda: None,
        budget: JudgeBudget | None = None,
    ):
        """`fail` takes what the run can't go on with; `changed` is called when `stuck` may have changed."""
        self._player, self._recorder, self._fail, self._changed = player, recorder, fail, changed
        self._budget = budget or JudgeBudget()
        self._places = asyncio.Semaphore(self._budget.at_once)
        self._asking = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.counts = RewardCounts()

    @property
    def waiting(self) -> int:
        return len(self._tasks)

    @property
    def stuck(self) -> str:
        """Why no episode that awaits its rewards can get them; empty: some may."""
        return self._budget.spent if self._tasks and not self._asking else ""

    @property
    def and_at_the_judge(self) -> str:
        """For the end of a sentence that says where to look."""
        why = self.counts.last_missing
        return f", and at the judge; the last episode without a verdict: {why}" if why else ""

    def ask(self, result: EpisodeResult, done: Callable[[EpisodeResult], None]) -> None:
        """`done` takes the episode with its rewards."""
        name = result.attempt.episode
        task = asyncio.get_running_loop().create_task(self._asked(result, done), name=f"rewards {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda task: self._ended(name, task))

    def forget(self, episodes: Collection[str]) -> None:
        """Their groups are of no use any more."""
        for task in [self._tasks[name] for name in episodes if name in self._tasks]:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _asked(self, result: EpisodeResult, done: Callable[[EpisodeResult], None]) -> None:
        self.counts = replace(self.counts, asked=self.counts.asked + 1)
        begun = time.monotonic()
        try:
            async with self._places:
                await self._affordable()
                self._asking += 1
                try:
                    rewards = await self._player.reward(result.record, result.frames)
                finally:
                    self._asking -= 1
        except FrameError as lost:
            rewards = missing(result.record, f"its screens are lost: {lost}")
        self._budget.add(rewards.usage)
        record = result.record.rewarded(rewards)
        why = "" if record.valid else record.message or "no reason was given"
        self.counts = self.counts.with_one(time.monotonic() - begun, rewards.usage, why)
        if self._recorder is not None:
            self._recorder.rewards(record.id, rewards)
        done(replace(result, record=record))

    async def _affordable(self) -> None:
        """Ends with the session where the budget is not raised."""
        while self._budget.spent:
            self._changed()
            await asyncio.sleep(_LOOK)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)
