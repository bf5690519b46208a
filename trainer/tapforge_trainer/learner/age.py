"""How far the policy that learns is from those that sampled its tokens, by the tokens' age.

A token's age is the version of the learner's weights before the update less the version of the weights that sampled it.
Of each age there is, an update's metrics have

    tokens_age_N    tokens with a weight in the loss
    kl_age_N        mean over them of k3 = exp(-gap) - 1 + gap, where gap is the log-probability with which the token
                    was sampled less the learner's: an estimate of the policy's divergence from the one that sampled

`OLDEST` stands for that age and all above it. At age 0 the weights are the same, and what is left is what engine and
learner compute differently. Of an update with several mini-batches the first counts: in later ones the weights have
moved already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from .batches import TokenBatch

OLDEST: Final = 8
#: nats that a token's difference counts as at most: k3 grows like its exponential
_RANGE: Final = 20.0


def compare_by_age(
    logp: np.ndarray, data: TokenBatch, chosen: np.ndarray, version: int, add: Callable[[str, float], None]
) -> None:
    """Gives `add` names and values of sums that `of_ages` divides. `logp`: the learner's, [tokens]; `chosen`: which of
    the batch's response tokens they are; `version`: of the learner's weights."""
    counted = data.weight[chosen] > 0
    gap = np.clip((data.behavior[chosen] - logp)[counted].astype(np.float64), -_RANGE, _RANGE)
    k3 = np.exp(-gap) - 1 + gap
    age = np.clip(version - data.version[chosen][counted], 0, OLDEST)
    for found in np.unique(age).tolist():
        add(f"age_tokens_{found}", float((age == found).sum()))
        add(f"age_k3_{found}", float(k3[age == found].sum()))


def of_ages(sums: dict[str, float]) -> dict[str, float]:
    """The metrics, from sums over ranks, which are taken out of `sums`."""
    metrics: dict[str, float] = {}
    for age in range(OLDEST + 1):
        if tokens := sums.pop(f"age_tokens_{age}", 0.0):
            metrics[f"tokens_age_{age}"] = tokens
            metrics[f"kl_age_{age}"] = sums.pop(f"age_k3_{age}") / tokens
    return metrics
