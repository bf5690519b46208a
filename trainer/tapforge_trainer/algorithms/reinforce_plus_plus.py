"""REINFORCE++ (arXiv:2501.03262): returns against the whole batch's, with and without a baseline of the group.

    reinforce_plus_plus:          A = whiten(G),  G[t] = reward[t] + gamma * G[t+1]
    reinforce_plus_plus_baseline: A = whiten(R - mean(R of the group))

`whiten` subtracts the batch's mean and divides by the root of its variance plus 1e-8. `per` says what an entry of the
batch is: `token` (the default, as published: a step counts as often as it has response tokens) or `step`. With gamma 1
and rewards on steps' last tokens, `token` is what the published token-level code gives. gamma discounts per step, as in
ROLL's agentic form, never per token.

Conventions:
- The batch is the population: without a baseline, a group that only failed is pushed down, one that only succeeded up.
- A step without tokens has no say where tokens count, and gets its value all the same.
- The variance divides by n - 1, as in verl (NeMo-RL: by n, so that its advantages are larger by sqrt(n / (n - 1))).
- A group of one has a distance of 0 from its baseline before whitening (verl: the raw return).
- A batch whose entries are all equal has exactly 0.
- Where outcomes gate: without a baseline, a batch in which all ended alike has 0. With one, a group that ended alike is
  in no statistic and has exactly 0; as published, whitening would move it off 0 with the batch's mean.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .choices import one_of, within
from .episodes import episodes_of, single_steps, whole_episodes
from .group_statistics import center, discounted_to_go, mixed, whiten
from .steps import Advantages, Floats, Ints, Steps, need

Entry = Literal["token", "step"]


def reinforce_plus_plus(steps: Steps, *, gamma: float = 1.0, per: Entry = "token") -> Advantages:
    within("gamma", gamma, 0, 1)
    weight = _weight(steps, per, "reinforce_plus_plus")
    to_go = discounted_to_go(steps.reward[steps.valid], steps.trajectory[steps.valid], gamma)
    success = steps.valid_success
    if success is not None and (success.all() or not success.any()):
        return single_steps(steps.valid, np.zeros(len(to_go)))
    return single_steps(steps.valid, whiten(to_go, weight))


def reinforce_plus_plus_baseline(steps: Steps, *, per: Entry = "token") -> Advantages:
    weight = _weight(steps, per, "reinforce_plus_plus_baseline")
    episodes = episodes_of(steps)
    distance = center(episodes.returns, episodes.group, episodes.groups, episodes.success)[episodes.of_step]
    compared = mixed(episodes.group, episodes.groups, episodes.success)[episodes.group][episodes.of_step]
    return whole_episodes(steps.valid, np.where(compared, whiten(distance, weight * compared), 0.0))


def _weight(steps: Steps, per: Entry, estimator: str) -> Floats | Ints:
    """How often each valid step counts."""
    one_of("per", per, Entry)
    if per == "step":
        return np.ones(int(steps.valid.sum()))
    remedy = "give the response tokens of each step, or set its option per to step"
    return need(steps.tokens, estimator, "tokens", remedy)[steps.valid]
