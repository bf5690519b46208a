"""What a teacher finds likely at each place of the policy's own tokens: the other half of a distillation by forward KL.

On the host from the teacher's pass on, 8 bytes for each of k tokens at each place; on the device for one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .packed import on_device


@dataclass(frozen=True, slots=True)
class Likely:
    """R response tokens, k tokens of the vocabulary at each of them, the likeliest first. Rows of other ranks are 0."""

    ids: np.ndarray  # [R, k] int32
    #: by the teacher, over what may be said; -inf: may not be said
    logp: np.ndarray  # [R, k] float32

    @staticmethod
    def empty(places: int, k: int) -> Likely:
        # Pages that no row is written to take no memory.
        return Likely(np.zeros((places, k), np.int32), np.zeros((places, k), np.float32))

    def put(self, places: np.ndarray, ids: Tensor, logp: Tensor) -> None:
        self.ids[places], self.logp[places] = ids.cpu().numpy(), logp.float().cpu().numpy()

    def at(self, places: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """(ids, log-probabilities) [places, k]."""
        return on_device(self.ids[places], device).long(), on_device(self.logp[places], device)
