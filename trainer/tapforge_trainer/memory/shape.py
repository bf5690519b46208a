"""Sizes of a model from its config.json: widths and parameter counts, part by part. No torch.

- Counts are those of the Hugging Face classes, to the parameter: tests compare them on the meta device.
- A field that is missing gets the default of the class where it has one; a field that is absurd is a FolderError that
  names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapforge_trainer.learner.families import FolderError, ModelConfig, family_of

#: more than any model has: what is above is a mistake in the file
_MOST = {"vocab_size": 10_000_000, "num_hidden_layers": 1024, "depth": 1024, "num_experts": 4096}
_WIDEST = 1_000_000


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer."""

    parameters: int
    #: (inputs, outputs) of its linear layers by name, for adapters; experts have none
    linears: Mapping[str, tuple[int, int]]
    #: width of the MLP that a token goes through, all its experts together
    intermediate: int
    sparse: bool


@dataclass(frozen=True, slots=True)
class VisionShape:
    depth: int
    width: int
    heads: int
    intermediate: int
    patch: int
    merge: int
    temporal: int
    #: SwiGLU instead of two matrices
    gated: bool
    #: RMSNorm instead of LayerNorm
    rms: bool
    #: blocks whose output goes to the language model too
    deepstack: int
    block: int
    #: patch embedding, positions and mergers
    rest: int

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
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    #: RMSNorm on queries and keys
    qk_norm: bool
    vocabulary: int
    #: the head is the embedding
    tied: bool
    layers: tuple[LayerShape, ...]
    vision: VisionShape
    experts_per_token: int = 0

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

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        return self.kv_heads * self.head_dim

    def adapters(self, rank: int, targets: tuple[str, ...]) -> tuple[int, ...]:
        """Parameters that LoRA of `rank` adds to each layer. Raises FolderError for a target that no layer has."""
        known = {name for layer in self.layers for name in layer.linears}
        if unknown := sorted(set(targets) - known):
            raise FolderError(
                f"spec.model.lora.targets: {', '.join(unknown)} is no linear layer of the language model; it has "
                f"{', '.join(sorted(known))}"
            )
        return tuple(
            sum(rank * (inputs + outputs) for name, (inputs, outputs) in layer.linears.items() if name in targets)
            for layer in self.layers
        )

    @staticmethod
    def of(config: ModelConfig) -> Shape:
        """Raises FolderError for a config.json that is none of a known family's."""
        family_of(config)
        text = _Section(config, config.text, "text_config")
        kind = config.model_type
        hidden, heads = text.number("hidden_size"), text.number("num_attention_heads")
        kv_heads = text.number("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise text.wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        head_dim = text.number("head_dim", default=max(1, hidden // heads))
        third = kind.startswith("qwen3")
        layers = tuple(
            _layer(text, number, hidden, heads * head_dim, kv_heads * head_dim, head_dim, third)
            for number in range(text.number("num_hidden_layers"))
        )
        sparse = kind == "qwen3_vl_moe"
        return Shape(
            kind,
            hidden,
            heads,
            kv_heads,
            head_dim,
            third,
            text.number("vocab_size"),
            config.tied,
            layers,
            _vision(_Section(config, config.vision, "vision_config"), kind, hidden),
            text.number("num_experts_per_tok", default=8) if sparse else 0,
        )


def _layer(text: _Section, number: int, hidden: int, q: int, kv: int, head_dim: int, third: bool) -> LayerShape:
    linears = {"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden)}
    # Qwen2 has biases on queries, keys and values; Qwen3 norms instead, and biases where its config says so
    biases = q + 2 * kv if not third else 2 * head_dim + (q + 2 * kv + hidden) * text.flag("attention_bias")
    experts = 0
    if text.config.model_type == "qwen3_vl_moe":  # published as num_experts; transformers 5 writes the other name
        experts = text.number("num_experts", default=text.number("num_local_experts", default=128))
    dense = number in text.numbers("mlp_only_layers") or (number + 1) % text.number("decoder_sparse_step", default=1)
    if experts and not dense:
        width = text.number("moe_intermediate_size", default=1408)
        mlp = experts * (3 * hidden * width + hidden)
        used = width * text.number("num_experts_per_tok", default=8)
    else:
        width = used = text.number("intermediate_size")
        mlp = 3 * hidden * width
        linears |= {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    attention = hidden * (2 * q + 2 * kv) + biases
    return LayerShape(attention + mlp + 2 * hidden, linears, used, bool(experts and not dense))


def _vision(vision: _Section, kind: str, hidden: int) -> VisionShape:
    second, gated = kind == "qwen2_vl", kind == "qwen2_5_vl"
    third = not (second or gated)
    width = vision.number("embed_dim" if second else "hidden_size", default=1280 if second else None)
    depth = vision.number("depth", default=27 if third else 32)
    patch = vision.number("patch_size", default=16 if third else 14)
    merge = vision.number("spatial_merge_size", default=2)
    temporal = vision.number("temporal_patch_size", default=2)
    out = vision.number("hidden_size" if second else "out_hidden_size", default=hidden)
    if second:
        intermediate = width * vision.number("mlp_ratio", default=4)
    else:
        intermediate = vision.number("intermediate_size", default=3420 if gated else 4304)
    norm = width if gated else 2 * width
    matrices = 3 if gated else 2
    mlp = matrices * width * intermediate + (2 * intermediate if gated else intermediate) + width
    block = 2 * norm + 4 * width * width + 4 * width + mlp
    merged = width * merge * merge
    merger = merged * merged + merged + merged * out + out
    levels = len(vision.numbers("deepstack_visual_indexes", default=(8, 16, 24))) if third else 0
    rest = 3 * temporal * patch * patch * width + norm + merger
    if third:
        positions = vision.number("num_position_embeddings", default=2304)
        rest += width + positions * width + levels * (2 * merged + merger)
    heads = vision.number("num_heads", default=16)
    return VisionShape(depth, width, heads, intermediate, patch, merge, temporal, gated, gated, levels, block, rest)


@dataclass(frozen=True, slots=True)
class _Section:
    """Fields of one part of config.json."""

    config: ModelConfig
    fields: Mapping[str, Any]
    name: str

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
            raise FolderError(f"{self.config.folder}/config.json: {self.name} is no object")
        value = self.fields.get(field)
        if value is None:
            value = default
        if value is None:
            raise FolderError(
                f"{self.config.folder}/config.json has no {self.name}.{field}: the model's sizes can't be told"
            )
        return value
