"""Qwen2-VL: published without "language_model" in its names; its tower attends over whole frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .family import Family, vision_arguments
from .folder import ModelConfig
from .published import flat, repositories
from .shape import AttentionShape, LayerShape, Section, Shape, VisionShape, dense_layer, language_model, tower


def layer(text: Section, attention: AttentionShape) -> LayerShape:
    """Also Qwen2.5-VL's: biases on queries, keys and values."""
    return dense_layer(text, attention, attention.query + 2 * attention.key_value)


def tied(config: ModelConfig) -> bool:
    """Also Qwen2.5-VL's. Both were saved with `tie_word_embeddings` among the language model's fields alone, and
    transformers heeds it there as well as at the top."""
    return config.tied or bool(config.text.get("tie_word_embeddings"))


def _shape(config: ModelConfig) -> Shape:
    text, attention = Section.text(config), AttentionShape.of(Section.text(config))
    of_all, vision = layer(text, attention), _tower(Section.vision(config))
    return language_model(config, text, attention, lambda number: of_all, vision, qk_norm=False, tied=tied(config))


def _tower(vision: Section) -> VisionShape:
    """Its width is called embed_dim, and the language model's hidden_size."""
    width = vision.number("embed_dim", default=1280)
    return tower(
        vision,
        width=width,
        intermediate=width * vision.number("mlp_ratio", default=4),
        out=vision.number("hidden_size"),
        activation="quick_gelu",
        depth=32,
        patch=14,
    )


def _published(hidden: int, **text: Any) -> Mapping[str, Any]:
    return flat("qwen2_vl", {"embed_dim": 1280, "mlp_ratio": 4, "hidden_size": hidden}, hidden=hidden, **text)


_PUBLISHED = {
    "Qwen2-VL-2B": _published(1536, intermediate=8960, layers=28, heads=12, kv_heads=2, vocabulary=151936, tied=True),
    "Qwen2-VL-7B": _published(3584, intermediate=18944, layers=28, heads=28, kv_heads=4, vocabulary=152064),
}

FAMILY = Family(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    "vllm.model_executor.models.qwen2_vl",
    vision_arguments,
    _shape,
    shares_prompts=True,
    published=_PUBLISHED,
    repositories=repositories(_PUBLISHED, "Instruct")
    | {
        "ui-tars-2b-sft": "Qwen2-VL-2B",
        "ui-tars-7b-sft": "Qwen2-VL-7B",
        "ui-tars-7b-dpo": "Qwen2-VL-7B",
        "aguvis-7b-720p": "Qwen2-VL-7B",
    },
)
