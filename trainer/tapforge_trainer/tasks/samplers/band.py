"""Tasks whose success rate lies in a band; the others are taken with probability `outside`.

A task that was never played has its template's rate, or one half. With a band beside one half, unknown tasks are
outside of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapforge_envs.protocol import Task

from ...algorithms.choices import within
from ..memory import DifficultyMemory
from .sampler import LEAST


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    low: float = 0.2
    high: float = 0.8
    outside: float = 0.1

    def __post_init__(self) -> None:
        within("low", self.low, 0, 1)
        within("high", self.high, self.low, 1)
        within("outside", self.outside, LEAST, 1)

    def __call__(self, task: Task, memory: DifficultyMemory) -> float:
        return 1.0 if self.low <= memory.rate(task) <= self.high else self.outside
