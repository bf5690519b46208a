"""The model families that a run can train, one file each. A new one is a file that makes a `Family`, and a line in
`registry.py` or an entry point. No torch here."""

from __future__ import annotations

from .family import Family
from .folder import FolderError, ModelConfig
from .registry import families, family_named, family_of, shape_of
from .shape import LayerShape, Shape, VisionShape

__all__ = [
    "Family",
    "FolderError",
    "LayerShape",
    "ModelConfig",
    "Shape",
    "VisionShape",
    "families",
    "family_named",
    "family_of",
    "shape_of",
]
