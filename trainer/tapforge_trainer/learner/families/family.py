"""What differs between model families: all that the rest of the trainer has to know of one. No torch at module level.

A family is one file that makes a `Family`. Another package offers its own by an entry point in the group
`tapforge.families`:

    [project.entry-points."tapforge.families"]
    its_model_type = "my_package.module:FAMILY"

In all of them `model.visual` is the vision tower with its `blocks` and `merger`, `model.language_model` the language
model with `embed_tokens`, `layers` and `norm`, and `lm_head` the head. Names of tensors are of three kinds: a
parameter's, the published files' (`parameter_of`) and the engine's, which takes parameters' names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from tapforge_trainer.learner.positions import Positions, grid_positions

from .folder import FolderError, ModelConfig
from .shape import Shape

#: (vision configuration, patches (time, rows, columns) [frames, 3]) -> arguments of the tower's forward pass
VisionArguments = Callable[[Any, Any], dict[str, Any]]

_LANGUAGE = r"model\.language_model\.layers\.\d+\."


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture of Hugging Face's, which vLLM knows by the same name."""

    #: of config.json
    model_type: str
    architecture: str
    #: the module that has vLLM's class of that name
    engine_module: str
    #: what the tower would else compute from numbers that it reads from the device
    vision_arguments: VisionArguments
    #: sizes by config.json, which memory and operations are planned by. Raises FolderError
    shape: Callable[[ModelConfig], Shape]
    #: of the tokens of a sequence
    positions: Positions = grid_positions
    #: whether attention that looks back over the whole sequence is all by which a token of the language model sees
    #: others: then samples share what is computed of equal prompts (`learner/prompts.py`)
    shares_prompts: bool = False
    #: linear layers of the language model that LoRA adapts by default
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    #: why engines take no adapters alone, so that they are merged; "": they do
    merged_only: str = ""
    #: parameters whose last two sides are swapped in files and for the engine
    transposed: re.Pattern[str] | None = None
    #: the agent adapter of the model's makers; none where several may be right
    adapter: str | None = None
    #: published models: name -> what config.json says, as far as sizes go
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: repositories, without their owner and in lower case, whose model is one of these in size
    repositories: Mapping[str, str] = field(default_factory=dict)

    def parameter_of(self, name: str) -> str:
        """The parameter's name of a tensor in published files: the older families were published before language model
        and vision tower were parts of one `model`."""
        if name.startswith("visual."):
            return f"model.{name}"
        if name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual.")):
            return f"model.language_model.{name.removeprefix('model.')}"
        return name

    def swapped(self, parameter: str) -> bool:
        """Whether files and engine have the parameter's last two sides the other way round."""
        return self.transposed is not None and self.transposed.search(parameter) is not None

    def for_engine(self, parameter: str, tensor: Any) -> Any:
        """The tensor as vLLM's `load_weights` takes it under the parameter's name."""
        return tensor.transpose(-1, -2) if self.swapped(parameter) else tensor

    def lora_pattern(self, targets: Sequence[str] = ()) -> str:
        """A regular expression that matches the whole names, below the model, of the linear layers that are adapted:
        the language model's only, because vision towers have layers of the same names."""
        names = "|".join(map(re.escape, targets or self.lora_targets))
        return rf"{_LANGUAGE}(?:\w+\.)*(?:{names})"

    def adapted(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """The layers that LoRA adapts. Raises FolderError for a name that no linear layer of the language model has."""
        unknown = [name for name in wanted if name not in self.lora_targets]
        if unknown:
            near = get_close_matches(unknown[0], self.lora_targets, 1)
            guess = f"; did you mean {near[0]}?" if near else "."
            raise FolderError(
                f"{unknown[0]} is not a linear layer of the language model of {self.model_type}{guess} It has "
                f"{', '.join(self.lora_targets)}"
            )
        return tuple(wanted) or self.lora_targets


def vision_arguments(vision: Any, grids: Any) -> dict[str, Any]:
    """What every family's tower needs: where frames begin, the longest one, and each patch's place."""
    from transformers import vision_utils

    bounds = vision_utils.get_vision_cu_seqlens(grids)
    return {
        "cu_seqlens": bounds,
        "max_seqlen": int((bounds[1:] - bounds[:-1]).max()),
        "position_ids": vision_utils.get_vision_position_ids(grids, vision.spatial_merge_size),
    }
