"""The valid trajectories of a batch, each once: what estimators that compare whole episodes work on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .group_statistics import labels
from .steps import Advantages, Bools, Floats, Ints, Steps


@dataclass(frozen=True, slots=True)
class Episodes:
    """One entry per valid trajectory, but for `of_step`."""

    #: undiscounted sum of its rewards
    returns: Floats
    #: dense labels 0 .. groups-1
    group: Ints
    groups: int
    #: None: outcomes gate nothing
    success: Bools | None
    #: of each *valid* step, which of these trajectories it is in
    of_step: Ints
    _valid: Bools

    def __len__(self) -> int:
        return len(self.returns)

    @property
    def length(self) -> Ints:
        """Steps of each."""
        return np.bincount(self.of_step, minlength=len(self))

    def sums(self, values: Floats | Ints) -> Floats:
        """Of an array with one entry per step of the batch, the sum over each trajectory."""
        return np.bincount(self.of_step, values[self._valid], minlength=len(self)).astype(np.float64)

    def same_at_each_step(self, advantage: Floats) -> Advantages:
        """Of one advantage per trajectory."""
        return whole_episodes(self._valid, advantage[self.of_step])


def whole_episodes(valid: Bools, advantage: Floats) -> Advantages:
    """Of one advantage per valid step, all of it the episode's."""
    return Advantages(spread(valid, advantage), spread(valid, advantage), np.zeros(len(valid)), valid.astype(np.int64))


def single_steps(valid: Bools, advantage: Floats) -> Advantages:
    """Of one advantage per valid step, all of it the step's own, without a comparison of states."""
    return Advantages(spread(valid, advantage), np.zeros(len(valid)), spread(valid, advantage), valid.astype(np.int64))


def spread(valid: Bools, values: Floats) -> Floats:
    """Values of valid steps at their places, 0 elsewhere."""
    found = np.zeros(len(valid))
    found[valid] = values
    return found


def episodes_of(steps: Steps) -> Episodes:
    trajectory, count = labels(steps.trajectory[steps.valid])
    group, groups = labels(steps.group[steps.valid])
    member = np.zeros(count, dtype=np.int64)
    member[trajectory] = np.arange(len(trajectory))
    success = None if steps.valid_success is None else steps.valid_success[member]
    returns = np.bincount(trajectory, steps.reward[steps.valid], minlength=count).astype(np.float64)
    return Episodes(returns, group[member], groups, success, trajectory, steps.valid)
