"""In vLLM's workers: the bytes that arrived in a round of weights, and whether the model holds them.

`Arrivals` is made when the model is ready to load, and read after all was loaded, packed and copied to where kernels
find it. Rules:

- Of each tensor that arrives the digest is taken (`learner/digest.py`): the learner's of what it sent has to be equal.
- vLLM's own loaders say where a tensor is kept: in the first round each copy that they make is noted, from which part
  of what arrived to which part of which parameter. That is the same in every round.
- Of each such part the digest is taken on arrival, and again of what the parameter holds in the end.
- On CPUs linear layers and heads compute with a packed copy that can't be read. It is multiplied with columns of the
  identity, which gives back its columns exactly, but for the sign of zeros and for numbers so small that some
  instructions take them for zero; both count as zero. Of large layers only every few columns are read.
- Experts lie as their kernel wants them: the sum over their elements counts, wherever these are.
- A head that nothing is loaded into is tied: it has to hold what the embedding got.
- What can't be read isn't a fault: a tensor that no copy was seen of, a parameter that has another shape, number format
  or layout in the end than it was loaded in (quantized, padded, transposed), a packed copy whose kernel doesn't give
  back what it was made of. It is reported by its name, and the probe alone judges it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from ..learner.digest import contents, digest, values
from .received import Report

#: columns of a packed layer that are read in a round, at most, and their elements
_COLUMNS, _READ = 512, 2**22
#: rows of the identity that are multiplied at once
_ROWS = 256
#: of a packed matrix up to which its kernel may be another one; the side of one that is larger
_SMALL_BYTES, _LARGE = 2**20, 1024

#: how a parameter holds its elements: in their places; in a packed copy; in an order that only a kernel knows
Layout = Literal["plain", "packed", "shuffled"]


@dataclass(frozen=True, slots=True)
class Region:
    """Part of a tensor, as `Tensor.as_strided` takes it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Holder:
    """What computes with the elements."""

    module: str
    parameter: str
    layout: Layout
    #: of the parameter as it is loaded
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.module}.{self.parameter}" + (" (packed)" if self.layout == "packed" else "")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a tensor that arrives, and where it is kept."""

    source: Region
    target: Region
    holder: Holder
    #: loaded into an embedding, which this head may share
    tied: bool = False

    def arrived(self, tensor: Tensor) -> Tensor:
        """Its digest in a tensor that arrived."""
        part = self.source.of(tensor).to(self.holder.dtype)
        if self.holder.layout == "shuffled":
            return contents(part)
        if self.holder.layout == "packed":
            every = _every(self.holder.shape)
            part = _settled(part[:, -(self.target.offset % self.holder.shape[1]) % every :: every])
        return digest(part)

    def held(self, whole: Tensor) -> Tensor:
        """Its digest in what the holder has; of a packed one in the columns that are read."""
        if self.holder.layout == "plain":
            return digest(self.target.of(whole))
        width, (rows, columns) = self.holder.shape[1], self.target.size
        row, column = divmod(self.target.offset, width)
        every = _every(self.holder.shape)
        return digest(whole[row : row + rows, -(-column // every) : -(-(column + columns) // every)])


#: by name of the tensor that arrives
Pieces = dict[str, list[Piece]]


class Arrivals:
    """Of one round of weights in one worker, from its beginning on."""

    def __init__(self, model: nn.Module, known: Pieces | None):
        """`known`: `pieces` of an earlier round; None: they are to be found."""
        self._model = model
        self._modules = dict(model.named_modules())
        self._known = bool(known)
        self.pieces: Pieces = known or {}
        self._targets = {} if self._known else _targets(self._modules)
        self._heads = _tied_heads(self._modules)
        self._digests: dict[str, Tensor] = {}
        self._parts: dict[tuple[str, int], Tensor] = {}
        #: of the tensors that are being loaded
        self._loading: dict[str, Tensor] = {}
        #: names of those that a loader copies in parts which a packed layer has no columns of
        self._in_parts: set[str] = set()
        vars(model).pop("load_weights", None)  # of a round that came to no end
        self._load: Callable[..., Any] = model.load_weights
        vars(model)["load_weights"] = self._watched

    def read(self) -> Report:
        """Of all that arrived."""
        del vars(self._model)["load_weights"]
        unread = {name: "no parameter is known that it is kept in" for name in self._digests if name not in self.pieces}
        compared: list[tuple[str, Holder]] = []
        came: list[Tensor] = []
        held: list[Tensor] = []
        for holder, found in self._by_holder(everything_placed=not unread).items():
            whole, why = self._held_by(holder, found)
            if whole is None:
                unread |= {name: f"{holder} {why}" for name, _, _ in found}
                continue
            if holder.layout == "shuffled":
                compared.append((found[0][0], holder))
                came.append(torch.stack([self._parts[name, number] for name, number, _ in found]).sum())
                held.append(contents(whole))
                continue
            for name, number, piece in found:
                compared.append((name, holder))
                came.append(self._parts[name, number])
                held.append(piece.held(whole))
        equal = (torch.stack(came) == torch.stack(held)).tolist() if compared else []
        wrong: dict[str, str] = {}
        for (name, holder), same in zip(compared, equal, strict=True):
            if not same:
                wrong.setdefault(name, str(holder))
        return Report(values(self._digests), wrong, unread)

    def _by_holder(self, everything_placed: bool) -> dict[Holder, list[tuple[str, int, Piece]]]:
        """Name, number and place of the parts that arrived. A head is only taken for tied where it is known where all
        that arrived is kept: else something may have been loaded into it unseen."""
        loaded = {piece.holder.module for found in self.pieces.values() for piece in found if not piece.tied}
        by_holder: dict[Holder, list[tuple[str, int, Piece]]] = defaultdict(list)
        for name in self._digests:
            for number, piece in enumerate(self.pieces.get(name, ())):
                if not piece.tied or (everything_placed and piece.holder.module not in loaded):
                    by_holder[piece.holder].append((name, number, piece))
        return by_holder

    def _held_by(self, holder: Holder, found: list[tuple[str, int, Piece]]) -> tuple[Tensor | None, str]:
        """What the holder has, as it was loaded; or None and why that can't be read."""
        module = self._modules[holder.module]
        if holder.layout == "packed":
            if not _gives_back(_packed_like(holder.shape, holder.dtype), holder.dtype):
                return None, "has a kernel that rounds"
            try:
                return _columns(module, holder.shape, holder.dtype), ""
            except Exception as error:  # noqa: BLE001 - what can't be read is not a fault, whatever a kernel says of it
                return None, f"can't be multiplied: {error}"
        whole = getattr(module, holder.parameter, None)
        if not isinstance(whole, Tensor):
            return None, "is gone"
        whole = whole.detach()
        if whole.dtype != holder.dtype:
            return None, f"has {whole.dtype}, loaded were {holder.dtype}"
        if holder.layout == "shuffled":
            came = sum(piece.source.elements for _, _, piece in found)
            return (whole, "") if whole.numel() == came else (None, f"has {whole.numel()} elements, {came} came")
        if tuple(whole.shape) != holder.shape or whole.stride() != holder.stride:
            return None, "has another layout than it was loaded in"
        return whole, ""

    # --- while they are loaded ----------------------------------------------------------------------------------------

    def _watched(self, weights: Iterable[tuple[str, Tensor]], **options: Any) -> Any:
        """The model's `load_weights`."""
        with nullcontext() if self._known else _Copies(self._copied):
            try:
                return self._load(self._noted(weights), **options)
            finally:
                self._loading.clear()

    def _noted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._digests[name] = digest(tensor)
            if self._known:
                for number, piece in enumerate(self.pieces.get(name, ())):
                    self._parts[name, number] = piece.arrived(tensor)
            else:
                self._loading[name] = tensor
            yield name, tensor

    def _copied(self, target: Tensor, source: Tensor) -> None:
        owner = self._targets.get(target.untyped_storage()._cdata)
        name = next((name for name, tensor in self._loading.items() if _within(source, tensor)), None)
        if owner is None or name is None or name in self._in_parts:
            return
        tensor, (module, parameter, loaded) = self._loading[name], owner
        source = source.expand(target.shape)
        start = (source.data_ptr() - tensor.data_ptr()) // tensor.itemsize
        source_region = Region(tuple(source.shape), source.stride(), start)
        target_region = Region(tuple(target.shape), target.stride(), target.storage_offset())
        found = self.pieces.setdefault(name, [])
        for holder, tied in self._holders(module, parameter, loaded):
            if holder.layout == "packed" and source.dim() != 2:
                self._in_parts.add(name)
                del self.pieces[name]
                return
            piece = Piece(source_region, target_region, holder, tied)
            if piece not in found:  # vLLM loads into some parameters twice
                self._parts[name, len(found)] = piece.arrived(tensor)
                found.append(piece)

    def _holders(self, name: str, parameter: str, loaded: Tensor) -> Iterator[tuple[Holder, bool]]:
        shape, module, embedding = tuple(loaded.shape), self._modules[name], _is_embedding(self._modules[name])

        def holder(name: str, layout: Layout) -> Holder:
            return Holder(name, parameter, layout, shape, loaded.stride(), loaded.dtype)

        if hasattr(module, "w13_weight"):
            yield holder(name, "shuffled"), False
            return
        packed = parameter == "weight" and len(shape) == 2 and hasattr(module, "cpu_linear")
        if isinstance(module, VocabParallelEmbedding) or not packed:
            yield holder(name, "plain"), False
        if packed and not embedding:
            yield holder(name, "packed"), False
        for head in self._heads if embedding else ():
            yield holder(head, "plain"), True
            if hasattr(self._modules[head], "cpu_linear"):
                yield holder(head, "packed"), True


class _Copies(TorchDispatchMode):
    """Tells of each copy into a tensor."""

    def __init__(self, tell: Callable[[Tensor, Tensor], None]):
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._tell(args[0], args[1])
        return func(*args, **(kwargs or {}))


def _targets(modules: dict[str, nn.Module]) -> dict[int, tuple[str, str, Tensor]]:
    """What may be loaded into, by its storage. While a model is being loaded, it is on the meta device."""
    found: dict[int, tuple[str, str, Tensor]] = {}
    for name, module in modules.items():
        for parameter, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            found.setdefault(tensor.untyped_storage()._cdata, (name, parameter, tensor))
    return found


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


def _tied_heads(modules: dict[str, nn.Module]) -> list[str]:
    """Heads that may hold what the embedding holds: where there is one of each, of one shape."""
    heads = {name: module for name, module in modules.items() if isinstance(module, ParallelLMHead)}
    embeddings = [module for module in modules.values() if _is_embedding(module)]
    shapes = {tuple(module.weight.shape) for module in (*heads.values(), *embeddings) if hasattr(module, "weight")}
    return list(heads) if len(heads) == len(embeddings) == len(shapes) == 1 else []


def _within(part: Tensor, whole: Tensor) -> bool:
    """Whether it is a view of it."""
    begin = whole.data_ptr()
    return part.dtype == whole.dtype and begin <= part.data_ptr() < begin + max(1, whole.nbytes)


def _every(shape: tuple[int, ...]) -> int:
    """Of so many columns of a packed layer of this shape one is read."""
    rows, width = shape
    return -(-width // max(1, min(_COLUMNS, _READ // rows)))


def _columns(module: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Those that are read of a packed matrix of this shape."""
    width, columns = shape[1], []
    for chosen in torch.arange(0, width, _every(shape)).split(_ROWS):
        rows = torch.zeros(len(chosen), width, dtype=dtype)
        rows[torch.arange(len(chosen)), chosen] = 1
        columns.append(module.cpu_linear(rows, module.weight, None).t())
    return _settled(torch.cat(columns, 1))


def _packed_like(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """A matrix that gets the same kernel as one of this shape."""
    rows, columns = shape
    return (rows, columns) if rows * columns * dtype.itemsize <= _SMALL_BYTES else (_LARGE, _LARGE)


@lru_cache(maxsize=64)
def _gives_back(shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether columns of a packed matrix are those that it was made of: some processors and settings compute in fewer
    bits."""
    with torch.inference_mode():
        layer = nn.Module()
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return torch.equal(_columns(layer, shape, dtype), _settled(weight[:, :: _every(shape)]))


def _settled(part: Tensor) -> Tensor:
    """Without what a product with one loses."""
    return torch.where(part.abs() < torch.finfo(part.dtype).tiny, torch.zeros_like(part), part)
