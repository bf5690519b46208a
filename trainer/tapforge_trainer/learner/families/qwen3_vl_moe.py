"""Qwen3-VL with experts. All experts of a layer are two parameters, (experts, out, in) in transformers; the published
files and vLLM have them as (experts, in, out). LoRA adapts its attention only: experts are not linear layers."""

from __future__ import annotations

import re

from .family import Family
from .folder import ModelConfig
from .published import nested, repositories
from .qwen3_vl import LARGE, arguments, attention_biases, vision_shape
from .shape import AttentionShape, LayerShape, Section, Shape, dense_layer, language_model, sparse_layer


def _shape(config: ModelConfig) -> Shape:
    text, attention = Section.text(config), AttentionShape.of(Section.text(config))
    biases = attention_biases(text, attention)
    chosen = text.number("num_experts_per_tok", default=8)
    # published as num_experts; transformers 5 writes the other name
    experts = text.number("num_experts", default=text.number("num_local_experts", default=128))
    dense, every = text.numbers("mlp_only_layers"), text.number("decoder_sparse_step", default=1)

    def layer(number: int) -> LayerShape:
        if number in dense or (number + 1) % every:
            return dense_layer(text, attention, biases)
        width = text.number("moe_intermediate_size", default=1408)
        return sparse_layer(attention, biases, experts=experts, experts_per_token=chosen, width=width)

    vision = vision_shape(Section.vision(config), attention.hidden)
    # The language model's own tie_word_embeddings is another class's default, which transformers 5 saves as true.
    return language_model(
        config, text, attention, layer, vision, qk_norm=True, tied=config.tied, experts_per_token=chosen
    )


_PUBLISHED = {
    "Qwen3-VL-30B-A3B": nested(
        "qwen3_vl_moe",
        LARGE,
        hidden=2048,
        intermediate=6144,
        layers=48,
        heads=32,
        kv_heads=4,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
    )
}

FAMILY = Family(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    "vllm.model_executor.models.qwen3_vl_moe",
    arguments,
    _shape,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    merged_only="vLLM's experts beside adapters are Triton kernels, which no CPU has and no GPU here has run",
    transposed=re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$"),
    adapter="qwen3-vl",
    shares_prompts=True,
    published=_PUBLISHED,
    repositories=repositories(_PUBLISHED, "Instruct", "Thinking"),
)
