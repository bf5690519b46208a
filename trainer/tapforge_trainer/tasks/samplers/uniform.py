"""Every task is taken when its turn comes: the order as it is."""

from __future__ import annotations

from dataclasses import dataclass

from tapforge_envs.protocol import Task

from ..memory import DifficultyMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    def __call__(self, task: Task, memory: DifficultyMemory) -> float:
        return 1.0
