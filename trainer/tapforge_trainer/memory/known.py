"""Facts that a plan needs no download for: sizes of published models, as their config.json has them, and of GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tapforge_trainer.learner.families import ModelConfig

MIB: Final = 2**20
GIB: Final = 2**30

_TOKENS = {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653}


def _qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tower: str, tied: bool, **more: int
) -> Mapping[str, Any]:
    vision = {
        "large": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]},
        "small": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]},
    }[tower]
    text = {
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
    }
    shared = {"num_heads": 16, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {
        "model_type": "qwen3_vl_moe" if more else "qwen3_vl",
        **_TOKENS,
        "tie_word_embeddings": tied,
        "text_config": text,
        "vision_config": {**vision, **shared, "num_position_embeddings": 2304, "out_hidden_size": hidden},
    }


def _qwen2(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    vision: Mapping[str, int],
    tied: bool = False,
) -> Mapping[str, Any]:
    shared = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return {
        "model_type": "qwen2_vl" if "embed_dim" in vision else "qwen2_5_vl",
        **_TOKENS,
        "tie_word_embeddings": tied,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {**shared, **vision},
    }


def _tower_25(out: int, intermediate: int = 3420) -> Mapping[str, int]:
    return {"hidden_size": 1280, "intermediate_size": intermediate, "out_hidden_size": out}


def _tower_2(out: int) -> Mapping[str, int]:
    return {"embed_dim": 1280, "mlp_ratio": 4, "hidden_size": out}


_MOE = {
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
}

#: what config.json of a published model says, as far as sizes go
CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "Qwen3-VL-2B": _qwen3(2048, 6144, 28, 16, 8, "small", True),
        "Qwen3-VL-4B": _qwen3(2560, 9728, 36, 32, 8, "small", True),
        "Qwen3-VL-8B": _qwen3(4096, 12288, 36, 32, 8, "large", False),
        "Qwen3-VL-32B": _qwen3(5120, 25600, 64, 64, 8, "large", False),
        "Qwen3-VL-30B-A3B": _qwen3(2048, 6144, 48, 32, 4, "large", False, **_MOE),
        "Qwen2.5-VL-3B": _qwen2(2048, 11008, 36, 16, 2, 151936, _tower_25(2048), tied=True),
        "Qwen2.5-VL-7B": _qwen2(3584, 18944, 28, 28, 4, 152064, _tower_25(3584)),
        "Qwen2.5-VL-32B": _qwen2(5120, 27648, 64, 40, 8, 152064, _tower_25(5120, 3456)),
        "Qwen2-VL-2B": _qwen2(1536, 8960, 28, 12, 2, 151936, _tower_2(1536), tied=True),
        "Qwen2-VL-7B": _qwen2(3584, 18944, 28, 28, 4, 152064, _tower_2(3584)),
    }
)

#: repositories whose model is one of these in size; the owner is left out. Upper and lower case are the same
_SAME: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{
            f"{name}-{kind}".lower(): name
            for name in CONFIGS
            for kind in (("Instruct", "Thinking") if name.startswith("Qwen3") else ("Instruct",))
        },
        "ui-tars-1.5-7b": "Qwen2.5-VL-7B",
        "gui-owl-7b": "Qwen2.5-VL-7B",
        "ui-tars-2b-sft": "Qwen2-VL-2B",
        "ui-tars-7b-sft": "Qwen2-VL-7B",
        "ui-tars-7b-dpo": "Qwen2-VL-7B",
        "aguvis-7b-720p": "Qwen2-VL-7B",
        "mai-ui-2b": "Qwen3-VL-2B",
        "mai-ui-8b": "Qwen3-VL-8B",
    }
)


def config_of(repo: str) -> ModelConfig | None:
    """Of a repository of Hugging Face; None: it is not known here."""
    name = _SAME.get(repo.rpartition("/")[2].lower())
    return None if name is None else ModelConfig.of_document(Path(repo), CONFIGS[name])


#: MiB that nvidia-smi reports; a name is one of the words of nvidia.com/gpu.product, without "NVIDIA"
GPUS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "B200": 183_359,
        "H200": 143_771,
        "H100-80GB": 81_559,
        "H100-PCIe": 81_559,
        "H100-NVL": 95_830,
        "H20": 97_871,
        "A100-80GB": 81_920,
        "A100-40GB": 40_960,
        "L40S": 46_068,
        "L40": 46_068,
        "L4": 23_034,
        "A10G": 23_028,
        "A10": 23_028,
        "A40": 46_068,
        "RTX-A6000": 49_140,
        "RTX-6000-Ada": 49_140,
        "RTX-5090": 32_607,
        "RTX-4090": 24_564,
        "RTX-3090": 24_576,
        "V100-32GB": 32_768,
        "V100-16GB": 16_384,
        "T4": 15_360,
    }
)


def gpu_bytes(product: str) -> int | None:
    """Of a GPU, or of a slice of one, by its name or its nvidia.com/gpu.product; None: not known here, or several that
    differ."""
    words = set(product.upper().replace("_", "-").replace(" ", "-").split("-"))
    if "MIG" in words:  # its slice is the last word, such as 1g.10gb
        slices = [int(found[1]) for word in words if (found := re.fullmatch(r"\d+G\.(\d+)GB.*", word))]
        return slices[0] * 1024 * MIB if len(slices) == 1 else None
    if "LAPTOP" in words:  # another card of the same name
        return None
    known = {name: set(name.upper().split("-")) for name in GPUS}
    inside = [name for name, its in known.items() if its <= words]
    if inside:
        return GPUS[max(inside, key=len)] * MIB
    sizes = {GPUS[name] for name, its in known.items() if words <= its}
    return sizes.pop() * MIB if len(sizes) == 1 else None
