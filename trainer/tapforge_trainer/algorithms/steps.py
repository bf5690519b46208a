"""The arrays that every advantage estimator reads and the ones it answers with.

Invariants of `Steps`:
- All arrays have the same length n: one entry per step. Ids are any integers; only their equality counts.
- A trajectory id is unique over all groups: all its steps are in one group, and all are valid or none.
- The steps of a trajectory stand in time order; they need not be neighbours.
- `state` -1 means "unlike any other state": such a step is compared with nobody.
- Steps of invalid trajectories may be present: they are in no statistic and get advantage 0.
- With `success`, outcomes decide what has a signal: what is compared with nothing that ended otherwise gets 0, whatever
  its rewards are. Without it, any difference of rewards is a signal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: the state of a step that was given no state key
NO_STATE = -1


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
    #: whether the step's trajectory succeeded
    success: Bools | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("group", "trajectory", "state"):
            put(self, name, np.asarray(getattr(self, name), dtype=np.int64))
        put(self, "reward", np.asarray(self.reward, dtype=np.float64))
        put(self, "valid", np.asarray(self.valid, dtype=bool))
        if self.value is not None:
            put(self, "value", np.asarray(self.value, dtype=np.float64))
        if self.success is not None:
            put(self, "success", np.asarray(self.success, dtype=bool))
        lengths = {
            name: np.shape(getattr(self, name))
            for name in ("group", "trajectory", "state", "reward", "valid", "value", "success")
            if getattr(self, name) is not None
        }
        if set(lengths.values()) != {(len(self.reward),)}:
            raise ValueError(f"all arrays of Steps need one entry per step, but their shapes are {lengths}")
        self._check_trajectories()
        if not np.isfinite(self.reward[self.valid]).all():
            bad = int(np.flatnonzero(self.valid & ~np.isfinite(self.reward))[0])
            raise ValueError(f"reward of step {bad} is {self.reward[bad]}; a step without a reward has 0")

    def _check_trajectories(self) -> None:
        _, member, trajectory = np.unique(self.trajectory, return_index=True, return_inverse=True)
        constant = [(self.group, "has steps in two groups"), (self.valid, "is valid at some steps only")]
        if self.success is not None:
            constant.append((self.success, "succeeded at some steps only"))
        for array, what in constant:
            stray = np.flatnonzero(array != array[member][trajectory])
            if len(stray):
                name = self.trajectory[stray[0]]
                raise ValueError(f"trajectory {name} {what}; a trajectory id is unique over all groups of a batch")

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def valid_success(self) -> Bools | None:
        """Of valid steps."""
        return None if self.success is None else self.success[self.valid]


@dataclass(frozen=True, slots=True)
class Advantages:
    """One entry per step; all 0 on invalid trajectories. `total` is what the loss uses, the rest its origin."""

    total: Floats
    episode: Floats
    step: Floats
    #: steps that this step was compared with, itself included; 1 is a singleton, 0 an invalid step
    state_group_size: Ints
