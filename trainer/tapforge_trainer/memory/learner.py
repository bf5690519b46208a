"""Memory of one learner rank's GPU through an optimizer step, from sizes alone. Pure, no torch.

A step is a walk over FSDP groups: forward through vision blocks, embedding, decoder layers and head, backward the other
way, then the optimizer. At each moment of it the bytes are known by category; the peak is the largest sum. The counting
follows torch's FSDP2 and the autograd graphs of transformers' layers, and is checked against a trace of the learner's
own code on fake tensors (`trace.py`): category by category in tests.

    weights      shards of masters and of what is frozen, a frozen vision tower (whole), the reference's shards
    gradients    shards of reduced gradients, and what the backward pass has not reduced yet
    optimizer    AdamW's two moments
    unsharded    gathered weights of the groups that are in use
    activations  what the backward pass needs of the forward pass
    temporary    what lives within one operation or one group
    gather       the buffer that a group is gathered into before it is copied out
    reduce       fp32 gradients on their way to the ranks that keep them
    frames       pixels of a micro-batch, features of the frozen tower that are remembered

Not counted: the CUDA context, NCCL's buffers, fragmentation. `estimate.RESERVE` is there for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .shape import LayerShape, Shape

CATEGORIES: Final = (
    "weights",
    "gradients",
    "optimizer",
    "unsharded",
    "activations",
    "temporary",
    "gather",
    "reduce",
    "kv_cache",
    "frames",
)
#: as in policy/forward.py: logits that exist at one time, values of frozen features that are remembered
LOGITS_AT_ONCE: Final = 64 * 1024 * 1024
FEATURES_KEPT: Final = 64 * 1024 * 1024
#: bytes per logit of the chunk of the head that is computed again in the backward pass
_LOGIT_BYTES: Final = 24
_MASTER: Final = 4


@dataclass(frozen=True, slots=True)
class LearnerLoad:
    """What a rank has to do: the model, how it is trained, and one micro-batch."""

    shape: Shape
    ranks: int
    #: of a micro-batch
    tokens: int
    #: patches of its different frames
    patches: int
    #: tokens of answers, at whose positions logits are computed
    responses: int
    #: bytes of a number in the forward and backward pass
    width: int = 2
    #: rank of adapters; 0: all weights are trained
    lora: int = 0
    targets: tuple[str, ...] = ()
    freeze_vision: bool = True
    #: a frozen copy for the KL term
    reference: bool = False
    activation_checkpointing: bool = True
    sharded_gradients: bool = True
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    #: several micro-batches per optimizer step: gradients of earlier ones are there
    accumulates: bool = True

    @property
    def adapters(self) -> tuple[int, ...]:
        """Parameters of each layer's adapters."""
        if not self.lora:
            return (0,) * len(self.shape.layers)
        return self.shape.adapters(self.lora, self.targets)

    @property
    def trained(self) -> int:
        """Parameters."""
        if self.lora:
            return sum(self.adapters)
        return self.shape.text + (0 if self.freeze_vision else self.shape.vision.parameters)


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes of a GPU by category at one moment; what is not named is 0."""

    name: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def plus(self, name: str, **more: float) -> Moment:
        return Moment(name, {c: self.bytes.get(c, 0) + int(more.get(c, 0)) for c in CATEGORIES})


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters that FSDP gathers and reduces together."""

    name: str
    trained: int
    frozen: int
    #: bytes that the backward pass through it needs, all of which come back with recomputation
    needed: int = 0
    #: bytes of its input, which is all that is kept when the rest is computed again
    kept: int = 0
    #: bytes that come and go within its backward pass
    passing: int = 0

    @property
    def size(self) -> int:
        return self.trained + self.frozen


def peak(load: LearnerLoad) -> Moment:
    return max(moments(load), key=lambda moment: moment.total)


def moments(load: LearnerLoad) -> Iterator[Moment]:
    """Where the peak may be, in the order of a step."""
    static = resident(load)
    yield from _passes(load, static)
    yield _step(load, static)
    yield _sync(load, static)


