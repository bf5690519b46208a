"""Whether what describes a model fits together, before anything is started: architecture, tokenizer, image processor.
What the weights' files hold is checked where they are found (`model_source`) and read (`learner/sharding.py`). No
torch."""

from __future__ import annotations

from pathlib import Path

from tapforge_trainer.agents.tokens import Tokens
from tapforge_trainer.learner.frame_store import PixelFormat

from . import family_of
from .folder import FolderError, ModelConfig


def check_folder(folder: Path) -> ModelConfig:
    """Raises FolderError for an architecture that is not known, a tokenizer without the special tokens or with other
    ids than the config's, an image processor that cuts other patches than the vision tower takes, and layers that see
    the last tokens only."""
    config = ModelConfig.of_folder(folder)
    family_of(config)
    _check_windows(config)
    _check_tokens(config)
    _check_pixels(config)
    return config


def _check_windows(config: ModelConfig) -> None:
    """The learner's attention has no window; engines have."""
    text = config.text
    first, layers = text.get("max_window_layers", 0), text.get("num_hidden_layers", 0)
    if text.get("use_sliding_window") and text.get("sliding_window") and first < layers:
        raise FolderError(
            f"{config.folder}/config.json: use_sliding_window is true, so layers from {first} on see the last "
            f"{text['sliding_window']} tokens only, which the learner doesn't compute. Where prompts are shorter than "
            "that, set it to false: nothing else changes"
        )


def _check_tokens(config: ModelConfig) -> None:
    try:
        tokens = Tokens.load(config.folder)
    except (OSError, ValueError) as error:
        raise FolderError(str(error)) from error
    pairs = {
        "image_token_id": (config.image_token, tokens.image_pad),
        "vision_start_token_id": (config.vision_start, tokens.vision_start),
        "vision_end_token_id": (config.vision_end, tokens.vision_end),
    }
    for field, (announced, there) in pairs.items():
        if announced != there:
            raise FolderError(
                f"{config.folder}: {field} is {announced} in config.json and {there} in tokenizer.json; the two are of "
                "different models: fetch both again"
            )
    largest = max(tokens.allowed_ids[-1], *tokens.banned_ids)
    if largest >= config.vocabulary:
        raise FolderError(
            f"{config.folder}: tokenizer.json has the id {largest}, but config.json announces a vocabulary of "
            f"{config.vocabulary}; the two are of different models: fetch both again"
        )


def _check_pixels(config: ModelConfig) -> None:
    try:
        form = PixelFormat.of_folder(config.folder)
    except (OSError, ValueError, KeyError) as error:
        raise FolderError(f"{config.folder}: preprocessor_config.json can't be used: {error}") from error
    announced = tuple(config.vision.get(field) for field in ("patch_size", "spatial_merge_size"))
    if None not in announced and announced != (form.patch, form.merge):
        raise FolderError(
            f"{config.folder}: preprocessor_config.json cuts patches of {form.patch} pixels and merges {form.merge} a "
            f"side, but config.json announces {announced[0]} and {announced[1]}: fetch both again"
        )
