"""RLOO: a trajectory's return minus the mean return of the *other* trajectories of its group."""

from __future__ import annotations

import numpy as np

from .group_statistics import center, labels
from .grpo import returns_of
from .steps import Advantages, Steps


def rloo(steps: Steps) -> Advantages:
    group, groups = labels(steps.group[steps.valid])
    returns, first, trajectory = returns_of(steps)
    success = None if steps.valid_success is None else steps.valid_success[first]
    size = np.bincount(group[first], minlength=groups)[group[first]]
    # R - (sum - R) / (n - 1) = (R - mean) * n / (n - 1)
    others = center(returns, group[first], groups, success) * size / np.maximum(size - 1, 1)
    episode = np.zeros(len(steps))
    episode[steps.valid] = others[trajectory]
    return Advantages(episode, episode, np.zeros(len(steps)), steps.valid.astype(np.int64))
