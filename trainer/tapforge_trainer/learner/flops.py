"""Floating-point operations of the learner's passes, by closed form from a model's configuration. No torch.

What counts is what the model needs, as in "model FLOPs utilisation": matrix products and attention of the tokens and
patches that were given; not padding, not what is computed a second time in the backward pass to save memory, not norms
and activations (under 1 %), not LoRA's adapters (1-2 %). A multiplication with its addition is two operations.

In the backward pass inputs' gradients cost as much as the forward pass, and weights' gradients as much again where the
weights are trained; attention has no weights and always costs twice its forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ..placement.settings import LearnerSettings
from .families import ModelConfig
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
    def of(config: ModelConfig) -> Costs:
        text, vision = config.text, config.vision
        h, layers = text["hidden_size"], text["num_hidden_layers"]
        head = text.get("head_dim") or h // text["num_attention_heads"]
        wide, narrow = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
        attention = 2 * h * wide + 2 * h * narrow
        dense = 3 * h * text["intermediate_size"]
        experts = (
            text.get("num_experts") or text.get("num_local_experts") or 0
        )  # as published, as transformers 5 writes
        sparse = h * experts + 3 * h * text.get("moe_intermediate_size", 0) * text.get("num_experts_per_tok", 0)
        plain = layers if not experts else len(text.get("mlp_only_layers") or ())
        matrices = layers * attention + plain * dense + (layers - plain) * sparse
        full, windowed, window = _attention_blocks(config)
        v = _vision_width(config)
        merge = vision["spatial_merge_size"] ** 2
        inner = vision.get("intermediate_size") or int(v * vision["mlp_ratio"])
        gated = config.model_type == "qwen2_5_vl"
        block = 4 * v * v + (3 if gated else 2) * v * inner
        pixels = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * vision["patch_size"] ** 2
        mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
        merger = merge * v * merge * v + merge * v * h  # of a visual token, that is of `merge` patches
        return Costs(
            token=2.0 * matrices,
            square=2.0 * layers * wide,
            predicted=2.0 * h * config.vocabulary,
            patch=2.0 * (pixels * v + (full + windowed) * block + mergers * merger / merge)
            + 4.0 * windowed * window * v,
            patch_square=4.0 * full * v,
        )

    def text(self, lengths: Iterable[int], predicted: int) -> float:
        """Of the language model over sequences of these lengths, `predicted` tokens of which are predicted."""
        return sum(self.token * n + self.square * n * n for n in lengths) + self.predicted * predicted

    def vision(self, patches: Iterable[int]) -> float:
        """Of the vision tower over frames of so many patches."""
        return sum(self.patch * n + self.patch_square * n * n for n in patches)

    def backward(
        self, lengths: Iterable[int], predicted: int, patches: Iterable[int], *, weights: bool, tower: bool
    ) -> float:
        """Of the backward pass. `weights`: the language model's are trained, and not only adapters beside them;
        `tower`: the vision tower is trained."""
        lengths = list(lengths)
        attention = sum(self.square * n * n for n in lengths)
        products = self.text(lengths, predicted) - attention
        return 2 * attention + (2 if weights else 1) * products + (2 * self.vision(patches) if tower else 0.0)


class FlopCounter:
    """Of a rank's optimizer steps, as the model needs them: a frozen tower counts a frame once in a step, however many
    samples show it, also where it computes it again because its features were not kept."""

    def __init__(self, config: ModelConfig, settings: LearnerSettings, device: str = ""):
        """`device`: the GPU's name."""
        self._costs, self._settings = Costs.of(config), settings
        self._merge = config.vision["spatial_merge_size"] ** 2
        self._computed: set[str] = set()
        #: operations per second of the device; 0 where they are not known
        self.peak = (peak_flops(device) or 0.0) if settings.dtype == "bfloat16" else 0.0

    def begin(self) -> None:
        """The next step's."""
        self._computed.clear()

    def passes(self, lengths: Iterable[int], predicted: int, frames: Mapping[str, Patches]) -> float:
        """Of both passes over sequences of these lengths, of which so many tokens are predicted; frames by name."""
        lengths, trained = list(lengths), not self._settings.freeze_vision
        new = [frame for name, frame in frames.items() if trained or name not in self._computed]
        counted = [frame.tokens * self._merge for frame in new]
        self._computed.update(frames)
        costs = self._costs
        forward = costs.text(lengths, predicted) + costs.vision(counted)
        weights = self._settings.lora is None
        return forward + costs.backward(lengths, predicted, counted, weights=weights, tower=trained)


def _vision_width(config: ModelConfig) -> int:
    """Qwen2-VL calls it embed_dim, and the language model's width hidden_size."""
    return config.vision["embed_dim"] if config.model_type == "qwen2_vl" else config.vision["hidden_size"]


def _attention_blocks(config: ModelConfig) -> tuple[int, int, int]:
    """(blocks that attend to the whole frame, blocks that attend to windows, patches of a window)"""
    vision = config.vision
    depth = vision["depth"]
    whole = vision.get("fullatt_block_indexes")
    if config.model_type != "qwen2_5_vl" or whole is None:
        return depth, 0, 0
    full = sum(index < depth for index in whole)
    return full, depth - full, (vision["window_size"] // vision["patch_size"]) ** 2
