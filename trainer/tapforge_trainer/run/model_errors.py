"""Why a model can't do what a run asks of it, as far as its folder shows, before anything is started. No torch."""

from __future__ import annotations

from pathlib import Path

from tapforge_api import TrainingRun

from ..learner.families import FolderError, ModelConfig, family_of


def model_errors(run: TrainingRun, folder: Path) -> list[str]:
    """One message each; what can't be read at all is reported by what reads the folder."""
    return [error for error in (_context(run, folder), _adapters(run, folder)) if error is not None]


def _context(run: TrainingRun, folder: Path) -> str | None:
    from ..learner.frame_store import PixelFormat
    from ..sync.proof import least_context

    try:
        least = least_context(PixelFormat.of_folder(folder))
    except (OSError, ValueError):
        return None
    tokens = run.spec.model.context_tokens
    if tokens >= least:
        return None
    return (
        f"spec.model.contextTokens: {tokens} is too little for the model in {folder}: one of its smallest frames and a "
        f"short answer, by which new weights are checked, take {least} tokens; give at least that many"
    )


def _adapters(run: TrainingRun, folder: Path) -> str | None:
    lora = run.spec.model.lora
    if lora is None:
        return None
    try:
        family = family_of(ModelConfig.of_folder(folder))
    except (OSError, FolderError):
        return None
    try:
        family.adapted(lora.targets)
    except FolderError as error:
        return f"spec.model.lora.targets: {error}"
    return None
