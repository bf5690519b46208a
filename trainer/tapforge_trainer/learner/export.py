"""The learner's weights as a Hugging Face folder that loads wherever the model that training began with does: tensors,
config.json and all other files are spelled as that model's own are (`base_layout.py`).

With LoRA the model is merged, and the adapter lies beside it in `adapter/`, as peft and vLLM load it (not in the folder
itself, where transformers would put it on top of the merged weights). A reference of the KL term is with LoRA only
`adapter/`. Tensors are gathered name by name, and the first rank holds those of one file. The folder appears by one
rename, complete or not at all.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..model_source.ref import ModelError, ModelFile, ModelRef
from ..model_source.storage import fetched as fetched_files
from ..model_source.tiny_base import cache_root
from ..placement.settings import PROMPTED
from ..storage.object_storage import Conflict, StorageError, Store, open_store
from . import base_layout
from .checkpoint_storage import CheckpointBackend, CheckpointStore
from .client import Learner

if TYPE_CHECKING:
    from ..placement.settings import LearnerSettings
    from .rank import Rank

#: of a safetensors file; as much is held in memory
_FILE_BYTES: Final = 4 * 1024**3
#: of a folder that was put whole
LISTED: Final = ".files.json"
#: of a write that met another one
_TRIES: Final = 3


async def export(
    learner: Learner, folder: Path, place: CheckpointBackend | None = None, *, adapter: bool = False
) -> Path:
    """Writes the folder; one that is there already is replaced. `place`: of the run's checkpoints; where that is a
    store, the folder is kept beside them as well: the first rank writes it there, wherever that runs, and the folder is
    fetched from there. `adapter`: with LoRA only `adapter/`. Raises FencedOut."""
    adapter = adapter and learner.settings.lora is not None
    partial = folder.with_name(f".partial-{folder.name}")
    await asyncio.to_thread(_prepare, folder, partial)
    try:
        if isinstance(place, CheckpointStore):
            try:
                await learner.run(_export_to, place, folder.name, adapter)
            finally:  # also where a rank failed because of it
                await asyncio.to_thread(place.check)
            partial.rmdir()
            await asyncio.to_thread(fetch, f"{place.root}/{folder.name}", partial)
        else:
            await learner.run(_export_rank, str(partial.absolute()), adapter)
        await asyncio.to_thread(_publish, None if adapter else Path(learner.settings.model), partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _export_rank(rank: Rank, folder: str, adapter: bool = False) -> None:
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    from . import lora
    from .families import FolderError, ModelConfig, family_of
    from .sharding import EngineWeights, unsharded

    settings, model, path, base = rank.settings, rank.policy.model, Path(folder), Path(rank.settings.model)
    weights = EngineWeights(model, getattr(torch, settings.dtype))
    stored: dict[str, tuple[base_layout.Stored, ...]] = {}
    failure: Exception | None = None
    if rank.rank == 0 and not path.is_dir():
        failure = FileNotFoundError(
            f"{folder} is the driver's, and the first rank on another machine or in another Pod does not see it: they "
            "need a file system that both have (on Kubernetes spec.checkpoints.storage, ReadWriteMany)"
        )
    elif rank.rank == 0 and not adapter:
        try:
            stored = base_layout.stored_tensors(base, model, [name for name, _ in weights.shapes()])
        except FolderError as error:
            failure = error
    sizes = {
        place.name: torch.empty(shape, dtype=weights.dtype, device="meta")
        for name, shape in weights.shapes()
        for place in stored.get(name, ())
    }
    plan = split_torch_state_dict_into_shards(sizes, max_shard_size=_FILE_BYTES)
    held: dict[str, dict[str, torch.Tensor]] = {file: {} for file in plan.filename_to_tensors}
    for name, tensor in () if adapter else weights:
        if rank.rank > 0 or failure is not None:
            continue  # gathered all the same: the other ranks wait for this one
        for own, values in base_layout.as_stored(tensor.cpu(), stored[name]):
            file = plan.tensor_to_filename[own]
            held[file][own] = values
            if held[file].keys() == set(plan.filename_to_tensors[file]):
                try:
                    save_file(held.pop(file), path / file, {"format": "pt"})
                except Exception as error:  # noqa: BLE001 - safetensors has no other kind for a full disk; raised below
                    failure = error
                    held.clear()
                    break
    matrices = {name: unsharded(matrix.detach()).cpu() for name, matrix in lora.matrices(model).items()}
    if failure is not None:
        raise failure
    if rank.rank > 0:
        return
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    if not adapter:
        base_layout.write_config(base, path, settings.dtype)
        if settings.prompted:
            (path / PROMPTED).write_text(settings.prompted + "\n")
    if settings.lora is not None:
        family = family_of(ModelConfig.of_folder(base))
        pattern = family.lora_pattern(family.adapted(settings.lora.targets))
        lora.write(path / lora.FOLDER, matrices, settings.lora, pattern, *_base(settings))


def _base(settings: LearnerSettings) -> tuple[str, str | None]:
    """Name and revision of the model that an adapter is of, as others may read them: no folder of this machine."""
    source = settings.source
    if source is not None and source.kind == "hub":
        return source.place, source.commit
    place = settings.model if source is None or source.kind == "tiny" else source.place
    return Path(place).name, None


def _export_to(rank: Rank, place: CheckpointStore, prefix: str, adapter: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="tapforge-export-") as name:
        _export_rank(rank, name, adapter)
        if rank.rank == 0:
            if not adapter:
                base_layout.add_files(Path(rank.settings.model), Path(name))
            put_folder(open_store(place.root), prefix, Path(name), place.check)


def put_folder(store: Store, prefix: str, folder: Path, check: Callable[[], None]) -> None:
    """All files below a folder, and nothing else. It is complete, for `get_folder`, when this returns: a list of them
    comes last. `check` is called before each change, and raises where this one may not write any more. Nothing is
    written over: what an earlier writer that slept since its `check` finds there it does not replace, and what it
    wrote before this one does is removed."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    check()
    store.delete([f"{prefix}/{LISTED}"])
    store.delete_folder(prefix)
    for name, path in files.items():
        _put_new(store, f"{prefix}/{name}", functools.partial(store.upload, source=path), check)
    sizes = json.dumps({name: path.stat().st_size for name, path in files.items()}).encode()
    _put_new(store, f"{prefix}/{LISTED}", functools.partial(store.put, data=sizes, if_none_match=True), check)


