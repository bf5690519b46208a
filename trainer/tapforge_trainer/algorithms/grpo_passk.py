"""GRPO for pass@k (arXiv:2503.19595, as in verl): the best trajectory of a group has what it is ahead of the second.

    A = (largest R - second largest R) / (std(R of the group) + epsilon) for the best, 0 for all others

`normalization="mean"` leaves out the deviation; there is no mean in either.

Conventions: with a tie for the best all advantages are 0, so with rewards of 0 and 1 a group teaches only where exactly
one succeeded. A group of one has 0 (verl raises). Where outcomes gate, a group that ended alike has 0: its best is
best by penalties.
"""

from __future__ import annotations

import numpy as np

from .choices import one_of, within
from .episodes import episodes_of
from .group_statistics import Normalization, center, deviations, over, telling
from .steps import Advantages, Steps


def grpo_passk(steps: Steps, *, normalization: Normalization = "mean_std", epsilon: float = 1e-6) -> Advantages:
    one_of("normalization", normalization, Normalization)
    within("epsilon", epsilon, 0)
    episodes = episodes_of(steps)
    returns, group, groups = episodes.returns, episodes.group, episodes.groups
    order = np.lexsort((returns, group))
    ordered, among = returns[order], group[order]
    last = np.append(among[1:] != among[:-1], True)[: len(among)]
    ahead = np.append(0.0, np.where(among[1:] == among[:-1], ordered[1:] - ordered[:-1], 0.0))[: len(among)]
    advantage = np.zeros(len(episodes))
    advantage[order] = np.where(last & telling(returns, group, groups, episodes.success)[among], ahead, 0.0)
    if normalization == "mean_std":
        spread = deviations(center(returns, group, groups), group, groups)
        advantage = over(advantage, spread[group] + epsilon)
    return episodes.same_at_each_step(advantage)
