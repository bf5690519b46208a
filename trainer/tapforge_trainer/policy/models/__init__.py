"""The model families that a run can train, one file each; `family_of` finds that of a model folder. No torch here."""

from .family import FAMILIES, Family, family_of
from .folder import FolderError, ModelConfig

__all__ = ["FAMILIES", "Family", "FolderError", "ModelConfig", "family_of"]
