"""GSPO (arXiv:2507.18071): PPO's clipped loss with one ratio for a sequence, and a gradient through all its tokens.

    s = exp(mean over the sequence's tokens of logp - anchor), max(-A s, -A clip(s, 1 - low, 1 + high))

Published with aggregation `seq_mean_token_mean`. With clips 0.2/0.28 and `seq_mean_token_sum` it is LUSPO. Where the
advantage is the same all over a sequence, its gradient is GSPO-token's (`ppo.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tokens import TokenLoss, Tokens, check_clip, exp
from .ppo import clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo:
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio = exp(tokens.means(tokens.log_ratio))[tokens.sequence]
        return clipped(tokens.advantage, ratio, self.clip_low, self.clip_high)
