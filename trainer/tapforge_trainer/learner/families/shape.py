"""Sizes of a model from its config.json: widths and parameter counts, part by part. No torch.

- Counts are those of the Hugging Face classes, to the parameter: tests compare them on the meta device.
- A field that is missing gets the default of the class where it has one; a field that is absurd is a FolderError that
  names it.
- Each family says in its own file what its parts are made of; what they share is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .folder import FolderError, ModelConfig

#: more than any model has: what is above is a mistake in the file
_MOST = {"vocab_size": 10_000_000, "num_hidden_layers": 1024, "depth": 1024, "num_experts": 4096}
_WIDEST = 1_000_000


#: of a vision block's MLP
Activation = Literal["swiglu", "gelu", "quick_gelu"]
_MATRICES: Mapping[Activation, int] = {"swiglu": 3, "gelu": 2, "quick_gelu": 2}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer."""

    parameters: int
    #: (inputs, outputs) of its linear layers by name, for adapters; experts have none
    linears: Mapping[str, tuple[int, int]]
    #: width of the MLP that a token goes through, all its experts together
    intermediate: int
    #: among which a router chooses; 0: one MLP for all tokens
    experts: int = 0

    @property
    def sparse(self) -> bool:
        return self.experts > 0


@dataclass(frozen=True, slots=True)
class VisionShape:
    depth: int
    width: int
    heads: int
    intermediate: int
    patch: int
    merge: int
    temporal: int
    #: SwiGLU has three matrices, the others two
    activation: Activation
    #: RMSNorm instead of LayerNorm
    rms: bool
    #: blocks whose output goes to the language model too
    deepstack: int
    #: parameters of a block
    block: int
    #: patch embedding, positions and mergers
    rest: int
    #: blocks that attend within windows and not over the whole frame
    windowed: int = 0
    #: patches of a window
    window: int = 0

    @property
    def matrices(self) -> int:
        """Of a block's MLP."""
        return _MATRICES[self.activation]

    @property
    def parameters(self) -> int:
        return self.depth * self.block + self.rest

    @property
    def cell(self) -> int:
        """Pixels of a visual token's side."""
        return self.patch * self.merge


@dataclass(frozen=True, slots=True)
class Shape:
    """A vision-language model."""

    model_type: str
    attention: AttentionShape
    #: RMSNorm on queries and keys
    qk_norm: bool
    vocabulary: int
    #: the head is the embedding
    tied: bool
    layers: tuple[LayerShape, ...]
    vision: VisionShape
    experts_per_token: int = 0

    @property
    def hidden(self) -> int:
        return self.attention.hidden

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the head that are not the embedding's."""
        return 0 if self.tied else self.embedding

    @property
    def text(self) -> int:
        """Parameters without the vision tower: embedding, layers, final norm, head."""
        return self.embedding + sum(layer.parameters for layer in self.layers) + self.hidden + self.head

    @property
    def parameters(self) -> int:
        return self.text + self.vision.parameters

    def adapters(self, rank: int, targets: tuple[str, ...]) -> tuple[int, ...]:
        """Parameters that LoRA of `rank` adds to each layer. Raises FolderError for a target that no layer has."""
        known = {name for layer in self.layers for name in layer.linears}
        if unknown := sorted(set(targets) - known):
            raise FolderError(
                f"spec.model.lora.targets: {', '.join(unknown)} is not a linear layer of the language model; it has "
                f"{', '.join(sorted(known))}"
            )
        return tuple(
            sum(rank * (inputs + outputs) for name, (inputs, outputs) in layer.linears.items() if name in targets)
            for layer in self.layers
        )


