"""What a person did on a phone, up to its verdict.

- Of each step there is the screen that the person saw, the action and what the phone said about it. Texts that were
  typed right after each other, as a keyboard has them, are one step.
- An episode can be kept once it has ended, and only whole: not one in which a call failed, another client used the
  phone, or more was done than is held in memory.
- Where nothing judges the task, the person says how it went.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from typing import Protocol as Interface

from ..protocol import Action, Observation, Outcome, Reason, Score, Task, Terminate, Type, needs_score, outcome_of

#: of an episode that can be kept
MAX_STEPS: Final = 1000
MAX_BYTES: Final = 512 * 1024 * 1024
#: characters of a text that is typed in one step
_MAX_TEXT: Final = 10_000


@dataclass(frozen=True, slots=True)
class HumanStep:
    """`seen`: the screen on which `action` was done."""

    seen: Observation
    action: Action
    note: str = ""
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class HumanEpisode:
    """An episode that ended as success or failure; times are unix seconds."""

    phone: str
    task: Task
    steps: tuple[HumanStep, ...]
    #: after the last action
    last: Observation
    reason: Reason
    #: None where nothing judged it
    score: Score | None
    outcome: Outcome
    #: the person said so, because nothing else did
    decided: bool
    started: float
    ended: float


class CannotKeep(Exception):
    """An episode can't be written down; the message says why and what would help."""


class EpisodeWriter(Interface):
    """Writes episodes down."""

    async def keep(self, played: HumanEpisode) -> str:
        """What it is called from now on, in words. Returns when it would survive a power failure. Raises
        CannotKeep."""
        ...


@dataclass
class HumanAttempt:
    """One task in a person's hands."""

    phone: str
    task: Task
    steps: list[HumanStep] = field(default_factory=list)
    last: Observation | None = None
    reason: Reason | None = None
    score: Score | None = None
    outcome: Outcome | None = None
    #: why nothing judged it
    unjudged: str = ""
    #: why it can't be kept
    invalid: str = ""
    #: what it is called since it was kept
    kept: str = ""
    started: float = field(default_factory=time.time)
    ended: float = 0.0
    _bytes: int = 0

    def did(self, step: HumanStep, after: Observation) -> None:
        self._bytes += len(step.seen.frame.data)
        if len(self.steps) >= MAX_STEPS or self._bytes > MAX_BYTES:
            self.invalidate(f"it has more than {MAX_STEPS:,} steps or {MAX_BYTES >> 20} MiB of screens; discard it")
            self.steps.clear()
        elif not self.invalid:
            self.steps.append(step)
        self.last = after

    def invalidate(self, why: str) -> None:
        self.invalid = self.invalid or why

    def ends(self, reason: Reason) -> bool:
        """Whether a judge has to be asked."""
        self.reason, self.ended = reason, time.time()
        if needs_score(reason, self.task.feasible):
            return True
        self.outcome = outcome_of(reason, feasible=self.task.feasible, threshold=self.task.threshold)
        return False

    def judged(self, score: Score) -> None:
        assert self.reason is not None
        self.score, self.ended = score, time.time()
        task = self.task
        self.outcome = outcome_of(self.reason, feasible=task.feasible, threshold=task.threshold, score=score.value)

    def played(self, said: Outcome | None) -> HumanEpisode:
        """`said`: by the person, where nothing judged it. Raises CannotKeep."""
        if self.kept:
            raise CannotKeep(f"it is kept already, as {self.kept}")
        if self.reason is None or self.last is None:
            raise CannotKeep("the task isn't over: say Done, Can't be done or the answer first")
        if self.invalid:
            raise CannotKeep(f"it can't be kept: {self.invalid}")
        decided = self.outcome is None
        outcome = said if decided else self.outcome
        if outcome is None:
            raise CannotKeep("nothing judged it, so say whether it went well")
        return HumanEpisode(
            self.phone, self.task, typed_together(self.steps), self.last, self.reason, self.score, outcome, decided,
            self.started, self.ended,
        )  # fmt: skip

    def told(self) -> dict[str, Any]:
        """For the page: whether it can be kept, whether the person has to decide, and words."""
        over = self.reason is not None and (self.outcome is not None or bool(self.unjudged))
        return {
            "can": over and not self.invalid and not self.kept,
            "decide": over and self.outcome is None,
            "kept": self.kept,
            "invalid": self.invalid,
        }

    def verdict(self) -> dict[str, Any] | None:
        """As an episode of a run would end."""
        if self.reason is None:
            return None
        score = self.score or Score(0.0, self.unjudged)
        return {
            "score": None if self.score is None else score.value,
            "reason": score.reason,
            "side_effects": list(score.side_effects),
            "outcome": self.outcome,
            "feasible": self.task.feasible,
        }


def reason_of(action: Action) -> Reason:
    """Of a final action."""
    infeasible = isinstance(action, Terminate) and action.status == "infeasible"
    return Reason.DECLARED_INFEASIBLE if infeasible else Reason.DONE


def typed_together(steps: Sequence[HumanStep]) -> tuple[HumanStep, ...]:
    """With each run of typed texts as one text on its first screen."""
    made: list[HumanStep] = []
    for step in steps:
        before = made[-1] if made else None
        if before is not None and isinstance(before.action, Type) and isinstance(step.action, Type):
            text = before.action.text + step.action.text
            if len(text) <= _MAX_TEXT:
                made[-1] = HumanStep(before.seen, Type(text=text), step.note, before.reward + step.reward)
                continue
        made.append(step)
    return tuple(made)
