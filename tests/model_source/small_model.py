"""A whole model folder of a few kilobytes, as a repository or a bucket has it."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save
from tests.model_source.fake_hub import commit_of

REPO = "someone/model"
FIRST, SECOND = commit_of("first"), commit_of("second")


def files(seed: int = 0) -> dict[str, bytes]:
    """Of a model of one layer in two shards."""
    random = np.random.default_rng(seed)
    embedding = {"model.language_model.embed_tokens.weight": random.normal(size=(64, 16)).astype(np.float32)}
    layer = {"model.language_model.layers.0.mlp.up_proj.weight": random.normal(size=(32, 16)).astype(np.float32)}
    shards = {"model-00001-of-00002.safetensors": embedding, "model-00002-of-00002.safetensors": layer}
    index = {"weight_map": {name: shard for shard, tensors in shards.items() for name in tensors}}
    config = {"model_type": "qwen3_vl", "text_config": {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1}}
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "preprocessor_config.json": b'{"size": {}}',
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{shard: save(tensors) for shard, tensors in shards.items()},
        # of no use here, and many gigabytes elsewhere
        "pytorch_model.bin": b"x" * 1000,
        "onnx/model.json": b"[]",
        "README.md": b"a model",
    }


WANTED = {name for name in files() if name.split(".")[-1] in ("json", "jinja", "safetensors") and "/" not in name}
