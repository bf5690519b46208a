"""The estimators of advantages that studies compare, and what they read of episodes on the phone of `credit.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from tapforge_trainer.algorithms.registry import estimate
from tapforge_trainer.algorithms.steps import Steps

from .credit import Floats, Played

Signal: TypeAlias = Literal["outcome", "reward"]


def arrays(groups: Sequence[Sequence[Played]], signal: Signal = "outcome") -> Steps:
    numbers: dict[tuple[int, str], int] = {}
    group_of, trajectory, states, rewards, won, finals = (list[Any]() for _ in range(6))
    episodes = [(number, played) for number, group in enumerate(groups) for played in group]
    for place, (number, played) in enumerate(episodes):
        length = len(played.steps)
        final = numbers.setdefault((number, played.final), len(numbers))
        states += [numbers.setdefault((number, step.state), len(numbers)) for step in played.steps]
        rewards += [0.0] * (length - 1) + [float(played.won)]
        for column, value in ((group_of, number), (trajectory, place), (won, played.won), (finals, final)):
            column += [value] * length
    success = np.array(won)
    return Steps(
        group=np.array(group_of), trajectory=np.array(trajectory), state=np.array(states), reward=np.array(rewards),
        valid=np.ones(len(won), dtype=bool), success=success if signal == "outcome" else None,
        tokens=np.ones(len(won), dtype=np.int64),
        final_state=np.array(finals), goal=success,
    )  # fmt: skip


def _total(name: str, steps: Steps, rng: np.random.Generator, **options: Any) -> Floats:
    return estimate(name, steps, **options).total


def _shuffled(steps: Steps, rng: np.random.Generator) -> Floats:
    state = steps.state.copy()
    for number in np.unique(steps.group):
        inside = np.flatnonzero(steps.group == number)
        state[inside] = rng.permutation(state[inside])
    other = Steps(
        group=steps.group, trajectory=steps.trajectory, state=state, reward=steps.reward, valid=steps.valid,
        success=steps.success, tokens=steps.tokens, final_state=steps.final_state, goal=steps.goal,
    )  # fmt: skip
    return estimate("gigpo", other).total


def _step_alone(steps: Steps, rng: np.random.Generator) -> Floats:
    return estimate("gigpo", steps).step


def _successes_alone(steps: Steps, rng: np.random.Generator) -> Floats:
    """Rejection sampling: what succeeded is imitated, and nothing is pushed down."""
    assert steps.goal is not None
    return steps.goal.astype(np.float64)


Arm = Callable[[Steps, np.random.Generator], Floats]
ARMS: dict[str, Arm] = {
    **{
        name: partial(_total, name)
        for name in ("grpo", "discounted_grpo", "gigpo", "hgpo", "graphgpo", "dr_grpo", "rloo", "maxrl", "gpg")
    },
    "reinforce_plus_plus": partial(_total, "reinforce_plus_plus"),
    "gigpo_shuffled": _shuffled,
    "gigpo_step": _step_alone,
    "rejection_sft": _successes_alone,
}
CORE = ("grpo", "discounted_grpo", "gigpo", "gigpo_shuffled", "hgpo")
