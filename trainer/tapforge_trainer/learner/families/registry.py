"""The model families by `model_type` of config.json: ours, and those that installed packages offer (`family.py`). No
torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tapforge_trainer import plugins

from . import qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe
from .family import Family
from .folder import FolderError, ModelConfig
from .shape import Shape

ENTRY_POINTS: Final = "tapforge.families"
_BUILT_IN: Final[Mapping[str, Family]] = {
    module.FAMILY.model_type: module.FAMILY for module in (qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe)
}


def families() -> Mapping[str, Family]:
    """All that there are. Raises as `family_named` does."""
    return {name: family_named(name) for name in _names()}


def family_named(model_type: str) -> Family:
    """Raises FolderError for one that is not here, ValueError for one that is offered twice, TypeError for an entry
    point that is not a `Family` of this name."""
    point = plugins.find(ENTRY_POINTS, model_type, _BUILT_IN)
    if model_type in _BUILT_IN:
        return _BUILT_IN[model_type]
    if point is None:
        raise FolderError(f"this version trains no {model_type} models; it trains {', '.join(_names())}")
    found = point.load()
    if not isinstance(found, Family) or found.model_type != model_type:
        raise TypeError(
            f"the entry point {point.value!r} of {ENTRY_POINTS} is not a Family {model_type!r}: {found!r:.200}"
        )
    return found


def family_of(config: ModelConfig) -> Family:
    """Raises as `family_named` does."""
    if config.model_type not in _names():
        raise FolderError(
            f"{config.folder} holds a {config.model_type} model; this version trains {', '.join(_names())}"
        )
    return family_named(config.model_type)


def _names() -> list[str]:
    return [*_BUILT_IN, *(name for name in plugins.names(ENTRY_POINTS) if name not in _BUILT_IN)]


def shape_of(config: ModelConfig) -> Shape:
    """Sizes of the model. Raises FolderError for a config.json that is none of a known family's."""
    return family_of(config).shape(config)
