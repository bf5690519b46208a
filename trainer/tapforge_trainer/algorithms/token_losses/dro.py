"""DRO as verl has it (docs/algo/dro.md): the policy gradient, held near the anchor by a square. Nothing is clipped,
nothing exponentiated.

    -(A logp - beta / 2 (logp - anchor)^2)
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tokens import TokenLoss, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Dro:
    beta: float = 0.1

    def __post_init__(self) -> None:
        if not self.beta >= 0.0:
            raise ValueError(f"beta is {self.beta}; it must be at least 0")

    def __call__(self, tokens: Tokens) -> TokenLoss:
        return TokenLoss(self.beta / 2 * tokens.log_ratio.square() - tokens.advantage * tokens.logp)
