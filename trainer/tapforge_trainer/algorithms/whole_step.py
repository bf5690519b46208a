"""What is decided over all tokens of an optimizer step together, before it: on all ranks, in all micro-batches.

- A loss, a correction or a mask that has a method `gather` is asked once for the whole step, with the `StepTokens` of a
  statistics pass (`learner/statistics.py`), and answers with one number per token. That number is then at hand where
  the token's loss is computed, in whatever micro-batch it is. So ranks and splits change nothing.
- `over: micro_batch` is what published code does: asked in each micro-batch, with its tokens alone. It needs no pass,
  and what it selects depends on how the step is split.
- Selections are deterministic: the largest first, among equals the first in the batch's order. What is drawn is drawn
  from the update's seed and the token's place in the batch.

numpy alone: the driver reads what a pass costs, and has no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
#: over which tokens is decided
Over = Literal["step", "micro_batch"]
#: what is read of the policy before the step. logp, entropy: a forward pass; old: only where nothing has old
#: log-probabilities yet, as before the first step of an update that recomputes them
Read = Literal["logp", "entropy", "old"]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens that count, in the order of their batch. What nothing reads may be missing (None). All [tokens]."""

    advantage: Floats
    #: 0 .. sequences - 1, in order
    sequence: NDArray[np.int64]
    #: place in the batch, which no split changes
    place: NDArray[np.int64]
    #: of the policy that makes the step
    logp: Floats | None = None
    entropy: Floats | None = None
    #: of the policy before the update
    old: Floats | None = None
    behavior: Floats | None = None
    #: what the ratio is against
    anchor: Floats | None = None
    seed: int = 0

    def __len__(self) -> int:
        return len(self.advantage)

    def need(self, name: str) -> Any:
        """Raises ValueError where it wasn't read."""
        if (found := getattr(self, name)) is None:
            raise ValueError(f"{name} of a whole optimizer step was not read; a loss that needs it names it in `reads`")
        return found

    def draw(self) -> Floats:
        """A number in [0, 1) for each token."""
        if not len(self):
            return np.zeros(0)
        return np.random.default_rng(self.seed).random(int(self.place.max()) + 1)[self.place]


class WholeStep(Protocol):
    """Decides over a whole optimizer step."""

    @property
    def over(self) -> Over: ...

    @property
    def reads(self) -> frozenset[Read]: ...

    def gather(self, step: StepTokens, /) -> NDArray[Any]:
        """[tokens]"""
        ...


def checked(found: Any, name: str, step: StepTokens) -> NDArray[Any]:
    """What `gather` answered with, which may be another package's. Raises ValueError."""
    values = np.asarray(found)
    if values.shape != (len(step),):
        raise ValueError(
            f"{name} gathered {values.shape} for {len(step)} tokens of a step; one number per token is due"
        )
    if not np.isfinite(values).all():
        at = int(step.place[int(np.flatnonzero(~np.isfinite(values))[0])])
        raise ValueError(f"{name} gathered {values[~np.isfinite(values)][0]} for token {at} of a step; numbers are due")
    return values


def gathers(thing: Any) -> bool:
    return hasattr(thing, "gather")


def check_over(over: str) -> None:
    if over not in get_args(Over):
        raise ValueError(f"over is {over!r}; it is one of {', '.join(get_args(Over))}")


def passes(whole: Mapping[str, WholeStep], *, known: bool) -> bool:
    """Whether an optimizer step begins with a forward pass for them. `known`: old log-probabilities are at hand
    (`objective.py:old_known`)."""
    read = {one for thing in whole.values() if thing.over == "step" for one in thing.reads}
    return bool(read - {"old"}) or ("old" in read and not known)


def largest(values: Floats, count: int) -> NDArray[np.bool_]:
    """Which are the `count` largest; among equals the first."""
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(-values, kind="stable")[:count]] = True
    return chosen


def covariance(step: StepTokens) -> Floats:
    """(A - mean of A) (logp - mean of logp), a token's part of their covariance (arXiv:2505.22617)."""
    logp = step.need("logp")
    if not len(step):
        return np.zeros(0)
    # Rounding in a mean of equal values would make a sign of nothing.
    return _centred(step.advantage) * _centred(logp)


def _centred(values: Floats) -> Floats:
    if (values == values[0]).all():
        return np.zeros(len(values))
    centred: Floats = values - values.mean()
    return centred


def share_of(share: float, tokens: int) -> int:
    """At least one, if there is any."""
    return min(tokens, max(1, int(share * tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopEntropy:
    """Keeps the tokens with the largest entropies: those of the given share (arXiv:2506.01939). The bound is their
    quantile, interpolated between neighbours as numpy and TRL do; what equals it is kept."""

    share: float = 0.2
    over: Over = "step"

    def __post_init__(self) -> None:
        check_over(self.over)
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"the share of tokens with the largest entropies is {self.share}; it lies in (0, 1]")

    @property
    def reads(self) -> frozenset[Read]:
        return frozenset({"entropy"})

    def gather(self, step: StepTokens) -> NDArray[np.bool_]:
        entropy = step.need("entropy")
        if not len(step):
            return np.zeros(0, dtype=bool)
        kept: NDArray[np.bool_] = entropy >= np.quantile(entropy, 1.0 - self.share)
        return kept
