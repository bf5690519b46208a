"""GRPO: a trajectory's return against the other trajectories of its group; the same advantage at each of its steps.

`normalization="mean"` is Dr. GRPO. `row_statistics` takes mean and deviation over one entry per step instead of one per
trajectory, as some published code does: long trajectories then weigh more. `min_deviation` 0 is the published formula.
"""

from __future__ import annotations

import numpy as np

from .group_statistics import Normalization, compare, labels
from .steps import Advantages, Floats, Ints, Steps


def grpo(
    steps: Steps,
    *,
    normalization: Normalization = "mean_std",
    min_deviation: float = 0.0,
    row_statistics: bool = False,
    epsilon: float = 1e-6,
) -> Advantages:
    episode = np.zeros(len(steps))
    episode[steps.valid] = episode_advantage(steps, normalization, min_deviation, row_statistics, epsilon)
    return Advantages(episode, episode, np.zeros(len(steps)), steps.valid.astype(np.int64))


def episode_advantage(
    steps: Steps, normalization: Normalization, min_deviation: float, row_statistics: bool, epsilon: float
) -> Floats:
    """One entry per *valid* step."""
    group, groups = labels(steps.group[steps.valid])
    returns, first, trajectory = returns_of(steps)
    success = steps.valid_success
    if row_statistics:
        return compare(returns[trajectory], group, groups, normalization, epsilon, min_deviation, success)
    success = None if success is None else success[first]
    return compare(returns, group[first], groups, normalization, epsilon, min_deviation, success)[trajectory]


def returns_of(steps: Steps) -> tuple[Floats, Ints, Ints]:
    """Over valid steps: (undiscounted return of each trajectory, index of one of its steps, each step's trajectory)."""
    trajectory, count = labels(steps.trajectory[steps.valid])
    returns = np.bincount(trajectory, steps.reward[steps.valid], minlength=count).astype(np.float64)
    member = np.zeros(count, dtype=np.int64)
    member[trajectory] = np.arange(len(trajectory))
    return returns, member, trajectory
