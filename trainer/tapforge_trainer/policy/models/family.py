"""What differs between model families, as far as the rest of the trainer has to know it. No torch.

A family's own file has what needs torch; it is imported where a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from .folder import FolderError, ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture of Hugging Face's, which vLLM knows by the same name."""

    #: of config.json
    model_type: str
    architecture: str
    #: module of vllm.model_executor.models
    vllm_module: str
    #: linear layers of the language model that LoRA adapts where nobody says which
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            Family("qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl"),
            Family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
            Family("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl"),
            Family(
                "qwen3_vl_moe",
                "Qwen3VLMoeForConditionalGeneration",
                "qwen3_vl_moe",
                lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
            ),
        )
    }
)


def family_of(config: ModelConfig) -> Family:
    """Raises FolderError for an architecture that is not here."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise FolderError(
            f"{config.folder} holds a {config.model_type} model; this version trains {', '.join(FAMILIES)}"
        )
    return family
