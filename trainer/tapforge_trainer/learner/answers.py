"""What the learner says of an update's answers before they have advantages: passes without gradients.

Numbers are those of the policy before the update. Samples that older weights have sampled are read with the new ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tapforge_trainer.records import AnswerFacts, Facts, Sample

from .batches import MicroBatchPlan, TokenBatch

if TYPE_CHECKING:
    from .frame_source import FrameSource
    from .rank import Rank


def read_answers(
    rank: Rank,
    data: TokenBatch,
    frames: FrameSource,
    plans: Sequence[MicroBatchPlan],
    temperature: float,
    reads: Collection[str],
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """On every rank: (log-probabilities, the reference's, sums of squared probabilities, a critic's values), as far as
    they are read; nan where another rank has them. Raises FramesLost on all ranks."""
    rank.agree_on(data, plans, frames)
    squares = "score_square" in reads
    logp, squared, *values = rank.read(
        rank.policy, data, frames, plans, temperature, "squared" if squares else "entropy"
    )
    if "value" in reads and not values:
        raise ValueError("values are asked for, but the learner was started without a critic")
    reference = None
    if "divergence" in reads:
        with rank.reference.entered() as policy:
            reference = rank.read(policy, data, frames, plans, temperature)[0]
    return logp, reference, squared if squares else None, values[0] if "value" in reads else None


def answers(
    data: TokenBatch,
    logp: np.ndarray,
    reference: np.ndarray | None = None,
    squared: np.ndarray | None = None,
    value: np.ndarray | None = None,
) -> list[AnswerFacts]:
    """Of each response span, in order, from numbers of its tokens."""
    found: dict[str, np.ndarray] = {}
    logp = logp.astype(np.float64)
    if reference is not None:
        found["divergence"] = logp - reference
    if squared is not None:
        found["score_square"] = 1.0 - 2.0 * np.exp(logp.clip(max=0.0)) + squared
    first = np.flatnonzero(np.diff(data.span, prepend=-1))
    sums = {name: np.bincount(data.span, values).tolist() for name, values in found.items()}
    if value is not None:
        sums["value"] = value[first].tolist()
    return [AnswerFacts(**{name: values[k] for name, values in sums.items()}) for k in range(len(first))]


def by_step(samples: Sequence[Sample], found: Sequence[AnswerFacts]) -> Facts:
    """What `answers` says of these samples."""
    spans = [(sample.episode, span.step) for sample in samples for span in sample.spans]
    return dict(zip(spans, found, strict=True))
