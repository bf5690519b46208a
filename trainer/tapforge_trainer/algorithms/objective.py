"""What the loss is made of, as plain data: no torch, so that the driver and `plan` can build and print it.

`Counts` are *global*: over all ranks and micro-batches of one optimizer step. A loss divided by them adds up over any
split to the same loss and gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from .corrections import WEIGHTS, correction
from .distillation import Distillation
from .loss_registry import loss as loss_by_name
from .whole_step import TopEntropy, WholeStep, gathers

#: how token losses become one number: over all tokens; mean over sequences of the mean or of the sum over their tokens;
#: or of their sum over a constant (Dr. GRPO, arXiv:2503.20783)
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
#: whose log-probabilities the loss's ratio is against. behavior: of the engine that sampled, at each token's own
#: version of the weights; old: of the weights before the update, recomputed where the engine's are not the same
Anchor = Literal["behavior", "old"]
KL = Literal["k1", "k2", "k3", "k3_held", "k3+", "k3_ratio", "abs"]


@dataclass(frozen=True, slots=True)
class Objective:
    """A policy loss by name with optional importance correction and KL to a reference."""

    #: of a token, by name (`loss_registry.py`)
    loss: str = "ppo"
    #: its options
    options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: Aggregation = "token_mean"
    #: what `constant` divides a sequence's sum by: tokens
    constant_length: int = 1
    anchor: Anchor = "old"
    #: upper bound of exp(old - behavior), the weight that corrects for an older or different sampling policy;
    #: None: no correction
    importance_cap: float | None = 2.0
    #: options of further weights and masks by name (`corrections.py`); they act together
    corrections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: subtracts so much of the mean entropy from the loss, with its gradient
    entropy_bonus: float = 0.0
    #: the others of a step's tokens have no policy loss, and still count in means
    top_entropy: TopEntropy | None = None
    kl: KL = "k2"
    #: 0: no reference is needed
    kl_coefficient: float = 0.0
    #: a token's KL gradient never outweighs its advantage (ZeroGUI); for k2 only
    kl_advantage_cap: bool = False
    #: None: no teacher is needed
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        for name, kind in (("aggregation", Aggregation), ("anchor", Anchor), ("kl", KL)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(get_args(kind))}")
        if self.constant_length < 1:
            raise ValueError(f"constant_length is {self.constant_length}; it must be at least 1")
        if self.importance_cap is not None and self.importance_cap <= 0.0:
            raise ValueError(f"importance_cap is {self.importance_cap}; it must be over 0, or None for no correction")
        self._check_corrections()
        if not 0.0 <= self.entropy_bonus < math.inf:
            raise ValueError(f"entropy_bonus is {self.entropy_bonus}; it must be at least 0")
        if self.kl_coefficient < 0.0:
            raise ValueError(f"kl_coefficient is {self.kl_coefficient}; it must be at least 0")
        if self.kl_coefficient > 0.0 and self.kl == "k1":
            raise ValueError(
                "kl is k1, whose expected gradient is 0 in a loss on the policy's own samples; use k2 or k3"
            )
        if self.kl_advantage_cap and self.kl != "k2":
            raise ValueError(f"kl_advantage_cap bounds the gradient of k2, but kl is {self.kl}; set kl to k2")
        if self.distillation is not None and self.distillation.kind == "k1" and "loss" in self.whole_step():
            raise ValueError(
                f"the loss {self.loss} selects by advantages over whole optimizer steps, which a distillation of kind "
                "k1 changes token by token afterwards; use kind k2 or k3, or another loss"
            )

    def whole_step(self) -> dict[str, WholeStep]:
        """What decides over all tokens of an optimizer step: the loss, and corrections and masks by name."""
        parts: dict[str, Any] = {"loss": loss_by_name(self.loss, self.options), "top_entropy": self.top_entropy}
        parts |= {name: correction(name, options) for name, options in self.corrections.items()}
        return {name: part for name, part in parts.items() if gathers(part)}

    def _check_corrections(self) -> None:
        for name, options in self.corrections.items():
            correction(name, options)
        weights = sorted(WEIGHTS.intersection(self.corrections))
        if self.importance_cap is not None and weights:
            raise ValueError(
                f"importance_cap and the correction {weights[0]} both weigh tokens by old / behavior; leave one out"
            )
        if self.anchor == "behavior" and (weights or self.importance_cap is not None):
            raise ValueError(
                f"{weights[0] if weights else 'importance_cap'} weighs tokens by how far they are from the policy that "
                "sampled, but with the anchor behavior the ratio already is that weight: it would be squared. Leave it "
                "out (masks may stay), or use the anchor old"
            )
        if self.anchor == "behavior" and self.corrections.get("opsm", {}).get("against") == "old":
            raise ValueError("opsm is against old, which is not computed with the anchor behavior; leave it out")


def recomputed(anchor: Anchor, *, off_policy: bool, steps: int, corrected: bool) -> bool:
    """Whether old log-probabilities are the learner's own, and not the engine's. `off_policy`: samples may come from
    older weights; `steps`: optimizer steps of the update; `corrected`: there are corrections."""
    return anchor == "old" and (off_policy or steps > 1 or corrected)


def old_known(anchor: Anchor, *, own: bool, first: bool) -> bool:
    """Whether old log-probabilities are at hand before an optimizer step. `own`: they are recomputed, for all steps of
    an update but the `first`, which has them of its own pass. With the anchor `behavior` old is the policy that learns,
    as it is."""
    return anchor == "old" and not (own and first)


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums of weights over a whole optimizer step."""

    tokens: float
    sequences: float

    @staticmethod
    def of(sequences: Iterable[tuple[int, float]]) -> Counts:
        """From (tokens, weight) of every response span of the step, on all ranks together."""
        pairs = [(tokens, weight) for tokens, weight in sequences if tokens]
        return Counts(float(sum(t * w for t, w in pairs)), float(sum(w for _, w in pairs)))
