"""The learner's weights as a Hugging Face folder that transformers and vLLM load: checkpoint names, tied weights once,
config, tokenizer and processor files of the model that training began with.

With LoRA the model is merged, and the adapter lies beside it in `adapter/`, as peft and vLLM load it (not in the folder
itself, where transformers would put it on top of the merged weights). Tensors are gathered name by name, and the first
rank holds those of one file. The folder appears by one rename, complete or not at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..object_storage import open_store
from .learner import Learner

if TYPE_CHECKING:
    from .rank import Rank

#: of a safetensors file; as much is held in memory
_FILE_BYTES: Final = 4 * 1024**3
#: files of the original folder that are not copied: weights, and what is written anew
_OWN = (".safetensors", ".bin", ".pt", ".index.json")
_FRESH = {"config.json"}


async def export(learner: Learner, folder: Path, store: str = "") -> Path:
    """Writes the folder; one that is there already is replaced. `store`: a URI where it is kept as well. The first rank
    writes it there, wherever that runs, and the folder is fetched from there."""
    partial = folder.with_name(f".partial-{folder.name}")
    await asyncio.to_thread(_prepare, folder, partial)
    try:
        if store:
            await learner.run(_export_to, store)
            partial.rmdir()
            await asyncio.to_thread(fetch, store, partial)
        else:
            await learner.run(_export_rank, str(partial))
        await asyncio.to_thread(_publish, Path(learner.settings.model), partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _export_rank(rank: Rank, folder: str) -> None:
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    from . import lora
    from .models import ModelConfig, family_of
    from .sharding import EngineWeights, whole

    settings, model, path = rank.settings, rank.policy.model, Path(folder)
    weights = EngineWeights(model, getattr(torch, settings.dtype))
    sizes = {name: torch.empty(shape, dtype=weights.dtype, device="meta") for name, shape in weights.shapes()}
    plan = split_torch_state_dict_into_shards(sizes, max_shard_size=_FILE_BYTES)
    held: dict[str, torch.Tensor] = {}
    failure: Exception | None = None
    if rank.rank == 0 and not path.is_dir():
        failure = FileNotFoundError(
            f"{folder} is the driver's, and the first rank in another Pod does not see it: they need a volume that "
            "both mount (spec.checkpoints.storage, ReadWriteMany)"
        )
    for name, tensor in weights:
        if rank.rank > 0 or failure is not None:
            continue  # gathered all the same: the other ranks wait for this one
        held[name] = tensor.cpu().contiguous()
        file = plan.tensor_to_filename[name] if plan.is_sharded else "model.safetensors"
        if held.keys() == set(plan.filename_to_tensors[file]):
            try:
                save_file(held, path / file, {"format": "pt"})
            except Exception as error:  # noqa: BLE001 - safetensors has no other kind for a full disk; raised below
                failure = error
            held = {}
    matrices = {name: whole(matrix.detach()).cpu() for name, matrix in lora.matrices(model).items()}
    if failure is not None:
        raise failure
    if rank.rank > 0:
        return
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    family = family_of(ModelConfig.of_folder(Path(settings.model)))
    model.config.dtype = settings.dtype
    model.config.architectures = [family.architecture]
    model.config.save_pretrained(folder)
    if settings.lora is not None:
        pattern = family.lora_pattern(family.adapted(settings.lora.targets))
        lora.write(path / lora.FOLDER, matrices, settings.lora, pattern, settings.model)


def _export_to(rank: Rank, store: str) -> None:
    with tempfile.TemporaryDirectory(prefix="tapforge-export-") as name:
        _export_rank(rank, name)
        if rank.rank == 0:
            _add_files(Path(rank.settings.model), Path(name))
            place, _, last = store.rpartition("/")
            open_store(place).put_folder(last, Path(name))


def fetch(store: str, folder: Path) -> bool:
    """Makes the folder from what `export` kept; False: there is nothing complete."""
    place, _, last = store.rpartition("/")
    partial = folder.with_name(f".partial-{folder.name}")
    _prepare(folder, partial)
    if not open_store(place).get_folder(last, partial):
        partial.rmdir()
        return False
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return True


def refer_to(rank: Rank, folder: str, store: str) -> None:
    """The KL term pulls towards the weights in `folder`, or in `store` where a rank's node doesn't have it."""
    if Path(folder).is_dir() or not store:
        rank.refer_to(folder)
        return
    with tempfile.TemporaryDirectory(prefix="tapforge-reference-") as name:
        fetch(store, Path(name, "reference"))
        rank.refer_to(str(Path(name, "reference")))


def _prepare(folder: Path, partial: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()


def _add_files(model: Path, partial: Path) -> None:
    for path in model.iterdir():
        if path.is_file() and path.name not in _FRESH and not path.name.endswith(_OWN):
            shutil.copyfile(path, partial / path.name)


def _publish(model: Path, partial: Path, folder: Path) -> None:
    _add_files(model, partial)
    for path in partial.rglob("*"):
        os.chmod(path, 0o755 if path.is_dir() else 0o644)  # the weights' writer leaves them readable by its user alone
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
