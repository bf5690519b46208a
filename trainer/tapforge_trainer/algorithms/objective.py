"""What the loss is made of, as plain data: no torch, so that the driver and `plan` can build and print it.

`Counts` are *global*: over all ranks and micro-batches of one optimizer step. A loss divided by them adds up over any
split to the same loss and gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

#: token: each token's own ratio (PPO); sequence: the geometric mean over a sequence's tokens (GSPO)
Ratio = Literal["token", "sequence"]
#: how token losses become one number: over all tokens; mean over sequences of the mean or of the sum over their tokens
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]
KL = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class Objective:
    """A clipped policy loss with optional importance correction and KL to a reference."""

    ratio: Ratio = "token"
    #: the ratio is held inside [1 - clip_low, 1 + clip_high]
    clip_low: float = 0.2
    clip_high: float = 0.2
    #: for negative advantages a token's loss is at most dual_clip * |advantage|; None: unbounded
    dual_clip: float | None = None
    aggregation: Aggregation = "token_mean"
    #: upper bound of exp(old - behavior), the weight that corrects for an older or different sampling policy;
    #: None: no correction
    importance_cap: float | None = 2.0
    kl: KL = "k2"
    #: 0: no reference is needed
    kl_coefficient: float = 0.0
    #: a token's KL gradient never outweighs its advantage (ZeroGUI); for k2 only
    kl_advantage_cap: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("ratio", Ratio), ("aggregation", Aggregation), ("kl", KL)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is one of {', '.join(get_args(kind))}")
        if not 0.0 <= self.clip_low <= 1.0 or self.clip_high < 0.0:
            raise ValueError(f"clip is {self.clip_low}/{self.clip_high}; low lies in [0, 1] and high is at least 0")
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(
                f"dual_clip is {self.dual_clip}; it must be over 1, or every negative advantage is clipped"
            )
        if self.importance_cap is not None and self.importance_cap <= 0.0:
            raise ValueError(f"importance_cap is {self.importance_cap}; it must be over 0, or None for no correction")
        if self.kl_coefficient < 0.0:
            raise ValueError(f"kl_coefficient is {self.kl_coefficient}; it must be at least 0")
        if self.kl_coefficient > 0.0 and self.kl == "k1":
            raise ValueError(
                "kl is k1, whose expected gradient is 0 in a loss on the policy's own samples; use k2 or k3"
            )
        if self.kl_advantage_cap and self.kl != "k2":
            raise ValueError(f"kl_advantage_cap bounds the gradient of k2, but kl is {self.kl}; set kl to k2")


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
