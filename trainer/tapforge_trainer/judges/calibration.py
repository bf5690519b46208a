"""How good a judge is, against a verifier on the same episodes. Pure; all randomness comes from a seed.

- Precision, recall, false-positive rate and accuracy have Wilson's interval. Kappa is Cohen's (1960): agreement beyond
  what two judges with these rates would have by chance. Its interval resamples whole templates (bootstrap), widened by
  sqrt(C / (C - 1)) for few templates C, and is never narrower than Wilson's of the agreement; with fewer than two there
  is none. All at 95 %.
- Episodes without a verdict are counted as missing and are in no rate.
- An episode that ended for a reason by which it has failed whatever a judge would say is not asked about: it is a
  failure for both, and counts only where shares of all episodes are compared (`Gain`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tapforge_api.judge import VotingRule

from ..statistics import BOOTSTRAP_DRAWS, Interval, wilson
from .voting import decide

RULES: Final[tuple[VotingRule, ...]] = ("unanimous", "majority", "any")
#: parts of a run between which its gain is taken: the first and the last of so many
PARTS: Final = 3
_TAIL: Final = 0.025


@dataclass(frozen=True, slots=True)
class Compared:
    """One episode. `verdict` None: missing, or not asked."""

    template: str
    steps: int
    verified: bool
    verdict: bool | None
    #: of the models that decided
    votes: tuple[float | None, ...] = ()
    asked: bool = True

    @property
    def judged(self) -> bool | None:
        """What a run that is rewarded by this judge would count."""
        return self.verdict if self.asked else False


@dataclass(frozen=True, slots=True)
class Rate:
    value: float | None
    interval: Interval | None

    @staticmethod
    def of(hits: int, total: int) -> Rate:
        return Rate(hits / total if total else None, wilson(hits, total))


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of episodes that were asked about."""

    episodes: int
    missing: int
    true_positives: int
    false_positives: int
    false_negatives: int
    true_negatives: int
    precision: Rate
    recall: Rate
    false_positive_rate: Rate
    accuracy: Rate
    kappa: Rate


@dataclass(frozen=True, slots=True)
class Gain:
    """Last part of the run less the first, in shares of all its episodes. `by_judge` = `by_verifier` +
    `false_positives` - `false_negatives`."""

    episodes: int
    by_judge: float
    by_verifier: float
    false_positives: float
    #: None with fewer than two templates, and where there are none
    false_positives_interval: Interval | None
    false_negatives: float
    #: share of the last part's successes by the judge that may be false: its false positives at the upper end of their
    #: interval
    at_most_false: float | None


@dataclass(frozen=True, slots=True)
class Calibration:
    all: Agreement
    not_asked: int
    by_template: Mapping[str, Agreement]
    #: of the same votes; `single` is the first vote alone
    by_voting: Mapping[str, Agreement]
    #: by number of steps, thirds of the episodes
    by_length: Mapping[str, Agreement]
    gain: Gain | None


def calibration(episodes: Sequence[Compared], *, seed: int = 0) -> Calibration:
    """`episodes` in the order in which they were played."""
    asked = [one for one in episodes if one.asked]
    rules: dict[str, Callable[[tuple[float | None, ...]], float | None]] = {
        rule: partial(decide, rule=rule) for rule in RULES
    }
    if any(len(one.votes) > 1 for one in asked):
        rules["single"] = lambda votes: votes[0] if votes else None
    return Calibration(
        all=agreement(asked, seed=seed),
        not_asked=len(episodes) - len(asked),
        by_template={name: agreement(part, seed=seed) for name, part in _parts(asked, lambda one: one.template)},
        by_voting={
            name: agreement([_decided(one, rule(one.votes)) for one in asked], seed=seed)
            for name, rule in rules.items()
        },
        by_length={name: agreement(part, seed=seed) for name, part in _thirds(asked)},
        gain=_gain(episodes, seed),
    )


def agreement(episodes: Iterable[Compared], *, seed: int = 0) -> Agreement:
    every = list(episodes)
    known = [one for one in every if one.verdict is not None]
    tables: dict[str, NDArray[np.float64]] = {}
    for one in sorted(known, key=lambda one: one.template):
        table = tables.setdefault(one.template, np.zeros(4))
        table[2 * (not one.verified) + (not one.verdict)] += 1
    total = np.sum(list(tables.values()), axis=0) if tables else np.zeros(4)
    tp, fn, fp, tn = (int(count) for count in total)
    return Agreement(
        episodes=len(every),
        missing=len(every) - len(known),
        true_positives=tp,
        false_positives=fp,
        false_negatives=fn,
        true_negatives=tn,
        precision=Rate.of(tp, tp + fp),
        recall=Rate.of(tp, tp + fn),
        false_positive_rate=Rate.of(fp, fp + tn),
        accuracy=Rate.of(tp + tn, len(known)),
        kappa=_kappa(np.array(list(tables.values())).reshape(-1, 4), seed),
    )


