"""GMPO (arXiv:2507.20673): the geometric mean of clipped ratios.

    d = logp - anchor, at most clip_high where A > 0, at least -clip_low where A < 0
    -A s with s = exp(mean of d over the sequence's tokens) and A the sequence's mean advantage

What is clipped is the log-ratio, on the side that the token's own advantage pushes to. The gradient goes through all
tokens of a sequence that are not clipped. Published with aggregation `seq_mean_token_mean`: a sequence counts once.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tokens import TokenLoss, Tokens, check_bound, exp


@dataclass(frozen=True, slots=True, kw_only=True)
class Gmpo:
    #: of the log-ratio
    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        check_bound(clip_low=self.clip_low, clip_high=self.clip_high)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        distance, advantage = tokens.log_ratio, tokens.advantage
        high = (advantage > 0) & (distance > self.clip_high)
        low = (advantage < 0) & (distance < -self.clip_low)
        distance = distance.masked_fill(high, self.clip_high).masked_fill(low, -self.clip_low)
        ratio = exp(tokens.means(distance))
        loss = (-tokens.means(advantage) * ratio)[tokens.sequence]
        shares = {"clip_fraction_low": low, "clip_fraction_high": high}
        return TokenLoss(loss, shares, ratio.detach()[tokens.sequence])
