"""A Qwen3-VL of about a million parameters that is built on the spot: folder, tokenizer, grounding, scoring.

It is a real Qwen3-VL in shape and file format: transformers, vLLM and the learner load it like any other.
"""
