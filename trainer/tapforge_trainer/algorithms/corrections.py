"""What the distance between the policy that sampled and the one that learns does to tokens: weights and masks by name.

With g = old - behavior, the log-probability before the update less the one that a token was sampled with:

    truncate   weight min(exp(g), cap); by sequence: of the sum of g. Truncated importance sampling (TIS). Normalised:
               divided by its mean over a whole optimizer step's tokens, or sequences
    icepop     weight exp(g) where that is in [low, high], else 0; by sequence, by geometric: of g's sum, of its mean
    range      mask: exp(g) is in [low, high]; by product, by geometric: of the sum, of the mean of g over the sequence
    reject     mask: a measure of the distance is small enough; by token, or by sum, mean or maximum over the sequence
    veto       mask: sequences of which no token has exp(g) below `below` or above `above`
    opsm       mask: tokens with a negative advantage in sequences that have become unlikely since (arXiv:2512.02556)
    second_moment  mask (M2PO): the tokens with the largest g^2 of a whole optimizer step, as many as it takes for the
               mean of g^2 over the others to be below a threshold; the smallest is always kept (arXiv:2510.01161)

Measures of `reject` are k1 = -g, which is kept where log low <= k1 <= log high (bounds of behavior / old: published
code's way round), k2 = g^2 / 2 and k3 = exp(g) - 1 - g, which are kept where they are at most `high`.

All are constants. What is masked still counts in means: the divisors are those of all tokens. A sequence is a step's
answer. With the anchor `behavior` nothing is recomputed, and `old` is the policy that learns, as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np

from .options import check_options, unknown
from .tokens import LOG_RATIO_BOUND, Tokens, check_bound, exp
from .whole_step import Over, Read, StepTokens, check_over, largest

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Measure = Literal["k1", "k2", "k3"]
RejectBy = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]
Against = Literal["behavior", "old"]


@dataclass(frozen=True, slots=True)
class Policies:
    """The same tokens under those that sampled and learned. All [tokens], constants, 0 where nothing is counted."""

    tokens: Tokens
    old: Tensor
    behavior: Tensor
    #: by correction: what its `gather` said of the token over the whole optimizer step (`whole_step.py`)
    gathered: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def gap(self) -> Tensor:
        """old - behavior, held inside +-20."""
        return (self.old - self.behavior).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def over(self, values: Tensor, by: str) -> Tensor:
        """[tokens]: a token's own value, or the sum, the mean or the largest over its sequence."""
        if by == "token":
            return values
        if by in ("sequence", "product", "sequence_sum"):
            found = self.tokens.sums(values)
        elif by in ("geometric", "sequence_mean"):
            found = self.tokens.means(values)
        else:
            found = self.tokens.most(values)
        return found[self.tokens.sequence]


