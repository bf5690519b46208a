"""Pin a source, and resolve what was pinned."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tapforge_api.algorithm import Teacher
from tapforge_api.model import ModelSource

from . import hub, storage
from .folder import folder_faults, quantization_fault
from .ref import POLICY, ModelError, ModelRef, ModelRefused
from .tiny_base import cache_root, tiny_folder


def pin(source: ModelSource | Teacher, earlier: dict[str, Any] | None = None, field: str = POLICY) -> ModelRef:
    """`earlier`: `pinned` of an earlier session of the run, whose commit or files go on to be used; `field`: of the
    spec, that `source` is. Raises ModelError."""
    if source.path is not None:
        return replace(ModelRef.of_folder(Path(source.path.folder)), source=field)
    if source.hugging_face is not None:
        return hub.pinned(source.hugging_face, earlier, field)
    if source.object_storage is not None:
        return storage.pinned(source.object_storage.uri, earlier, field)
    tiny = None if isinstance(source, Teacher) else source.tiny
    return ModelRef("tiny", "" if tiny is None or tiny.weights == "base" else tiny.weights)


def resolve(ref: ModelRef, *, weights: bool = True, seconds: float = 3600.0, quantized: bool = False) -> Path:
    """The model's folder on this node, fetched where it is not there. Without `weights`, which may be missing then: for
    callers that only describe it. `seconds`: for the wait for another process that fetches it. `quantized`: the weights
    may be, for callers that only answer with them. Raises ModelError."""
    match ref.kind:
        case "tiny":
            try:
                return tiny_folder(ref.place)
            except FileNotFoundError as error:
                raise ModelError(str(error)) from error
        case "folder":
            folder = Path(ref.place)
            if not (folder / "config.json").is_file():
                raise ModelRefused(
                    f"{ref.shown} holds no config.json on {socket.gethostname()}; name a model folder, which every "
                    "node has at this place (on a cluster: a volume that head and workers mount)"
                )
        case "hub":
            folder = hub.fetched(ref, weights, seconds)
        case "storage":
            folder = storage.fetched(ref, cache_root() / "models", weights, seconds)
    described = quantization_fault(folder, weights=False)
    if quantized and described is not None:
        return folder
    faults = folder_faults(folder) if weights else [described] if described is not None else []
    if faults:
        raise ModelRefused(f"{ref.shown}: {folder} on {socket.gethostname()} {'; '.join(faults)}")
    return folder


def stay_offline() -> None:
    """From here on this process and its children ask the hub nothing, whatever a library would like to know."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
