"""Qwen2-VL: published without "language_model" in its names; its tower attends over whole frames."""

from __future__ import annotations

from .family import Family, vision_arguments

FAMILY = Family(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    "qwen2_vl",
    vision_arguments,
)
