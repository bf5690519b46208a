"""DPPO (arXiv:2602.04879): a trust region in probabilities instead of ratios. Rare tokens may change by any factor,
likely ones only by little.

With p = exp(logp) and q = exp(anchor), a token has no gradient where it has moved too far to the side that its
advantage pushes to (A = 0 counts as negative):

    dppo_tv    p - q > high for A > 0, p - q < -low for A <= 0
    dppo_kl    b > high and p > q for A > 0, b > low and p < q for A <= 0, where
               b = q log(q / p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8))

The loss of the others is -A sg(min(r, cap)) logp with `form: log` (verl), -A r with `form: ratio` (SkyRL): the same
gradient while r <= cap, another value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ..tokens import TokenLoss, Tokens, check_bound, exp, probability

if TYPE_CHECKING:
    from torch import Tensor

Form = Literal["log", "ratio"]

_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoTv:
    low: float = 0.1
    high: float = 0.1
    form: Form = "log"
    cap: float = 20.0

    def __post_init__(self) -> None:
        _check(self.form, self.low, self.high, self.cap)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        moved = probability(tokens.logp) - probability(tokens.anchor)
        high, low = moved > self.high, moved < -self.low
        return _loss(tokens, low, high, self.form, self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class DppoKl:
    low: float = 0.05
    high: float = 0.05
    form: Form = "log"
    cap: float = 20.0

    def __post_init__(self) -> None:
        _check(self.form, self.low, self.high, self.cap)

    def __call__(self, tokens: Tokens) -> TokenLoss:
        p, q = probability(tokens.logp), probability(tokens.anchor)
        others = (1.0 - q) * ((1.0 - q + _EPSILON) / (1.0 - p + _EPSILON)).log()
        divergence = others - q * tokens.log_ratio.detach()
        high, low = (divergence > self.high) & (p > q), (divergence > self.low) & (p < q)
        return _loss(tokens, low, high, self.form, self.cap)


def _check(form: str, low: float, high: float, cap: float) -> None:
    if form not in get_args(Form):
        raise ValueError(f"form is {form!r}; it is one of {', '.join(get_args(Form))}")
    check_bound(low=low, high=high, cap=cap)


def _loss(tokens: Tokens, low: Tensor, high: Tensor, form: Form, cap: float) -> TokenLoss:
    up = tokens.advantage > 0
    low, high = low & ~up, high & up
    ratio = exp(tokens.log_ratio)
    surrogate = ratio if form == "ratio" else ratio.detach().clamp_max(cap) * tokens.logp
    loss = (-tokens.advantage * surrogate).masked_fill(low | high, 0.0)
    return TokenLoss(loss, {"clip_fraction_low": low, "clip_fraction_high": high}, ratio)
