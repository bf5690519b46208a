"""prime-rl's losses, with the anchor `behavior`: a mask in probabilities (arXiv:2602.04879), and a pull towards the
policy that sampled (arXiv:2602.02276), of masked tokens too.

    -A r kept + kl (logp - anchor)^2, r = exp(logp - anchor), p = exp(logp), q = exp(anchor)
    prime_rl    dropped: p - q > high for A > 0, p - q < -low for A <= 0
    ipo         dropped: |p - q| > bound, whatever the sign of A

The square is of the log-ratio as it is, not held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..tokens import TokenLoss, Tokens, check_between, check_bound, exp, probability

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimeRl:
    low: float = 0.2
    high: float = 0.2
    kl: float = 1e-3

    def __post_init__(self) -> None:
        check_bound(low=self.low, high=self.high)
        check_between(0.0, 1e6, kl=self.kl)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        moved, up = probability(tokens.logp) - probability(tokens.anchor), tokens.advantage > 0
        return _loss(tokens, (moved < -self.low) & ~up, (moved > self.high) & up, self.kl)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ipo:
    bound: float = 0.1
    kl: float = 1e-3

    def __post_init__(self) -> None:
        check_bound(bound=self.bound)
        check_between(0.0, 1e6, kl=self.kl)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        moved = probability(tokens.logp) - probability(tokens.anchor)
        return _loss(tokens, moved < -self.bound, moved > self.bound, self.kl)


def _loss(tokens: Tokens, low: Tensor, high: Tensor, kl: float) -> TokenLoss:
    ratio = exp(tokens.log_ratio)
    loss = (-tokens.advantage * ratio).masked_fill(low | high, 0.0) + kl * tokens.log_ratio.square()
    return TokenLoss(loss, {"clip_fraction_low": low, "clip_fraction_high": high}, ratio)
