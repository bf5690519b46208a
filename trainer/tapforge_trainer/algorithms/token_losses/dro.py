"""DRO as verl has it (docs/algo/dro.md): the policy gradient, held near the anchor by a square. Nothing is clipped,
nothing exponentiated.

    -(A logp - beta / 2 (logp - anchor)^2)
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tokens import TokenLoss, Tokens, check_between


@dataclass(frozen=True, slots=True, kw_only=True)
class Dro:
    beta: float = 0.1

    def __post_init__(self) -> None:
        check_between(0.0, 1e6, beta=self.beta)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        return TokenLoss(self.beta / 2 * tokens.log_ratio.square() - tokens.advantage * tokens.logp)
