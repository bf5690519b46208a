"""What a checkpoint holds of the ranks, and how they write and read it, by torch.distributed.checkpoint. On the ranks.

Rules:
- Held are the parameters that are trained and their moments, under torch's names, by shape and not by rank: any number
  of ranks can resume from them. Of the frozen rest, which is the base model's, only its fingerprint.
- Weights that only a base model can complete are not loaded onto another base, nor adapters into a model without them.
- The state is copied (`stage`) while nothing is learned, and written from the copy in a thread while learning goes on.
  The thread has a process group of its own: its collectives must not meet those of an update. Until it has ended, also
  after its deadline, nothing else is staged: it would meet the same copy and the same process group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..storage.errors import explained
from ..storage.object_storage import is_uri, storage_options

if TYPE_CHECKING:
    from .rank import Rank

#: of the fingerprint: numbers of each tensor that count
_SAMPLE: Final = 1024
_MODEL, _OPTIMIZER, _CRITIC = "model", "optimizer", "critic"
#: names that a message shows
_SHOWN: Final = 3


@dataclass
class Saving:
    """A rank's own, from its first checkpoint on."""

    group: Any
    base: dict[str, Any]
    #: on GPUs kept for the next one, with its pinned memory: to pin takes longer than to copy
    stager: Any = None
    #: of what is being written, and where it goes
    future: Any = None
    target: str = ""


class StillWriting(RuntimeError):
    """A checkpoint is being written, and its time is over. What is there of it must not be touched."""


def stage(rank: Rank, target: str) -> dict[str, Any]:
    """Copies the rank's state, and begins to write it to `target`, a folder or URI. Returns the counters, and the base
    model's fingerprint if the rest is needed to complete what is written. Raises StillWriting."""
    import torch.distributed.checkpoint as dcp

    check_idle(rank, target)
    if not is_uri(target) and not Path(target).is_dir():  # dcp would make it, and no other process would see it
        raise FileNotFoundError(
            f"{target} is the driver's, and a rank on another machine or in another Pod does not see it: they need a "
            "file system that all have (on Kubernetes spec.checkpoints.storage, ReadWriteMany), or spec.checkpoints.uri"
        )
    if rank.saving is None:
        rank.saving = _saving(rank)
    saving: Saving = rank.saving
    saving.stager = saving.stager or _stager(rank.device.type == "cuda")
    # An optimizer without state would be given some, and its first step would count as the second.
    moments = bool(rank.optimizer.state)
    state, frozen = _trained(rank)
    held = {_MODEL: state, **({_OPTIMIZER: _moments(rank)} if moments else {}), **_critic(rank)}
    saving.future = dcp.async_save(
        held, storage_writer=_writer(target), process_group=saving.group, async_stager=saving.stager
    )
    saving.target = target
    return {"steps": rank.steps, "moments": moments, "base": saving.base if frozen else None}


def check_idle(rank: Rank, target: str) -> None:
    """Raises StillWriting if `target` can't be begun."""
    saving: Saving | None = rank.saving
    if saving is not None and saving.future is not None and not saving.future.done():
        raise StillWriting(
            f"{target} is not begun: the checkpoint before it, {saving.target}, is still being written after its "
            "deadline; see what the storage is waiting for"
        )


def written(rank: Rank, target: str, seconds: float) -> dict[str, int]:
    """Waits until all ranks have written what was staged. Returns the sizes of the files, bytes by name. Called beside
    the rank's other work. Raises StillWriting after `seconds`; the writing goes on."""
    from torch.distributed.checkpoint.api import CheckpointException

    saving: Saving = rank.saving
    future = saving.future
    if not wait([future], seconds).done:
        raise StillWriting(f"{target} was not written within {seconds:.0f} s; see what the storage is waiting for")
    try:
        metadata = future.result()
    except (CheckpointException, OSError) as error:  # the former hides what the ranks failed with
        raise _told(error, target) from None
    finally:
        saving.future = None
        if rank.device.type == "cpu":
            saving.stager.close()
            saving.stager = None
    sizes: dict[str, int] = {}
    for part in metadata.storage_data.values():
        sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), part.offset + part.length)
    return sizes


