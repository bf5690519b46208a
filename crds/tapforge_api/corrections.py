"""What the distance between the policy that sampled and the one that learns does to tokens: weights and masks."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .base import Fraction, Rule, Spec, not_both

#: of a range of ratios. 1 is inside: outside of it nothing would be left that is on policy
_Low = Annotated[float, Field(ge=0, le=1)]
_High = Annotated[float, Field(ge=1, le=1e9)]
Over = Annotated[
    Literal["step", "micro_batch"],
    Field(
        description="over which tokens is decided. step: those of a whole optimizer step, of all ranks; micro_batch: "
        "those that a rank computes at once, as in published code, so that the split changes what is decided",
    ),
]


class Truncation(Spec):
    """Truncated importance sampling (TIS): a token is weighted by min(ratio, cap)."""

    by: Literal["token", "sequence"] = Field(
        "token", description="token: its own ratio; sequence: the product of the ratios of its answer's tokens"
    )
    cap: Annotated[float, Field(gt=0, le=1e9)] = Field(2.0, description="largest weight")


class NormalisedTruncation(Spec):
    """As truncate, and divided by the mean of all such weights."""

    by: Literal["token", "sequence"] = Field(
        "token", description="token: its own ratio; sequence: the product of the ratios of its answer's tokens"
    )
    cap: Annotated[float, Field(gt=0, le=1e9)] = Field(2.0, description="largest weight before it is divided")
    over: Over = "step"


class SecondMoment(Spec):
    """The tokens with the largest squared logarithm of the ratio are masked, as many as it takes for its mean over the
    others to be below a threshold (M2PO)."""

    threshold: Annotated[float, Field(gt=0, le=100)] = Field(0.04, description="bound of the mean of the others")
    over: Over = "step"


class IcePop(Spec):
    """A token is weighted by the ratio where that is inside a range, else masked."""

    by: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="token: its own ratio; sequence: the product of the ratios of its answer's tokens; geometric: "
        "their geometric mean",
    )
    low: _Low = Field(0.5, description="smallest ratio that is kept")
    high: _High = Field(5.0, description="largest ratio that is kept")


class RatioRange(Spec):
    """Tokens or answers whose ratio is outside a range are masked; the others are not weighted."""

    by: Literal["token", "product", "geometric"] = Field(
        "geometric",
        description="token: each token's own ratio; product, geometric: whole answers, by the product or the geometric "
        "mean of the ratios of their tokens",
    )
    low: _Low = Field(0.99, description="smallest ratio that is kept")
    high: _High = Field(1.01, description="largest ratio that is kept")


class Rejection(Spec):
    """Tokens or answers that are too far off by a measure of the distance are masked. With g, the logarithm of the
    ratio, k1 is -g, k2 is g^2 / 2, and k3 is exp(g) - 1 - g."""

    by: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = Field(
        "token", description="token: each by itself; else whole answers, by sum, mean or largest over their tokens"
    )
    measure: Literal["k1", "k2", "k3"] = Field("k2", description="measure of the distance")
    low: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="of k1 alone: smallest exp(k1) that is kept, a ratio the other way round (engine / learner)"
    )
    high: Annotated[float, Field(gt=0, le=1e9)] = Field(
        0.05, description="k2 and k3: largest value that is kept; k1: largest exp(k1), at least 1"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="low must be set with measure k1, with high at least 1, and left out with k2 and k3, which are "
            "never negative",
            cel="self.measure == 'k1' ? has(self.low) && 1.0 <= self.high : !has(self.low)",
            holds=lambda o: o.low is not None and o.high >= 1.0 if o.measure == "k1" else o.low is None,
        ),
        Rule(
            message="by must not be sequence_max with measure k1, which is of both signs; use k2 or k3",
            cel="!(self.by == 'sequence_max' && self.measure == 'k1')",
            holds=lambda o: not (o.by == "sequence_max" and o.measure == "k1"),
        ),
    )


class Veto(Spec):
    """Answers with a token whose ratio is far off are masked."""

    below: Fraction = Field(1e-4, description="smallest ratio of a token")
    above: Annotated[float, Field(ge=1, le=1e9)] | None = Field(
        None, description="largest ratio of a token; without it there is none"
    )


class OffPolicyMask(Spec):
    """Tokens with a negative advantage are masked in answers that have become unlikely since (DeepSeek-V3.2)."""

    above: Annotated[float, Field(ge=0, le=1000)] = Field(
        0.1, description="largest mean over an answer's tokens of log-probability then, less that of now"
    )
    against: Literal["behavior", "old"] = Field(
        "behavior", description="whose log-probabilities are those of then: the engine's, or the learner's old ones"
    )


class Corrections(Spec):
    """What the distance between engine and learner does to tokens; what is set acts together. A ratio is between the
    learner's old probability of a token and the engine's. What is masked still counts in means."""

    truncate: Truncation | None = Field(None, description="weight: the ratio, at most a cap")
    normalised: NormalisedTruncation | None = Field(
        None, description="weight: the ratio, at most a cap, over the mean of these weights"
    )
    icepop: IcePop | None = Field(None, description="weight: the ratio inside a range, else 0")
    range: RatioRange | None = Field(None, description="mask by a range of the ratio")
    reject: Rejection | None = Field(None, description="mask by a measure of the distance")
    veto: Veto | None = Field(None, description="mask of answers by their worst token")
    opsm: OffPolicyMask | None = Field(None, description="mask of negative answers that have become unlikely")
    second_moment: SecondMoment | None = Field(
        None, description="mask of the tokens that are farthest off, over a whole optimizer step"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        not_both("truncate", "icepop", "both weigh a token by its ratio, which would be squared"),
        not_both("truncate", "normalised", "both weigh a token by its ratio, which would be squared"),
        not_both("normalised", "icepop", "both weigh a token by its ratio, which would be squared"),
    )

    @property
    def weighing(self) -> bool:
        return any(one is not None for one in (self.truncate, self.normalised, self.icepop))
