"""SAPO (arXiv:2511.20347): a soft gate in place of a clip.

    -A 4 / tau sigmoid(tau (r - 1)), r = exp(logp - anchor), tau = tau_positive for A > 0, else tau_negative

Published with aggregation `seq_mean_token_mean`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tokens import TokenLoss, Tokens, check_between, exp


@dataclass(frozen=True, slots=True, kw_only=True)
class Sapo:
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        check_between(1e-6, 1e6, tau_positive=self.tau_positive, tau_negative=self.tau_negative)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        ratio = exp(tokens.log_ratio)
        tau = ratio.new_full((), self.tau_negative).where(tokens.advantage <= 0, self.tau_positive)
        gate = 4.0 / tau * (tau * (ratio - 1.0)).sigmoid()
        return TokenLoss(-tokens.advantage * gate, ratio=ratio)
