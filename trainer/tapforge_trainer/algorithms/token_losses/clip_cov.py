"""Clip-Cov (arXiv:2505.22617): PPO's clipped loss without the gradient of some of the tokens whose log-probability
moves most along with the advantage.

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); 0 for the share of the step's tokens (at least one) out of those
    that are not clipped and whose (A - mean A)(logp - mean logp) lies between low and high

`draw: random` is published: which of them is drawn; `largest` takes the largest. Published code (verl) selects in each
micro-batch: `over: micro_batch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ..tokens import LOG_RATIO_BOUND, TokenLoss, Tokens, check_between, check_clip, gathered
from ..tokens import exp as ratio_of
from ..whole_step import Over, Read, StepTokens, check_over, covariance, largest, share_of
from .ppo import clipped

if TYPE_CHECKING:
    from numpy.typing import NDArray

Draw = Literal["random", "largest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov:
    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    draw: Draw = "random"
    over: Over = "step"

    def __post_init__(self) -> None:
        check_between(0.0, 1.0, share=self.share)
        check_clip(self.clip_low, self.clip_high)
        check_over(self.over)
        if not self.low < self.high:
            raise ValueError(f"low and high are {self.low} and {self.high}; covariances between them are cut off")
        if self.draw not in get_args(Draw):
            raise ValueError(f"draw is {self.draw!r}; it is one of {', '.join(get_args(Draw))}")

    @property
    def reads(self) -> frozenset[Read]:
        return frozenset({"logp", "old"})

    def gather(self, step: StepTokens) -> NDArray[Any]:
        moved = (step.need("logp") - step.need("anchor")).clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio = np.exp(moved)
        bound = -step.advantage * ratio.clip(1.0 - self.clip_low, 1.0 + self.clip_high)
        cov = covariance(step)
        may = (bound <= -step.advantage * ratio) & (cov > self.low) & (cov < self.high)
        order = np.where(may, cov if self.draw == "largest" else step.draw(), -np.inf)
        return largest(order, share_of(self.share, len(step))) & may

    def __call__(self, tokens: Tokens) -> TokenLoss:
        cut = gathered(tokens, "clip_cov") > 0
        found = clipped(tokens.advantage, ratio_of(tokens.log_ratio), self.clip_low, self.clip_high)
        shares = {**found.shares, "clip_cov_fraction": cut}
        return TokenLoss(found.loss.masked_fill(cut, 0.0), shares, found.ratio)
