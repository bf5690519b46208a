"""Qwen2.5-VL: most blocks of its tower attend within windows, whose patches `window_index` brings together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import Family, vision_arguments
from .folder import ModelConfig
from .published import flat, repositories
from .qwen2_vl import layer, tied
from .shape import AttentionShape, Section, Shape, VisionShape, language_model, tower


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


def _shape(config: ModelConfig) -> Shape:
    text, attention = Section.text(config), AttentionShape.of(Section.text(config))
    of_all, vision = layer(text, attention), _tower(Section.vision(config), attention.hidden)
    return language_model(config, text, attention, lambda number: of_all, vision, qk_norm=False, tied=tied(config))


def _tower(vision: Section, hidden: int) -> VisionShape:
    depth, patch = vision.number("depth", default=32), vision.number("patch_size", default=14)
    whole = {block for block in vision.numbers("fullatt_block_indexes", default=(7, 15, 23, 31)) if block < depth}
    return tower(
        vision,
        width=vision.number("hidden_size"),
        intermediate=vision.number("intermediate_size", default=3420),
        out=vision.number("out_hidden_size", default=hidden),
        activation="swiglu",
        depth=32,
        patch=14,
        rms=True,
        windowed=depth - len(whole),
        window=(vision.number("window_size", default=112) // patch) ** 2,
    )


def _published(hidden: int, tower_intermediate: int = 3420, **text: Any) -> Mapping[str, Any]:
    vision = {"hidden_size": 1280, "intermediate_size": tower_intermediate, "out_hidden_size": hidden}
    return flat("qwen2_5_vl", vision, hidden=hidden, **text)


_PUBLISHED = {
    "Qwen2.5-VL-3B": _published(
        2048, intermediate=11008, layers=36, heads=16, kv_heads=2, vocabulary=151936, tied=True
    ),
    "Qwen2.5-VL-7B": _published(3584, intermediate=18944, layers=28, heads=28, kv_heads=4, vocabulary=152064),
    "Qwen2.5-VL-32B": _published(5120, 3456, intermediate=27648, layers=64, heads=40, kv_heads=8, vocabulary=152064),
}

FAMILY = Family(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    "vllm.model_executor.models.qwen2_5_vl",
    _arguments,
    _shape,
    adapter="qwen2.5-vl",
    shares_prompts=True,
    published=_PUBLISHED,
    repositories=repositories(_PUBLISHED, "Instruct")
    | {"ui-tars-1.5-7b": "Qwen2.5-VL-7B", "gui-owl-7b": "Qwen2.5-VL-7B"},
)
