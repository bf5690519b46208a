"""Qwen3-VL: its tower's learned positions are interpolated to the frame's size, and some of its blocks feed the first
layers of the language model (deepstack)."""

from __future__ import annotations

from typing import Any

from .family import Family, vision_arguments


def arguments(vision: Any, grids: Any) -> dict[str, Any]:
    """Also Qwen3-VL-MoE's."""
    from transformers import vision_utils

    index, weight = vision_utils.get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=int(vision.num_position_embeddings**0.5),
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=vision.spatial_merge_size,
    )
    return vision_arguments(vision, grids) | {"interp_indices": index, "interp_weights": weight}


FAMILY = Family("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl", arguments, adapter="qwen3-vl")
