"""Memory of one learner rank's GPU through an optimizer step, from sizes alone. Pure, no torch.

A step is a walk over FSDP groups: forward through embedding, vision blocks, decoder layers and head, backward the other
way, then the optimizer. At each moment of it the bytes are known by category; the peak is the largest sum. The counting
follows torch's FSDP2 and the autograd graphs of transformers' layers, and is checked against a trace of the learner's
own code on fake tensors (`trace.py`): category by category in tests.

    weights      shards of masters and of what is frozen, a frozen vision tower (whole), shards of the reference and of
                 a teacher, whose tower is whole
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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ..learner.families import LayerShape, Shape
from ..learner.families.build import checkpointed

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
#: as in learner/head.py, learner/features.py and sync/gpu.py: logits at one time, bytes of features and of a bucket
LOGITS_AT_ONCE: Final = 64 * 1024 * 1024
FEATURES_KEPT: Final = 256 * 1024 * 1024
BUCKET_BYTES: Final = 256 * 1024 * 1024
#: bytes per logit of a piece of the head, all fp32: five tensors while the entropy is computed; in the backward pass,
#: which computes none, the log-softmax, its gradient and the logits' gradient
_LOGIT_BYTES: Final = 20
_LOGIT_BYTES_BACKWARD: Final = 12
#: more where the entropy has a gradient: probabilities, masked log-probabilities, at the widest moment their gradients
_LOGIT_BYTES_ENTROPY: Final = 8
_MASTER: Final = 4
#: tensors of its inner width that a vision block's MLP keeps for its backward pass; quick GELU is a product of two
_KEPT: Final[Mapping[str, int]] = {"swiglu": 4, "quick_gelu": 3, "gelu": 2}


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
    #: of a distillation: a whole frozen model
    teacher: Shape | None = None
    #: the loss has an entropy bonus
    entropy_gradient: bool = False
    activation_checkpointing: bool = True
    #: of the layers, the first ones
    checkpointed_share: float = 1.0
    sharded_gradients: bool = True
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    #: several micro-batches per optimizer step: gradients of earlier ones are there
    accumulates: bool = True
    #: keys and values that a layer keeps, in those of `tokens`: samples that share a prompt have their own copies
    #: (`learner/planning.py:ATTENDED`)
    attended: int = 1
    #: bytes of a frozen tower's features that are remembered
    features: int = FEATURES_KEPT

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
    #: parameters whose gradients are there at its widest moment
    first: int = 0
    #: of what it needs its input alone is kept
    again: bool = False

    @property
    def size(self) -> int:
        return self.trained + self.frozen


def peak(load: LearnerLoad) -> Moment:
    return max(moments(load), key=lambda moment: moment.total)


def moments(load: LearnerLoad) -> Iterator[Moment]:
    """Where the peak may be, in the order of a step."""
    static = resident(load)
    if load.teacher is not None:
        yield _taught(load, load.teacher, static)
    yield from _passes(load, static)
    yield _step(load, static)
    yield _sync(load, static)


def resident(load: LearnerLoad) -> Moment:
    """Between two steps: what never leaves the GPU."""
    shape, width, trained = load.shape, load.width, load.trained
    tower = shape.vision.parameters if load.freeze_vision else 0
    frozen = shape.parameters - tower - (0 if load.lora else trained)
    reference = 2 * _MASTER * trained if load.lora else width * shape.text  # of LoRA two more sets of adapters
    reference = reference if load.reference else 0
    if load.reference and not load.lora and not load.freeze_vision:
        reference += width * shape.vision.parameters
    shards = 0.0 if load.cpu_offload else (_MASTER * trained + width * frozen + reference) / load.ranks
    moments = 0.0 if load.cpu_offload else 2 * _MASTER * trained / load.ranks
    features = load.features if load.freeze_vision else 0
    if (teacher := load.teacher) is not None:
        shards += 0.0 if load.cpu_offload else width * teacher.text / load.ranks
        tower += teacher.vision.parameters
        features += load.features
    return Moment("resident", {}).plus(
        "between steps", weights=shards + width * tower, optimizer=moments, frames=features
    )


def _taught(load: LearnerLoad, teacher: Shape, static: Moment) -> Moment:
    """The teacher's pass, without gradients: a layer and the next one are whole, and a piece of the head's logits."""
    layer = max(teacher.layers, key=lambda one: one.parameters)
    own = replace(load, shape=teacher, lora=0, targets=(), freeze_vision=True, teacher=None)
    piece = min(load.responses, max(1, LOGITS_AT_ONCE // teacher.vocabulary)) * teacher.vocabulary
    return static.plus(
        "the teacher's pass",
        unsharded=load.width * teacher.embedding,
        gather=2 * load.width * layer.parameters,
        activations=_layer_bytes(own, layer) * load.tokens,
        temporary=max(_LOGIT_BYTES * piece, _tower_forward(own)),
    )


def _passes(load: LearnerLoad, static: Moment) -> Iterator[Moment]:
    width, ranks, sharded = load.width, load.ranks, load.sharded_gradients
    shape, vision, reshards = load.shape, load.shape.vision, load.reshard_after_forward
    if load.accumulates:
        static = static.plus("accumulating", gradients=_accumulated(load))
    root, blocks, embedding, layers, head = _groups(load)
    pixels = 3 * vision.patch**2 * load.patches
    static = static.plus("pixels", frames=pixels * (1 if load.freeze_vision else 1 + width * vision.temporal))
    passing = static.plus(
        "", unsharded=width * root.size
    )  # the root's weights stay from the first to the last operation
    if load.freeze_vision:
        yield passing.plus("frozen vision tower", temporary=_tower_forward(load) + 8 * pixels)
    saved = width * shape.hidden * ((1 + vision.deepstack) * _visual_tokens(load) + load.responses)
    saved += 2 * width * shape.attention.head_dim * load.tokens + (0 if load.freeze_vision else _mergers(load))
    walked = [*embedding, *blocks, *layers]
    keeps = [group.kept if group.again else max(group.kept, group.needed) for group in walked]
    whole = 0 if reshards else width * sum(group.size for group in walked)

    # Pieces of the head's logits, and the gradients of its weight: of earlier pieces, of this one, and their sum.
    weight = width * shape.embedding
    piece = max(1, LOGITS_AT_ONCE // shape.vocabulary)
    logits = min(load.responses, piece) * shape.vocabulary
    pieces = 0 if load.lora else min(3, 2 * (load.responses > piece) + 1)
    last = (4 + 2 * width) * shape.hidden * load.tokens  # the final norm
    here = passing.plus("", activations=saved + sum(keeps) + last, unsharded=whole + width * head.size)
    yield here.plus("forward of the head", gather=width * head.size, temporary=_LOGIT_BYTES * logits)
    ahead = width * walked[-1].size if reshards else 0
    per_logit = _LOGIT_BYTES_BACKWARD + _LOGIT_BYTES_ENTROPY * load.entropy_gradient
    passes = max(per_logit * logits + (pieces > 1) * weight, pieces * weight)
    yield here.plus("backward of the head", gather=ahead, temporary=passes)

    grads = (
        0.0 if load.lora or not shape.tied else weight
    )  # the tied embedding is the root's: not reduced before the end
    reduced, before = head.trained, head
    for number in reversed(range(len(walked))):
        group, coming = walked[number], walked[number - 1]
        # Shares that are there already are added to; those that are offloaded leave at once.
        pass_on = load.accumulates or load.cpu_offload
        shares = _MASTER * (group.trained if pass_on else reduced) / ranks if sharded else 0
        inside = passing.plus(
            "",
            activations=saved + sum(keeps[: number + 1]),
            gather=width * coming.size if reshards and number else 0,
            gradients=grads + shares,
        )
        # The widest moment is when what its MLP needs is there and gradients of weights, but for one, are not. At the
        # end of the pass it is the other way round, and the weights have been given up before gradients are reduced.
        yield inside.plus(
            f"backward of {group.name}",
            activations=group.needed if group.again else 0,
            unsharded=width * group.size if reshards else whole,
            gradients=width * group.first,
            temporary=group.passing,
            reduce=_MASTER * before.trained if sharded else 0,
        )
        yield inside.plus(
            f"gradients of {group.name}",
            unsharded=0 if reshards else whole - width * group.size,
            gradients=width * group.trained,
            reduce=_MASTER * group.trained if sharded else 0,
        )
        whole -= 0 if reshards else width * group.size
        reduced, before = reduced + group.trained, group
    shares = 0 if load.accumulates or load.cpu_offload or not sharded else _MASTER * reduced / ranks
    if shape.tied and not load.lora:
        held = _MASTER * before.trained if sharded else 0
        yield passing.plus("gradients of the embedding", gradients=shares, temporary=3 * weight, reduce=held)
    yield static.plus("gradients of the root", gradients=width * root.trained + shares, reduce=_MASTER * root.trained)


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
    return static.plus("weight sync", temporary=(_MASTER + load.width) * _largest(load))


def proof(load: LearnerLoad, tokens: int) -> Moment:
    """The pass over so many tokens that engines have answered with right after a sync, without gradients."""
    root, _, embedding, layers, head = _groups(load)
    piece = min(tokens, max(1, LOGITS_AT_ONCE // load.shape.vocabulary)) * load.shape.vocabulary
    widest = max(_layer_bytes(load, layer) for layer in load.shape.layers)
    return resident(load).plus(
        "proof of a sync",
        unsharded=load.width * sum(group.size for group in (root, head, *embedding)),
        gather=2 * load.width * max(group.size for group in layers),
        activations=widest * min(tokens, load.tokens),
        temporary=_LOGIT_BYTES * piece,
    )


def bucket_bytes(load: LearnerLoad) -> int:
    """What weights travel in where an engine shares the GPU."""
    return max(BUCKET_BYTES, load.width * _largest(load))


def _largest(load: LearnerLoad) -> int:
    """Parameters of the largest tensor, at most."""
    layer = max(load.shape.layers, key=lambda one: one.parameters)
    return max(load.shape.embedding, layer.parameters if layer.sparse else 0)


# --- groups -----------------------------------------------------------------------------------------------------------


def _groups(load: LearnerLoad) -> tuple[_Group, list[_Group], list[_Group], list[_Group], _Group]:
    """(root, vision blocks, embedding, decoder layers, head). A tied embedding and a frozen tower are not groups."""
    shape, full = load.shape, not load.lora
    vision = shape.vision
    rest = shape.hidden
    blocks: list[_Group] = []
    if not load.freeze_vision:
        rest += vision.rest
        kept = load.width * vision.width * load.patches
        needed = int(_block_bytes(load) * load.patches)
        passing = 2 * load.width * vision.intermediate * load.patches
        first = vision.width * vision.intermediate
        again = _again(load, vision.depth)
        blocks = [
            _Group("a vision block", vision.block, 0, needed, kept, passing, first, number < again)
            for number in range(vision.depth)
        ]
    tied = shape.embedding if shape.tied else 0
    root = _of("the root", rest + tied, full)
    embedding = [] if shape.tied else [_of("the embedding", shape.embedding, full)]
    kept = load.width * shape.hidden * load.tokens
    layers, again = [], _again(load, len(shape.layers))
    for number, (layer, adapters) in enumerate(zip(shape.layers, load.adapters, strict=True)):
        needed = int(_layer_bytes(load, layer) * load.tokens)
        # gradients of its MLP's two products; of an adapted one by both ways, and their sum
        passing = (3 if load.lora else 2) * load.width * layer.intermediate * load.tokens
        trained, frozen = (adapters, layer.parameters) if load.lora else (layer.parameters, 0)
        first = 0 if load.lora else layer.parameters if layer.sparse else shape.hidden * layer.intermediate
        layers.append(_Group("a layer", trained, frozen, needed, kept, passing, first, number < again))
    return root, blocks, embedding, layers, _of("the head", shape.head, full)


def _again(load: LearnerLoad, layers: int) -> int:
    return checkpointed(layers, load.checkpointed_share) if load.activation_checkpointing else 0


def _of(name: str, size: int, trained: bool) -> _Group:
    return _Group(name, size if trained else 0, 0 if trained else size)


def _layer_bytes(load: LearnerLoad, layer: LayerShape) -> float:
    """Per token, of what transformers' decoder layer needs for its backward pass; its input in the pass's format is not
    among it. A norm keeps its input in fp32, the inverse deviation, the output, and for its weight's gradient the
    normalized input."""
    shape, width = load.shape, load.width
    q, kv = shape.attention.query, shape.attention.key_value
    normalized = 0 if load.lora else width
    norms = 2 * ((4 + width + normalized) * shape.hidden + 4)
    if shape.qk_norm:
        norms += (4 + normalized) * (q + kv) + 4 * (shape.attention.heads + shape.attention.kv_heads)
    attention = width * (2 * q + 2 * kv * load.attended) + 4 * shape.attention.heads
    mlp = 4 * width * layer.intermediate
    if layer.sparse:  # tokens are copied to their experts, and back
        mlp += 2 * width * shape.hidden * shape.experts_per_token
    adapted = len([target for target in load.targets if target in layer.linears])
    return norms + attention + mlp + width * load.lora * adapted  # what an adapter's first matrix gives


def _block_bytes(load: LearnerLoad) -> float:
    """Per patch, of transformers' vision block."""
    vision, width = load.shape.vision, load.width
    if vision.rms:
        norms = 2 * ((4 + 2 * width) * vision.width + 4)
    else:
        norms = 2 * (2 * width * vision.width + 2 * width) - width * vision.width
    attention = 6 * width * vision.width + 4 * vision.heads
    mlp = _KEPT[vision.activation] * width * vision.intermediate
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
