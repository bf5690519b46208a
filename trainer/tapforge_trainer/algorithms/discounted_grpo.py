"""GRPO over discounted steps: a step's return to go against those of all steps of its group, whatever state they saw.

    A = (G - mean(G)) / (std(G) + epsilon) over all steps of the group,  G[t] = reward[t] + gamma * G[t+1]

ROLL has it as `step_reinforce`, grouped by task. It is the control for credit by states: what it gains over grpo is
the discount's, not the states'. `normalization="mean"` leaves out the deviation.

Conventions: a trajectory of one step among others is compared as any. Long trajectories have more steps, so more of a
say. A group of one is compared with itself over time, and so has advantages. (ROLL has 0 at a deviation <= 1e-6.) Where
outcomes gate, a group that ended alike has 0: discounting would compare nothing but lengths there.
"""

from __future__ import annotations

from .choices import within
from .episodes import single_steps
from .group_statistics import Normalization, compare, discounted_to_go, labels
from .steps import Advantages, Steps


def discounted_grpo(
    steps: Steps,
    *,
    normalization: Normalization = "mean_std",
    gamma: float = 0.95,
    min_deviation: float = 0.0,
    epsilon: float = 1e-6,
) -> Advantages:
    within("gamma", gamma, 0, 1)
    valid = steps.valid
    to_go = discounted_to_go(steps.reward[valid], steps.trajectory[valid], gamma)
    group, groups = labels(steps.group[valid])
    return single_steps(
        valid, compare(to_go, group, groups, normalization, epsilon, min_deviation, steps.valid_success)
    )
