"""LoRA adapters that come in alone, in vLLM's workers: beside weights that stay as they are, as matrices of a low rank.

vLLM reads adapters from folders; here the tensors come as the learner sends them (`learner/lora.py:for_engine`) and
take the place of those before. Rules:

- An engine has one adapter for its whole life, under one number, which every request names: one that changes nothing
  until the first comes. So a request that is in flight while another one comes goes on with that, and its tokens'
  versions say from which on.
- Adapters are replaced here and nowhere else: between two steps, in every worker. No request loads one.
- Digests of what arrived are to be the learner's of what it sent, as for whole weights (`arrivals.py`). A worker's
  share of each matrix is compared with what its kernels read; what is beyond its rank there has to be zero. Which part
  of a matrix is a worker's share, vLLM's layer says: whether that is right, the log-probabilities show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from ..learner.digest import digest, values
from .received import Report

#: what vLLM expects in front of a layer's name, as peft writes it
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class _Share:
    """Of a matrix that arrived, what this worker should hold."""

    source: str
    module: str
    #: "a" or "b", and its place among the layers that vLLM computes as one
    part: str
    place: int
    shape: tuple[int, ...]
    digest: Tensor

    def is_held(self, modules: Mapping[str, Any]) -> bool:
        held = getattr(modules[self.module], f"lora_{self.part}_stacked")[self.place][0, 0]
        rows, columns = self.shape
        beyond = int(torch.count_nonzero(held)) - int(torch.count_nonzero(held[:rows, :columns]))
        return not beyond and torch.equal(digest(held[:rows, :columns]), self.digest)

    def __str__(self) -> str:
        return f"{self.module}.lora_{self.part}_stacked[{self.place}]"


class AdapterArrival:
    """Of one adapter in one worker."""

    def __init__(self, manager: Any, tensors: Mapping[str, Tensor], names: Mapping[str, str]):
        """`manager`: vLLM's `LoRAModelManager`; `names`: of the engine's layers by those of the tensors'."""
        self._modules: Mapping[str, Any] = manager.modules
        self._digests = {name: digest(tensor) for name, tensor in tensors.items()}
        self._shares = list(_shares(manager, tensors, names))

    def read(self) -> Report:
        """Of all that arrived, against what is held now."""
        placed = {share.source for share in self._shares}
        wrong = {name: "no layer of the engine's" for name in self._digests if name not in placed}
        for share in self._shares:
            if not share.is_held(self._modules):
                wrong.setdefault(share.source, str(share))
        return Report(values(self._digests), wrong)


def _shares(manager: Any, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> Iterator[_Share]:
    layer_of = {engine: own for own, engine in names.items()}
    for name, module in manager.modules.items():
        parts = [layer_of.get(part) for part in manager.packed_modules.get(name, [name])]
        for part, matrix in (("a", "lora_A"), ("b", "lora_B")):
            sources = [f"{layer}.{matrix}.weight" if layer is not None else None for layer in parts]
            whole = [tensors[source] if source is not None else None for source in sources]
            cut = getattr(module, f"slice_lora_{part}")
            mine = whole
            if module.tp_size > 1:
                mine = cut(whole) if len(whole) > 1 else [cut(whole[0])] if whole[0] is not None else whole
            for place, (source, share) in enumerate(zip(sources, mine, strict=True)):
                if source is not None and share is not None:
                    held = share.contiguous()
                    yield _Share(source, name, part, place, tuple(held.shape), digest(held))


def replace_adapter(runner: Any, adapter_id: int, tensors: Mapping[str, Tensor] | None) -> AdapterArrival | None:
    """`runner`: vLLM's model runner, which from here on has these tensors as its one adapter. None: one that changes
    nothing. Tensors are named as the learner's layers, lora_B holds alpha / rank already."""
    loader = runner.lora_manager
    manager = loader._adapter_manager
    found = dict(tensors or {})
    layers = [name.removesuffix(".lora_A.weight") for name in found if name.endswith(".lora_A.weight")]
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = mapper.get_rename_mapper() if mapper is not None else None
    names = {layer: parse_fine_tuned_lora_name(f"{_PREFIX}{layer}.lora_A.weight", mapper)[0] for layer in layers}
    manager.remove_adapter(adapter_id)
    if not found:
        manager._registered_adapters[adapter_id] = LoRAModel(adapter_id, 1, {})  # `add_adapter` takes no empty one
        manager.activate_adapter(adapter_id)
        return None
    rank = len(found[f"{layers[0]}.lora_A.weight"])
    adapter = LoRAModel.from_lora_tensors(
        adapter_id,
        {_PREFIX + name: tensor for name, tensor in found.items()},
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=layers),
        device="cpu",
        dtype=loader.lora_config.lora_dtype,
        weights_mapper=mapper,
    )
    arrival = AdapterArrival(manager, found, names)
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter_id)
    return arrival
