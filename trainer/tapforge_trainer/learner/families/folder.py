"""What config.json of a model folder says, in either of the layouts that Hugging Face's folders have: fields of the
language model in `text_config`, or beside it at the top, as Qwen2-VL and Qwen2.5-VL were published. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapforge_trainer.model_source.quantization import quantization_of


class FolderError(ValueError):
    """A model folder that can't be used; the message names the file, what is wrong and the remedy."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Of a vision-language model."""

    folder: Path
    model_type: str
    #: rows of the embedding; the vocabulary may end before
    vocabulary: int
    image_token: int
    vision_start: int
    vision_end: int
    #: the language model's and the vision tower's own fields
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    #: the field at the top says that the head is the embedding; a family may heed another one, too (`Shape.tied`)
    tied: bool = False

    @staticmethod
    def of_folder(folder: Path, *, quantized: bool = False) -> ModelConfig:
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise FolderError(f"{path} is missing: {folder} is not a model folder in Hugging Face's layout") from error
        except ValueError as error:
            raise FolderError(f"{path} is not JSON: {error}") from error
        return ModelConfig.of_document(folder, config, quantized=quantized)

    @staticmethod
    def of_document(folder: Path, config: Any, *, quantized: bool = False) -> ModelConfig:
        """`config`: what config.json of `folder` holds. `quantized`: the weights may be, for what only counts them."""
        path = folder / "config.json"
        if not isinstance(config, Mapping):
            raise FolderError(f"{path} is {type(config).__name__}, not an object")
        if not quantized and (fault := quantization_of({"config.json": config})):
            raise FolderError(f"{path}: the model {fault}")
        text = config.get("text_config") or config
        vision = config.get("vision_config")
        for name, part in (("text_config", text), ("vision_config", vision)):
            if part is not None and not isinstance(part, Mapping):
                raise FolderError(f"{path}: {name} is {type(part).__name__}, not an object")
        kind = config.get("model_type")
        if kind is not None and not isinstance(kind, str):
            raise FolderError(f"{path}: model_type is {kind!r:.80}, not a name")
        try:
            return ModelConfig(
                folder,
                config["model_type"],
                text["vocab_size"],
                config["image_token_id"],
                config["vision_start_token_id"],
                config["vision_end_token_id"],
                text,
                config["vision_config"],
                bool(config.get("tie_word_embeddings")),
            )
        except KeyError as error:
            raise FolderError(
                f"{path} has no {error.args[0]}: use a vision-language model of a known family"
            ) from error
