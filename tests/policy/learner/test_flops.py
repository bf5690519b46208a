"""The closed form of operations against torch's own counter, on every family at a small width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tapforge_trainer.learner.families import ModelConfig, shape_of
from tapforge_trainer.learner.flops import Costs, FlopCounter, peak_flops
from tapforge_trainer.learner.frame_store import Patches
from tapforge_trainer.placement.settings import LearnerSettings, LoraSettings

#: (rows, columns) of patches: whole windows of Qwen2.5-VL
GRID = (16, 16)
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
}
WINDOWED = {"window_size": 112, "fullatt_block_indexes": [1, 3], "out_hidden_size": 64}
DEEP = {"out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
#: by class: fields of the language model and of the tower
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": ({}, {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 4, "patch_size": 14}),
    "Qwen2_5_VL": ({}, {"hidden_size": 48, "intermediate_size": 100, "patch_size": 14, **WINDOWED}),
    "Qwen3VL": ({"head_dim": 16}, {"hidden_size": 48, "intermediate_size": 100, "patch_size": 16, **DEEP}),
    "Qwen3VLMoe": (
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
        {"hidden_size": 48, "intermediate_size": 100, "patch_size": 16, **DEEP},
    ),
}
IDS = {"image_token_id": 490, "video_token_id": 491, "vision_start_token_id": 492, "vision_end_token_id": 493}


def _model(name: str, folder: Path) -> tuple[Any, ModelConfig]:
    import transformers

    text, vision = FAMILIES[name]
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | text,
        vision_config={"depth": 4, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, **vision},
        **IDS,
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    model = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(config, attn_implementation="eager")
    return model, ModelConfig.of_folder(folder)


def _counted(run: Any) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "Qwen3VLMoe"])
def test_the_language_model_costs_what_torch_counts(name: str, tmp_path: Path) -> None:
    model, config = _model(name, tmp_path)
    costs, length = Costs.of(shape_of(config)), 40
    ids = torch.arange(length)[None]
    counted = _counted(lambda: model.model.language_model(input_ids=ids, use_cache=False))
    # torch counts the whole square of attention, of which a causal model needs half
    assert counted == pytest.approx(costs.token * length + 2 * costs.square * length**2, rel=0.01)
    assert costs.text([length], 5) - costs.text([length], 0) == 5 * _counted(lambda: model.lm_head(torch.zeros(1, 64)))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tower_costs_what_torch_counts(name: str, tmp_path: Path) -> None:
    model, config = _model(name, tmp_path)
    patches = GRID[0] * GRID[1]
    pixels = torch.zeros(patches, 3 * 2 * config.vision["patch_size"] ** 2)
    counted = _counted(lambda: model.model.visual(pixels, grid_thw=torch.tensor([[1, *GRID]])))
    assert counted == pytest.approx(Costs.of(shape_of(config)).vision([patches]), rel=0.01)


def test_of_experts_those_count_that_a_token_goes_through(tmp_path: Path) -> None:
    _, config = _model("Qwen3VLMoe", tmp_path)
    attention = 2 * 64 * 64 + 2 * 64 * 32
    expected = 3 * attention + 3 * 64 * 160 + 2 * (8 * 64 + 2 * 3 * 64 * 48)
    assert Costs.of(shape_of(config)).token == 2 * expected


def test_a_backward_pass_costs_twice_where_all_is_trained_and_less_with_adapters(tmp_path: Path) -> None:
    _, config = _model("Qwen3VL", tmp_path)
    costs = Costs.of(shape_of(config))
    forward, tower = costs.text([30, 20], 7), costs.vision([256])
    assert costs.backward([30, 20], 7, [256], weights=True, tower=True) == pytest.approx(2 * (forward + tower))
    adapters = costs.backward([30, 20], 7, [256], weights=False, tower=False)
    assert adapters == pytest.approx(forward + costs.square * (30**2 + 20**2))


def test_a_frozen_tower_computes_a_frame_once_in_a_step(tmp_path: Path) -> None:
    _, config = _model("Qwen3VL", tmp_path)
    frames = {"a": Patches(torch.zeros(0).numpy(), 8, 8)}
    settings = LearnerSettings("", (), lora=LoraSettings(8, 16.0))
    counter = FlopCounter(shape_of(config), settings)
    first, again = (counter.passes([50], 3, frames) for _ in range(2))
    assert first - again == Costs.of(shape_of(config)).vision([256])
    counter.begin()
    assert counter.passes([50], 3, frames) == first
    assert counter.peak == 0.0


@pytest.mark.parametrize(
    "device, peak",
    [
        ("NVIDIA H100 80GB HBM3", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA H200", 9.89e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA A10G", 7.0e13),
        ("NVIDIA L40S", 3.62e14),
        ("NVIDIA H20", 1.48e14),
        ("NVIDIA GeForce RTX 4090", 1.652e14),
        ("NVIDIA Made Up 1", None),
        ("", None),
    ],
)
def test_a_gpu_is_known_by_its_name(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak
