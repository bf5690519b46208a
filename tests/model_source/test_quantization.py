"""Quantized weights, as each tool publishes them, are refused by name before anything starts; plain ones are not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model_source.conftest import node
from tests.model_source.small_model import files

from tapforge_trainer.learner.families import FolderError, ModelConfig
from tapforge_trainer.model_source.folder import folder_faults, incomplete, quantization_fault

LAYER = "model.language_model.layers.0.mlp.up_proj"
SHARD = "model-00002-of-00002.safetensors"
FP8 = torch.zeros(32, 16).to(torch.float8_e4m3fn)
INT8 = torch.zeros(32, 16, dtype=torch.int8)
SCALE = torch.ones(32, 1)


def folder_of(place: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    """A whole model folder of one layer; `tensors` in place of that layer's."""
    place.mkdir()
    for name, data in files().items():
        if "/" not in name:
            (place / name).write_bytes(data)
    document = json.loads((place / "config.json").read_text()) | config
    (place / "config.json").write_text(json.dumps(document))
    if tensors is not None:
        save_file({f"{LAYER}{name}": tensor for name, tensor in tensors.items()}, place / SHARD)
    return place


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
    "FP8 by blocks": (
        {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
        {".weight": FP8, ".weight_scale_inv": SCALE},
        "quantization_config fp8 e4m3; model",
    ),
    "FP8 of compressed-tensors": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
        {".weight": FP8, ".weight_scale": SCALE},
        "compressed-tensors float-quantized",
    ),
    "FP8 that nothing but the numbers tells": (
        {},
        {".weight": FP8, ".weight_scale": SCALE},
        "up_proj.weight is F8_E4M3",
    ),
    "INT8 of compressed-tensors": (
        {"compression_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
        {".weight": INT8, ".weight_scale": SCALE},
        "compression_config compressed-tensors int-quantized",
    ),
    "4 bit of compressed-tensors": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
        {".weight_packed": torch.zeros(32, 2, dtype=torch.int32), ".weight_scale": SCALE},
        "pack-quantized",
    ),
    "ModelOpt within the text configuration": (
        {"text_config": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}},
        {".weight": torch.zeros(32, 8, dtype=torch.uint8), ".weight_scale": FP8},
        "text_config.quantization_config modelopt NVFP4",
    ),
    "bitsandbytes, 8 bit": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}},
        {".weight": INT8, ".SCB": SCALE},
        "bitsandbytes 8 bit",
    ),
    "bitsandbytes, 4 bit": (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {".weight": torch.zeros(256, 1, dtype=torch.uint8), ".weight.absmax": SCALE},
        "bitsandbytes 4 bit",
    ),
    "AWQ": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
        {".qweight": torch.zeros(16, 4, dtype=torch.int32), ".scales": SCALE},
        "awq 4 bit",
    ),
    "GPTQ": (
        {"quantization_config": {"quant_method": "gptq", "bits": 8}},
        {".qweight": torch.zeros(8, 32, dtype=torch.int32), ".g_idx": torch.zeros(16, dtype=torch.int32)},
        "gptq 8 bit",
    ),
    "MLX": (
        {"quantization": {"group_size": 64, "bits": 4}},
        {".weight": torch.zeros(32, 2, dtype=torch.int32), ".scales": SCALE, ".biases": SCALE.clone()},
        "quantization 4 bit",
    ),
    "scales beside weights of 16 bits": ({}, {".weight": SCALE.half(), ".input_scale": SCALE}, "input_scale is there"),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_quantized_weights_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    config, tensors, words = PUBLISHED[kind]
    if "text_config" in config:
        config = {"text_config": json.loads(files()["config.json"])["text_config"] | config["text_config"]}
    (fault,) = folder_faults(folder_of(tmp_path / "model", config, tensors))
    assert words in fault
    assert "name the model that it was quantized from" in fault and "spec.model.lora" in fault


@pytest.mark.parametrize(
    ("name", "document", "words"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, "FP8"),
        ("quant_config.json", {"w_bit": 4, "version": "GEMM"}, "4 bit"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "4 bit"),
    ],
)
def test_files_beside_the_configuration_tell_it_too(tmp_path: Path, name: str, document: dict, words: str) -> None:
    folder = folder_of(tmp_path / "model", {}, {".weight": INT8})
    (folder / name).write_text(json.dumps(document))
    (fault,) = folder_faults(folder)
    assert f"{name}: " in fault and words in fault


def test_a_cache_alone_that_is_quantized_is_no_fault(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", {})
    document = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(document))
    assert folder_faults(folder) == []


def test_a_repository_in_the_cache_is_refused_by_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, and without its weights."""
    from huggingface_hub import constants

    from tapforge_api import load
    from tapforge_trainer.run.local_files import inspect_files

    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / ("c" * 40)
    snapshot.parent.mkdir(parents=True)
    folder_of(snapshot, PUBLISHED["AWQ"][0])
    refs = tmp_path / "hub" / "models--a--b" / "refs"
    refs.mkdir()
    (refs / "main").write_text("c" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    head = "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: x}\n"
    (error,) = inspect_files(load(head, ("model.source.huggingFace.repo=a/b",)), tmp_path).errors
    assert "spec.model.source.huggingFace: a/b holds quantized weights" in error and "awq 4 bit" in error


def test_gguf_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", {})
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "model-Q4_K_M.gguf").touch()
    assert "model-Q4_K_M.gguf: GGUF" in folder_faults(folder)[0]


def test_plain_weights_are_not_refused(tmp_path: Path) -> None:
    for number, kind in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        tensors = {".weight": torch.zeros(32, 16, dtype=kind), ".position_ids": torch.arange(4)}
        config = {"quantization_config": None, "compression_config": {}}
        assert folder_faults(folder_of(tmp_path / str(number), config, tensors)) == []


def test_a_field_that_was_left_behind_is_named(tmp_path: Path) -> None:
    """An engine would quantize the weights again, and a learner wouldn't."""
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (fault,) = folder_faults(folder_of(tmp_path / "model", config))
    assert "they are plain numbers" in fault and "delete it" in fault


def test_it_is_found_without_weights_and_is_no_damage(tmp_path: Path) -> None:
    """A driver, which fetches none, refuses it before a node does; and nothing is fetched again because of it."""
    config, tensors, words = PUBLISHED["FP8 by blocks"]
    folder = folder_of(tmp_path / "model", config, tensors)
    assert incomplete(folder) == []
    here = node(tmp_path)
    ref = {"kind": "folder", "place": str(folder), "commit": "", "files": []}
    for weights in (True, False):
        kind, said = here.resolve(ref, weights=weights)
        assert kind == "ModelRefused" and words.split(";")[0] in said
    for path in folder.glob("*.safetensors"):
        path.unlink()
    fault = quantization_fault(folder, weights=False)
    assert fault is not None and "fp8" in fault
    with pytest.raises(FolderError, match="holds quantized weights"):
        ModelConfig.of_folder(folder)


def test_a_learner_reads_no_quantized_weight_as_a_plain_one(tmp_path: Path) -> None:
    import shutil
    from types import SimpleNamespace

    from tapforge_trainer.learner.sharding import load_weights
    from tapforge_trainer.model_source.tiny_base import SHIPPED

    shutil.copytree(SHIPPED, tmp_path / "model")
    weights = load_file(SHIPPED / "model.safetensors")
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, tmp_path / "model" / "model.safetensors")
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_vl"))
    with pytest.raises(FolderError, match=r"holds quantized weights \(.*up_proj.weight is torch.float8_e4m3fn"):
        load_weights(model, tmp_path / "model")
