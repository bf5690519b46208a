"""`tapforge relearn`: what other advantages would have made of the episodes that a run has recorded.

- Batches are those of the run: groups in their order, as many as an update takes. Where the recording's beginning was
  removed they may begin elsewhere, which only estimators that look at a whole batch notice.
- Nothing is learned, and unless gradients are asked for (`relearn_gradients.py`) no screen is read: advantages come of
  outcomes, rewards, states and lengths alone.
- Compared are the steps of groups that the run compared. `correlation` is Pearson's, `size` a ratio of root mean
  squares (a learner with AdamW hardly minds it), `sign_changes` the share of steps that both push, but in opposite
  directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tapforge_api import TrainingRun, load

from ..algorithms.presets import PRESETS, preset
from ..batch import BatchRules, batches_of, build_batch
from ..recording.reader import Recording
from ..records import GroupRecord
from .assembly import ConfigurationError
from .columns import columns
from .folder import ROLLOUT, SPEC, run_of
from .policy_settings import update_settings
from .relearn_gradients import Gradient, check_complete, facts_of, opened
from .relearn_gradients import compared as gradients_compared

if TYPE_CHECKING:
    from ..learner.gradients import Gradients

#: what of a preset decides about advantages
_ADVANTAGE = (
    "algorithm.advantage",
    "algorithm.critic",
    "algorithm.signal",
    "algorithm.statistics",
    "algorithm.invalidAnswerPenalty",
)

#: takes out what the run says of them
_NOTHING = tuple(f"spec.{path}=null" for path in _ADVANTAGE)

_GRADIENT = ("gradient: cosine", "size", "noise", "digest")

#: by episode and step
Advantages = Mapping[tuple[str, int], float]


@dataclass(frozen=True, slots=True)
class Compared:
    """With the run's own advantages; None where nothing is pushed."""

    #: all that come to the same
    name: str
    correlation: float | None
    size: float | None
    sign_changes: float | None
    #: steps without an advantage, over all
    zero: float
    #: why there are none
    error: str = ""
    gradient: Gradient | None = None


@dataclass(frozen=True, slots=True)
class Relearned:
    groups: int
    batches: int
    steps: int
    compared: tuple[Compared, ...]


def relearn(
    folder: Path,
    overrides: Sequence[str],
    *,
    gradients: bool = False,
    weights: Path | None = None,
    updates: int | None = None,
) -> Relearned:
    """The run's own advantages, those of its file with `overrides`, if there are any, and those of all presets without
    a critic; with `gradients` at `weights` those, too. `updates`: only of so many first batches. Raises SetupError and
    RecordingError."""
    run = run_of(folder)
    if any(stage.rewards is not None for stage in run.spec.stages):
        raise ConfigurationError(f"{folder} is of a run whose stages have rewards of their own: relearn knows one")
    if gradients and any(stage.temperature is not None for stage in run.spec.stages):
        raise ConfigurationError(
            f"{folder} is of a run whose stages have temperatures of their own: relearn --gradients knows one"
        )
    groups = Recording(folder / ROLLOUT).settled(prompts=gradients)
    batches = batches_of(groups, run.spec.rollout.groups_per_update)[:updates]
    groups = [group for batch in batches for group in batch]
    others = _others(folder, run, overrides)
    if not gradients:
        return _relearned(folder, groups, batches, others, None)
    check_complete(folder, groups, _rules(run))
    with opened(run, folder, others, weights) as rank:
        return _relearned(folder, groups, batches, others, rank)


def _others(folder: Path, run: TrainingRun, overrides: Sequence[str]) -> dict[str, TrainingRun]:
    """By name, the run's own first."""
    others = {"the run's own": run}
    if overrides:
        others["with --set"] = load(folder / SPEC, overrides)
    recorded = run.spec.environment.source.dataset is not None
    for name in PRESETS:
        values = [value for value in preset(name).values if value.path.startswith(_ADVANTAGE)]
        if recorded:  # a run on recorded steps has no such penalty
            values = [value for value in values if value.path != "algorithm.invalidAnswerPenalty"]
        if any(value.path.startswith("algorithm.critic") for value in values):
            continue  # what a critic said is not recorded
        others[name] = load(folder / SPEC, [*_NOTHING, *(f"spec.{value.path}={value.value}" for value in values)])
    return others


