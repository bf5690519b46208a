"""What a token loss reads and what it answers with: flat response tokens of whole sequences.

- All tensors are [tokens], in fp32 at least, and finite. `sequence` says which sequence a token is of: a step's answer.
- Only `logp` has a gradient.
- Tokens that are not `counted` are padding: all their numbers are 0, and what a loss says of them is not looked at.
  They have to stay out of what is taken over a sequence, as they do in `Tokens.sums` and `Tokens.means`.
- Log-ratios are held inside +-20 before they are exponentiated (`exp`): far outside there is no gradient, never inf or
  nan.

Methods of tensors are all that is used here and in `token_losses/`, and numpy where a loss decides over a whole step:
the driver reads names and options of losses, and has no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

#: exp(20) is 5e8
LOG_RATIO_BOUND = 20.0
#: no ratio is larger, and fp32 has it
_LARGEST = 1e9


@dataclass(frozen=True, slots=True)
class Tokens:
    """One micro-batch."""

    #: log-probabilities under the policy that learns
    logp: Tensor
    #: log-probabilities that the ratio is against: of the policy that sampled, or of the one before the update
    anchor: Tensor
    advantage: Tensor
    #: bool
    counted: Tensor
    #: 0 .. sequences - 1
    sequence: Tensor
    sequences: int
    #: return of the token's episode; None: not known
    score: Tensor | None = None
    #: what the loss's own `gather` said of the token over the whole optimizer step (`whole_step.py`)
    gathered: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        """As it is, not held."""
        return self.logp - self.anchor

    def sums(self, values: Tensor) -> Tensor:
        """[sequences], over counted tokens."""
        return per_sequence(values * self.counted, self.sequence, self.sequences)

    def means(self, values: Tensor) -> Tensor:
        """[sequences], over counted tokens; 0 where there are none."""
        length = self.sums(self.counted.to(values.dtype))
        return self.sums(values) / length.clamp_min(1.0)

    def most(self, values: Tensor) -> Tensor:
        """[sequences], the largest of the counted tokens; -inf where there are none."""
        shown = values.where(self.counted, float("-inf"))
        found = values.new_full((self.sequences,), float("-inf"))
        return found.scatter_reduce(0, self.sequence, shown, "amax")


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What a token loss says, before it is weighted, masked and averaged."""

    #: [tokens], with the gradient by `logp`
    loss: Tensor
    #: bool [tokens] by name: tokens that a bound of the loss has changed. Their shares are metrics; each name contains
    #: "fraction"
    shares: Mapping[str, Tensor] = field(default_factory=dict)
    #: [tokens]: the ratio that the loss is made of, for metrics; None: each token's own
    ratio: Tensor | None = None


class Loss(Protocol):
    """A loss with its options."""

    def __call__(self, tokens: Tokens, /) -> TokenLoss: ...


def per_sequence(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """[sequences], sums of values of tokens."""
    return values.new_zeros(sequences).index_add(0, sequence, values)


def gathered(tokens: Tokens, loss: str) -> Tensor:
    """Raises ValueError where nothing asked the loss's `gather`."""
    if tokens.gathered is None:
        raise ValueError(f"{loss} needs what its gather says of the whole optimizer step (Tokens.gathered)")
    return tokens.gathered


def exp(log_ratio: Tensor, highest: float = LOG_RATIO_BOUND) -> Tensor:
    """A ratio, from a log-ratio that is held inside +-20, or at most at `highest`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, highest).exp()


def probability(logp: Tensor) -> Tensor:
    """A constant. Rounding makes log-probabilities that are a little over 0."""
    return logp.detach().clamp_max(0.0).exp()


def check_clip(low: float, high: float) -> None:
    """Of a ratio that is held inside [1 - low, 1 + high]; an infinite high holds nothing. Raises ValueError."""
    if not 0.0 <= low <= 1.0 or not _bounds(high):
        raise ValueError(f"clip is {low}/{high}; low lies in [0, 1] and high in [0, {_LARGEST:g}], or is inf")


def check_bound(**values: float) -> None:
    """Of bounds and caps; an infinite one holds nothing. Raises ValueError for the first that makes no sense."""
    for name, value in values.items():
        if not (value > 0.0 and _bounds(value)):
            raise ValueError(f"{name} is {value}; it must be over 0 and at most {_LARGEST:g}, or inf")


def check_between(low: float, high: float, **values: float) -> None:
    """Of factors, with which numbers have to stay finite in fp32. Raises ValueError for the first that is outside."""
    for name, value in values.items():
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}; it must be at least {low:g} and at most {high:g}")


def _bounds(value: float) -> bool:
    return 0.0 <= value <= _LARGEST or value == math.inf
