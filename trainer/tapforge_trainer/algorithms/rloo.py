"""RLOO (arXiv:2402.14740): a trajectory's return minus the mean return of the *other* trajectories of its group.

Conventions: a group of one has 0 (verl's `rloo`: the raw return; its `rloo_vectorized`: 0). Where outcomes gate, a
group that ended alike has 0.
"""

from __future__ import annotations

import numpy as np

from .episodes import episodes_of
from .group_statistics import center
from .steps import Advantages, Steps


def rloo(steps: Steps) -> Advantages:
    episodes = episodes_of(steps)
    size = np.bincount(episodes.group, minlength=episodes.groups)[episodes.group]
    distance = center(episodes.returns, episodes.group, episodes.groups, episodes.success)
    # R - (sum - R) / (n - 1) = (R - mean) * n / (n - 1)
    return episodes.same_at_each_step(distance * size / np.maximum(size - 1, 1))