def load(rank: Rank, where: str, document: dict[str, Any], moments: bool) -> None:
    """Brings the rank to the state that `where`, a folder or URI, holds. `moments`: the optimizer's as well; else it
    begins afresh. Raises ValueError for what does not fit the model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    counters = document["counters"]
    moments = moments and counters["moments"]
    rank.optimizer.state.clear()
    reader = _reader(where)
    parts = reader.read_metadata().state_dict_metadata
    saved = {name for name in parts if name.startswith(f"{_MODEL}.")}
    everything = get_model_state_dict(rank.policy.model)
    wanted = {name: value for name, value in everything.items() if f"{_MODEL}.{name}" in saved}
    _check_names(saved, everything, wanted, set(_trained(rank)[0]))
    if len(wanted) < len(everything):
        folder = rank.settings.model
        _check_base(document.get("base"), fingerprint(Path(folder), wanted), folder)
    found: dict[str, Any] = {_MODEL: wanted, **({_OPTIMIZER: _moments(rank)} if moments else {})}
    if any(name.startswith(f"{_CRITIC}.") for name in parts):  # a checkpoint of a run without one leaves it as it is
        found |= _critic(rank)
    try:
        dcp.load(found, storage_reader=reader)
    except (CheckpointException, OSError) as error:
        raise _told(error, where) from None
    set_model_state_dict(rank.policy.model, found[_MODEL], options=StateDictOptions(strict=False))
    if moments:
        set_optimizer_state_dict(rank.policy.model, rank.optimizer, found[_OPTIMIZER])
    if rank.critic is not None and _CRITIC in found:
        rank.critic.load(found[_CRITIC], moments)
    rank.steps = counters["steps"] if moments or not counters["moments"] else 0
    rank.policy.forget_features()


# --- what is held -----------------------------------------------------------------------------------------------------


def _trained(rank: Rank) -> tuple[dict[str, Any], bool]:
    """What is trained of the model, as torch names it, and whether anything is not. Its tensors are those that the rank
    computes with."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = rank.policy.model
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    state = get_model_state_dict(model)
    return {name: value for name, value in state.items() if name not in frozen}, bool(frozen)


def _moments(rank: Rank) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(rank.policy.model, rank.optimizer)


def _critic(rank: Rank) -> dict[str, Any]:
    return {} if rank.critic is None else {_CRITIC: rank.critic.state()}


def _check_names(saved: set[str], everything: dict[str, Any], wanted: dict[str, Any], trained: set[str]) -> None:
    if unknown := sorted(saved - {f"{_MODEL}.{name}" for name in everything}):
        raise ValueError(
            f"it holds {len(unknown)} parameters that the model of this run has not: {_some(unknown)}; spec.model has "
            "to be as it was (its source, lora)"
        )
    if lacking := sorted(trained - set(wanted)):
        raise ValueError(
            f"it lacks {len(lacking)} parameters that this run trains: {_some(lacking)}; spec.model has to be as it "
            "was (lora, freezeVision)"
        )


def _check_base(there: dict[str, Any] | None, here: dict[str, Any], folder: str) -> None:
    """Nothing is known of the base of a checkpoint of an earlier version, which holds what was frozen as well."""
    if there is None or there == here:
        return
    raise ValueError(
        f"it holds only what was trained, and of another base model than the one in {folder}: of that one "
        f"{_base(there)} are needed, and here are {_base(here)}; name its base model in spec.model.source"
    )


def _base(base: dict[str, Any]) -> str:
    return f"{base['tensors']} frozen tensors of {base['model']} ({base['weights'][:12]})"


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def fingerprint(folder: Path, trained: Collection[str]) -> dict[str, Any]:
    """Tells a base model from others, also of the same shapes: names of its parameters, shapes, and a sample of each,
    as numbers, so that it is the same in whatever layout, number format and files. `trained`: parameters that don't
    count. Raises FolderError for a family that is not here."""
    from safetensors import safe_open

    from .families import ModelConfig, family_of

    family = family_of(ModelConfig.of_folder(folder))
    samples: dict[str, bytes] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                if (parameter := family.parameter_of(name)) not in trained:
                    samples[parameter] = _sample(file.get_slice(name))
    digest = hashlib.sha256()
    for parameter in sorted(samples):
        digest.update(parameter.encode() + samples[parameter])
    return {"model": family.model_type, "tensors": len(samples), "weights": digest.hexdigest()}


def _sample(tensor: Any) -> bytes:
    """The shape, and numbers of the row in the middle."""
    shape = tuple(tensor.get_shape())
    row = tensor[shape[0] // 2 : shape[0] // 2 + 1] if shape else tensor[...]
    return repr(shape).encode() + row.flatten()[:_SAMPLE].float().numpy().tobytes()


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def _saving(rank: Rank) -> Saving:
    from datetime import timedelta

    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=rank.settings.update_seconds))
    return Saving(group, fingerprint(Path(rank.settings.model), _trained(rank)[0]))


def _stager(gpu: bool) -> Any:
    """It has copied when it returns."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
        )
    )


def _writer(target: str) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(target, **storage_options(target)) if is_uri(target) else dcp.FileSystemWriter(target)


def _reader(where: str) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(where, **storage_options(where)) if is_uri(where) else dcp.FileSystemReader(where)


def _told(error: BaseException, place: str) -> BaseException:
    """Of what ranks failed with, that of the first one, in words where it is a store."""
    failures = getattr(error, "failures", None) or {0: (error,)}
    first = failures[min(failures)][0]
    cause = first if isinstance(first, BaseException) else error
    return explained(cause, place) if is_uri(place) else cause
