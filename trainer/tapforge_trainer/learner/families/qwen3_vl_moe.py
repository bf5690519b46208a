"""Qwen3-VL with experts. All experts of a layer are two parameters, (experts, out, in) in transformers; the published
files and vLLM have them as (experts, in, out). LoRA adapts its attention only: experts are no linear layers."""

from __future__ import annotations

import re

from .family import Family
from .qwen3_vl import arguments

FAMILY = Family(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_moe",
    arguments,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    transposed=re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$"),
    adapter="qwen3-vl",
)
