"""How sure a success rate is. Pure; all randomness comes from a seed.

Two intervals, both at 95 % unless asked otherwise:
- Wilson's takes every episode as independent.
- The clustered one takes the *templates* as drawn at random: episodes of one template succeed and fail together, so
  that 200 episodes of 10 templates say less than 200 independent ones. It resamples whole templates (bootstrap),
  widened by sqrt(C / (C - 1)) for few templates C, and is never narrower than Wilson's: where all episodes agree, a
  bootstrap would claim certainty. With fewer than two templates there is none.

A success rate is over valid episodes, and beside it over attempted ones (valid and invalid). Episodes that we stopped
ourselves count in neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tapforge_envs.protocol import Outcome

BOOTSTRAP_DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Success:
    """Rates are None where there is nothing to take a share of."""

    successes: int
    valid: int
    invalid: int
    templates: int
    #: over valid episodes
    rate: float | None
    interval: Interval | None
    interval_by_template: Interval | None
    #: over valid and invalid episodes
    rate_attempted: float | None
    interval_attempted: Interval | None

    @property
    def attempted(self) -> int:
        return self.valid + self.invalid


def success_of(episodes: Iterable[tuple[str, Outcome | None]], *, seed: int = 0) -> Success:
    """From (template, outcome) of each episode; outcome None is an episode that we stopped."""
    counted = [(template, outcome) for template, outcome in episodes if outcome is not None]
    valid = [(template, outcome is Outcome.SUCCESS) for template, outcome in counted if outcome is not Outcome.INVALID]
    successes = sum(success for _, success in valid)
    templates = sorted({template for template, _ in valid})
    return Success(
        successes=successes,
        valid=len(valid),
        invalid=len(counted) - len(valid),
        templates=len(templates),
        rate=successes / len(valid) if valid else None,
        interval=wilson(successes, len(valid)),
        interval_by_template=by_template(valid, seed=seed),
        rate_attempted=successes / len(counted) if counted else None,
        interval_attempted=wilson(successes, len(counted)),
    )


def wilson(successes: int, episodes: int, confidence: float = 0.95) -> Interval | None:
    if not 0 <= successes <= episodes:
        raise ValueError(f"{successes} successes of {episodes} episodes can't be")
    if episodes == 0:
        return None
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate = successes / episodes
    middle = rate + z**2 / (2 * episodes)
    reach = z * math.sqrt(rate * (1 - rate) / episodes + z**2 / (4 * episodes**2))
    scale = 1 + z**2 / episodes
    # At 0 and at n the formula's end is the rate itself, up to a rounding error.
    low = 0.0 if successes == 0 else (middle - reach) / scale
    high = 1.0 if successes == episodes else (middle + reach) / scale
    return Interval(low, high)


def by_template(
    episodes: Sequence[tuple[str, bool]], *, seed: int = 0, confidence: float = 0.95, draws: int = BOOTSTRAP_DRAWS
) -> Interval | None:
    """From (template, success) of each valid episode."""
    totals: dict[str, list[int]] = {}
    for template, success in sorted(episodes):
        total = totals.setdefault(template, [0, 0])
        total[0] += success
        total[1] += 1
    if len(totals) < 2:
        return None
    table = np.array(list(totals.values()), dtype=np.float64)
    low, high = _resampled(table, seed, confidence, draws)
    plain = wilson(int(table[:, 0].sum()), int(table[:, 1].sum()), confidence)
    assert plain is not None  # there are at least two episodes
    return Interval(max(0.0, min(low, plain.low)), min(1.0, max(high, plain.high)))


@dataclass(frozen=True, slots=True)
class Gain:
    """After minus before, over tasks that have valid episodes in both."""

    tasks: int
    difference: float
    #: None with fewer than two templates
    interval: Interval | None


def gain(
    before: Mapping[tuple[str, str], Sequence[bool]],
    after: Mapping[tuple[str, str], Sequence[bool]],
    *,
    seed: int = 0,
    confidence: float = 0.95,
    draws: int = BOOTSTRAP_DRAWS,
) -> Gain | None:
    """Paired by task: keys are (template, task), values the successes of its valid episodes. None: no common task."""
    totals: dict[str, list[float]] = {}
    for key in sorted(before.keys() & after.keys()):
        if before[key] and after[key]:
            total = totals.setdefault(key[0], [0.0, 0.0])
            total[0] += sum(after[key]) / len(after[key]) - sum(before[key]) / len(before[key])
            total[1] += 1
    if not totals:
        return None
    table = np.array(list(totals.values()), dtype=np.float64)
    difference, tasks = table.sum(axis=0)
    interval = None
    if len(table) > 1:
        low, high = _resampled(table, seed, confidence, draws)
        interval = Interval(max(-1.0, low), min(1.0, high))
    return Gain(int(tasks), float(difference / tasks), interval)


def _resampled(table: NDArray[np.float64], seed: int, confidence: float, draws: int) -> tuple[float, float]:
    """Interval of sum(first column) / sum(second column) when rows are drawn again with replacement."""
    rows = len(table)
    drawn = np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), size=draws) @ table
    estimate = table[:, 0].sum() / table[:, 1].sum()
    deviation = (drawn[:, 0] / drawn[:, 1] - estimate) * math.sqrt(rows / (rows - 1))
    low, high = estimate + np.quantile(deviation, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
