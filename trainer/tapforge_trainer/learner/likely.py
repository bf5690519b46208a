"""What a teacher finds likely at each place of the policy's own tokens: the other half of a distillation by forward KL.

On the host from the teacher's pass on, 8 bytes for each of k tokens at each place; on the device for one micro-batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .packed import on_device


class Likely:
    """R response tokens, k tokens of the vocabulary at each of them, the likeliest first. Only those that this rank
    reads take memory: of what all ranks have, each would else touch almost every page."""

    def __init__(self, places: int, k: int):
        self.k = k
        #: [R]: which of the parts below has a token, and in which row
        self._part, self._row = np.full(places, -1, np.int32), np.zeros(places, np.int32)
        #: of each micro-batch: tokens [r, k] int32, and their log-probabilities [r, k] by the teacher, over what may be
        #: said; -inf: may not be said
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []

    def put(self, places: np.ndarray, ids: Tensor, logp: Tensor) -> None:
        """Of a micro-batch's response tokens."""
        self._part[places], self._row[places] = len(self._parts), np.arange(len(places))
        self._parts.append((ids.to(torch.int32).cpu().numpy(), logp.float().cpu().numpy()))

    def at(self, places: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """(ids, log-probabilities) [places, k], of places that were put."""
        ids, logp = np.empty((len(places), self.k), np.int32), np.empty((len(places), self.k), np.float32)
        part, row = self._part[places], self._row[places]
        for number in np.unique(part):
            here = part == number
            ids[here], logp[here] = (values[row[here]] for values in self._parts[number])
        return on_device(ids, device).long(), on_device(logp, device)
