"""KL-Cov (arXiv:2505.22617): tokens whose log-probability moves most along with the advantage are held where they were.

    -A r, plus coefficient |logp - anchor| for the share of the step's tokens whose (A - mean A)(logp - mean logp) is
    largest, at least one

Nothing is clipped, and the difference is as it is, not held. Published code (verl) selects in each micro-batch:
`over: micro_batch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..tokens import TokenLoss, Tokens, check_between, exp, gathered
from ..whole_step import Over, Read, StepTokens, check_over, covariance, largest, share_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class KlCov:
    share: float = 2e-4
    coefficient: float = 1.0
    over: Over = "step"

    def __post_init__(self) -> None:
        check_between(0.0, 1.0, share=self.share)
        check_between(0.0, 1e6, coefficient=self.coefficient)
        check_over(self.over)

    @property
    def reads(self) -> frozenset[Read]:
        return frozenset({"logp"})

    def gather(self, step: StepTokens) -> NDArray[Any]:
        return largest(covariance(step), share_of(self.share, len(step)))

    def __call__(self, tokens: Tokens) -> TokenLoss:
        held = gathered(tokens, "kl_cov") > 0
        ratio = exp(tokens.log_ratio)
        pull = self.coefficient * tokens.log_ratio.abs()
        loss = -tokens.advantage * ratio + pull.masked_fill(~held, 0.0)
        return TokenLoss(loss, {"kl_cov_fraction": held}, ratio)
