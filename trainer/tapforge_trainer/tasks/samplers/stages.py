"""A mix of templates that changes with the updates.

    plan: "0: open*=1, switch=0.2; 30: *=1"

Stages are separated by semicolons and begin with the number of updates from which they hold; the first one begins at 0.
A template's weight is that of the first pattern it matches (`*`, `?`, `[...]`), and 0 if it matches none. Weights are
relative to each other: in the first stage above `switch` is taken in a fifth of its turns, `open_two` in every one.
How often a template has a turn is up to the suite or the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise

from tapforge_envs.protocol import Task

from ..memory import DifficultyMemory

_EXAMPLE = "such as '0: open*=1, switch=0.2; 30: *=1'"


@dataclass(frozen=True, slots=True)
class Stage:
    since: int
    #: (pattern, weight from 0 to 1), the largest is 1
    weights: tuple[tuple[str, float], ...]

    def weight(self, template: str) -> float:
        return next((weight for pattern, weight in self.weights if fnmatchcase(template, pattern)), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    plan: str
    stages: tuple[Stage, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        stages = tuple(_stage(text.strip()) for text in self.plan.split(";") if text.strip())
        if not stages:
            raise ValueError(f"plan has no stage; give some, {_EXAMPLE}")
        if stages[0].since:
            raise ValueError(f"plan's first stage begins at update {stages[0].since}; it has to begin at 0")
        for one, next_ in pairwise(stages):
            if next_.since <= one.since:
                raise ValueError(f"plan's stage {next_.since} comes after stage {one.since}; write them in order")
        object.__setattr__(self, "stages", stages)

    def __call__(self, task: Task, memory: DifficultyMemory) -> float:
        return self.stage(memory.update).weight(task.template)

    def stage(self, update: int) -> Stage:
        """The one that holds after so many updates."""
        return [stage for stage in self.stages if stage.since <= update][-1]


def _stage(text: str) -> Stage:
    since, colon, mix = text.partition(":")
    if not colon or not since.strip().isdecimal():
        raise ValueError(f"plan's stage {text!r} doesn't begin with an update and a colon, {_EXAMPLE}")
    weights = [_weight(one.strip()) for one in mix.split(",") if one.strip()]
    largest = max((weight for _, weight in weights), default=0.0)
    if largest <= 0:
        raise ValueError(f"plan's stage {text!r} gives no template a weight above 0, {_EXAMPLE}")
    return Stage(int(since), tuple((pattern, weight / largest) for pattern, weight in weights))


def _weight(text: str) -> tuple[str, float]:
    pattern, _, number = text.rpartition("=")
    try:
        weight = float(number)
        if not pattern.strip() or not 0 <= weight < float("inf"):
            raise ValueError
    except ValueError:
        raise ValueError(f"plan's {text!r} is not TEMPLATE=WEIGHT with a weight of at least 0, {_EXAMPLE}") from None
    return pattern.strip(), weight
