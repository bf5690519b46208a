"""Model folders that can't be trained are refused by name, before anything is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.families import real

from tapforge_trainer.learner.families import FolderError
from tapforge_trainer.learner.families.check import check_folder
from tapforge_trainer.run.local_files import model_folder_errors
from tapforge_trainer.tiny.folder import write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(real.folder("qwen2.5-vl-7b-tiny", dtype="bfloat16"), tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", real.TINY)
def test_the_families_are_taken(name: str) -> None:
    assert check_folder(real.folder(name)).model_type == real.family(name)
    assert model_folder_errors(real.folder(name)) == []


def test_the_tiny_model_and_the_flat_layout_are_taken(tmp_path: Path) -> None:
    write_model(tmp_path, 0)
    assert check_folder(tmp_path).model_type == "qwen3_vl"
    assert check_folder(real.folder("qwen2.5-vl-7b-tiny", flat=True)).model_type == "qwen2_5_vl"


def test_another_architecture_is_named(folder: Path) -> None:
    edit(folder / "config.json", model_type="llava")
    with pytest.raises(FolderError, match=r"llava model; this version trains qwen2_vl, qwen2_5_vl, qwen3_vl"):
        check_folder(folder)
    assert "llava" in model_folder_errors(folder)[0]


def test_windows_that_the_learner_does_not_compute_are_refused(folder: Path) -> None:
    path = folder / "config.json"
    text = json.loads(path.read_text())["text_config"]
    edit(path, text_config=text | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1})
    with pytest.raises(FolderError, match=r"layers from 1 on see the last 4096 tokens only.*set it to false"):
        check_folder(folder)
    edit(path, text_config=text | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28})
    assert check_folder(folder).model_type == "qwen2_5_vl", "no layer has one"


def test_a_tokenizer_without_the_special_tokens_is_named(folder: Path) -> None:
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text())
    made["added_tokens"] = [token for token in made["added_tokens"] if token["content"] != "<|image_pad|>"]
    path.write_text(json.dumps(made))
    with pytest.raises(FolderError, match=r"no special token <\|image_pad\|>"):
        check_folder(folder)


def test_a_tokenizer_of_another_model_is_named(folder: Path) -> None:
    edit(folder / "config.json", image_token_id=151660)
    with pytest.raises(FolderError, match="image_token_id is 151660 in config.json and 151655 in tokenizer.json"):
        check_folder(folder)


def test_a_vocabulary_that_is_too_small_is_named(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit(folder / "config.json", text_config=text | {"vocab_size": 151_000})
    with pytest.raises(FolderError, match=r"has the id 15\d+, but config.json announces a vocabulary of 151000"):
        check_folder(folder)


def test_an_image_processor_of_another_family_is_named(folder: Path) -> None:
    edit(folder / "preprocessor_config.json", patch_size=16)
    with pytest.raises(FolderError, match="cuts patches of 16 pixels .* announces 14"):
        check_folder(folder)


def test_a_missing_file_with_weights_is_named(tmp_path: Path) -> None:
    real.write_folder(tmp_path, "qwen3-vl-2b-tiny", 2, 2, "bfloat16", file_bytes=20 << 20)
    gone = min(tmp_path.glob("*.safetensors"))
    gone.unlink()
    assert gone.name in model_folder_errors(tmp_path)[0]


def test_weights_of_another_size_are_named(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit(folder / "config.json", text_config=text | {"num_hidden_layers": 3})
    assert "3 layers, the weights have 2" in model_folder_errors(folder)[0]
