"""`tapforge relearn --gradients`: what gradients other learning rules make of the episodes that a run has recorded.

- Batches are those of `relearn`; each is one optimizer step, whatever `learner.miniBatches` says, without clipping.
- All gradients are at the same weights: `--weights`, or else those that the run's KL term pulls towards, or the run's
  initial ones. They are not those of the update that learned from a batch, so that differences are of rules alone.
- `cosine` is over all batches together, `size` a ratio of norms, `noise` the deviation of a batch's gradient from the
  mean of all, over that mean's norm. `digest` is of all bits: on CPUs the same each time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tapforge_api import TrainingRun

from ..batch import BatchRules, answers_of, build_batch
from ..model_source.ref import ModelError
from ..model_source.resolve import resolve
from ..placement.machine import Machine
from ..recording.reader import FRAMES, Recording
from ..records import Facts, GroupRecord, Sample
from . import assembly, policy_settings
from .assembly import ConfigurationError, SetupError
from .folder import REFERENCE, ROLLOUT
from .model_pin import model_of, teacher_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..learner.gradients import Gradients


@dataclass(frozen=True, slots=True)
class Gradient:
    """Beside the run's own; None where there is none."""

    cosine: float | None
    size: float | None
    noise: float | None
    digest: str


@contextmanager
def opened(
    run: TrainingRun, folder: Path, arms: Mapping[str, TrainingRun], weights: Path | None
) -> Iterator[Gradients]:
    """The learner's rank of this process. Raises SetupError."""
    from ..learner.gradients import gradients_of

    if weights is not None and run.spec.model.lora is not None:
        raise ConfigurationError(
            f"--weights {weights}: gradients of a run with adapters (spec.model.lora) are at those it begins with; "
            "leave --weights out"
        )
    if weights is None and run.spec.model.lora is None and (folder / REFERENCE / "config.json").is_file():
        weights = folder / REFERENCE
    try:
        model = resolve(model_of(run, folder)) if weights is None else weights
    except ModelError as error:
        raise SetupError(f"{error}; or name a folder with weights in --weights") from error
    agent = assembly.agent_of(run, model)
    teacher = _teacher(run, folder) if any(arm.spec.algorithm.distillation for arm in arms.values()) else None
    settings = policy_settings.learner_settings(run, model, agent, Machine.local(), "cpu", teacher=teacher)
    pulls = any(arm.spec.algorithm.kl.coefficient for arm in arms.values())
    reference = str(folder / REFERENCE if (folder / REFERENCE).is_dir() else model)
    with gradients_of(settings, reference if pulls else None, Recording(folder / ROLLOUT).frames) as found:
        yield found


def _teacher(run: TrainingRun, folder: Path) -> Path | None:
    """The run's own, for all arms. Raises SetupError."""
    source = teacher_of(run, folder)
    if source is None:
        raise ConfigurationError(
            "algorithm.distillation of an arm needs a teacher, and the run has none: compare kinds and weights of runs "
            "that were distilled"
        )
    try:
        return resolve(source)
    except ModelError as error:
        raise SetupError(str(error)) from error


def check_complete(folder: Path, groups: Sequence[GroupRecord], rules: BatchRules) -> None:
    """Raises ConfigurationError unless all screens of what is compared are there as the model saw them."""
    frames = Recording(folder / ROLLOUT).frames
    samples = answers_of(groups, rules)
    lack = sorted({s.episode for s in samples if not all(map(frames.has, s.frames))})
    if lack:
        why = frames.lacks or (f"they were recorded as {frames.lossy}" if frames.lossy else "they are gone")
        raise ConfigurationError(
            f"{folder / ROLLOUT / FRAMES}: gradients need every screen as the model saw it, but {len(lack)} of "
            f"{len({s.episode for s in samples})} episodes lack some (the first: {lack[0]}): {why}. Record with "
            "recording.frames: all and encoding: png, and without share and maxGiB"
        )


def facts_of(
    rank: Gradients | None, run: TrainingRun, groups: Sequence[GroupRecord], rules: BatchRules
) -> Facts | None:
    """What the rules read of answers before there are advantages, as far as there is a rank that reads."""
    reads = rules.reads - {"value"}  # the critic is not recorded
    if rank is None or not reads or not (samples := answers_of(groups, rules)):
        return None
    return rank.facts(samples, run.spec.rollout.temperature, reads)


def compared(
    rank: Gradients, batches: Sequence[Sequence[GroupRecord]], arms: Sequence[tuple[TrainingRun, BatchRules]]
) -> list[Gradient | None]:
    """Of each arm, the first of which is the run's own; None for one whose advantages can't be made."""
    sums = [_Sums() for _ in arms]
    for number, groups in enumerate(batches):
        own: Tensor | None = None
        for (run, rules), found in zip(arms, sums, strict=True):
            if found.broken:
                continue
            try:
                samples = build_batch(groups, rules, facts_of(rank, run, groups, rules)).samples
            except Exception:  # noqa: BLE001 - another package's estimator; the table of advantages says why
                found.broken = True
                continue
            gradient = _gradient(rank, run, samples, number)
            own = gradient if found is sums[0] else own
            found.add(gradient, own)
    return [None if one.broken else one.result(sums[0]) for one in sums]


def _gradient(rank: Gradients, run: TrainingRun, samples: Sequence[Sample], update: int) -> Tensor | None:
    """None: nothing is learned."""
    return rank.of(samples, policy_settings.update_settings(run, update)) if samples else None


class _Sums:
    """Of one arm, over batches."""

    def __init__(self) -> None:
        self.broken = False
        self.squares, self.products, self.batches = 0.0, 0.0, 0
        self._total: Tensor | None = None
        self._digest = hashlib.sha256()

    def add(self, gradient: Tensor | None, own: Tensor | None) -> None:
        self.batches += 1
        if gradient is None:
            self._digest.update(b"none")
            return
        self._digest.update(gradient.numpy().tobytes())
        wide = gradient.double()
        self.squares += float(wide.square().sum())
        self.products += 0.0 if own is None else float((wide * own.double()).sum())
        self._total = wide if self._total is None else self._total + wide

    def result(self, own: _Sums) -> Gradient:
        norm, of_own = math.sqrt(self.squares), math.sqrt(own.squares)
        both = norm > 0 and of_own > 0
        return Gradient(
            self.products / (norm * of_own) if both else None,
            norm / of_own if both else None,
            self._noise(),
            self._digest.hexdigest()[:16],
        )

    def _noise(self) -> float | None:
        if self._total is None or self.batches < 2:
            return None
        mean = float(self._total.square().sum()) / self.batches**2
        spread = (self.squares - self.batches * mean) / (self.batches - 1)
        return math.sqrt(max(0.0, spread) / mean) if mean > 0 else None
