"""What a run's initial weights, its teacher and the models of `spec.models` were pinned to, for all of its sessions:
`model.json`, `teacher.json`, `model-NAME.json`.

Rules:
1. Each lies in the run's folder and, where checkpoints go to object storage, beside those as well: the folder may be
   lost with its Pod. The folder's counts, where there is one.
2. One that can't be read is an error: a model is never pinned anew because of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tapforge_api import TrainingRun
from tapforge_api.algorithm import Teacher
from tapforge_api.model import ModelSource
from tapforge_api.models import ServedModel

from ..model_source.ref import POLICY, TEACHER, ModelError, ModelRef, ModelRefused
from ..model_source.resolve import pin
from ..storage.object_storage import Conflict, StorageError, open_store
from .assembly import ConfigurationError, SetupError
from .folder import write_atomically
from .local_files import checkpoint_uri

PINNED: Final = "model.json"
#: of the teacher
PINNED_TEACHER: Final = "teacher.json"


def model_of(run: TrainingRun, folder: Path, *, keep: bool = False, served: ServedModel | None = None) -> ModelRef:
    """The initial weights, or those of a model that is served beside the policy, pinned. Later sessions of the run,
    whose folder it is, begin with the same ones. `keep`: also beside checkpoints in object storage. Blocks. Raises
    SetupError."""
    if served is not None:
        kept = folder / f"model-{served.name}.json"
        return _pinned(run, served.source, f"spec.models[{served.name}].source", kept, keep=keep)
    return _pinned(run, run.spec.model.source, POLICY, folder / PINNED, keep=keep)


def teacher_of(run: TrainingRun, folder: Path, *, keep: bool = False) -> ModelRef | None:
    """The teacher, likewise; None: the run has none."""
    taught = run.spec.algorithm.distillation
    return None if taught is None else _pinned(run, taught.teacher, TEACHER, folder / PINNED_TEACHER, keep=keep)


def _pinned(run: TrainingRun, source: ModelSource | Teacher, field: str, kept: Path, *, keep: bool) -> ModelRef:
    moves = source.hugging_face is not None or source.object_storage is not None
    uri = checkpoint_uri(run) if moves else None
    try:
        text = _text(kept) if moves else None
        stored = open_store(uri).read(kept.name) if uri is not None else None
        earlier = None if text is None else _parsed(text, str(kept))
        if earlier is None and stored is not None:
            earlier = _parsed(stored[0], f"{uri}/{kept.name}")
        model = pin(source, earlier, field)
        if not (model.commit or model.files):
            return model
        now = (json.dumps(model.pinned) + "\n").encode()
        if now != text and (keep or text is None):  # a measurement with another model leaves the run its own
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, now.decode())
        if keep and uri is not None and (stored is None or stored[0] != now):
            etag = None if stored is None else stored[1]
            open_store(uri).put(kept.name, now, if_none_match=etag is None, if_match=etag)
    except ModelRefused as error:
        raise ConfigurationError(str(error)) from error
    except ModelError as error:
        raise SetupError(str(error)) from error
    except Conflict as error:
        kept.unlink(missing_ok=True)  # the other one's counts
        raise SetupError(f"another session of the run has just pinned its model ({error}): start again") from error
    except StorageError as error:
        raise SetupError(f"spec.checkpoints.uri: {error}") from error
    return model


def _text(kept: Path) -> bytes | None:
    try:
        return kept.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SetupError(f"{kept}, what the model was pinned to, can't be read ({error.strerror})") from error


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        files = [[str(name), int(size), str(etag)] for name, size, etag in found["files"]]
        return {**{name: str(found[name]) for name in ("kind", "place", "commit")}, "files": files}
    except (ValueError, TypeError, KeyError) as error:
        raise SetupError(
            f"{where}, what the model was pinned to, can't be read ({type(error).__name__}: {error}): restore it, or "
            "delete it to begin with the model as it is now"
        ) from error
