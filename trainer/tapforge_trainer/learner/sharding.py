"""A learner's model: built without memory, sharded over the ranks, filled from a folder, and read again for engines.

Rules:
- No rank ever holds the whole model. It is built on the meta device, wrapped with FSDP2, and then each rank reads its
  own shards out of the safetensors files; what is gathered for engines and exports is gathered name by name.
- What is trained is fp32, whatever the files hold. What is frozen is in the number format of the forward pass, and so
  is a reference. Buffers (rotary frequencies) are computed, and stay fp32: rounded ones turn far patches by the wrong
  angle.
- Layers, vision blocks, embedding and head are groups of their own. A tied embedding and head are one parameter, which
  is needed from the first to the last operation of a pass: it stays with the root.
- A frozen vision tower is held whole by every rank and never sharded, so that a rank may enter it alone. With adapters
  everything but them is frozen, the tower as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..placement.settings import LearnerSettings
from . import lora
from .batches import Vocabulary
from .digest import digest, values
from .families import FolderError, ModelConfig, family_named, family_of
from .families.build import build, embedding, head, tied, transformer_layers, vision_blocks
from .frame_store import PixelFormat

if TYPE_CHECKING:
    from .packed import PackedPolicy


def load_policy(
    settings: LearnerSettings,
    form: PixelFormat,
    mesh: DeviceMesh,
    *,
    frozen: bool = False,
    tower_of: PackedPolicy | None = None,
) -> tuple[PackedPolicy, Vocabulary]:
    """The model of the settings' folder, sharded over `mesh`; collective. `frozen`: nothing of it is trained, so that
    all of it is in the number format of the pass. `tower_of`: another policy, whose frozen vision tower this one uses
    instead of its own. Raises FolderError where the folder does not hold the model that its config.json announces."""
    policy, vocabulary = build_policy(settings, form, frozen=frozen)
    folder = Path(settings.model)
    if tower_of is not None:
        policy.share_tower(tower_of)
    shard(policy, mesh, settings)
    materialize(policy, policy.model, torch.device(settings.device), offload=settings.cpu_offload)
    load_weights(policy.model, folder, skip="model.visual." if tower_of is not None else None)
    lora.begin(policy.model, settings.seed)
    return policy, vocabulary


def load_teacher(settings: LearnerSettings, form: PixelFormat, mesh: DeviceMesh) -> PackedPolicy | None:
    """The settings' teacher, frozen, with its own sizes and vision tower; collective. It reads the policy's own tokens
    and patches (`run/teacher_check.py`). None: there is none. Raises FolderError."""
    if not settings.teacher:
        return None
    own = replace(settings, model=settings.teacher, lora=None, freeze_vision=True, critic=None)
    return load_policy(own, form, mesh, frozen=True)[0]


def build_policy(
    settings: LearnerSettings, form: PixelFormat, *, frozen: bool = False
) -> tuple[PackedPolicy, Vocabulary]:
    """Without memory: every parameter and buffer of the model is on the meta device. Raises FolderError."""
    folder = ModelConfig.of_folder(Path(settings.model))
    vocabulary = Vocabulary.of(folder.vocabulary, folder.image_token, settings.allowed_ids)
    model = meta_model(folder)
    if settings.lora is not None:
        family = family_of(folder)
        lora.adapt(model, settings.lora, family.lora_pattern(family.adapted(settings.lora.targets)))
        settings = replace(settings, freeze_vision=True)
    policy = build(folder, settings, form, vocabulary, model=model)
    if frozen:
        policy.requires_grad_(False)
    dtype = getattr(torch, settings.dtype)
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return policy, vocabulary


def meta_model(folder: ModelConfig) -> Any:
    """transformers' model of a folder, in training mode, in fp32, on the meta device."""
    import transformers

    kind = getattr(transformers, family_of(folder).architecture)
    with torch.device("meta"):
        model = kind(kind.config_class.from_pretrained(folder.folder, local_files_only=True))
    model.float().train()
    return model


def shard(policy: PackedPolicy, mesh: DeviceMesh, settings: LearnerSettings) -> None:
    """FSDP2, bottom-up."""
    options: dict[str, Any] = {"mesh": mesh}
    if settings.dtype != "float32":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=getattr(torch, settings.dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if settings.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=settings.device == "cuda")
    inner = options | {"reshard_after_forward": settings.reshard_after_forward}
    for layer in transformer_layers(policy.model):
        fully_shard(layer, **inner)
    ignored = set(policy.visual.parameters()) if policy.freeze_vision else None
    if ignored is None:
        for block in vision_blocks(policy.model):
            fully_shard(block, **inner)
    if not tied(policy.model):
        fully_shard(embedding(policy.model), **inner)
        fully_shard(head(policy.model), **inner)
    fully_shard(policy, ignored_params=ignored, **options)


def materialize(policy: nn.Module, model: Any, device: torch.device, *, offload: bool = False) -> None:
    """Memory for what of the policy is on the meta device, and values of the buffers of its model, transformers'.
    `offload`: shards are in the host's memory."""

    def place(tensor: Tensor) -> Tensor:
        here = torch.device("cpu") if offload and isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=here) if tensor.is_meta else tensor.to(here)

    policy._apply(place)
    for module in model.modules():
        if module._non_persistent_buffers_set:  # in no file: what transformers computes when it loads a model
            model._init_weights(module)


# --- from a folder ----------------------------------------------------------------------------------------------------


