"""GiGPO: the episode's advantage (as in GRPO) plus `weight` times an advantage of the step itself.

The step's own advantage compares its discounted return to go with those of all steps in the same group that saw the
same state, across trajectories and across time. A step whose state no other saw gets 0, so GiGPO falls back to GRPO
where state keys are unique; `state_group_size` makes that visible. Where outcomes are known, so does a step whose state
was only seen on the way to one outcome: discounting would compare nothing but lengths there. Without outcomes and with
`min_deviation` 0 this is the published formula.
"""

from __future__ import annotations

import numpy as np

from .choices import within
from .group_statistics import Normalization, compare, discounted_to_go, distinct, labels
from .grpo import episode_advantage
from .steps import Advantages, Steps


def gigpo(
    steps: Steps,
    *,
    normalization: Normalization = "mean_std",
    gamma: float = 0.95,
    weight: float = 1.0,
    min_deviation: float = 0.0,
    row_statistics: bool = False,
    epsilon: float = 1e-6,
) -> Advantages:
    within("gamma", gamma, 0, 1)
    within("weight", weight, 0, 1e6)
    n = len(steps)
    valid = steps.valid
    episode, step = np.zeros(n), np.zeros(n)
    size = np.zeros(n, dtype=np.int64)
    episode[valid] = episode_advantage(steps, normalization, min_deviation, row_statistics, epsilon)
    to_go = discounted_to_go(steps.reward[valid], steps.trajectory[valid], gamma)
    group, count = labels(steps.group[valid], distinct(steps.state[valid]))
    step[valid] = compare(to_go, group, count, normalization, epsilon, min_deviation, steps.valid_success)
    size[valid] = np.bincount(group, minlength=count)[group]
    return Advantages(episode + weight * step, episode, step, size)
