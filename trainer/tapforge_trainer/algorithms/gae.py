"""Generalised advantage estimation (arXiv:1506.02438) from a critic's values, per trajectory.

    delta[t] = reward[t] + gamma * value[t+1] - value[t];  advantage[t] = sum over k of (gamma * lambda_)^k * delta[t+k]

The value after a trajectory's last step is 0, whether it ended or was cut off. `whiten` subtracts the mean of the batch
and divides by its deviation: `none` (default), `steps` (each counts once) or `tokens` (each as often as it has response
tokens, as verl does always). The critic learns value + advantage, of the advantage that isn't whitened.

Conventions: nothing is compared inside groups, so a group of one is as any, and outcomes gate nothing: the critic says
what was to be expected. Whitened, a batch whose advantages are all equal has exactly 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from .choices import one_of, within
from .episodes import single_steps
from .group_statistics import discounted_to_go
from .group_statistics import whiten as whitened
from .steps import Advantages, Steps, need

Whiten = Literal["none", "steps", "tokens"]
REMEDY = "they are a critic's (`algorithm.critic`), which only a run has: recordings don't hold them"


def gae(steps: Steps, *, gamma: float = 1.0, lambda_: float = 1.0, whiten: Whiten = "none") -> Advantages:
    one_of("whiten", whiten, Whiten)
    within("gamma", gamma, 0, 1)
    within("lambda_", lambda_, 0, 1)
    valid = steps.valid
    value = need(steps.value, "gae", "value", REMEDY)[valid]
    trajectory = steps.trajectory[valid]
    order = np.argsort(trajectory, kind="stable")
    following = np.zeros(len(value))
    same = trajectory[order][:-1] == trajectory[order][1:]
    following[order[:-1]] = np.where(same, value[order][1:], 0.0)
    advantage = discounted_to_go(steps.reward[valid] + gamma * following - value, trajectory, gamma * lambda_)
    target = np.zeros(len(valid))
    target[valid] = value + advantage
    if whiten == "steps":
        advantage = whitened(advantage, np.ones(len(advantage)))
    elif whiten == "tokens":
        remedy = "give the response tokens of each step, or set its option whiten to steps"
        advantage = whitened(advantage, need(steps.tokens, "gae", "tokens", remedy)[valid])
    return replace(single_steps(valid, advantage), target=target)


gae.reads = frozenset({"value"})  # type: ignore[attr-defined]