def _relearned(
    folder: Path,
    groups: Sequence[GroupRecord],
    batches: Sequence[Sequence[GroupRecord]],
    others: Mapping[str, TrainingRun],
    rank: Gradients | None,
) -> Relearned:
    run = next(iter(others.values()))
    try:
        own = _advantages(batches, run, rank)
    except Exception as error:  # another package's estimator may break in any way
        raise ConfigurationError(f"{folder}: the run's own advantages can't be computed again: {error}") from error
    if not own:
        raise ConfigurationError(f"{folder} has no recorded group with episodes to compare: run it first")
    same: dict[str, list[str]] = {}
    for name, other in others.items():
        try:
            loss = "" if rank is None else repr(update_settings(other, 0).objective)
            same.setdefault(repr(_rules(other)) + loss, []).append(name)
        except Exception as error:
            raise ConfigurationError(f"{name}: spec.algorithm.advantage: {error}") from error
    compared = [_compared(names, own, batches, others[names[0]], rank) for names in same.values()]
    if rank is not None:
        arms = [(others[names[0]], _rules(others[names[0]])) for names in same.values()]
        found = gradients_compared(rank, batches, arms)
        compared = [replace(one, gradient=gradient) for one, gradient in zip(compared, found, strict=True)]
    return Relearned(len(groups), len(batches), len(own), tuple(compared))


def _compared(
    names: Sequence[str],
    own: Advantages,
    batches: Sequence[Sequence[GroupRecord]],
    run: TrainingRun,
    rank: Gradients | None,
) -> Compared:
    name = ", ".join(names)
    try:
        other = _advantages(batches, run, rank)
    except Exception as error:  # noqa: BLE001 - it needs what a recording doesn't have, or is another package's
        return Compared(name, None, None, None, 1.0, str(error) or type(error).__name__)
    a, b = (np.array([found.get(key, 0.0) for key in own]) for found in (own, other))
    both = (a != 0.0) & (b != 0.0)
    return Compared(
        name,
        _correlation(a, b),
        _ratio(_root_mean_square(b), _root_mean_square(a)),
        float(np.mean(np.sign(a[both]) != np.sign(b[both]))) if both.any() else None,
        float(np.mean(b == 0.0)),
    )


def _advantages(
    batches: Sequence[Sequence[GroupRecord]], run: TrainingRun, rank: Gradients | None = None
) -> Advantages:
    rules = _rules(run)
    made = (build_batch(groups, rules, facts_of(rank, run, groups, rules)) for groups in batches)
    credits = (credit for batch in made for credit in batch.credits)
    return {(credit.episode, credit.step): credit.advantage for credit in credits}


def _rules(run: TrainingRun) -> BatchRules:
    return BatchRules.of(run.spec.algorithm, run.spec.rewards, min_valid=run.spec.rollout.min_valid)


def _correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else None


def _root_mean_square(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def lines(found: Relearned) -> Iterator[str]:
    yield f"{found.steps:,} steps of {found.groups:,} groups, in {found.batches:,} batches"
    learned = any(one.gradient is not None for one in found.compared)
    rows = [("", "correlation", "size", "sign changes", "zero", *(_GRADIENT if learned else ()))]
    for one in found.compared:
        row = (one.name, _number(one.correlation), _number(one.size), _percent(one.sign_changes), _percent(one.zero))
        rows.append((*row, *(_of_gradient(one.gradient) if learned else ())))
    yield from columns(rows)
    yield from (f"note: {one.name}: {one.error}" for one in found.compared if one.error)


def _of_gradient(found: Gradient | None) -> tuple[str, ...]:
    if found is None:
        return ("–",) * len(_GRADIENT)
    return _number(found.cosine), _number(found.size), _number(found.noise), found.digest


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
