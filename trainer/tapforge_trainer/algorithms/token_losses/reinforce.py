"""REINFORCE with a truncated importance weight of the policy that learns: verl's `reinforce` in bypass mode, with the
anchor `behavior`.

    -sg(min(r, cap)) A logp; level token: r = exp(logp - anchor), level sequence: r = exp(its sum over the sequence)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..tokens import TokenLoss, Tokens, check_bound, exp

Level = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce:
    level: Level = "token"
    cap: float = 2.0

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise ValueError(f"level is {self.level!r}; it is one of {', '.join(get_args(Level))}")
        check_bound(cap=self.cap)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        distance = tokens.log_ratio.detach()
        ratio = exp(distance if self.level == "token" else tokens.sums(distance)[tokens.sequence])
        loss = -ratio.clamp_max(self.cap) * tokens.advantage * tokens.logp
        return TokenLoss(loss, {"clip_fraction_high": ratio > self.cap}, ratio)
