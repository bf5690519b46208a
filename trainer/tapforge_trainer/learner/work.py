"""What each sample of a token batch costs to learn from, so that ranks are given equal work and not equal tokens:
attention grows with the square of a sequence, and the vision tower has a price of its own. Pure numpy.

Of a frame's size the driver knows nothing: the visual tokens of a sample are shared out over its frames. A frozen tower
is counted for each sample that shows a frame, though features may still be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..placement.settings import LearnerSettings
from .batches import TokenBatch
from .families import ModelConfig, family_of
from .flops import Costs


@dataclass(frozen=True, slots=True)
class SampleWork:
    costs: Costs
    #: patches of a visual token
    patches: int
    #: the language model's weights are trained, and not only adapters beside them; the tower is
    weights: bool
    tower: bool

    @staticmethod
    def of(config: ModelConfig, settings: LearnerSettings) -> SampleWork:
        """Raises FolderError for a model that no family knows."""
        shape = family_of(config).shape(config)
        return SampleWork(
            Costs.of(shape), shape.vision.merge**2, weights=settings.lora is None, tower=not settings.freeze_vision
        )

    def __call__(self, data: TokenBatch) -> np.ndarray:
        """[samples] operations of both passes."""
        frames = np.fromiter((len(names) for names in data.frames), dtype=np.float64, count=len(data))
        predicted = np.bincount(data.sample, minlength=len(data)).astype(np.float64)
        return self._both(data.lengths.astype(np.float64), np.diff(data.offsets), frames, predicted)

    def of_prompts(self, data: TokenBatch) -> np.ndarray:
        """[samples] of their first prompts alone: how much less a sample costs beside another one that has its prompt;
        0 where none has."""
        found = self._both(data.prompts.tokens.astype(np.float64), data.prompts.ids, data.prompts.frames, 0.0)
        return np.where(data.prompts.tokens > 0, found, 0.0)

    def _both(self, lengths: Any, ids: Any, frames: Any, predicted: Any) -> np.ndarray:
        products = self.costs.token * lengths + self.costs.predicted * predicted
        seen = (lengths - ids + frames) * self.patches
        vision = self.costs.patch * seen + self.costs.patch_square * seen**2 / np.maximum(frames, 1)
        text = (3 if self.weights else 2) * products + 3 * self.costs.square * lengths**2
        return np.asarray(text + (3 if self.tower else 1) * vision)
