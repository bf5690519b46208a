"""The arrays that every advantage estimator reads and the ones it answers with.

Invariants of `Steps`:
- All arrays have the same length n: one entry per step. Ids are any integers; only their equality counts.
- A trajectory id is unique over all groups: all its steps are in one group, and all are valid or none. What is said of
  a trajectory (`success`, `goal`, `final_state`) is the same at each of its steps.
- The steps of a trajectory stand in time order; they need not be neighbours.
- `state` -1 means "unlike any other state": such a step is compared with no other.
- Steps of invalid trajectories may be present: they are in no statistic and get advantage 0.
- With `success`, outcomes decide what has a signal: what is compared with nothing that ended otherwise gets 0, whatever
  its rewards are. Without it, any difference of rewards is a signal.
- Arrays that may be None are there for the estimators that need them, which refuse to do without (`need`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
T = TypeVar("T")

#: the state of a step that was given no state key
NO_STATE = -1

_TYPES: Mapping[str, type] = {
    "group": np.int64,
    "trajectory": np.int64,
    "state": np.int64,
    "reward": np.float64,
    "valid": np.bool_,
    "value": np.float64,
    "success": np.bool_,
    "tokens": np.int64,
    "final_state": np.int64,
    "goal": np.bool_,
    "score_square": np.float64,
}


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one batch, flat."""

    group: Ints
    trajectory: Ints
    state: Ints
    reward: Floats
    #: whether the step's trajectory is valid
    valid: Bools
    #: a critic's estimate at the step; only estimators with a critic need it
    value: Floats | None = None
    #: whether the step's trajectory succeeded, where outcomes decide what has a signal
    success: Bools | None = None
    #: response tokens of the step; 0 or more
    tokens: Ints | None = None
    #: rewards by name, each with one entry per step. Those of a batch, each times its weight, add up to `reward`
    streams: Mapping[str, Floats] | None = None
    #: the state that the trajectory's last step led to; a number that no step has is a state that none left, NO_STATE
    #: is one that is not known
    final_state: Ints | None = None
    #: whether the trajectory reached its goal, whatever decides what has a signal; equals `success` where that is given
    goal: Bools | None = None
    #: sum over the step's tokens of the squared length of the gradient of its log-probability by the logits,
    #: 1 - 2 p + sum of p^2 over the vocabulary
    score_square: Floats | None = None
    #: by name of stream; one that isn't named has 1
    stream_weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, kind in _TYPES.items():
            if (given := getattr(self, name)) is not None:
                put(self, name, np.asarray(given, dtype=kind))
        if self.streams is not None:
            put(self, "streams", {name: np.asarray(one, dtype=np.float64) for name, one in self.streams.items()})
        lengths = {name: np.shape(one) for name in _TYPES if (one := getattr(self, name)) is not None}
        lengths |= {f"streams {name}": np.shape(one) for name, one in (self.streams or {}).items()}
        if set(lengths.values()) != {(len(self.reward),)}:
            raise ValueError(f"all arrays of Steps need one entry per step, but their shapes are {lengths}")
        self._check_trajectories()
        self._check_numbers()

    def _check_trajectories(self) -> None:
        _, member, trajectory = np.unique(self.trajectory, return_index=True, return_inverse=True)
        for array, what in (
            (self.group, "has steps in two groups"),
            (self.valid, "is valid at some steps only"),
            (self.success, "succeeded at some steps only"),
            (self.goal, "reached its goal at some steps only"),
            (self.final_state, "has two final states"),
        ):
            if array is not None and len(stray := np.flatnonzero(array != array[member][trajectory])):
                name = self.trajectory[stray[0]]
                raise ValueError(f"trajectory {name} {what}; a trajectory id is unique over all groups of a batch")
        if self.success is not None and self.goal is not None and (differ := self.success != self.goal).any():
            name = self.trajectory[np.flatnonzero(differ)[0]]
            raise ValueError(
                f"trajectory {name} succeeded by `success` or by `goal`, not by both; they are one outcome"
            )

    def _check_numbers(self) -> None:
        named = {f"reward {name!r}": one for name, one in (self.streams or {}).items()}
        for name, rewards in {"reward": self.reward, **named}.items():
            bad = np.flatnonzero(self.valid & ~np.isfinite(rewards))
            if len(bad):
                raise ValueError(f"{name} of step {bad[0]} is {rewards[bad[0]]}; a step without a reward has 0")
        if self.tokens is not None and (self.tokens < 0).any():
            at = int(np.flatnonzero(self.tokens < 0)[0])
            raise ValueError(f"step {at} has {self.tokens[at]} response tokens; a step without an answer has 0")

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def valid_success(self) -> Bools | None:
        """Of valid steps."""
        return None if self.success is None else self.success[self.valid]


def need(given: T | None, estimator: str, name: str, remedy: str) -> T:
    """What an estimator can't do without. Raises ValueError where `Steps` doesn't have it."""
    if given is None:
        raise ValueError(f"{estimator} needs Steps.{name}, which is None; {remedy}")
    return given


@dataclass(frozen=True, slots=True)
class Advantages:
    """One entry per step; all 0 on invalid trajectories. `total` is what the loss uses, the rest its origin."""

    total: Floats
    episode: Floats
    step: Floats
    #: steps that this step was compared with for the state that they saw, itself included; 1 is a singleton, and what
    #: estimators that compare no states give, 0 an invalid step
    state_group_size: Ints
    #: the return that a critic is to learn, of estimators that have one
    target: Floats | None = None