def load_weights(model: Any, folder: Path, *, skip: str | None = None) -> None:
    """Fills the model's parameters, each rank its own shards; collective. Names that begin with `skip` are left."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    files = tensors_of(folder)
    family = family_named(model.config.model_type)
    published = {family.parameter_of(name): name for name in files}
    _check_plain(folder, files)
    wanted, missing, other = {}, [], []
    adapters = lora.matrices(model)
    for name, parameter in model.named_parameters():
        if name in adapters or (skip is not None and name.startswith(skip)):
            continue
        source = published.get(name)
        if source is None:
            missing.append(name)
            continue
        size, target = tuple(files[source].size), parameter.detach()
        if tuple(family.for_engine(name, target).shape) == size:
            target = family.for_engine(name, target)  # as published; transformers writes its own layout
        if size == tuple(target.shape):
            wanted[source] = target
        else:
            other.append(f"{source} is {list(size)} and not {list(parameter.shape)}")
    if missing or other:
        raise FolderError(_contradiction(folder, missing, other))
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)))


def tensors_of(folder: Path) -> dict[str, Any]:
    """What a folder's safetensors files say of each tensor, by its name there: torch's `TensorStorageMetadata`. Raises
    FolderError."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    try:
        return dict(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
    except Exception as error:  # safetensors has no other kind for a file of another format or one that is cut short
        raise FolderError(f"a safetensors file of {folder} can't be read ({error}); fetch the model again") from error


def _check_plain(folder: Path, files: Mapping[str, Any]) -> None:
    """Quantized weights have names and shapes that fit, and are another model without their scales."""
    for name, found in files.items():
        kind = found.properties.dtype
        if name.endswith("weight") and not (kind.is_floating_point and kind.itemsize >= 2):
            raise FolderError(
                f"{folder} holds quantized weights ({name} is {kind}), which can't be trained: name the model that it "
                "was quantized from"
            )


def _contradiction(folder: Path, missing: list[str], other: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors are in none of its safetensors files, {missing[0]} for one")
    if other:
        parts.append(f"{len(other)} tensors have another shape than its config.json says: {other[0]}")
    return f"{folder} does not hold the model that its config.json announces: {'; '.join(parts)}. Fetch the model again"


# --- for engines ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SentWeights:
    """What a rank sent in a round of weights, for the proof that it arrived."""

    #: of the tensors by name (`digest.py`), on their device
    digests: dict[str, Tensor] = field(default_factory=dict)
    #: by the rank that sends; the others' would be the same
    digested: bool = True
    #: tensors that do not hold the adapter of their layer
    unmerged: list[str] = field(default_factory=list)

    def read(self) -> tuple[dict[str, int], tuple[str, ...]]:
        return values(self.digests), tuple(self.unmerged)


class EngineWeights:
    """Whole tensors under checkpoint names in `dtype`, as an engine loads them, gathered one after another: iterating
    is collective, and every rank gets every tensor. `device`: where they are gathered; None: where the shards are,
    which may be the host's memory. Adapters are merged; experts lie as they were published, as
    (experts, in, out). `sent` notes what was yielded."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        device: torch.device | None = None,
        sent: SentWeights | None = None,
    ):
        self._model, self.dtype, self._device, self._sent = model, dtype, device, sent
        self._family = family_named(model.config.model_type)

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """In the order of iteration."""
        return [(name, tuple(self._family.for_engine(name, parameter).shape)) for name, parameter in self._parameters()]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        adapted = {f"{name}.weight": layer for name, layer in lora.layers(self._model).items()}
        # By the parameter itself: a name that finds no adapter is one of the faults.
        owners = {id(layer.weight): layer for layer in self._model.modules() if isinstance(layer, lora.Adapted)}
        for name, parameter in self._parameters():
            shards = adapted[name].merged() if name in adapted else parameter.detach()
            shards = shards.to(self.dtype)
            if self._sent is not None and (layer := owners.get(id(parameter))) and not lora.is_merged(layer, shards):
                self._sent.unmerged.append(name)
            if self._device is not None:
                shards = shards.to(self._device)
            whole = self._family.for_engine(name, unsharded(shards)).contiguous()
            if self._sent is not None and self._sent.digested:
                self._sent.digests[name] = digest(whole)
            yield name, whole

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        adapters = lora.matrices(self._model)
        return [(name, p) for name, p in self._model.named_parameters() if name not in adapters]


def adapters(rank: Any) -> dict[str, Tensor]:
    """All matrices of the rank's adapters as an engine takes them (`lora.for_engine`), on the host; collective, kept by
    the first rank, and noted as what was sent."""
    found: dict[str, Tensor] = {}
    note = rank.sent = SentWeights(digested=rank.rank == 0)
    for name, whole in lora.for_engine(rank.policy.model, getattr(torch, rank.settings.dtype)):
        if note.digested:
            note.digests[name], found[name] = digest(whole), whole.cpu()
    return found


def sent(rank: Any) -> tuple[dict[str, int], tuple[str, ...]]:
    """Digests of what the rank sent last, by name, and what of it lacks its adapter."""
    return rank.sent.read() if rank.sent is not None else ({}, ())


def unsharded(tensor: Tensor) -> Tensor:
    """The tensor of all ranks; collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def pack(weights: Mapping[str, Tensor]) -> bytes:
    """Tensors by checkpoint name as safetensors bytes: what travels through Ray's object store."""
    from safetensors.torch import save

    return save({name: tensor.contiguous() for name, tensor in weights.items()})


def reshard(policy: nn.Module) -> None:
    """Only shards are left. After a pass without gradients the root, and what is not freed after its forward pass, is
    whole: code that then reads or writes parameters would get or change that copy instead of the shards."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
