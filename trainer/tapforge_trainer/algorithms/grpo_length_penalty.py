"""GRPO with a price on length (prime-rl's `length_penalty`): tokens and turns cost a share of the group's mean return.

    R' = R - mean(R) * (output * tokens / most tokens + turns * steps / most steps);  A = R' - mean(R')

Means and maxima are over the group; `output` and `turns` are the prices of the longest. As the price is a share of the
mean, a group that only fails is not penalised, and where penalties make the mean negative, length pays. prime-rl's
third term, for input tokens, is left out: here it would price frames.

Conventions: no deviation. A maximum of 0 tokens counts as 1. A group of one has 0. Where outcomes gate, a group that
ended alike has 0: there the price would be all there is to compare.
"""

from __future__ import annotations

import numpy as np

from .choices import within
from .episodes import episodes_of
from .group_statistics import center
from .steps import Advantages, Floats, Ints, Steps, need


def grpo_length_penalty(steps: Steps, *, output: float = 0.1, turns: float = 0.0) -> Advantages:
    within("output", output, 0)
    within("turns", turns, 0)
    remedy = "give the response tokens of each step, or use dr_grpo"
    tokens = need(steps.tokens, "grpo_length_penalty", "tokens", remedy)
    episodes = episodes_of(steps)
    group, groups = episodes.group, episodes.groups
    mean = np.bincount(group, episodes.returns, minlength=groups) / np.maximum(np.bincount(group, minlength=groups), 1)
    price = output * _of_most(episodes.sums(tokens), group, groups) + turns * _of_most(episodes.length, group, groups)
    return episodes.same_at_each_step(center(episodes.returns - mean[group] * price, group, groups, episodes.success))


def _of_most(length: Floats | Ints, group: Ints, groups: int) -> Floats:
    most = np.zeros(groups)
    np.maximum.at(most, group, length)
    return length / np.where(most > 0, most, 1.0)[group]
