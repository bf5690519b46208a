"""What is wrong with a model folder, before anybody loads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.model_source.conftest import node

from tapforge_trainer.model_source.folder import folder_faults
from tapforge_trainer.model_source.ref import ModelRef, ModelRefused
from tapforge_trainer.model_source.resolve import resolve
from tapforge_trainer.model_source.tiny_base import SHIPPED

SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def edited(folder: Path, **text: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= text
    (folder / "config.json").write_text(json.dumps(config))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / SHARDS[1]).unlink(), "lacks 1 of the 2 shards that model.safetensors.index.json names"),
        (lambda f: cut(f / SHARDS[0]), "bytes instead of"),
        (lambda f: (f / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\n"), "pointer of Git LFS"),
        (lambda f: (f / SHARDS[0]).write_bytes(b"\x08" + b"\0" * 7 + b"nonsense"), "is not a safetensors file"),
        (lambda f: (f / SHARDS[0]).write_bytes(b""), "is not a safetensors file"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "broken model.safetensors.index.json"),
        (lambda f: (f / "config.json").write_text("{"), "not a JSON object"),
        (lambda f: (f / "tokenizer.json").unlink(), "lacks a tokenizer"),
        (lambda f: [path.unlink() for path in f.glob("*.safetensors")], "lacks weights"),
        (shutil.rmtree, "lacks config.json"),
        (lambda f: edited(f, vocab_size=65), "config.json says 65 tokens of width 16, the weights"),
        (lambda f: edited(f, hidden_size=32), "config.json says 64 tokens of width 32, the weights"),
        (lambda f: edited(f, num_hidden_layers=36), "config.json says 36 layers, the weights have 1"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, spoil: Callable[[Path], object], words: str) -> None:
    assert folder_faults(folder) == []
    spoil(folder)
    (fault,) = folder_faults(folder)
    assert words in fault


def test_the_shipped_model_and_one_without_an_index_are_whole(folder: Path) -> None:
    assert folder_faults(SHIPPED) == []
    for path in folder.glob("model*"):
        path.unlink()
    save_file({"model.embed_tokens.weight": np.zeros((64, 16), np.float32)}, folder / "model.safetensors")
    assert folder_faults(folder) == []


def test_layers_of_a_tower_of_another_family_are_none_of_the_language_model_s(tmp_path: Path) -> None:
    """As of a judge's model, which is served alone: names of Gemma's and InternVL's towers."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 1}}))
    names = [f"model.vision_tower.encoder.layers.{k}.w" for k in range(3)] + ["model.language_model.layers.0.w"]
    save_file({name: np.zeros(1, np.float32) for name in names}, tmp_path / "model.safetensors")
    assert folder_faults(tmp_path) == []


def test_a_volume_is_looked_at_on_the_node_that_needs_it(folder: Path, tmp_path: Path) -> None:
    ref = {"kind": "folder", "place": str(folder), "commit": "", "files": []}
    here = node(tmp_path)
    assert here.resolve(ref) == ("", str(folder))
    (folder / SHARDS[0]).unlink()
    kind, words = here.resolve(ref)
    assert kind == "ModelRefused" and SHARDS[0] in words and "path.folder" in words
    assert here.resolve(ref, weights=False)[0] == ""
    kind, words = here.resolve(ref | {"place": str(tmp_path / "nowhere")})
    assert kind == "ModelRefused" and "a volume that head and workers mount" in words


def test_the_tiny_model_is_each_nodes_own() -> None:
    assert resolve(ModelRef("tiny"), weights=False).joinpath("model.safetensors").is_file()
    with pytest.raises(ModelRefused, match=r"path\.folder"):
        resolve(ModelRef.of_folder(Path("nowhere")))


def test_a_token_is_in_no_text_of_a_reference() -> None:
    ref = ModelRef("hub", "a/b", "c", token="secret")
    assert "secret" not in f"{ref!r} {ref.shown} {ref.pinned}"
