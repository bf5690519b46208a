"""VESPO as TRL has it (`loss_type: vespo`): REINFORCE with a smooth weight of the whole sequence's ratio.

    -phi A logp, phi = exp(lambda + k log w - lambda w), w = exp(sum over the sequence's tokens of logp - anchor)

phi is a constant, and 1 at w = 1. k and lambda are `k_positive`, `lambda_positive` for A >= 0, else `k_negative`,
`lambda_negative`. Each log-ratio is held inside +-20, their sum inside [log 1e-8, 20].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..tokens import LOG_RATIO_BOUND, TokenLoss, Tokens, check_between


@dataclass(frozen=True, slots=True, kw_only=True)
class Vespo:
    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        check_between(
            1e-6,
            1e3,
            k_positive=self.k_positive,
            lambda_positive=self.lambda_positive,
            k_negative=self.k_negative,
            lambda_negative=self.lambda_negative,
        )
        _check_peak("positive", self.k_positive, self.lambda_positive)
        _check_peak("negative", self.k_negative, self.lambda_negative)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        held = tokens.log_ratio.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        log_w = tokens.sums(held).clamp(math.log(1e-8), LOG_RATIO_BOUND)[tokens.sequence]
        w, up = log_w.exp(), tokens.advantage >= 0
        k = w.new_full((), self.k_positive).where(up, self.k_negative)
        lambda_ = w.new_full((), self.lambda_positive).where(up, self.lambda_negative)
        phi = (lambda_ + k * log_w - lambda_ * w).exp()
        return TokenLoss(-phi * tokens.advantage * tokens.logp, ratio=w)


def _check_peak(sign: str, k: float, lambda_: float) -> None:
    """phi is largest at w = k / lambda."""
    if lambda_ + k * math.log(k / lambda_) - k > LOG_RATIO_BOUND:
        raise ValueError(
            f"k_{sign} is {k} and lambda_{sign} {lambda_}; the weight would be over exp({LOG_RATIO_BOUND:g}) where the "
            "ratio is k / lambda. Take values that are nearer to each other"
        )
