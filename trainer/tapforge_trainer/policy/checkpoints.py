"""Checkpoints of a run: weights and optimizer by torch.distributed.checkpoint, the driver's state as JSON beside them.

    root/
      update-00000012/   *.distcp and .metadata by the ranks, state.json by the driver
      latest             the name of the newest complete one

Rules:
- Ranks write where the driver made the folder: on several nodes it has to be on a volume that all of them mount.
- A checkpoint appears by one rename, after everything in it was written and flushed; `latest` moves by another. A
  crash or a full disk at any moment leaves the one before untouched, and `latest` never names an incomplete one.
- Weights and moments are saved under torch's names, by shape and not by rank: any number of ranks can go on with them.
- The newest `keep` stay; what `latest` names is never deleted.
- Going on from a checkpoint is going on as if nothing had been: same weights, optimizer moments and step count, bit for
  bit.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .learner import Learner, LearnerError

if TYPE_CHECKING:
    from .rank import Rank

LATEST = "latest"
_STATE = "state.json"
_PREFIX = "update-"
_PARTIAL = ".partial-"
_REPLACED = ".replaced-"
#: bytes free at which a failed write is put down to the disk
_NEARLY_FULL = 1024 * 1024
#: of state.json; a checkpoint of another one is refused
_FORMAT = 2


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; the message names it and what is left."""


async def save(learner: Learner, root: Path, update: int, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Writes the checkpoint of `update` (an older one of the same number is replaced) and returns its folder. `state`
    is the driver's own: anything that JSON holds. The folder that `root` is in has to be there."""
    folder = root / f"{_PREFIX}{update:08d}"
    partial = root / f"{_PARTIAL}{folder.name}"
    try:
        await asyncio.to_thread(_prepare, root, partial)
        counters = (await learner.run(_save_rank, str(partial)))[0]
        document = {"format": _FORMAT, "update": update, "counters": counters, "driver": dict(state)}
        await asyncio.to_thread(_publish, root, partial, folder, document, keep)
    except (OSError, LearnerError) as error:
        why = _why(error, root)
        shutil.rmtree(partial, ignore_errors=True)
        newest = latest(root)
        left = f"{newest.name} is still there and complete" if newest else "there is no earlier one"
        raise CheckpointError(f"checkpoint {folder} could not be written: {why}; {left}") from error
    return folder


async def load(learner: Learner, root: Path, folder: Path | None = None) -> dict[str, Any] | None:
    """Brings the learner to the state of `folder`, or of the newest checkpoint in `root`; returns the driver's state,
    or None if there is nothing to go on from."""
    chosen = folder or latest(root)
    if chosen is None:
        return None
    document = read_state(chosen)
    try:
        await learner.run(_load_rank, str(chosen), document["counters"])
    except LearnerError as error:
        raise CheckpointError(f"checkpoint {chosen} does not fit the model or is damaged: {error}") from error
    return document["driver"]


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint."""
    try:
        name = (root / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    folder = root / name
    replaced = root / f"{_REPLACED}{name}"
    if not folder.exists() and (replaced / _STATE).is_file():
        return replaced  # killed between the two renames of `_publish`: the one before is still whole
    if not (folder / _STATE).is_file():
        raise CheckpointError(f"{root / LATEST} names {name!r}, which is not there; name another one by resumeFrom")
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON document of a checkpoint: format, update, counters, driver."""
    path = folder / _STATE
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {_STATE}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if document.get("format") != _FORMAT:
        raise CheckpointError(
            f"{folder} has format {document.get('format')}; this version reads format {_FORMAT}: go on with the "
            "version that wrote it, or begin anew from its export"
        )
    return document


# --- on the ranks -----------------------------------------------------------------------------------------------------


def _state_dict(rank: Rank, *, optimizer: bool) -> dict[str, Any]:
    """As torch names it. Its tensors are those that the rank computes with."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    found = {"model": get_model_state_dict(rank.policy.model)}
    if optimizer:
        found["optimizer"] = get_optimizer_state_dict(rank.policy.model, rank.optimizer)
    return found


def _save_rank(rank: Rank, folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    if not Path(folder).is_dir():  # dcp would make it, and nobody else would see it
        raise FileNotFoundError(
            f"{folder} is the driver's, and a rank in another Pod does not see it: ranks and driver need a volume that "
            "all of them mount (spec.checkpoints.storage, ReadWriteMany)"
        )
    # An optimizer without state would be given some, and its first step would count as the second.
    moments = bool(rank.optimizer.state)
    dcp.save(_state_dict(rank, optimizer=moments), checkpoint_id=folder)
    return {"steps": rank.steps, "moments": moments}


def _load_rank(rank: Rank, folder: str, counters: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    rank.optimizer.state.clear()
    found = _state_dict(rank, optimizer=counters["moments"])
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(rank.policy.model, found["model"])
    if counters["moments"]:
        set_optimizer_state_dict(rank.policy.model, rank.optimizer, found["optimizer"])
    rank.steps = counters["steps"]
    rank.policy.forget_features()


# --- on the driver ----------------------------------------------------------------------------------------------------


def _why(error: Exception, root: Path) -> str:
    if _full(error, root):
        return f"the disk is full ({error}); make room, or enlarge the volume"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return f"the file system is read-only ({error}); see why, and mount it so that it can be written"
    return str(error)


def _full(error: Exception, root: Path) -> bool:
    """torch reports a full disk as anything but that, so the disk is asked as well."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return root.exists() and shutil.disk_usage(root).free < _NEARLY_FULL


def _prepare(root: Path, partial: Path) -> None:
    root.mkdir(exist_ok=True)
    for left in root.glob(f"{_PARTIAL}*"):  # of a run that was killed while it wrote
        shutil.rmtree(left)
    for left in root.glob(f"{_REPLACED}*"):
        whole = root / left.name.removeprefix(_REPLACED)
        if whole.exists():
            shutil.rmtree(left)
        else:
            left.rename(whole)
    partial.mkdir()


def _publish(root: Path, partial: Path, folder: Path, document: dict[str, Any], keep: int) -> None:
    (partial / _STATE).write_text(json.dumps(document, indent=1) + "\n")
    for path in partial.rglob("*"):
        if path.is_file():
            _flush(path)
    _flush(partial)
    if folder.exists():
        replaced = root / f"{_REPLACED}{folder.name}"
        folder.rename(replaced)
        partial.rename(folder)
        shutil.rmtree(replaced)
    else:
        partial.rename(folder)
    pointer = root / f".{LATEST}.new"
    pointer.write_text(folder.name + "\n")
    _flush(pointer)
    pointer.rename(root / LATEST)
    _flush(root)
    complete = sorted(path for path in root.glob(f"{_PREFIX}*") if path != folder)
    for old in complete[: max(0, len(complete) - (keep - 1))]:
        shutil.rmtree(old)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
