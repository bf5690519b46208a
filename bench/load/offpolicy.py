"""Samples of older, rounded weights: what anchors and corrections make of them, on the phone of `credit.py`.

The actor has the learner's weights of `staleness` updates ago, rounded to bf16, and rounds its logits too, as engines
do; the learner has fp32. An update is two optimizer steps over the same episodes. Losses, corrections and anchors are
those of runs (`algorithms/losses.py`); a step's answer is one token here, so token and sequence are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tapforge_trainer.algorithms.losses import policy_loss
from tapforge_trainer.algorithms.objective import Counts, Objective

from .arms import ARMS as ESTIMATORS
from .arms import arrays
from .credit import Floats, Ints, Policy, Seen, flat, gradient, imitation, measured, played

#: updates, and environment steps of one; more and smaller ones than where all is on-policy, so that eight are a part
UPDATES, STEPS = 16, 200
#: optimizer steps of an update
MINI_BATCHES = 2

#: `old_truncated` is the default of runs; `old` corrects nothing
ARMS = {
    "behavior": Objective(anchor="behavior", importance_cap=None),
    "old": Objective(anchor="old", importance_cap=None),
    "old_truncated": Objective(anchor="old", importance_cap=2.0),
    "old_icepop": Objective(anchor="old", importance_cap=None, corrections={"icepop": {"low": 0.5, "high": 5.0}}),
    "behavior_dppo": Objective(loss="dppo_tv", anchor="behavior", importance_cap=None),
}


def rounded(values: Floats) -> Floats:
    """To bf16 and back."""
    return torch.from_numpy(values).bfloat16().double().numpy()


class Actor(Policy):
    """Weights and logits in bf16."""

    def probabilities(self, features: Ints) -> Floats:
        logits = rounded(self.weights[features].sum(axis=1))
        shifted = np.exp(logits - logits.max())
        return shifted / shifted.sum()


def run(arm: str, seed: int, rate: float, updates: int, staleness: int) -> dict[str, Any]:
    """Trains and measures. The start, the tasks and what is measured depend on the seed alone."""
    objective = ARMS[arm]
    policy, rng = Policy(imitation(seed)), np.random.default_rng((seed, 5))
    before, curve, figures = measured(policy, seed), [], dict[str, list[float]]()
    history = [policy.weights.copy()]
    for number in range(updates):
        actor = Actor(rounded(history[max(0, number - staleness)]))
        groups = played(actor, seed, 100 * number, STEPS, rng)
        advantages = ESTIMATORS["grpo"](arrays(groups), rng)
        curve.append(float(np.mean([one.won for group in groups for one in group])))
        if (scale := math.sqrt(float(np.mean(advantages**2)))) > 0:
            steps = flat(groups)
            old = _logp([_now(policy, step) for step in steps])
            for part in np.array_split(rng.permutation(len(steps)), MINI_BATCHES):
                some = [steps[place] for place in part]
                found = _step(policy, some, advantages[part] / scale, old[part], objective, rate)
                for name, value in found.items():
                    figures.setdefault(name, []).append(value)
        history.append(policy.weights.copy())
    return {
        "before": before,
        "after": measured(policy, seed),
        "during": round(float(np.mean(curve)), 4),
        "rate": rate,
        "updates": updates,
        "staleness": staleness,
        **{name: round(float(np.mean(values)), 4) for name, values in figures.items()},
    }


def _step(
    policy: Policy, steps: Sequence[Seen], advantages: Floats, old: Floats, objective: Objective, rate: float
) -> dict[str, float]:
    now = [_now(policy, step) for step in steps]
    logp = torch.from_numpy(_logp(now)).requires_grad_()
    behavior = torch.from_numpy(_logp(steps))
    result = policy_loss(
        logp,
        torch.from_numpy(old),
        torch.from_numpy(advantages),
        torch.arange(len(steps)),
        objective=objective,
        counts=Counts(float(len(steps)), float(len(steps))),
        behavior_logp=behavior,
    )
    result.loss.backward()
    assert logp.grad is not None
    pushed = logp.grad.numpy()
    policy.move(gradient(now, -pushed * len(steps)), rate)
    gap = logp.detach() - behavior
    return {
        "kl_behavior": float((gap.exp() - 1 - gap).mean()),
        "masked": float(np.mean((pushed == 0) & (advantages != 0))),
    }


def _now(policy: Policy, step: Seen) -> Seen:
    return replace(step, probabilities=policy.probabilities(step.features))


def _logp(steps: Sequence[Seen]) -> Floats:
    return np.log([max(step.probabilities[step.chosen], 1e-300) for step in steps])
