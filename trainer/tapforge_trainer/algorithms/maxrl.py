"""MaxRL (arXiv:2602.02710): a trajectory's distance from its group's mean return, divided by that mean.

    A = (R - mean(R of the group)) / (mean(R of the group) + epsilon)

A rare success of a hard task counts for more than one of many. For returns that are not negative: a group whose mean
is not positive has 0 (SkyRL divides by a negative mean too, which turns every sign). `epsilon` is 0, as in prime-rl and
the paper; SkyRL adds 1e-6.

Conventions: a group of one has 0 (SkyRL: the raw return). Where outcomes gate, a group that ended alike has 0.
"""

from __future__ import annotations

import numpy as np

from .choices import within
from .episodes import episodes_of
from .group_statistics import center
from .steps import Advantages, Steps


def maxrl(steps: Steps, *, epsilon: float = 0.0) -> Advantages:
    within("epsilon", epsilon, 0)
    episodes = episodes_of(steps)
    group, groups = episodes.group, episodes.groups
    mean = np.bincount(group, episodes.returns, minlength=groups) / np.maximum(np.bincount(group, minlength=groups), 1)
    largest = np.zeros(groups)
    np.maximum.at(largest, group, np.abs(episodes.returns))
    positive = mean > 1e-12 * largest  # less is what rounding leaves of 0
    scale = np.where(positive, 1.0 / np.where(positive, mean + epsilon, 1.0), 0.0)
    return episodes.same_at_each_step(center(episodes.returns, group, groups, episodes.success) * scale[group])
