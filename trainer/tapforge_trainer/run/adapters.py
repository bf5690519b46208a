"""From a run to its adapter: the options that it is made with, and what is wrong with them before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tapforge_api import TrainingRun

from ..placement.settings import PROMPTED


def adapter_options(run: TrainingRun) -> dict[str, Any]:
    """Of `make_agent`, but the adapter's name and the folder."""
    model, adapter = run.spec.model, run.spec.model.adapter
    return {
        "prompt": adapter.prompt,
        "history_images": adapter.images,
        "history_steps": adapter.history_steps,
        "context_tokens": model.context_tokens,
        "response_tokens": run.spec.rollout.response_tokens,
        "min_pixels": model.min_pixels,
        "max_pixels": model.max_pixels or adapter.max_pixels,
        "prompt_file": None if adapter.prompt_file is None else Path(adapter.prompt_file),
        "context": adapter.context,
        "keep": None if adapter.history.blocks is None else adapter.history.blocks.keep,
    }


def prompted_of(run: TrainingRun) -> dict[str, Any]:
    """How the run's policy is prompted, as the file spells it: what `PROMPTED` in an export holds."""
    fields = {"name", "prompt", "history", "history_images", "history_steps"}
    return run.spec.model.adapter.model_dump(mode="json", by_alias=True, exclude_none=True, include=fields)


def prompted_by(folder: Path) -> dict[str, Any] | None:
    """How the model in this folder was prompted in the run that exported it; None: it is not an export, or of a release
    that didn't write it."""
    try:
        found = json.loads((folder / PROMPTED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def adapter_errors(run: TrainingRun, folder: Path | None) -> list[str]:
    """What is wrong with the adapter, as far as names, files and the model's image processor show; complete sentences.
    `folder`: the model's, where it is at hand. No tokenizer is loaded."""
    from ..agents.context import ContextError, context_of
    from ..agents.prompt_file import PromptFile
    from ..agents.registry import dialect_of
    from ..agents.vision import VisionGrid

    options, adapter = adapter_options(run), run.spec.model.adapter
    errors = []
    image_allowed = True
    try:
        dialect = dialect_of(adapter.name, folder)
        image_allowed = dialect is None or dialect.history != "all"
    except ValueError as error:
        errors.append(f"spec.model.adapter.name: {error}")
    if options["context"] is not None:
        try:
            context_of(options["context"])
        except ContextError as error:
            errors.append(f"spec.model.adapter.context: {error}")
    if options["prompt_file"] is not None:
        try:
            PromptFile(options["prompt_file"], image_allowed=image_allowed)
        except ValueError as error:
            errors.append(f"spec.model.adapter.promptFile: {error}")
        if adapter.prompt != "full":
            errors.append("spec.model.adapter.promptFile: needs adapter.prompt full")
    if folder is not None:
        try:
            VisionGrid.load(folder).bounded(options["min_pixels"], options["max_pixels"], otherwise=1)
        except (ValueError, OSError) as error:
            errors.append(f"spec.model: {error}")
    return errors
