"""HGPO (arXiv:2602.22817): a step against those that saw the same state, and those that came there the same way.

A level's cell holds the steps of a group whose last states, up to some number, are the same, across trajectories and
time. In each cell the discounted returns to go are compared: a = (G - mean) / (std + epsilon), with the deviation that
divides by n ("mean": a = G - mean). Finer levels weigh more. There is no term of the whole episode unless `base` is on:
a step in a state that no other step saw has 0.

`form` says what levels are and how they are added; published numbers come from `code`, the default:
- `code` (the authors' recipe): levels k = 1 .. history + 1 compare the last k states, the step's own included; a step
  at index t has levels up to t + 1. A = sum(w a) / (sum(w) + epsilon) with w = (k + 1)^alpha, over the levels that the
  step has: cells of one are not levels.
- `paper` (section 4.2): levels k = 0 .. history compare the step's state and the k before it, fewer at the start.
  A = sum(w a) / sum(w) with w = (k + 1)^alpha over all levels: a cell of one adds 0 and keeps its weight.
Weights of history 2 and alpha 1 are 2, 3, 4 by code and 1, 2, 3 by paper.

Other options: `drop_zeros` (form code) leaves out levels whose advantage is 0, as the recipe does. It compares floats
with 0, so that rounding decides there; here what is within 1e-12 of the cell's mean is 0. It is off by default: a step
that did as well as its cell counts as 0. `base` (form code) adds a level of weight 1, the episode's return as in `grpo`
with `row_statistics`. `min_deviation` as in `gigpo`.

Conventions: a step without a state key is compared with none. Where outcomes gate, a cell whose steps all ended alike
is treated as a cell of one, and a group that ended alike has 0.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .choices import one_of, within
from .episodes import episodes_of, spread
from .group_statistics import Normalization, center, deviations, discounted_to_go, distinct, labels, mixed, over
from .grpo import episode_advantage
from .steps import Advantages, Bools, Floats, Ints, Steps

Form = Literal["code", "paper"]


def hgpo(
    steps: Steps,
    *,
    normalization: Normalization = "mean_std",
    gamma: float = 0.95,
    history: int = 2,
    alpha: float = 1.0,
    form: Form = "code",
    drop_zeros: bool = False,
    base: bool = False,
    min_deviation: float = 0.0,
    epsilon: float = 1e-6,
) -> Advantages:
    """`history` is how many states before a step's own count, `alpha` how much more finer levels weigh (0: equally)."""
    one_of("normalization", normalization, Normalization)
    one_of("form", form, Form)
    within("gamma", gamma, 0, 1)
    within("history", history, 0, 64)
    within("alpha", alpha, 0, 16)
    within("min_deviation", min_deviation, 0)
    within("epsilon", epsilon, 0)
    if form == "paper" and (drop_zeros or base):
        raise ValueError(f"drop_zeros and base are of form 'code', but form is {form!r}; leave them out")
    valid, success = steps.valid, steps.valid_success
    to_go = discounted_to_go(steps.reward[valid], steps.trajectory[valid], gamma)
    own, count = labels(steps.group[valid], distinct(steps.state[valid]))
    size = np.zeros(len(steps), dtype=np.int64)
    size[valid] = np.bincount(own, minlength=count)[own]

    weights, total = np.zeros(len(to_go)), np.zeros(len(to_go))
    episode = np.zeros(len(to_go))
    if base:
        level = episode_advantage(steps, normalization, min_deviation, True, epsilon)
        has = (level != 0) if drop_zeros else _in_company(steps)
        weights += has
        total += level
        episode = level
    for k, (cell, cells, early) in enumerate(_levels(own, steps.trajectory[valid], history)):
        level, has = _compared(to_go, cell, cells, normalization, min_deviation, epsilon, success, drop_zeros)
        if form == "code":
            has, weight = has & ~early, float(k + 2) ** alpha
        else:
            has, weight = np.ones(len(to_go), dtype=bool), float(k + 1) ** alpha
        weights += weight * has
        total += weight * np.where(has, level, 0.0)
    divisor = weights + (epsilon if form == "code" else 0.0)
    share = np.divide(1.0, divisor, out=np.zeros(len(to_go)), where=weights > 0)
    whole, part = spread(valid, total * share), spread(valid, episode * share)
    return Advantages(whole, part, whole - part, size)


def _levels(own: Ints, trajectory: Ints, history: int) -> list[tuple[Ints, int, Bools]]:
    """For 0 .. history states before a step's own: the cell of each step, how many cells there are, and which steps are
    too early to have so many. Those are in a cell with what began alike."""
    order = np.argsort(trajectory, kind="stable")
    before = np.full(len(own), -1, dtype=np.int64)
    before[order[1:]] = np.where(trajectory[order][1:] == trajectory[order][:-1], order[:-1], -1)
    cell, count = labels(own)
    early = np.zeros(len(own), dtype=bool)
    earlier = np.arange(len(own))
    found = [(cell, count, early)]
    for _ in range(history):
        earlier = np.where(earlier >= 0, before[earlier], -1)
        early = earlier < 0
        cell, count = labels(cell, np.where(early, -1, own[earlier]))
        found.append((cell, count, early))
    return found


def _compared(
    to_go: Floats,
    cell: Ints,
    cells: int,
    normalization: Normalization,
    min_deviation: float,
    epsilon: float,
    success: Bools | None,
    drop_zeros: bool,
) -> tuple[Floats, Bools]:
    """The advantage of each step in its cell, and whether that is a level."""
    distance = center(to_go, cell, cells, success)
    has = (np.bincount(cell, minlength=cells) > 1) & mixed(cell, cells, success)
    most = np.zeros(cells)
    np.maximum.at(most, cell, np.abs(to_go))
    nothing = np.abs(distance) <= 1e-12 * most[cell]
    distance = np.where(nothing, 0.0, distance)
    if normalization == "mean_std":
        least = np.maximum(deviations(distance, cell, cells, biased=True), min_deviation)
        distance = over(distance, (least + epsilon)[cell])
    return distance, has[cell] & ~nothing if drop_zeros else has[cell]


def _in_company(steps: Steps) -> Bools:
    """Which valid steps are of a group with more than one trajectory that outcomes let compare."""
    episodes = episodes_of(steps)
    more = np.bincount(episodes.group, minlength=episodes.groups) > 1
    return (more & mixed(episodes.group, episodes.groups, episodes.success))[episodes.group][episodes.of_step]