def _put_new(store: Store, path: str, write: Callable[[str], object], check: Callable[[], None]) -> None:
    for _ in range(_TRIES):
        check()
        try:
            write(path)
        except Conflict:
            check()
            store.delete([path])
        else:
            return
    raise StorageError(f"{store.uri_of(path)} was written by others {_TRIES} times in a row")


def get_folder(store: Store, prefix: str, folder: Path) -> bool:
    """What `put_folder` wrote, into a folder that is there; False: nothing complete is there. Raises StorageError."""
    found = store.read(f"{prefix}/{LISTED}")
    if found is None:
        return False
    for name, size in json.loads(found[0]).items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        store.get(f"{prefix}/{name}", target)
        if (came := target.stat().st_size) != size:
            raise StorageError(f"{store.uri_of(f'{prefix}/{name}')} has {came} bytes instead of {size}; delete it")
    return True


def fetch(store: str, folder: Path) -> bool:
    """Makes the folder from what `export` kept; False: there is nothing complete."""
    place, _, last = store.rpartition("/")
    partial = folder.with_name(f".partial-{folder.name}")
    _prepare(folder, partial)
    if not get_folder(open_store(place), last, partial):
        partial.rmdir()
        return False
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return True


def refer_to(rank: Rank, folder: str, store: str) -> None:
    """The KL term pulls towards the weights in `folder`, or in `store` where a rank's node doesn't have it. A node
    fetches them once, with LoRA the adapter alone, and keeps them until its ranks have read them. Raises ModelError."""
    import torch.distributed as dist

    from . import lora

    part = "" if rank.settings.lora is None else lora.FOLDER
    found = Path(folder, part)
    fetched = bool(store) and not found.is_dir()
    if fetched:
        found = _reference(store, part, rank.settings.start_seconds)
    rank.reference.load(str(found))
    if store:  # all ranks know that, where the folder is they don't
        dist.barrier()
    if fetched:
        shutil.rmtree(found, ignore_errors=True)


def _reference(store: str, part: str, seconds: float) -> Path:
    """On this node. Its files' ETags are in its name: another run's of the same name is another one."""
    try:
        there = open_store(store).list()
    except StorageError as error:
        raise ModelError(f"the KL term's reference: {error}") from error
    below = f"{part}/" if part else ""
    files = tuple(
        ModelFile(one.path.removeprefix(below), one.size, one.etag)
        for one in there
        if one.path.startswith(below) and one.path != LISTED
    )
    if not files or LISTED not in {one.path for one in there}:
        raise ModelError(f"the KL term's reference: {store} holds nothing complete")
    place = f"{store}/{part}".rstrip("/")
    return fetched_files(ModelRef("reference", place, files=files), cache_root() / "references", True, seconds)


def _prepare(folder: Path, partial: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()


def _publish(model: Path | None, partial: Path, folder: Path) -> None:
    if model is not None:
        base_layout.add_files(model, partial)
    for path in partial.rglob("*"):
        os.chmod(path, 0o755 if path.is_dir() else 0o644)  # the weights' writer leaves them readable by its user alone
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
