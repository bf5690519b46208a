"""What a sampler is: how likely a task is taken when its turn comes.

Tasks come in the seeded order of `tasks/source.py`, the same as without a sampler, and each is taken or passed over. So
a sampler changes how often tasks are practised, never their order, and it works for suites without an end as for lists.
"""

from __future__ import annotations

from typing import Final, Protocol

from tapforge_envs.protocol import Task

from ..memory import DifficultyMemory

#: smallest weight that ours let an option say: of a thousand turns one is taken
LEAST: Final = 0.001


class Sampler(Protocol):
    """A pure function; its options are keyword-only parameters of its class."""

    def __call__(self, task: Task, memory: DifficultyMemory) -> float:
        """Probability from 0 to 1 that the task is taken. `memory.update` is the number of updates so far."""
        ...
