"""REINFORCE with the ratio as weight, on tokens whose ratio is near 1: SkyRL's `rollout_is`, for anchor `behavior`.

    -sg(r if 1 - clip_low < r < 1 + clip_high else 0) A logp, r = exp(logp - anchor)

What is outside has no gradient, whatever the sign of its advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tokens import TokenLoss, Tokens, check_clip, exp


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutIs:
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio = exp(tokens.log_ratio.detach())
        low, high = ratio <= 1.0 - self.clip_low, ratio >= 1.0 + self.clip_high
        weight = ratio.masked_fill(low | high, 0.0)
        shares = {"clip_fraction_low": low, "clip_fraction_high": high}
        return TokenLoss(-weight * tokens.advantage * tokens.logp, shares, ratio)
