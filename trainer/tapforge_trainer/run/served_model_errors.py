"""What is wrong with `spec.models` and what asks them, before anything is started, as far as the models are at hand.

Of a request's images as many are allowed as judges, or a teacher's prompts, have at most; a model that takes none can't
be asked where there are some.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tapforge_api import TrainingRun
from tapforge_api.models import ServedModel, own_models
from tapforge_api.rewards import Rewards

from ..judges.conventions import CONVENTIONS
from ..model_source.hub import cached_snapshot
from ..model_source.quantization import DOCUMENTS, quantization_of
from ..model_source.tiny_base import tiny_folder
from ..rollout.frame_budget import judged_tokens

#: parts of names of fields of config.json that a model has which takes images
_SEES = ("vision", "visual", "image", "img")


def served_model_errors(run: TrainingRun, sent: Mapping[str, int]) -> list[str]:
    """As far as the models are at hand. `sent`: images of a request at most, by the name of the model that is asked;
    of others, which a command doesn't start, nothing has to be there."""
    found = []
    for model in run.spec.models:
        if model.name not in sent:
            continue
        folder = _at_hand(model)
        if folder is not None and (folder / "config.json").is_file():
            found += folder_errors(model, folder, sent[model.name], run.spec.device)
        elif model.source.path is not None:
            place = model.source.path.folder
            found.append(f"spec.models[{model.name}].source.path.folder: {place} holds no config.json")
    return found


def images_sent(rewards: Iterable[Rewards]) -> dict[str, int]:
    """Images of a request at most, by the name of the model that is asked."""
    sent: dict[str, int] = {}
    for one in rewards:
        for stream in one.streams:
            if stream.judge is None:
                continue
            convention = CONVENTIONS[stream.judge.prompt or ("task" if stream.kind == "judge" else "step")]
            most = stream.judge.screens if (convention.kind, convention.screens) == ("task", "all") else 2
            most = 0 if convention.screens == "none" else most
            for name in own_models([one.model_copy(update={"streams": (stream,)})]):
                sent[name] = max(sent.get(name, 0), most)
    return sent


def notes_on_models(run: TrainingRun, rewards: Iterable[Rewards]) -> list[str]:
    """Models that a run doesn't start; and where screens of a question may be more than a model's context holds: it
    would refuse each such question."""
    sent, each, found = images_sent(rewards), judged_tokens(run), []
    for model in run.spec.models:
        if model.name not in sent:
            found.append(
                f"spec.models[{model.name}] is asked by no judge: a run doesn't start it, and needs no GPUs for it; "
                f"tapforge collect --teacher {model.name} serves it"
            )
        images = sent.get(model.name, 0)
        if images * each > model.context_tokens:
            smaller = ", recording.screens to model" if run.spec.recording.screens == "device" else ""
            found.append(
                f"spec.models[{model.name}].contextTokens ({model.context_tokens:,}) is less than the {images} screens "
                f"of a question may have, each up to {each:,} tokens: raise it, or lower the judge's screens{smaller}"
            )
    return found


def folder_errors(model: ServedModel, folder: Path, images: int, device: str | None) -> list[str]:
    """By the files of its folder. `images`: of a request, at most; `device`: None: not known yet."""
    where, documents = f"spec.models[{model.name}]", _documents(folder)
    config = documents.get("config.json", {})
    text = config.get("text_config")
    positions = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    wrong = []
    if images and config and not any(part in name for name in config for part in _SEES):
        wrong.append(
            f"{where}: {folder} takes no images by its config.json, and a request has up to {images} screens: take "
            "a vision-language model, or a judge whose prompt shows no screen"
        )
    if isinstance(positions, int) and model.context_tokens > positions:
        more = f"{model.context_tokens:,} is more than the model's {positions:,}"
        wrong.append(f"{where}.contextTokens: {more}; lower it")
    if device == "cpu" and quantization_of(documents) is not None:
        wrong.append(
            f"{where}: {folder} holds quantized weights, which are served on GPUs alone; take the model that it was "
            "quantized from"
        )
    return wrong


def _documents(folder: Path) -> Mapping[str, Any]:
    found = {}
    for name in DOCUMENTS:
        try:
            document = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        if isinstance(document, dict):
            found[name] = document
    return found


def _at_hand(model: ServedModel) -> Path | None:
    """A folder with the model's config.json; None: nothing is known without a download."""
    source = model.source
    if source.path is not None:
        return Path(source.path.folder)
    if source.hugging_face is not None:
        return cached_snapshot(source.hugging_face.repo, source.hugging_face.revision)
    try:
        return tiny_folder(source.tiny.weights) if source.tiny is not None else None
    except FileNotFoundError:
        return None
