"""Low-rank adapters on a frozen model's linear layers, with peft's arithmetic, names and file format.

    y = W x + (alpha / rank) * B A x

Rules:
- A layer keeps its own weight and name; the adapter's matrices lie below it as `lora_A.weight` and `lora_B.weight`.
  They are fp32, whatever the base is, and the only parameters that are trained.
- In bf16 the adapter's output is added to a base output that is rounded already, as vLLM's engines add it: changes of
  less than half a step vanish on both sides alike. Summed in fp32 here alone they would show at once, and the learner
  would be five times as far from what engines sample with (`bench/lora.py`).
- Only linear layers of the language model are adapted: vision towers have layers of the same names.
- B begins as zero: before the first step the adapted model is the model itself, so that the adapters of that moment are
  the reference of a KL term. `exchanged` puts other adapters in for a while; nothing is loaded twice.
- The first values of a layer's adapter follow from the seed and the layer's name alone, not from the number of ranks.
- peft's own injection is not used because it can't be traced under a fake tensor mode, by which memory is planned.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ..placement.settings import LoraSettings
from .families import FolderError
from .linear import linear

#: of an export that has an adapter
FOLDER = "adapter"
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
#: what peft puts in front of a module's name
_PREFIX = "base_model.model."
#: of the largest element of a product, by which fp32 sums in another order may differ
_REORDERED = 1e-5


class Adapted(nn.Linear):
    """A frozen linear layer and its adapter."""

    def __init__(self, base: nn.Linear, rank: int, scale: float):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = base.in_features, base.out_features, scale
        self.weight, self.bias = base.weight, base.bias
        options: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": torch.float32}
        self.lora_A = nn.Linear(base.in_features, rank, **options)
        self.lora_B = nn.Linear(rank, base.out_features, **options)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias) + self.scale * self.lora_B(self.lora_A(x))

    def merged(self) -> Tensor:
        """W + scale * B A in fp32, sharded as W is; collective."""
        a, b = self.lora_A.weight, self.lora_B.weight
        if isinstance(a, DTensor):
            a = a.redistribute(placements=[Replicate()])
        return self.weight.float() + self.scale * (b @ a)


@torch.no_grad()
def is_merged(layer: Adapted, shards: Tensor) -> bool:
    """Whether `shards` are this rank's of the layer's weight with its adapter, in their number format; collective. A
    product may be summed in another order the second time. So they have to be within rounding of what is computed here,
    and no bits of the plain weight where the adapter changes some."""
    a, b = layer.lora_A.weight, layer.lora_B.weight
    whole = a.full_tensor() if isinstance(a, DTensor) else a
    sent, plain = _local(shards), _local(layer.weight).float()
    change = layer.scale * (_local(b) @ whole)
    expected = plain + change
    if torch.equal(sent, plain.to(sent.dtype)):
        return torch.equal(sent, expected.to(sent.dtype))
    most = change.abs().max() if change.numel() else change.new_zeros(())
    rounding = torch.finfo(sent.dtype).eps * expected.abs() + _REORDERED * most
    return bool(((sent.float() - expected).abs() <= rounding).all())


def adapt(model: nn.Module, lora: LoraSettings, pattern: str) -> None:
    """Freezes the model and gives the layers whose whole names match adapters without values (`begin`)."""
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if re.fullmatch(pattern, name):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Adapted(layer, lora.rank, lora.alpha / lora.rank))


def layers(model: nn.Module) -> dict[str, Adapted]:
    """The adapted layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters by name, in the order of the model."""
    return {
        f"{name}.{part}.weight": getattr(layer, part).weight
        for name, layer in layers(model).items()
        for part in ("lora_A", "lora_B")
    }


@torch.no_grad()
def begin(model: nn.Module, seed: int) -> None:
    """First values: A uniform as in peft, B zero."""
    for name, layer in layers(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
        bound = 1 / math.sqrt(layer.in_features)
        first = torch.empty(layer.lora_A.weight.shape).uniform_(-bound, bound, generator=generator)
        _local(layer.lora_A.weight).copy_(_shard(layer.lora_A.weight, first))
        layer.lora_B.weight.zero_()


@torch.no_grad()
def for_engine(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Whole matrices by name in `dtype`, B times alpha / rank, so that engines count them once; collective."""
    for name, layer in layers(model).items():
        for part, factor in (("lora_A", 1.0), ("lora_B", layer.scale)):
            shards = (factor * getattr(layer, part).weight.detach()).to(dtype)
            whole = shards.full_tensor() if isinstance(shards, DTensor) else shards
            yield f"{name}.{part}.weight", whole.contiguous()


def values(model: nn.Module) -> dict[str, Tensor]:
    """A copy of this rank's shards of the adapters."""
    return {name: _local(parameter).clone() for name, parameter in matrices(model).items()}


@contextmanager
def exchanged(model: nn.Module, other: Mapping[str, Tensor]) -> Iterator[None]:
    """While it is entered, the model has the adapters of `other`, made by `values`. Only shards may be there."""
    own = values(model)
    _set(model, other)
    try:
        yield
    finally:
        _set(model, own)


@torch.no_grad()
def _set(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    for name, parameter in matrices(model).items():
        _local(parameter).copy_(found[name])


def _local(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# --- peft's files -----------------------------------------------------------------------------------------------------


def write(
    folder: Path, found: Mapping[str, Tensor], lora: LoraSettings, pattern: str, base: str, revision: str | None
) -> None:
    """Whole matrices by name as peft and vLLM load them. `pattern`: whole names of the adapted layers; `base`,
    `revision`: of the model that they are of."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file({_PREFIX + name: tensor.contiguous() for name, tensor in found.items()}, folder / _WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": pattern,
        "inference_mode": True,
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards of an adapter that `write` wrote for the same layers and rank. Raises FolderError."""
    from safetensors import safe_open

    path = folder / _WEIGHTS
    own = values(model)
    try:
        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(_PREFIX + name) for name in own}
    except Exception as error:  # safetensors has no other kind
        raise FolderError(f"{path} does not hold the adapters of this run's layers: {error}") from error
    mine = {}
    for name, parameter in matrices(model).items():
        if found[name].shape != parameter.shape:
            raise FolderError(
                f"{path} holds adapters of another rank: {name} is {list(found[name].shape)}, not "
                f"{list(parameter.shape)}; use the rank that they were trained with"
            )
        mine[name] = _shard(parameter, found[name])
    return mine


def _shard(parameter: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device)
    mesh, placements = parameter.device_mesh, parameter.placements
    local = distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()
    return local.to(parameter.to_local().device)
