"""GPG (arXiv:2504.02546): a trajectory's distance from its group's mean return, scaled by how many returns are not 0.

    A = B / max(1, trajectories of the batch with R != 0) * (R - mean(R of the group)),  B = trajectories of the batch

The scale is verl's, with its `f_norm` 1: an update in which few succeed takes as large a step as one in which all do.

Conventions: a group of one has 0 (verl: the scaled raw return). Where outcomes gate, a group that ended alike has 0.
Both count in the scale. Invalid trajectories count nowhere.
"""

from __future__ import annotations

import numpy as np

from .episodes import episodes_of
from .group_statistics import center
from .steps import Advantages, Steps


def gpg(steps: Steps) -> Advantages:
    episodes = episodes_of(steps)
    scale = len(episodes) / max(1, int(np.count_nonzero(episodes.returns)))
    distance = center(episodes.returns, episodes.group, episodes.groups, episodes.success)
    return episodes.same_at_each_step(scale * distance)
