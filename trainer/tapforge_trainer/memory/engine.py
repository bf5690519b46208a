"""Memory of one GPU of an engine, from sizes alone. Pure.

vLLM takes a share of the GPU: the weights first, then what a pass of `batched` tokens with the images of its encoder
budget needs, and the key-value cache gets the rest. Where the rest holds not even one answer at full context, vLLM
refuses to start. The passes are an estimate (two layers' activations and the logits of all sequences), which vLLM
measures when it starts; CUDA graphs are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..learner.families import Shape
from .learner import Moment

#: tokens of a pass where the run says nothing, as vLLM chooses for library use: of GPUs with 70 GiB and more (no A100),
#: and of others
BATCHED_TOKENS = (16384, 8192)
_LARGE = 70 * 2**30


@dataclass(frozen=True, slots=True)
class EngineLoad:
    shape: Shape
    tensor_parallel: int
    #: tokens of a prompt with its answer, at most
    context: int
    #: answers at once
    sequences: int
    #: tokens of a pass
    batched: int
    #: visual tokens of the largest frame
    frame_tokens: int
    #: bytes of a number
    width: int = 2
    #: key-value cache that the run asks for; None: what is left
    kv_cache: int | None = None
    #: rank of adapters that come in alone, as vLLM has room for it, and the layers that have them; 0: none
    lora: int = 0
    targets: tuple[str, ...] = ()

    @property
    def weights(self) -> float:
        """Bytes on one GPU, with the room for an adapter: each worker has its first or its second matrix whole."""
        adapter = sum(self.shape.adapters(self.lora, self.targets)) if self.lora else 0
        return self.width * (self.shape.parameters / self.tensor_parallel + adapter)

    @property
    def kv_bytes_per_token(self) -> int:
        """On one GPU; heads that can't be split further are there several times."""
        heads = max(1, -(-self.shape.attention.kv_heads // self.tensor_parallel))
        return 2 * len(self.shape.layers) * heads * self.shape.attention.head_dim * self.width

    @property
    def kv_wanted(self) -> int:
        """Of all answers at once, each at full context."""
        return self.sequences * self.context * self.kv_bytes_per_token


def batched_tokens(given: int | None, card: int, product: str | None) -> int:
    if given is not None:
        return given
    return BATCHED_TOKENS[0 if card >= _LARGE and "A100" not in (product or "") else 1]


def engine_moment(load: EngineLoad, budget: int) -> Moment:
    """`budget`: bytes of the GPU that the engine may take."""
    shape, width, parallel = load.shape, load.width, load.tensor_parallel
    vision = shape.vision
    encoded = max(load.batched, load.frame_tokens)  # vLLM's encoder budget, in visual tokens
    widest = max(layer.intermediate for layer in shape.layers)
    tokens = (
        width
        * load.batched
        * (6 * shape.hidden + (3 * widest + shape.attention.query + 2 * shape.attention.key_value) // parallel)
    )
    patches = encoded * vision.merge**2
    attention, mlp = (5 * width + 8) * vision.width, 2 * width * (vision.width + vision.intermediate)
    tower = max(attention, mlp) * patches // parallel
    logits = min(load.sequences, load.batched) * shape.vocabulary * 3 * 4  # fp32 from the head on
    rest = Moment("", {}).plus(
        "sampling",
        weights=load.weights,
        temporary=max(tokens + logits, tower),
        frames=width * shape.hidden * (1 + vision.deepstack) * encoded,
    )
    cache = max(0, budget - rest.total) if load.kv_cache is None else load.kv_cache
    return rest.plus("sampling", kv_cache=cache)


def problem(load: EngineLoad, moment: Moment) -> str | None:
    """Why the engine can't start or can't answer; None: it can, as far as memory and heads go."""
    shape, parallel = load.shape, load.tensor_parallel
    if shape.attention.heads % parallel:
        return f"engine.tensorParallel {parallel} does not divide the model's {shape.attention.heads} attention heads"
    if shape.attention.kv_heads % parallel and parallel % shape.attention.kv_heads:
        heads = shape.attention.kv_heads
        return f"engine.tensorParallel {parallel} and the model's {heads} key-value heads don't divide each other"
    one = load.context * load.kv_bytes_per_token
    if moment.bytes["kv_cache"] < one:
        return (
            f"the key-value cache gets {moment.bytes['kv_cache'] / 2**30:.1f} GiB, and one answer at full context "
            f"needs {one / 2**30:.1f}"
        )
    return None
