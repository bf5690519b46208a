"""Generalised advantage estimation from a critic's values, per trajectory. The value after its last step is 0.

delta[t] = reward[t] + gamma * value[t+1] - value[t];  advantage[t] = sum over k of (gamma * lambda_)^k * delta[t+k]
"""

from __future__ import annotations

import numpy as np

from .group_statistics import discounted_to_go
from .steps import Advantages, Steps


def gae(steps: Steps, *, gamma: float = 1.0, lambda_: float = 1.0) -> Advantages:
    if steps.value is None:
        raise ValueError(
            "gae compares rewards with a critic's values, but Steps.value is None; use gigpo, grpo or rloo"
        )
    valid = steps.valid
    trajectory, value = steps.trajectory[valid], steps.value[valid]
    order = np.argsort(trajectory, kind="stable")
    following = np.zeros(len(value))
    same = trajectory[order][:-1] == trajectory[order][1:]
    following[order[:-1]] = np.where(same, value[order][1:], 0.0)
    step = np.zeros(len(steps))
    delta = steps.reward[valid] + gamma * following - value
    step[valid] = discounted_to_go(delta, trajectory, gamma * lambda_)
    return Advantages(step, np.zeros(len(steps)), step, valid.astype(np.int64))
