"""The model families that a run can train, one file each; `family_of` finds that of a model folder. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from . import qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe
from .family import Family
from .folder import FolderError, ModelConfig

__all__ = ["FAMILIES", "Family", "FolderError", "ModelConfig", "family_of"]

#: by `model_type` of config.json
FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {module.FAMILY.model_type: module.FAMILY for module in (qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe)}
)


def family_of(config: ModelConfig) -> Family:
    """Raises FolderError for an architecture that is not here."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise FolderError(
            f"{config.folder} holds a {config.model_type} model; this version trains {', '.join(FAMILIES)}"
        )
    return family
