"""Qwen3-VL: its tower's learned positions are interpolated to the frame's size, and some of its blocks feed the first
layers of the language model (deepstack)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from .family import Family, vision_arguments
from .folder import ModelConfig
from .published import nested, repositories
from .shape import AttentionShape, Section, Shape, VisionShape, dense_layer, language_model, merger, tower


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


def attention_biases(text: Section, attention: AttentionShape) -> int:
    """Norms on the heads of queries and keys, and biases where the model's file says so. Also Qwen3-VL-MoE's."""
    biases = attention.query + 2 * attention.key_value + attention.hidden
    return 2 * attention.head_dim + biases * text.flag("attention_bias")


def vision_shape(vision: Section, hidden: int) -> VisionShape:
    """Also Qwen3-VL-MoE's. `hidden`: the language model's width."""
    width, out = vision.number("hidden_size"), vision.number("out_hidden_size", default=hidden)
    plain = tower(
        vision,
        width=width,
        intermediate=vision.number("intermediate_size", default=4304),
        out=out,
        activation="gelu",
        depth=27,
        patch=16,
    )
    levels = len(vision.numbers("deepstack_visual_indexes", default=(8, 16, 24)))
    merged = width * plain.merge**2
    deep = levels * (2 * merged + merger(width, plain.merge, out))
    learned = width + vision.number("num_position_embeddings", default=2304) * width  # with the embedding's bias
    return replace(plain, deepstack=levels, rest=plain.rest + learned + deep)


def _shape(config: ModelConfig) -> Shape:
    text, attention = Section.text(config), AttentionShape.of(Section.text(config))
    of_all = dense_layer(text, attention, attention_biases(text, attention))
    vision = vision_shape(Section.vision(config), attention.hidden)
    return language_model(config, text, attention, lambda number: of_all, vision, qk_norm=True, tied=config.tied)


#: towers of published models
LARGE: Final[Mapping[str, Any]] = MappingProxyType(
    {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
)
_SMALL: Final[Mapping[str, Any]] = MappingProxyType(
    {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
)


def _published(tower: Mapping[str, Any], **text: Any) -> Mapping[str, Any]:
    return nested("qwen3_vl", tower, **text)


_PUBLISHED = {
    "Qwen3-VL-2B": _published(_SMALL, hidden=2048, intermediate=6144, layers=28, heads=16, kv_heads=8, tied=True),
    "Qwen3-VL-4B": _published(_SMALL, hidden=2560, intermediate=9728, layers=36, heads=32, kv_heads=8, tied=True),
    "Qwen3-VL-8B": _published(LARGE, hidden=4096, intermediate=12288, layers=36, heads=32, kv_heads=8),
    "Qwen3-VL-32B": _published(LARGE, hidden=5120, intermediate=25600, layers=64, heads=64, kv_heads=8),
}

FAMILY = Family(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    "vllm.model_executor.models.qwen3_vl",
    arguments,
    _shape,
    adapter="qwen3-vl",
    shares_prompts=True,
    published=_PUBLISHED,
    repositories=repositories(_PUBLISHED, "Instruct", "Thinking")
    | {"mai-ui-2b": "Qwen3-VL-2B", "mai-ui-8b": "Qwen3-VL-8B"},
)
