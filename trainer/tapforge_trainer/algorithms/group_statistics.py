"""Comparing values inside groups, and sums over time inside trajectories: the arithmetic of all estimators.

Everything is vectorised over all groups at once; no Python loop runs over steps.
A group is given as a dense label per value: 0 .. count-1 (`labels`). It is the episodes of a task, or the steps of
these that saw the same state. In a group of fewer than two members, in one whose values are all equal, and, where
outcomes are known, in one whose members all ended alike, every comparison is exactly 0.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .choices import one_of, within
from .steps import NO_STATE, Bools, Floats, Ints

#: mean: distance from the mean; mean_std: that, divided by the unbiased standard deviation, or by the least one that is
#: allowed, plus epsilon
Normalization = Literal["mean", "mean_std"]


def labels(*keys: Ints) -> tuple[Ints, int]:
    """Dense labels of the distinct tuples of `keys`, and how many there are."""
    label = np.unique(keys[0], return_inverse=True)[1]
    for key in keys[1:]:
        dense = np.unique(key, return_inverse=True)[1]
        label = np.unique(label * (dense.max(initial=0) + 1) + dense, return_inverse=True)[1]
    return label, int(label.max(initial=-1)) + 1


def center(values: Floats, group: Ints, count: int, success: Bools | None = None) -> Floats:
    """Distance of each value from its group's mean. `success` is the outcome behind each value, where it is known
    and decides which groups have something to tell."""
    size = np.bincount(group, minlength=count)
    mean = np.bincount(group, values, minlength=count) / np.maximum(size, 1)
    # A mean of equal floats can be off by a rounding error, which a tiny deviation would blow up.
    return np.where(telling(values, group, count, success)[group], values - mean[group], 0.0)


def telling(values: Floats, group: Ints, count: int, success: Bools | None) -> Bools:
    """Which groups have something to tell: they hold different values and, where outcomes are known, both outcomes."""
    return _varied(values, group, count) & mixed(group, count, success)


def mixed(group: Ints, count: int, success: Bools | None) -> Bools:
    """Which groups hold both outcomes; all of them where outcomes gate nothing."""
    return np.ones(count, dtype=bool) if success is None else _varied(success, group, count)


def compare(
    values: Floats,
    group: Ints,
    count: int,
    mode: Normalization,
    epsilon: float,
    min_deviation: float,
    success: Bools | None,
) -> Floats:
    """`center`, divided by the unbiased standard deviation plus epsilon if the mode says so. A deviation under
    `min_deviation` counts as that much: small differences stay small."""
    one_of("normalization", mode, Normalization)
    within("epsilon", epsilon, 0)
    within("min_deviation", min_deviation, 0)
    distance = center(values, group, count, success)
    if mode == "mean":
        return distance
    return over(distance, (np.maximum(deviations(distance, group, count), min_deviation) + epsilon)[group])


def over(distance: Floats, deviation: Floats | float) -> Floats:
    """Distances divided by a deviation; 0 where that is 0, as it may be without an epsilon."""
    return np.divide(distance, deviation, out=np.zeros(len(distance)), where=np.asarray(deviation) > 0)


def deviations(distance: Floats, group: Ints, count: int, *, biased: bool = False) -> Floats:
    """The standard deviation of each group from its members' distances (`center`), which divides by its size less 1;
    `biased`: by its size."""
    size = np.bincount(group, minlength=count)
    return np.sqrt(np.bincount(group, distance**2, minlength=count) / np.maximum(size - (not biased), 1))


def distinct(state: Ints) -> Ints:
    """States of which those without a key are states of their own: numbered past all others."""
    return np.where(state == NO_STATE, np.cumsum(state == NO_STATE) + state.max(initial=0), state)


def _varied(values: Floats | Bools, group: Ints, count: int) -> Bools:
    """Which groups hold two different values."""
    varied = np.zeros(count, dtype=bool)
    first = np.zeros(count, dtype=values.dtype)
    first[group] = values
    varied[group[values != first[group]]] = True
    return varied


def discounted_to_go(values: Floats, trajectory: Ints, discount: float) -> Floats:
    """values[t] + discount * values[t+1] + discount^2 * values[t+2] + ... inside each trajectory.

    By doubling: after k rounds an entry holds the sum of the next 2^k values, so the longest trajectory costs log2(its
    length) passes over the array.
    """
    order = np.argsort(trajectory, kind="stable")
    ordered = trajectory[order]
    sums = values[order].copy()
    reach = 1
    while reach < len(sums):
        same = ordered[:-reach] == ordered[reach:]
        if not same.any():
            break
        sums[:-reach] += np.where(same, discount**reach * sums[reach:], 0.0)
        reach *= 2
    result = np.empty_like(sums)
    result[order] = sums
    return result


def unless_rounding(mean: float, values: Floats) -> float:
    """A mean of `values`, or 0 where it is what rounding leaves of values that cancel out. What is 0 among these stays
    exactly 0, so that a group without spread is known by it."""
    return mean if abs(mean) > 1e-12 * float(np.abs(values).max(initial=0.0)) else 0.0


def whiten(values: Floats, weight: Floats | Ints) -> Floats:
    """(x - mean) / sqrt(variance + 1e-8), an entry counting as often as its weight says. The variance divides by the
    sum of weights less 1. Entries of weight 0 have no say and get their value all the same. Where fewer than two count,
    or all that count are equal, everything is exactly 0 (verl's `masked_whiten` leaves some 1e-5)."""
    counting = values[weight > 0]
    total = float(weight.sum())
    if total < 2 or (counting == counting[0]).all():
        return np.zeros(len(values))
    mean = unless_rounding(float((weight * values).sum()) / total, counting)
    variance = float((weight * (values - mean) ** 2).sum()) / (total - 1)
    return (values - mean) / np.sqrt(variance + 1e-8)
