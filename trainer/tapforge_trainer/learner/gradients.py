"""Gradients of recorded answers at weights that stay as they are: one rank in this process, without Ray.

The same samples at the same weights give the same bits on CPUs. Nothing is clipped and no weight moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tapforge_trainer.algorithms.objective import Counts
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.recording.frames import FrameStore
from tapforge_trainer.records import Facts, Sample

from ..placement.settings import LearnerSettings, UpdateSettings
from .answers import answers, by_step, read_answers
from .batch_loss import DeviceFigures
from .batches import MicroBatchPlan, TokenBatch, token_batch
from .metrics import UpdateMetrics
from .planning import plan_samples
from .rank import MiniBatch, Rank


@dataclass(frozen=True, slots=True)
class Recorded:
    """Frames out of a recording."""

    store: FrameStore

    def read(self, episode: str, names: Collection[str]) -> Mapping[str, FittedFrame]:
        return {name: self.store.frame(name) for name in names}

    def lost(self, wanted: Mapping[str, Collection[str]]) -> list[str]:
        return [episode for episode, names in wanted.items() if not all(map(self.store.has, names))]


@dataclass(frozen=True, slots=True)
class Gradients:
    """Use `gradients_of`."""

    rank: Rank
    frames: Recorded

    def of(self, samples: Sequence[Sample], settings: UpdateSettings) -> Tensor:
        """[trained parameters], fp32, of all samples in one optimizer step. Raises FramesLost."""
        data, plans = self._planned(samples)
        _, first = np.unique(data.span, return_index=True)
        weight = data.weight.astype(np.float64)
        batch = MiniBatch(tuple(plans), Counts(float(weight.sum()), float(weight[first].sum())))
        metrics = UpdateMetrics()
        figures = DeviceFigures(metrics)
        ((_, loss, likely),) = self.rank.losses(data, self.frames, [batch], settings, figures)
        self.rank.accumulate(data, self.frames, batch, settings, loss, metrics, figures, likely=likely)
        parts = []
        for parameter in self.rank.policy.parameters():
            if (grad := parameter.grad) is not None:
                whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                parts.append(whole.detach().flatten().float().cpu())
        self.rank.optimizer.zero_grad(set_to_none=True)
        return torch.cat(parts)

    def facts(self, samples: Sequence[Sample], temperature: float, reads: Collection[str]) -> Facts:
        """As `Learner.answers`."""
        data, plans = self._planned(samples)
        return by_step(samples, answers(data, *read_answers(self.rank, data, self.frames, plans, temperature, reads)))

    def _planned(self, samples: Sequence[Sample]) -> tuple[TokenBatch, list[MicroBatchPlan]]:
        data = token_batch(samples, self.rank.vocabulary, share=self.rank.family.shares_prompts)
        return data, plan_samples(data, np.arange(len(data)), 1, self.rank.settings.tokens_per_micro_batch)[0]


@contextmanager
def gradients_of(settings: LearnerSettings, reference: str | None, frames: FrameStore) -> Iterator[Gradients]:
    """`reference`: folder of what a KL term pulls towards; None: there is none."""
    settings = replace(settings, ranks=1, reference=reference is not None, critic=None)
    rank = Rank(settings, 0, dist.HashStore())
    try:
        if reference is not None:
            rank.reference.load(reference)
        yield Gradients(rank, Recorded(frames))
    finally:
        dist.destroy_process_group()