# --- what families share ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Of every layer of a language model."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        inner, outer = (self.hidden, self.key_value), (self.hidden, self.query)
        return {"q_proj": outer, "k_proj": inner, "v_proj": inner, "o_proj": (self.query, self.hidden)}

    @staticmethod
    def of(text: Section) -> AttentionShape:
        hidden, heads = text.number("hidden_size"), text.number("num_attention_heads")
        kv_heads = text.number("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise text.wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        return AttentionShape(hidden, heads, kv_heads, text.number("head_dim", default=max(1, hidden // heads)))


def dense_layer(text: Section, attention: AttentionShape, biases: int) -> LayerShape:
    """A layer with one MLP. `biases`: parameters of its attention beside the matrices, norms on heads among them."""
    hidden, width = attention.hidden, text.number("intermediate_size")
    mlp = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    return _layer(attention, biases, 3 * hidden * width, mlp, width)


def sparse_layer(
    attention: AttentionShape, biases: int, *, experts: int, experts_per_token: int, width: int
) -> LayerShape:
    """A layer with a router and experts of this width."""
    parameters = experts * (3 * attention.hidden * width + attention.hidden)
    return _layer(attention, biases, parameters, {}, width * experts_per_token, experts)


def _layer(
    attention: AttentionShape,
    biases: int,
    mlp: int,
    linears: Mapping[str, tuple[int, int]],
    intermediate: int,
    experts: int = 0,
) -> LayerShape:
    matrices = attention.hidden * (2 * attention.query + 2 * attention.key_value)
    parameters = matrices + biases + mlp + 2 * attention.hidden
    return LayerShape(parameters, {**attention.linears, **linears}, intermediate, experts)


def language_model(
    config: ModelConfig,
    text: Section,
    attention: AttentionShape,
    layer: Callable[[int], LayerShape],
    vision: VisionShape,
    *,
    qk_norm: bool,
    tied: bool,
    experts_per_token: int = 0,
) -> Shape:
    """The whole model. `layer`: its layers by number; `tied`: the head is the embedding."""
    return Shape(
        config.model_type,
        attention,
        qk_norm,
        text.number("vocab_size"),
        tied,
        tuple(layer(number) for number in range(text.number("num_hidden_layers"))),
        vision,
        experts_per_token,
    )


def tower(
    vision: Section,
    *,
    width: int,
    intermediate: int,
    out: int,
    activation: Activation,
    depth: int,
    patch: int,
    rms: bool = False,
    windowed: int = 0,
    window: int = 0,
) -> VisionShape:
    """A vision tower whose patches are embedded without a bias and merged once. `depth` and `patch` are the class's
    defaults; `out`: the language model's width."""
    depth, patch = vision.number("depth", default=depth), vision.number("patch_size", default=patch)
    merge = vision.number("spatial_merge_size", default=2)
    temporal = vision.number("temporal_patch_size", default=2)
    norm = width if rms else 2 * width
    matrices = _MATRICES[activation]
    mlp = matrices * width * intermediate + (matrices - 1) * intermediate + width
    block = 2 * norm + 4 * width * width + 4 * width + mlp
    rest = 3 * temporal * patch * patch * width + norm + merger(width, merge, out)
    heads = vision.number("num_heads", default=16)
    return VisionShape(
        depth, width, heads, intermediate, patch, merge, temporal, activation, rms, 0, block, rest, windowed, window
    )


def merger(width: int, merge: int, out: int) -> int:
    """Parameters that make a visual token of merge x merge patches, without the norm before them."""
    merged = width * merge * merge
    return merged * merged + merged + merged * out + out


@dataclass(frozen=True, slots=True)
class Section:
    """Fields of one part of config.json, checked as they are asked for."""

    config: ModelConfig
    fields: Mapping[str, Any]
    name: str

    @staticmethod
    def text(config: ModelConfig) -> Section:
        """The language model's."""
        return Section(config, config.text, "text_config")

    @staticmethod
    def vision(config: ModelConfig) -> Section:
        """The vision tower's."""
        return Section(config, config.vision, "vision_config")

    def wrong(self, field: str, value: object, wanted: str) -> FolderError:
        return FolderError(f"{self.config.folder}/config.json: {self.name}.{field} is {value!r:.80}, not {wanted}")

    def number(self, field: str, default: int | None = None) -> int:
        value = self._field(field, default)
        most = _MOST.get(field, _WIDEST)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(field, value, f"a whole number from 1 to {most:,}")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        value = self._field(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, value, "true or false")
        return value

    def numbers(self, field: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        value = self._field(field, default)
        if not isinstance(value, list | tuple) or any(isinstance(n, bool) or not isinstance(n, int) for n in value):
            raise self.wrong(field, value, "a list of whole numbers")
        return tuple(value)

    def _field(self, field: str, default: Any) -> Any:
        if not isinstance(self.fields, Mapping):
            raise FolderError(f"{self.config.folder}/config.json: {self.name} is not an object")
        value = self.fields.get(field)
        if value is None:
            value = default
        if value is None:
            raise FolderError(
                f"{self.config.folder}/config.json has no {self.name}.{field}: the model's sizes are unknown"
            )
        return value
