"""PPO's clipped loss (arXiv:1707.06347), with a clip of its own upwards (arXiv:2503.14476) and dual clip
(arXiv:1912.09729).

    max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 at most -dual A

`ratio: sequence` is GSPO-token (arXiv:2507.18071, eq. 14): the value of r is the geometric mean of the ratios of the
sequence's tokens, its gradient goes through the token's own log-probability. As in published code (verl, SkyRL) its
logarithm is held at 10 at most, where that of a token is held at 20.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ..tokens import TokenLoss, Tokens, check_clip, exp

if TYPE_CHECKING:
    from torch import Tensor

#: token: each token's own ratio (PPO); sequence: the geometric mean over a sequence's tokens (GSPO-token)
Ratio = Literal["token", "sequence"]

#: of a sequence's mean log-ratio
_SEQUENCE_BOUND = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ppo:
    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    #: for negative advantages a token's loss is at most dual_clip * |advantage|
    dual_clip: float = math.inf

    def __post_init__(self) -> None:
        if self.ratio not in get_args(Ratio):
            raise ValueError(f"ratio is {self.ratio!r}; it is one of {', '.join(get_args(Ratio))}")
        check_clip(self.clip_low, self.clip_high)
        if not self.dual_clip > 1.0:
            raise ValueError(
                f"dual_clip is {self.dual_clip}; it must be over 1, or every negative advantage is clipped"
            )

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio = exp(tokens.log_ratio)
        if self.ratio == "sequence":
            mean = tokens.means(tokens.log_ratio.detach())[tokens.sequence]
            ratio = exp(mean + tokens.logp - tokens.logp.detach(), _SEQUENCE_BOUND)
        return clipped(tokens.advantage, ratio, self.clip_low, self.clip_high, self.dual_clip)


def clipped(advantage: Tensor, ratio: Tensor, low: float, high: float, dual: float = math.inf) -> TokenLoss:
    """Of any ratio, [tokens]."""
    loss = (-advantage * ratio).maximum(-advantage * ratio.clamp(1.0 - low, 1.0 + high))
    shares = {
        "clip_fraction_low": (advantage < 0) & (ratio < 1.0 - low),
        "clip_fraction_high": (advantage > 0) & (ratio > 1.0 + high),
    }
    if math.isfinite(dual):
        bound = -dual * advantage
        shares["dual_clip_fraction"] = (advantage < 0) & (loss > bound)
        loss = bound.where(shares["dual_clip_fraction"], loss)
    return TokenLoss(loss, shares, ratio)
