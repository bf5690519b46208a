"""The learner's weights as a Hugging Face folder that transformers and vLLM load: checkpoint names, tied weights once,
config, tokenizer and processor files of the model that training began with.

The folder appears by one rename, complete or not at all.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from .learner import Learner

if TYPE_CHECKING:
    from .rank import Rank

#: files of the original folder that are not copied: weights, and what is written anew
_OWN = (".safetensors", ".bin", ".pt", ".index.json")
_FRESH = {"config.json", "generation_config.json"}


async def export(learner: Learner, folder: Path) -> Path:
    """Writes the folder; one that is there already is replaced."""
    partial = folder.with_name(f".partial-{folder.name}")
    await asyncio.to_thread(_prepare, folder, partial)
    try:
        await learner.run(_export_rank, str(partial))
        await asyncio.to_thread(_publish, Path(learner.settings.model), partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _export_rank(rank: Rank, folder: str) -> None:
    weights = rank.weights()
    if rank.rank == 0:
        rank.policy.model.save_pretrained(folder, state_dict=weights)


def _prepare(folder: Path, partial: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()


def _publish(model: Path, partial: Path, folder: Path) -> None:
    for path in model.iterdir():
        if path.is_file() and path.name not in _FRESH and not path.name.endswith(_OWN):
            shutil.copyfile(path, partial / path.name)
    for path in partial.iterdir():
        os.chmod(path, 0o644)  # the weights' writer leaves them readable by its user alone
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
