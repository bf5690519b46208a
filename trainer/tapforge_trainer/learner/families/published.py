"""Fields of config.json that published models of several families share, as far as sizes go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TOKENS: Mapping[str, int] = {
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def repositories(names: Iterable[str], *kinds: str) -> dict[str, str]:
    """Their makers' repositories of these kinds each -> name."""
    return {f"{name}-{kind}".lower(): name for name in names for kind in kinds}


def flat(
    kind: str,
    tower: Mapping[str, int],
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    tied: bool = False,
) -> Mapping[str, Any]:
    """Of Qwen2-VL and Qwen2.5-VL: the language model's fields stand at the top."""
    shared = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {
        "model_type": kind,
        **TOKENS,
        "tie_word_embeddings": tied,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {**shared, **tower},
    }


def nested(
    kind: str,
    tower: Mapping[str, Any],
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    tied: bool = False,
    **more: int,
) -> Mapping[str, Any]:
    """Of Qwen3-VL and its mixtures. `more`: of the language model."""
    shared = {"num_heads": 16, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {
        "model_type": kind,
        **TOKENS,
        "tie_word_embeddings": tied,
        "text_config": {
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "vocab_size": 151936,
            "attention_bias": False,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
            **more,
        },
        "vision_config": {**tower, **shared, "num_position_embeddings": 2304, "out_hidden_size": hidden},
    }
