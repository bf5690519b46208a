"""The learner's policy around a transformers model, and the parts of the model that are sharded on their own.

torch is imported where a policy is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tapforge_trainer.learner.batches import Vocabulary
from tapforge_trainer.learner.frame_store import PixelFormat
from tapforge_trainer.placement.settings import LearnerSettings

from . import family_of
from .folder import ModelConfig

if TYPE_CHECKING:
    from torch import nn

    from tapforge_trainer.learner.packed import PackedPolicy


def build(
    config: ModelConfig, settings: LearnerSettings, form: PixelFormat, vocabulary: Vocabulary, *, model: nn.Module
) -> PackedPolicy:
    """`model`: the family's `ForConditionalGeneration`, on any device, before it is sharded; its forward functions are
    replaced. Raises FolderError for an architecture that is not known."""
    family = family_of(config)
    model.train()
    if settings.activation_checkpointing:
        # Per language layer, and per vision block of a tower that learns.
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for stack in (transformer_layers(model), vision_blocks(model)):
            for one in stack[checkpointed(len(stack), settings.checkpointed_share) :]:
                one.gradient_checkpointing = False
    from tapforge_trainer.learner.linear import accelerate
    from tapforge_trainer.learner.packed import PackedPolicy

    if settings.device == "cpu":
        accelerate(model)
    return PackedPolicy(
        model,
        family.vision_arguments,
        form,
        vocabulary,
        freeze_vision=settings.freeze_vision,
        kernel=settings.attention,
    )


def checkpointed(layers: int, share: float) -> int:
    """How many of the layers, the first ones, keep their inputs alone: at least one. The backward pass begins with the
    last ones, so that what they keep is gone before an earlier layer is computed again."""
    return max(1, round(share * layers))


def transformer_layers(model: Any) -> list[nn.Module]:
    """The language model's, in order."""
    return list(model.model.language_model.layers)


def vision_blocks(model: Any) -> list[nn.Module]:
    """The tower's, in order."""
    return list(model.model.visual.blocks)


def embedding(model: Any) -> nn.Module:
    """Of tokens. Its weight may be the head's too (`tied`)."""
    return model.model.language_model.embed_tokens


def head(model: Any) -> nn.Module:
    """The policies call it as a module, once per pass."""
    return model.lm_head


def tied(model: Any) -> bool:
    """Whether embedding and head are one parameter: they then belong to one group of shards."""
    return embedding(model).weight is head(model).weight
