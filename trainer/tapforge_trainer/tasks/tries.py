"""What tries of a policy tell of a task: how hard it is, and whether it can be done. Pure.

- It can be done where one try did it. It can't where a try said so and the environment, or the judge, agreed. Both at
  once, or neither, is unknown: a label that the task has stays, and none is made up.
- Running out of steps is counted apart, and never as having said that a task can't be done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tapforge_envs.protocol import Outcome, Reason

from ..records import EpisodeRecord
from ..statistics import wilson


@dataclass(frozen=True, slots=True)
class Tries:
    """Numbers of tries of one task; each is in exactly one."""

    #: done, by the environment or the judge
    done: int = 0
    #: said that it can't be done, and that was right; and was not
    infeasible: int = 0
    infeasible_wrongly: int = 0
    #: ended as done, or given up, and wasn't
    failed: int = 0
    step_limit: int = 0
    #: answers without an action, or a prompt that outgrew the context
    malformed: int = 0
    #: the phone, its judge or ourselves: says nothing of the task
    invalid: int = 0

    @property
    def valid(self) -> int:
        return sum(asdict(self).values()) - self.invalid

    @property
    def feasible(self) -> bool | None:
        """None: not known."""
        if bool(self.done) == bool(self.infeasible):
            return None
        return bool(self.done)

    def as_json(self) -> dict[str, Any]:
        won = self.done + self.infeasible
        interval = wilson(won, self.valid)
        return {
            **asdict(self),
            "success": won / self.valid if self.valid else None,
            "interval": [round(interval.low, 4), round(interval.high, 4)] if interval else None,
            "says": self.says,
        }

    @property
    def says(self) -> str:
        """One word for people."""
        if self.done and self.infeasible:
            return "contradictory"
        if self.done:
            return "feasible"
        if self.infeasible:
            return "infeasible"
        if not self.valid:
            return "nothing"
        return "out of steps" if 2 * self.step_limit >= self.valid else "never done"


def tries_of(episodes: Iterable[EpisodeRecord]) -> Tries:
    counts = dict.fromkeys(Tries.__dataclass_fields__, 0)
    for one in episodes:
        counts[_kind(one)] += 1
    return Tries(**counts)


def _kind(one: EpisodeRecord) -> str:
    if not one.valid:
        return "invalid"
    won = one.outcome is Outcome.SUCCESS
    match one.reason:
        case Reason.DECLARED_INFEASIBLE:
            return "infeasible" if won else "infeasible_wrongly"
        case Reason.STEP_LIMIT:
            return "step_limit"
        case Reason.PARSE_FAILURES | Reason.CONTEXT_LIMIT:
            return "malformed"
        case _:
            return "done" if won else "failed"
