"""GRPO (arXiv:2402.03300): a trajectory's return against the others of its group, the same at each of its steps.

    A = (R - mean(R of the group)) / (std(R of the group) + epsilon)

- `normalization="mean"` leaves out the deviation: Dr. GRPO (arXiv:2503.20783), by name `dr_grpo`. Its other half, a
  constant in place of lengths, is an aggregation of the loss.
- `deviation="batch"` divides by the deviation of all returns of the batch instead of the group's (TRL's
  `scale_rewards="batch"`, which adds 1e-4): groups of one have no advantage, but count in it. The default is the
  group's, as published.
- `row_statistics` takes mean and deviation over one entry per step instead of one per trajectory, as some published
  code does: long trajectories then weigh more.
- `min_deviation` 0 is the published formula.

Conventions: a group of one has 0 (verl: the raw return). Invalid trajectories are in no statistic. Where outcomes gate,
a group that ended alike has 0.
"""

from __future__ import annotations

from typing import Literal

from .choices import one_of
from .episodes import episodes_of, whole_episodes
from .group_statistics import Normalization, compare, over
from .steps import Advantages, Floats, Steps

Deviation = Literal["group", "batch"]


def grpo(
    steps: Steps,
    *,
    normalization: Normalization = "mean_std",
    min_deviation: float = 0.0,
    row_statistics: bool = False,
    epsilon: float = 1e-6,
    deviation: Deviation = "group",
) -> Advantages:
    """One number per trajectory, in units of reward or of its deviation. Raises ValueError for an unknown option."""
    one_of("deviation", deviation, Deviation)
    one_of("normalization", normalization, Normalization)
    if deviation == "group":
        episode = episode_advantage(steps, normalization, min_deviation, row_statistics, epsilon)
    elif normalization == "mean":
        raise ValueError("deviation is 'batch', but normalization 'mean' divides by none; take mean_std")
    else:
        distance = episode_advantage(steps, "mean", min_deviation, row_statistics, epsilon)
        every = episodes_of(steps)
        returns = every.returns[every.of_step] if row_statistics else every.returns
        spread = float(returns.std(ddof=1)) if len(returns) > 1 else 0.0
        episode = over(distance, max(spread, min_deviation) + epsilon)
    return whole_episodes(steps.valid, episode)


def dr_grpo(steps: Steps) -> Advantages:
    """`grpo` without the deviation."""
    return grpo(steps, normalization="mean")


def episode_advantage(
    steps: Steps, normalization: Normalization, min_deviation: float, row_statistics: bool, epsilon: float
) -> Floats:
    """One entry per *valid* step."""
    episodes = episodes_of(steps)
    returns, group, success = episodes.returns, episodes.group, episodes.success
    if not row_statistics:
        compared = compare(returns, group, episodes.groups, normalization, epsilon, min_deviation, success)
        return compared[episodes.of_step]
    rows = episodes.of_step
    success = None if success is None else success[rows]
    return compare(returns[rows], group[rows], episodes.groups, normalization, epsilon, min_deviation, success)
