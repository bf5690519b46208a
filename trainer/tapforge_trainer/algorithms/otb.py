"""Optimal token baselines, step by step (arXiv:2602.07078): the return to go against a mean that is weighted by how far
a step could move the policy.

    w     of a step: sum over its tokens of 1 - 2 p + sum over the vocabulary of p^2, the squared length of the gradient
          of its log-probability by the logits (`Steps.score_square`)
    W     w of a trajectory's steps so far, added up
    B[k]  sum of G W / (sum of W + 1e-8), over the trajectories of the group that have a k-th step
    A     G - B[k], G the undiscounted return to go

Steps are lined up by their number, not by state: it is the published rule with steps in the place of tokens.

`tail` is for steps that one trajectory alone has: `kept` compares it with itself, so that it has 0, as everywhere
here; `raw`, verl's default, gives it its return to go.

Conventions: a group of one has 0 (verl: the raw return). Where outcomes gate, a group that ended alike has 0.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .choices import one_of
from .episodes import single_steps
from .group_statistics import discounted_to_go, labels, mixed
from .steps import Advantages, Steps, need

Tail = Literal["kept", "raw"]
REMEDY = "it is read by the learner before advantages are made, in a run or by `tapforge relearn --gradients`"


def otb(steps: Steps, *, tail: Tail = "kept") -> Advantages:
    one_of("tail", tail, Tail)
    valid = steps.valid
    square = need(steps.score_square, "otb", "score_square", REMEDY)[valid]
    group, groups = labels(steps.group[valid])
    trajectory, trajectories = labels(steps.trajectory[valid])
    to_go = discounted_to_go(steps.reward[valid], trajectory, 1.0)
    order = np.argsort(trajectory, kind="stable")
    length = np.bincount(trajectory, minlength=trajectories)
    first = np.cumsum(length) - length
    number, so_far = np.zeros(len(order), dtype=np.int64), np.zeros(len(order))
    number[order] = np.arange(len(order)) - np.repeat(first, length)
    running = np.cumsum(square[order])
    before = np.concatenate([[0.0], running])[first]
    so_far[order] = running - np.repeat(before, length)
    level, levels = labels(group, number)
    weighed = np.bincount(level, to_go * so_far, minlength=levels)
    baseline = weighed / (np.bincount(level, so_far, minlength=levels) + 1e-8)
    alone = np.bincount(level, minlength=levels) == 1
    if tail == "raw":
        baseline[alone] = 0.0
    advantage = to_go - baseline[level]
    if tail == "kept":
        advantage[alone[level]] = 0.0
    members = np.bincount(group[number == 0], minlength=groups)
    tells = (members > 1) & mixed(group, groups, steps.valid_success)
    return single_steps(valid, np.where(tells[group], advantage, 0.0))


#: of what the learner says of an answer before advantages are made (`records.py:AnswerFacts`)
otb.reads = frozenset({"score_square"})  # type: ignore[attr-defined]