def resident(load: LearnerLoad) -> Moment:
    """Between two steps: what never leaves the GPU."""
    shape, width, trained = load.shape, load.width, load.trained
    tower = shape.vision.parameters if load.freeze_vision else 0
    frozen = shape.parameters - tower - (0 if load.lora else trained)
    reference = width * shape.text if load.reference and not load.lora else 0
    if load.reference and not load.lora and not load.freeze_vision:
        reference += width * shape.vision.parameters
    shards = 0.0 if load.cpu_offload else (_MASTER * trained + width * frozen + reference) / load.ranks
    moments = 0.0 if load.cpu_offload else 2 * _MASTER * trained / load.ranks
    features = width * FEATURES_KEPT if load.freeze_vision else 0
    return Moment("resident", {}).plus(
        "between steps", weights=shards + width * tower, optimizer=moments, frames=features
    )


def _passes(load: LearnerLoad, static: Moment) -> Iterator[Moment]:
    width, ranks, checkpointing = load.width, load.ranks, load.activation_checkpointing
    if load.accumulates:
        static = static.plus("accumulating", gradients=_accumulated(load))
    pixels = 3 * load.shape.vision.temporal * load.shape.vision.patch**2 * load.patches
    root, vision, embedding, layers, head = _groups(load)
    static = static.plus("pixels", frames=(1 + width + 4) * pixels, unsharded=width * root.size)
    if load.freeze_vision:
        yield static.plus("frozen vision tower", temporary=_tower_forward(load))
    features = width * load.shape.hidden * (1 + load.shape.vision.deepstack) * _visual_tokens(load)
    saved = features + (_mergers(load) if not load.freeze_vision else 0)
    saved += width * load.shape.hidden * (load.tokens + load.responses) + 4 * width * load.shape.head_dim * load.tokens
    walked = [*vision, *embedding, *layers]
    keeps = [group.kept if checkpointing else max(group.kept, group.needed) for group in walked]
    unsharded = 0 if load.reshard_after_forward else width * sum(group.size for group in walked)
    # backward: the head first
    here = static.plus("", activations=saved + sum(keeps), unsharded=unsharded)
    grads = 0.0 if load.lora else width * root.trained  # of the root, not reduced before the end
    chunk = min(load.responses, max(1, LOGITS_AT_ONCE // load.shape.vocabulary)) * load.shape.vocabulary
    yield here.plus(
        "head",
        unsharded=width * head.size if load.reshard_after_forward else 0,
        gradients=width * head.trained + grads,
        temporary=_LOGIT_BYTES * chunk,
    )
    reduced = head.trained
    before = head
    for number in reversed(range(len(walked))):
        group, coming = walked[number], walked[number - 1] if number else root
        if not group.trained and not load.lora:
            continue
        sharded = load.sharded_gradients
        # shares that are there already are added to; those that are offloaded leave at once
        passing = load.accumulates or load.cpu_offload
        shares = _MASTER * (group.trained if passing else reduced) / ranks if sharded else 0
        inside = static.plus(
            "",
            activations=saved + sum(keeps[: number + 1]) + (group.needed if checkpointing else 0),
            unsharded=width * group.size if load.reshard_after_forward else unsharded,
            gather=width * coming.size if load.reshard_after_forward and number else 0,
            gradients=grads + width * group.trained + shares,
        )
        held = _MASTER * before.trained if sharded else 0
        yield inside.plus(f"backward of {group.name}", temporary=group.passing, reduce=held)
        yield inside.plus(f"gradients of {group.name}", reduce=_MASTER * group.trained if sharded else 0)
        reduced, before = reduced + group.trained, group
    yield static.plus(
        "gradients of the root",
        activations=saved,
        gradients=width * root.trained + (0 if load.accumulates or load.cpu_offload else _MASTER * reduced / ranks),
        reduce=_MASTER * (root.trained + before.trained) if load.sharded_gradients else _MASTER * root.trained,
    )


def _accumulated(load: LearnerLoad) -> float:
    """Of gradients of earlier micro-batches."""
    if not load.sharded_gradients:
        return _MASTER * load.trained
    return 0.0 if load.cpu_offload else _MASTER * load.trained / load.ranks


def _step(load: LearnerLoad, static: Moment) -> Moment:
    """A fused AdamW needs nothing of its own."""
    return static.plus("optimizer", gradients=0 if load.cpu_offload else _MASTER * load.trained / load.ranks)


def _sync(load: LearnerLoad, static: Moment) -> Moment:
    """Engines get the weights tensor by tensor: one is whole at a time, as master and in the engine's format."""
    largest = load.shape.embedding
    layer = max(load.shape.layers, key=lambda one: one.parameters)
    largest = max(largest, layer.parameters if layer.sparse else 0)
    return static.plus("weight sync", temporary=(_MASTER + load.width) * largest)


# --- groups -----------------------------------------------------------------------------------------------------------


def _groups(load: LearnerLoad) -> tuple[_Group, list[_Group], list[_Group], list[_Group], _Group]:
    """(root, vision blocks, embedding, decoder layers, head). A tied embedding and a frozen tower are no groups."""
    shape, full = load.shape, not load.lora
    vision = shape.vision
    rest = shape.hidden
    blocks: list[_Group] = []
    if not load.freeze_vision:
        rest += vision.rest
        kept = load.width * vision.width * load.patches
        needed = int(_block_bytes(load) * load.patches)
        passing = 2 * load.width * vision.intermediate * load.patches
        blocks = [_Group("a vision block", vision.block, 0, needed, kept, passing)] * vision.depth
    tied = shape.embedding if shape.tied else 0
    root = _of("the root", rest + tied, full)
    embedding = [] if shape.tied else [_of("the embedding", shape.embedding, full)]
    kept = load.width * shape.hidden * load.tokens
    layers = []
    for layer, adapters in zip(shape.layers, load.adapters, strict=True):
        needed = int(_layer_bytes(load, layer) * load.tokens)
        passing = 2 * load.width * layer.intermediate * load.tokens
        trained, frozen = (adapters, layer.parameters) if load.lora else (layer.parameters, 0)
        layers.append(_Group("a layer", trained, frozen, needed, kept, passing))
    return root, blocks, embedding, layers, _of("the head", shape.head, full)


def _of(name: str, size: int, trained: bool) -> _Group:
    return _Group(name, size if trained else 0, 0 if trained else size)


def _layer_bytes(load: LearnerLoad, layer: LayerShape) -> float:
    """Per token, of what transformers' decoder layer needs for its backward pass; its input in the pass's format is not
    among it. A norm keeps its input in fp32, the inverse deviation, the normalized input and the output."""
    shape, width = load.shape, load.width
    q, kv = shape.query, shape.key_value
    norms = 2 * ((4 + 2 * width) * shape.hidden + 4)
    if shape.qk_norm:
        norms += (4 + width) * (q + kv) + 4 * (shape.heads + shape.kv_heads)
    attention = width * (2 * q + 2 * kv) + 4 * shape.heads
    mlp = 4 * width * layer.intermediate
    if layer.sparse:  # tokens are copied to their experts, and back
        mlp += 2 * width * shape.hidden * shape.experts_per_token
    # of an adapter: what its first matrix gives, and that times the scale
    return norms + attention + mlp + 2 * width * load.lora * len([t for t in load.targets if t in layer.linears])


def _block_bytes(load: LearnerLoad) -> float:
    """Per patch, of transformers' vision block."""
    vision, width = load.shape.vision, load.width
    if vision.rms:
        norms = 2 * ((4 + 2 * width) * vision.width + 4)
    else:
        norms = 2 * (2 * width * vision.width + 2 * width) - width * vision.width
    attention = 6 * width * vision.width + 4 * vision.heads
    mlp = (4 if vision.gated else 2) * width * vision.intermediate
    return norms + attention + mlp


def _visual_tokens(load: LearnerLoad) -> int:
    return load.patches // load.shape.vision.merge**2


def _mergers(load: LearnerLoad) -> int:
    """Of a trained tower's mergers: input of the norm, its output, and twice what is between the two matrices."""
    vision = load.shape.vision
    return (1 + vision.deepstack) * 4 * load.width * vision.width * load.patches


def _tower_forward(load: LearnerLoad) -> int:
    """A frozen tower's widest moment: a block's input and queries, keys and values, in fp32 for their rotation."""
    vision = load.shape.vision
    attention = (5 * load.width + 8) * vision.width
    mlp = 2 * load.width * vision.width + 2 * load.width * vision.intermediate
    return max(attention, mlp) * load.patches
