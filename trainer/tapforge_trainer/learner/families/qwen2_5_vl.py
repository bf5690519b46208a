"""Qwen2.5-VL: most blocks of its tower attend within windows, whose patches `window_index` brings together."""

from __future__ import annotations

from typing import Any

from .family import Family, vision_arguments


def _arguments(vision: Any, grids: Any) -> dict[str, Any]:
    from transformers import vision_utils

    index, bounds = vision_utils.get_vision_window_index(
        grids,
        spatial_merge_size=vision.spatial_merge_size,
        window_size=vision.window_size,
        patch_size=vision.patch_size,
    )
    return vision_arguments(vision, grids) | {
        "window_index": index,
        "cu_window_seqlens": bounds,
        "max_window_seqlen": int((bounds[1:] - bounds[:-1]).max()),
    }


FAMILY = Family(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_vl",
    _arguments,
    adapter="qwen2.5-vl",
)
