"""A small whole model folder, a hub that has it, and nodes: processes with caches of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from tests.model_source.fake_hub import FakeHub, Repository, commit_of
from tests.s3 import bucket, s3_server

__all__ = ["bucket", "s3_server"]

REPO = "someone/model"
FIRST, SECOND = commit_of("first"), commit_of("second")

#: pins and resolves in a process of its own, whose environment is that of a node
_SCRIPT = """
import json, sys
from dataclasses import asdict
from tapforge_api.model import ModelSource
from tapforge_trainer.model_source import ref, resolve
asked = json.loads(sys.argv[1])
try:
    if "source" in asked:
        found = asdict(resolve.pin(ModelSource.model_validate(asked["source"]), asked["earlier"]))
    else:
        given = asked["ref"] | {"files": tuple(ref.ModelFile(**file) for file in asked["ref"]["files"])}
        found = str(resolve.resolve(ref.ModelRef(**given), weights=asked["weights"], seconds=asked["seconds"]))
    print(json.dumps(["", found]))
except ref.ModelError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    for name, data in files().items():
        if "/" not in name:
            (place / name).write_bytes(data)
    return place


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    fake = FakeHub({REPO: Repository(files(), {"main": FIRST})})
    fake.endpoint = fake.start()  # type: ignore[attr-defined]
    yield fake
    fake.stop()


@dataclass
class Node:
    """Processes with this environment. What fails is (type of the error, words), else ("", what was asked for)."""

    environment: dict[str, str]

    def start(self, *before: str, **asked: Any) -> subprocess.Popen[str]:
        """`before`: a command that runs this one."""
        command = [*before, sys.executable, "-c", _SCRIPT, json.dumps(asked)]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)

    def pin(self, source: dict, earlier: dict | None = None) -> tuple[str, Any]:
        return said(self.start(source=source, earlier=earlier))

    def resolve(self, ref: dict, *, weights: bool = True, seconds: float = 60.0) -> tuple[str, Any]:
        return said(self.start(ref=ref, weights=weights, seconds=seconds))


def said(process: subprocess.Popen[str]) -> tuple[str, Any]:
    out, _ = process.communicate(timeout=120)
    kind, found = json.loads(out.splitlines()[-1])
    return kind, found


def pinned(node: Node, source: dict, earlier: dict | None = None) -> dict:
    kind, found = node.pin(source, earlier)
    assert kind == "", found
    return found


def node(place: Path, **environment: str) -> Node:
    cleared = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_CACHE")
    base = {name: value for name, value in os.environ.items() if name not in cleared}
    return Node(base | {"HF_HOME": f"{place}/hf", "TAPFORGE_CACHE": f"{place}/tapforge"} | environment)