def _kappa(tables: NDArray[np.float64], seed: int) -> Rate:
    """`tables`: true positives, false negatives, false positives, true negatives of each template."""
    total = tables.sum(axis=0, keepdims=True)
    value = float(_kappas(total)[0])
    if math.isnan(value):
        return Rate(None, None)
    drawn = _resampled(tables, _kappas, value, seed)
    if drawn is None:
        return Rate(value, None)
    # Where all agree, a bootstrap would claim certainty.
    tp, _, _, tn = total[0]
    agreed = wilson(int(tp + tn), int(total.sum()))
    chance = _chance(total)[0]
    assert agreed is not None and chance < 1  # kappa is a number
    low, high = ((end - chance) / (1 - chance) for end in (agreed.low, agreed.high))
    return Rate(value, Interval(max(-1.0, min(drawn.low, low)), min(1.0, max(drawn.high, high))))


def _chance(tables: NDArray[np.float64]) -> NDArray[np.float64]:
    """Agreement of two judges with these rates who don't look."""
    tp, fn, fp, tn = tables.T
    return ((tp + fn) * (tp + fp) + (fp + tn) * (fn + tn)) / tables.sum(axis=1) ** 2


def _kappas(tables: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each row; NaN where both judges say one thing alone, or nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        agreed = (tables[:, 0] + tables[:, 3]) / tables.sum(axis=1)
        chance = _chance(tables)
        return np.where(chance < 1, (agreed - chance) / (1 - chance), np.nan)


def _resampled(
    rows: NDArray[np.float64],
    figure: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    value: float,
    seed: int,
) -> Interval | None:
    """Of a figure of the sums of rows, when rows are drawn again with replacement."""
    count = len(rows)
    if count < 2:
        return None
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=BOOTSTRAP_DRAWS) @ rows
    deviation = (figure(drawn) - value) * math.sqrt(count / (count - 1))
    low, high = value + np.quantile(deviation[~np.isnan(deviation)], [_TAIL, 1 - _TAIL])
    return Interval(max(-1.0, float(low)), min(1.0, float(high)))


def _gain(episodes: Sequence[Compared], seed: int) -> Gain | None:
    """None where a part has no episode."""
    known = [one for one in episodes if one.judged is not None]
    size = len(known) // PARTS
    if not size:
        return None
    first, last = known[:size], known[-size:]
    figures: tuple[Callable[[Compared], bool], ...] = (
        lambda one: bool(one.judged),
        lambda one: one.verified,
        lambda one: bool(one.judged) and not one.verified,
        lambda one: one.verified and not one.judged,
    )
    by_judge, by_verifier, false_positives, false_negatives = (
        (sum(map(figure, last)) - sum(map(figure, first))) / size for figure in figures
    )
    counts: dict[str, list[int]] = {}
    for place, part in enumerate((first, last)):
        for one in part:
            row = counts.setdefault(one.template, [0, 0, 0, 0])
            row[place] += bool(one.judged) and not one.verified
            row[2 + place] += 1
    rows = np.array([counts[name] for name in sorted(counts)], dtype=np.float64)

    def difference(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return sums[:, 1] / sums[:, 3] - sums[:, 0] / sums[:, 2]

    claimed = sum(bool(one.judged) for one in last)
    false = wilson(sum(bool(one.judged) and not one.verified for one in last), claimed)
    return Gain(
        episodes=2 * size,
        by_judge=by_judge,
        by_verifier=by_verifier,
        false_positives=false_positives,
        false_positives_interval=_resampled(rows, difference, false_positives, seed) if rows[:, :2].any() else None,
        false_negatives=false_negatives,
        at_most_false=None if false is None else false.high,
    )


def _decided(one: Compared, value: float | None) -> Compared:
    return Compared(one.template, one.steps, one.verified, None if value is None else value == 1.0, one.votes)


def _parts(episodes: Iterable[Compared], of: Callable[[Compared], str]) -> list[tuple[str, list[Compared]]]:
    found: dict[str, list[Compared]] = {}
    for one in episodes:
        found.setdefault(of(one), []).append(one)
    return sorted(found.items())


def _thirds(episodes: Sequence[Compared]) -> list[tuple[str, list[Compared]]]:
    """By number of steps; equal numbers are in one part, so that there may be fewer than three."""
    lengths = sorted(one.steps for one in episodes)
    last = len(lengths) - 1
    ends = sorted({lengths[min(last, len(lengths) * part // PARTS)] for part in range(1, PARTS + 1) if lengths})
    found, begin = list[tuple[str, list[Compared]]](), 0
    for end in ends:
        part = [one for one in episodes if begin <= one.steps <= end]
        found.append((f"{begin or min(lengths)} to {end} steps", part))
        begin = end + 1
    return found
