"""What judges may use, over all sessions of a run, in tokens and in money (`spec.stop`).

- Counted is what endpoints say of the questions that they answered.
- Once a limit is reached, no episode is asked about any more. What is being asked then is waited for, and counts: at
  most `at_once` episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tapforge_api.learning import Stop
from tapforge_api.rewards import Rewards

#: episodes; a judge of steps has some 15 questions of each
AT_ONCE: Final = 128


class JudgeBudgetSpent(Exception):
    """Verdicts are needed that may not be asked for. The message says what to raise."""


@dataclass(slots=True)
class JudgeBudget:
    #: spec.stop, as it was edited last
    limits: Callable[[], Stop] = Stop
    #: episodes
    at_once: int = AT_ONCE
    tokens: int = 0
    money: float = 0.0

    def add(self, usage: Mapping[str, float]) -> None:
        """`usage`: as `EpisodeRewards` has it."""
        self.tokens += int(usage.get("prompt_tokens", 0) + usage.get("answer_tokens", 0))
        self.money += usage.get("money", 0.0)

    @property
    def spent(self) -> str:
        """Which limit is reached, and the remedy; empty: none."""
        return self.limits().spent_on_judges(self.tokens, self.money)


def episodes_at_once(rewards: Rewards, stop: Stop) -> int:
    """How many episodes are asked about at a time. With a budget no more than endpoints answer questions at once: what
    waits for its turn when the budget is spent would be asked beyond it."""
    judges = [stream.judge for stream in rewards.streams if stream.judge is not None]
    if not judges or (stop.judge_tokens is None and stop.judge_money is None):
        return AT_ONCE
    return min(AT_ONCE, sum(model.concurrency for judge in judges for model in judge.models))
