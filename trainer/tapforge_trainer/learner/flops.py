"""Floating-point operations of the learner's passes, by closed form from a model's configuration. No torch.

What counts is what the model needs, as in "model FLOPs utilisation": matrix products and attention of the tokens and
patches that were given; not padding, not what is computed a second time in the backward pass to save memory, not norms
and activations (under 1 %), not LoRA's adapters (1-2 %). A multiplication with its addition is two operations.

In the backward pass inputs' gradients cost as much as the forward pass, and weights' gradients as much again where the
weights are trained; attention has no weights and always costs twice its forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..placement.settings import LearnerSettings
from .families import Shape
from .frame_store import Patches

#: dense bfloat16 operations per second that makers state, by a part of the device's name; longer names first
_PEAKS: Final = (
    ("GB200", 2.5e15),
    ("GB300", 2.5e15),
    ("B300", 2.25e15),
    ("B200", 2.25e15),
    ("B100", 1.75e15),
    ("H200 NVL", 8.35e14),
    ("H200", 9.89e14),
    ("GH200", 9.89e14),
    ("H100 PCIe", 7.56e14),
    ("H100 NVL", 8.35e14),
    ("H100", 9.89e14),
    ("H800", 9.89e14),
    ("H20", 1.48e14),
    ("A100", 3.12e14),
    ("A800", 3.12e14),
    ("A10G", 7.0e13),
    ("A10", 1.25e14),
    ("A30", 1.65e14),
    ("A40", 1.497e14),
    ("RTX A6000", 1.548e14),
    ("RTX 6000 Ada", 3.64e14),
    ("RTX 3090", 7.1e13),
    ("RTX 4090", 1.652e14),
    ("RTX 5090", 2.095e14),
    ("L40S", 3.62e14),
    ("L40", 1.81e14),
    ("L4", 1.21e14),
    ("MI300X", 1.307e15),
    ("MI325X", 1.307e15),
    ("MI250X", 3.83e14),
)


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 operations per second of the GPU of this name; None for one that is not known."""
    words = device.upper()
    found = [(name, peak) for name, peak in _PEAKS if name.upper() in words]
    return max(found, key=lambda one: len(one[0]))[1] if found else None


@dataclass(frozen=True, slots=True)
class Costs:
    """Operations of a forward pass."""

    #: of a token in all layers' matrices
    token: float
    #: of a sequence, times the square of its length: causal attention of all layers
    square: float
    #: of a token that is predicted: the head
    predicted: float
    #: of a patch: its embedding, all blocks' matrices, its share of the mergers, and attention within windows
    patch: float
    #: of a frame, times the square of its patches: blocks that attend to the whole frame
    patch_square: float

    @staticmethod
    def of(shape: Shape) -> Costs:
        hidden, vision = shape.hidden, shape.vision
        attention = 2 * hidden * shape.attention.query + 2 * hidden * shape.attention.key_value
        # of a layer with experts its router, and the experts that a token goes through
        mlp = sum(3 * hidden * layer.intermediate + hidden * layer.experts for layer in shape.layers)
        matrices = len(shape.layers) * attention + mlp
        width, merge = vision.width, vision.merge**2
        block = 4 * width * width + vision.matrices * width * vision.intermediate
        pixels = 3 * vision.temporal * vision.patch**2
        merger = merge * width * merge * width + merge * width * hidden  # of a visual token, that is of `merge` patches
        return Costs(
            token=2.0 * matrices,
            square=2.0 * len(shape.layers) * shape.attention.query,
            predicted=2.0 * hidden * shape.vocabulary,
            patch=2.0 * (pixels * width + vision.depth * block + (1 + vision.deepstack) * merger / merge)
            + 4.0 * vision.windowed * vision.window * width,
            patch_square=4.0 * (vision.depth - vision.windowed) * width,
        )

    def text(self, lengths: Iterable[int], predicted: int, before: Iterable[int] | None = None) -> float:
        """Of the language model over sequences of these lengths, `predicted` tokens of which are predicted. `before`:
        tokens before each that it attends to and that were computed for another one."""
        lengths = list(lengths)
        return self.token * sum(lengths) + self._attention(lengths, before) + self.predicted * predicted

    def _attention(self, lengths: Sequence[int], before: Iterable[int] | None) -> float:
        # a triangle without that of the tokens before
        earlier = [0] * len(lengths) if before is None else before
        return self.square * sum((n + b) ** 2 - b**2 for n, b in zip(lengths, earlier, strict=True))

    def vision(self, patches: Iterable[int]) -> float:
        """Of the vision tower over frames of so many patches."""
        return sum(self.patch * n + self.patch_square * n * n for n in patches)

    def backward(
        self,
        lengths: Iterable[int],
        predicted: int,
        patches: Iterable[int],
        before: Iterable[int] | None = None,
        *,
        weights: bool,
        tower: bool,
    ) -> float:
        """Of the backward pass. `weights`: the language model's are trained, and not only adapters beside them;
        `tower`: the vision tower is trained; `before`: as of `text`."""
        lengths = list(lengths)
        attention = self._attention(lengths, before)
        products = self.token * sum(lengths) + self.predicted * predicted
        return 2 * attention + (2 if weights else 1) * products + (2 * self.vision(patches) if tower else 0.0)


class FlopCounter:
    """Of a rank's optimizer steps, as the model needs them: a frozen tower counts a frame once in a step, however many
    samples show it, also where it computes it again because its features were not kept."""

    def __init__(self, shape: Shape, settings: LearnerSettings, device: str = ""):
        """`device`: the GPU's name."""
        self._costs, self._settings = Costs.of(shape), settings
        self._merge = shape.vision.merge**2
        self._computed: set[str] = set()
        #: operations per second of the device; 0 where they are not known
        self.peak = (peak_flops(device) or 0.0) if settings.dtype == "bfloat16" else 0.0

    def begin(self) -> None:
        """The next step's."""
        self._computed.clear()

    def passes(
        self,
        lengths: np.ndarray | Sequence[int],
        predicted: int,
        frames: Mapping[str, Patches],
        before: np.ndarray | None = None,
    ) -> float:
        """Of both passes over sequences of these lengths, of which so many tokens are predicted; frames by name;
        `before`: as of `Costs.text`."""
        trained = not self._settings.freeze_vision
        lengths = np.asarray(lengths, np.int64).tolist()
        earlier = None if before is None else before.tolist()
        new = [frame for name, frame in frames.items() if trained or name not in self._computed]
        counted = [frame.tokens * self._merge for frame in new]
        self._computed.update(frames)
        costs = self._costs
        forward = costs.text(lengths, predicted, earlier) + costs.vision(counted)
        weights = self._settings.lora is None
        return forward + costs.backward(lengths, predicted, counted, earlier, weights=weights, tower=trained)
