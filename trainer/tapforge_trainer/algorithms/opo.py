"""OPO (arXiv:2505.23585): a trajectory's return minus the baseline of least variance under an even length of gradients.

    A = R - sum(L R) / sum(L) over the group,  L = response tokens of the trajectory, all its steps together

Conventions: no deviation. A trajectory without tokens has no say in the baseline. A group of one, or one without any
token, has 0 (verl: the raw return, and NaN). The tokens count, so advantages of a group don't sum to 0, but their sum
weighted by tokens does. Where outcomes gate, a group that ended alike has 0.
"""

from __future__ import annotations

import numpy as np

from .episodes import episodes_of
from .group_statistics import telling
from .steps import Advantages, Steps, need


def opo(steps: Steps) -> Advantages:
    tokens = need(steps.tokens, "opo", "tokens", "give the response tokens of each step, or use dr_grpo or rloo")
    episodes = episodes_of(steps)
    group, groups = episodes.group, episodes.groups
    length = episodes.sums(tokens)
    total = np.bincount(group, length, minlength=groups)
    baseline = np.bincount(group, length * episodes.returns, minlength=groups) / np.maximum(total, 1)
    compared = telling(episodes.returns, group, groups, episodes.success) & (total > 0)
    return episodes.same_at_each_step(np.where(compared[group], episodes.returns - baseline[group], 0.0))
