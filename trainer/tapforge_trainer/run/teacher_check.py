"""Whether a teacher can read a policy's own tokens and screens: before anything starts, from both folders' files alone.

A distillation compares log-probabilities of the same ids at the same places. So both models have to mean the same by
every id, cut screens into the same patches, and be prompted alike. Sizes, layers and rows of padding after the
vocabulary may differ, as they do within a family. Needs no torch and no weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tapforge_api import TrainingRun
from tapforge_api.model import ModelSource

from ..agents import make_agent
from ..agents.made_up import made_up_episode
from ..learner.families import FolderError, ModelConfig
from ..learner.frame_store import PixelFormat
from ..model_source.ref import TEACHER
from ..model_source.tiny_base import base_folder
from .adapters import adapter_options

_INSTEAD: Final = (
    "collect its answers and imitate them (tapforge collect, tapforge sft), or name a teacher of the family"
)
#: of config.json, that passes over screens need
_SHARED: Final = ("image_token", "vision_start", "vision_end")
#: a screen that every family can show, pixels
_SCREEN: Final = (448, 896)


def teacher_errors(run: TrainingRun, policy: Path | None = None, teacher: Path | None = None) -> list[str]:
    """Why the model in `teacher` can't teach the one in `policy`; empty: it can. Without them those that the file
    names, if both are on this machine."""
    policy, teacher = policy or _here(run.spec.model.source), teacher or _taught_by(run)
    if policy is None or teacher is None:
        return []
    try:
        found = next(_differences(run, policy, teacher), None)
    except (FolderError, OSError, ValueError) as error:
        return [f"{TEACHER}: {teacher} can't be compared with the policy: {error}"]
    return [] if found is None else [f"{TEACHER}: {teacher} {found}: {_INSTEAD}"]


def _here(source: ModelSource) -> Path | None:
    if source.tiny is not None:
        return base_folder()
    return None if source.path is None else Path(source.path.folder)


def _taught_by(run: TrainingRun) -> Path | None:
    taught = run.spec.algorithm.distillation
    return None if taught is None or taught.teacher.path is None else Path(taught.teacher.path.folder)


def _differences(run: TrainingRun, policy: Path, teacher: Path) -> Iterator[str]:
    """The first one is enough: those after it may follow from it."""
    own, other = ModelConfig.of_folder(policy), ModelConfig.of_folder(teacher)
    if own.model_type != other.model_type:
        yield f"is of another family ({other.model_type}; the policy is {own.model_type})"
    ours, theirs = _vocabulary(policy), _vocabulary(teacher)
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            yield f"has {theirs[token]!r} as token {token}, which is {ours[token]!r} of the policy"
    if lacking := sorted(ours.keys() - theirs.keys()):
        yield f"lacks {len(lacking)} tokens of the policy, first {lacking[0]}, {ours[lacking[0]]!r}"
    if other.vocabulary <= max(ours):
        yield f"has {other.vocabulary} rows in its embedding, and the policy's tokens go up to {max(ours)}"
    for name in _SHARED:
        if getattr(own, name) != getattr(other, name):
            yield f"has {name}_id {getattr(other, name)}, where the policy has {getattr(own, name)}"
    # How small a frame may be is the policy's own affair: its frames are what the teacher sees.
    mine, yours = (replace(PixelFormat.of_folder(folder), least_tokens=1) for folder in (policy, teacher))
    if mine != yours:
        yield f"cuts screens otherwise ({yours}; the policy's are {mine})"
    if _prompts(run, policy) != _prompts(run, teacher):
        yield "is prompted otherwise by the run's adapter"


def _vocabulary(folder: Path) -> dict[int, str]:
    """Every token by its id, special ones included. Raises OSError and ValueError."""
    document: Any = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    try:
        found = {int(number): token for token, number in document["model"]["vocab"].items()}
        return found | {int(one["id"]): one["content"] for one in document.get("added_tokens") or ()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'tokenizer.json'} has no vocabulary of tokens by their ids") from error


def _prompts(run: TrainingRun, folder: Path) -> list[tuple[int, ...]]:
    """Ids of a made-up episode's prompts, with a placeholder per screen. Raises ValueError."""
    agent = make_agent(run.spec.model.adapter.name, folder, **adapter_options(run))
    return [tuple(prompt.ids) for prompt in made_up_episode(agent, *_SCREEN)]