class Correction(Protocol):
    """A weight or a mask with its options."""

    def __call__(self, policies: Policies, /) -> tuple[Tensor, Tensor]:
        """(factor of each token's loss, whether the token is one that the correction has cut), [tokens]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate:
    by: Literal["token", "sequence"] = "token"
    cap: float = 2.0

    def __post_init__(self) -> None:
        _check_by(self.by, "token", "sequence")
        check_bound(cap=self.cap)

    def __call__(self, policies: Policies) -> tuple[Tensor, Tensor]:
        ratio = exp(policies.over(policies.gap, self.by))
        return ratio.clamp_max(self.cap), ratio > self.cap


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalised:
    """`Truncate` over its mean. Where that is 1e-8 or less, weights stay as they are (verl)."""

    by: Literal["token", "sequence"] = "token"
    cap: float = 2.0
    over: Over = "step"

    def __post_init__(self) -> None:
        Truncate(by=self.by, cap=self.cap)
        check_over(self.over)

    @property
    def reads(self) -> frozenset[Read]:
        return frozenset({"old"})

    def gather(self, step: StepTokens) -> NDArray[Any]:
        gap = _gap(step)
        if self.by == "sequence":
            gap = np.bincount(step.sequence, gap)[np.unique(step.sequence)]
        weight = np.exp(gap.clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).clip(None, self.cap)
        mean = weight.mean() if len(weight) else 0.0
        return np.full(len(step), mean if mean > 1e-8 else 1.0)

    def __call__(self, policies: Policies) -> tuple[Tensor, Tensor]:
        weight, cut = Truncate(by=self.by, cap=self.cap)(policies)
        mean = policies.gathered["normalised"]
        return weight / mean.where(mean > 0, 1.0), cut


@dataclass(frozen=True, slots=True, kw_only=True)
class IcePop:
    by: Literal["token", "sequence", "geometric"] = "token"
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _check_by(self.by, "token", "sequence", "geometric")
        _check_range(self.low, self.high)

    def __call__(self, policies: Policies) -> tuple[Tensor, Tensor]:
        ratio = exp(policies.over(policies.gap, self.by))
        outside = (ratio < self.low) | (ratio > self.high)
        return ratio.masked_fill(outside, 0.0), outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    by: Literal["token", "product", "geometric"] = "geometric"
    low: float = 0.99
    high: float = 1.01

    def __post_init__(self) -> None:
        _check_by(self.by, "token", "product", "geometric")
        _check_range(self.low, self.high)

    def __call__(self, policies: Policies) -> tuple[Tensor, Tensor]:
        ratio = exp(policies.over(policies.gap, self.by))
        return _mask((ratio < self.low) | (ratio > self.high), ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    by: RejectBy = "token"
    measure: Measure = "k2"
    #: of k1 alone
    low: float = 0.0
    high: float = 0.05

    def __post_init__(self) -> None:
        _check_by(self.by, *get_args(RejectBy))
        if self.measure not in get_args(Measure):
            raise ValueError(f"measure is {self.measure!r}; it is one of {', '.join(get_args(Measure))}")
        check_bound(high=self.high)
        if self.measure != "k1" and self.low:
            raise ValueError(f"low is {self.low}, a bound of k1; {self.measure} is never negative and has `high` alone")
        if self.measure == "k1" and not 0.0 < self.low <= 1.0 <= self.high:
            raise ValueError(f"low and high are {self.low} and {self.high}; with k1 they are ratios around 1")
        if self.measure == "k1" and self.by == "sequence_max":
            raise ValueError("by is sequence_max, which k1 doesn't have: it is of both signs; use k2 or k3")

    def __call__(self, policies: Policies) -> tuple[Tensor, Tensor]:
        gap = policies.gap
        if self.measure == "k1":
            found = policies.over(-gap, self.by)
            return _mask((found < math.log(self.low)) | (found > math.log(self.high)), gap)
        distance = gap.square() / 2 if self.measure == "k2" else gap.expm1() - gap
        return _mask(policies.over(distance, self.by) > self.high, gap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Veto:
    below: float = 1e-4
    above: float = math.inf

    def __post_init__(self) -> None:
        if not 0.0 <= self.below <= 1.0 <= self.above:
            raise ValueError(f"below and above are {self.below} and {self.above}; they are ratios around 1")

    def __call__(self, policies: Policies) -> tuple[Tensor, Tensor]:
        ratio = exp(policies.gap)
        outside = ((ratio < self.below) | (ratio > self.above)).to(ratio.dtype)
        return _mask(policies.over(outside, "sequence_sum") > 0, ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opsm:
    #: of the mean over a sequence of log-probabilities then less log-probabilities now
    above: float = 0.1
    #: whose log-probabilities are those of then: DeepSeek's and TRL's are the engine's, slime's the old policy's
    against: Against = "behavior"

    def __post_init__(self) -> None:
        if self.against not in get_args(Against):
            raise ValueError(f"against is {self.against!r}; it is one of {', '.join(get_args(Against))}")
        if not self.above >= 0.0:
            raise ValueError(f"above is {self.above}; it must be at least 0")

    def __call__(self, policies: Policies) -> tuple[Tensor, Tensor]:
        then = policies.behavior if self.against == "behavior" else policies.old
        fallen = policies.over(then - policies.tokens.logp.detach(), "sequence_mean")
        return _mask((policies.tokens.advantage < 0) & (fallen > self.above), fallen)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondMoment:
    threshold: float = 0.04
    over: Over = "step"

    def __post_init__(self) -> None:
        check_over(self.over)
        check_bound(threshold=self.threshold)

    @property
    def reads(self) -> frozenset[Read]:
        return frozenset({"old"})

    def gather(self, step: StepTokens) -> NDArray[Any]:
        """Which are kept."""
        if not len(step):
            return np.zeros(0, dtype=bool)
        square = _gap(step) ** 2
        means = np.cumsum(np.sort(square)) / np.arange(1, len(square) + 1)  # they rise
        kept = max(1, int((means < self.threshold).sum()))
        return ~largest(square, len(square) - kept)

    def __call__(self, policies: Policies) -> tuple[Tensor, Tensor]:
        return _mask(policies.gathered["second_moment"] == 0, policies.old)


def _gap(step: StepTokens) -> NDArray[Any]:
    gap: NDArray[Any] = (step.need("old") - step.need("behavior")).clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return gap


BUILT_IN: Mapping[str, Callable[..., Correction]] = {
    "truncate": Truncate,
    "normalised": Normalised,
    "icepop": IcePop,
    "range": Range,
    "reject": Reject,
    "veto": Veto,
    "opsm": Opsm,
    "second_moment": SecondMoment,
}
#: what multiplies a token's loss by a ratio; the others are masks
WEIGHTS = frozenset({"truncate", "normalised", "icepop"})


def correction(name: str, options: Mapping[str, Any]) -> Correction:
    """Raises UnknownName, and ValueError for an option's value that makes no sense."""
    if name not in BUILT_IN:
        raise unknown("correction", name, BUILT_IN)
    check_options(name, BUILT_IN[name], options)
    try:
        return BUILT_IN[name](**options)
    except ValueError as error:
        raise ValueError(f"correction {name}: {error}") from error


def _mask(dropped: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    return (~dropped).to(like.dtype), dropped


def _check_by(by: str, *known: str) -> None:
    if by not in known:
        raise ValueError(f"by is {by!r}; it is one of {', '.join(known)}")


def _check_range(low: float, high: float) -> None:
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(
            f"low and high are {low} and {high}; they are ratios, and 1, which is on policy, lies between them"
        )
