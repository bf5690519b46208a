"""TOPR (arXiv:2503.14286): tapered off-policy REINFORCE. Answers of episodes with a positive return are learned as they
are, those of the others with an importance weight of at most 1.

    -A logp where the episode's return is over 0, else -sg(min(r, 1)) A logp, r = exp(logp - anchor)

What decides is the episode's return, not the sign of the advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tokens import TokenLoss, Tokens, exp


@dataclass(frozen=True, slots=True, kw_only=True)
class Topr:
    def __call__(self, tokens: Tokens) -> TokenLoss:
        if tokens.score is None:
            raise ValueError("topr needs the returns of the tokens' episodes")
        ratio = exp(tokens.log_ratio.detach())
        tapered = tokens.score <= 0
        weight = ratio.clamp_max(1.0).masked_fill(~tapered, 1.0)
        shares = {"clip_fraction_high": tapered & (ratio > 1.0)}
        return TokenLoss(-weight * tokens.advantage * tokens.logp, shares, ratio)
