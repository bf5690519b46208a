"""Tasks whose success rate is near one half: there a group's outcomes vary most, and only then its advantages say
anything.

    floor + (1 - floor) * 4 r (1 - r),  r: the memory's estimate

4 r (1 - r) is the variance of an outcome over its largest, 1/4. The floor is what tasks that always fail or succeed are
still taken with, so that each comes again and is noticed when it changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapforge_envs.protocol import Task

from ...algorithms.choices import within
from ..memory import DifficultyMemory
from .sampler import LEAST


@dataclass(frozen=True, slots=True, kw_only=True)
class NearHalf:
    floor: float = 0.1

    def __post_init__(self) -> None:
        within("floor", self.floor, LEAST, 1)

    def __call__(self, task: Task, memory: DifficultyMemory) -> float:
        rate = memory.rate(task)
        return self.floor + (1 - self.floor) * 4 * rate * (1 - rate)
