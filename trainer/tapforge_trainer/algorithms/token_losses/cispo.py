"""CISPO (arXiv:2506.13585): REINFORCE with a clipped importance weight, which is a constant: what is clipped keeps its
gradient.

    -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp, r = exp(logp - anchor)

clip_low 1 is not a lower bound: TRL's form, whose cap is 1 + clip_high.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tokens import TokenLoss, Tokens, check_clip, exp


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo:
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio = exp(tokens.log_ratio.detach())
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        shares = {"clip_fraction_low": ratio < low, "clip_fraction_high": ratio > high}
        return TokenLoss(-ratio.clamp(low, high) * tokens.advantage * tokens.logp, shares, ratio)
