"""A rank's part of the policy loss on a micro-batch, and figures that are read from its device once.

A GPU computes while the host queues what comes next. Each number that is read of it makes the host wait until the GPU
has come as far, and the GPU then waits for the host. So figures stay where they are computed (`DeviceFigures`) until
the backward pass is queued as well, and are read together with the log-probabilities and entropies of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tapforge_trainer.algorithms.losses import policy_loss
from tapforge_trainer.algorithms.objective import Counts, Objective

from .batches import TokenBatch
from .metrics import UpdateMetrics


class DeviceFigures:
    """Figures of a micro-batch, on their device until `read`."""

    def __init__(self, metrics: UpdateMetrics):
        """`metrics`: where they come to."""
        self._metrics = metrics
        self._sums: list[tuple[str, Tensor, float]] = []
        self._maxima: list[tuple[str, Tensor]] = []

    def add(self, name: str, value: Tensor, steps: int = 1) -> None:
        """A scalar, of which a `steps`-th counts."""
        self._sums.append((name, value, steps))

    def top(self, name: str, value: Tensor) -> None:
        self._maxima.append((name, value))

    def read(self, logp: Tensor, entropy: Tensor) -> np.ndarray:
        """Waits for the device, once. Returns both, [2, tokens], on the host."""
        found = [value for _, value, _ in self._sums] + [value for _, value in self._maxima]
        tokens = [logp.detach().float(), entropy.detach().float()]
        values = torch.cat([*tokens, *(value.detach().float().reshape(1) for value in found)]).cpu().numpy()
        scalars = values[2 * len(logp) :].tolist()
        for name, _, steps in self._sums:
            self._metrics.add(name, scalars.pop(0) / steps)
        for name, _ in self._maxima:
            self._metrics.top(name, scalars.pop(0))
        self._sums, self._maxima = [], []
        return values[: 2 * len(logp)].reshape(2, -1)


def imitation_loss(
    counts: Counts,
    figures: DeviceFigures,
    steps: int,
    logp: Tensor,
    chosen: np.ndarray,
    weight: Tensor,
    entropy: Tensor,
) -> Tensor:
    """Cross-entropy."""
    value = -(weight * logp).sum() / max(counts.tokens, 1e-12)
    figures.add("loss", value.detach(), steps)
    return value


def batch_loss(
    data: TokenBatch,
    old: np.ndarray | None,
    reference: np.ndarray | None,
    teacher: np.ndarray | None,
    objective: Objective,
    counts: Counts,
    figures: DeviceFigures,
    steps: int,
    compared: bool,
    logp: Tensor,
    chosen: np.ndarray,
    weight: Tensor,
    entropy: Tensor,
    apart: Tensor | None = None,
    *,
    gathered: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
) -> Tensor:
    """`old` None: the weights are those that old log-probabilities are of, or none are needed. `compared`: the
    samples' own log-probabilities are another policy's, and enter as anchor, weights and masks. `apart`: the
    tokens' divergence from what the teacher finds likely, if the objective has one. `gathered`: what was decided
    over the whole optimizer step (`statistics.py`); `seed`: the step's, for what isn't."""

    def here(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[chosen]).to(logp.device)

    _, sequence = np.unique(data.span[chosen], return_inverse=True)
    result = policy_loss(
        logp,
        logp.detach() if old is None else here(old),
        here(data.advantage),
        torch.from_numpy(sequence).to(logp.device),
        objective=objective,
        counts=counts,
        weight=weight,
        behavior_logp=here(data.behavior) if compared else None,
        ref_logp=None if reference is None else here(reference),
        teacher_logp=None if teacher is None else here(teacher),
        apart=apart,
        score=here(data.score),
        entropy=entropy,
        gathered={name: here(values) for name, values in (gathered or {}).items()},
        sequences=int(sequence.max()) + 1 if len(sequence) else 0,
        seed=seed * 1_000_003 + (int(chosen[0]) if len(chosen) else 0),  # micro-batches draw apart
    )
    # The only step's ratio to itself is 1, whatever the samples are: figures of it would tell nothing.
    silent = result.of_ratio if old is None and steps == 1 and objective.anchor == "old" else frozenset()
    for name, value in result.sums.items():
        if name not in silent:
            figures.add(name, value, steps)
    for name, value in result.maxima.items():
        if name not in silent:
            figures.top(name, value)
    return result.loss
