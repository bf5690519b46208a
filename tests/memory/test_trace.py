"""The closed form against a trace of the learner's own model, sharding and passes on fake tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.families.real import config

from tapforge_trainer.cli.main import cli
from tapforge_trainer.learner.families import ModelConfig, families, shape_of
from tapforge_trainer.memory.known import published
from tapforge_trainer.memory.learner import BUCKET_BYTES, FEATURES_KEPT, LOGITS_AT_ONCE, LearnerLoad, peak
from tapforge_trainer.memory.trace import trace

#: of the traced peak
TOLERANCE = 0.05
GIB = 2**30


def compared(document: Any, **settings: Any) -> None:
    made = ModelConfig.of_document(Path("model"), document)
    shape = shape_of(made)
    if settings.get("lora"):
        settings["targets"] = families()[shape.model_type].lora_targets
    given = {"ranks": 8, "tokens": 8192, "patches": 7728, "responses": 1024, "accumulates": False, **settings}
    load = LearnerLoad(shape, **given)
    # What of the features is remembered after so few micro-batches; a run's fill what there is room for.
    batches = 4 if load.accumulates else 2
    visual = load.patches // shape.vision.merge**2
    features = batches * load.width * shape.hidden * (1 + shape.vision.deepstack) * visual
    load = replace(load, features=min(FEATURES_KEPT, features))
    traced, closed = trace(load, made).peak, peak(load)
    assert closed.total == pytest.approx(traced.total, rel=TOLERANCE), (closed, traced)
    # These are counted alike by both, whatever the moment is; what lives shorter is named differently.
    for category in ("weights", "optimizer"):
        assert closed.bytes[category] == pytest.approx(traced.bytes[category], rel=0.01, abs=2**20), category


def test_constants_are_those_of_the_policy() -> None:
    from tapforge_trainer.learner import features, head
    from tapforge_trainer.sync import gpu as gpu_transfer

    assert (LOGITS_AT_ONCE, FEATURES_KEPT) == (head.LOGITS_AT_ONCE, features.FEATURES_KEPT)
    assert BUCKET_BYTES == gpu_transfer.BUCKET_BYTES


FEW_LAYERS = [
    ("qwen3-vl-8b", {"accumulates": True, "attended": 2}),
    pytest.param("qwen3-vl-8b", {"accumulates": True, "sharded_gradients": False}, marks=pytest.mark.long),
    pytest.param("qwen3-vl-8b", {"lora": 64}, marks=pytest.mark.long),
    ("qwen3-vl-2b", {"lora": 64, "entropy_gradient": True, "tokens": 2048, "patches": 1024, "responses": 440}),
    pytest.param("qwen3-vl-2b", {"freeze_vision": False}, marks=pytest.mark.long),
    pytest.param("qwen2.5-vl-7b", {"freeze_vision": False, "activation_checkpointing": False}, marks=pytest.mark.long),
    ("qwen3-vl-8b", {"checkpointed_share": 0.5, "tokens": 4096, "attended": 2}),
    pytest.param("qwen2.5-vl-7b", {"freeze_vision": False, "checkpointed_share": 0.5}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "settings"), FEW_LAYERS, ids=str)
def test_a_few_layers_take_what_the_closed_form_says(name: str, settings: dict[str, Any]) -> None:
    compared(config(name, 4, 3).to_dict(), **settings)


def test_the_command_says_both(tmp_path: Path) -> None:
    """The trace beside the closed form, for a model of a few layers."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config("qwen2.5-vl-7b", 3, 2).to_dict()))
    words = ["plan", "--memory", "--trace", "--output", "json", "--config", str(path)]
    said = CliRunner().invoke(cli, [*words, "-f", "manifests/samples/run-qwen2.5-vl-7b.yaml"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.output)["traced"]
    assert sum(found["per_gpu_bytes"].values()) == found["peak_bytes"]
    assert found["closed_form_bytes"] == pytest.approx(found["peak_bytes"], rel=2 * TOLERANCE)


#: of each family one at its whole depth; the larger ones take a core for minutes
FULL = [
    pytest.param("qwen3-vl-8b", {}, marks=pytest.mark.width),
    pytest.param(
        "qwen2.5-vl-7b",
        {"lora": 64, "ranks": 2, "tokens": 16384, "accumulates": True},
        marks=pytest.mark.width,
    ),
    pytest.param("qwen2-vl-7b", {"freeze_vision": False, "activation_checkpointing": False}, marks=pytest.mark.width),
    pytest.param("qwen3-vl-2b", {"ranks": 1}, marks=pytest.mark.long),
]
#: the closed form is linear in layers, and a trace takes as long as there are many
A_THIRD = [
    ("qwen3-vl-8b", {"tokens": 32768}),
    ("qwen3-vl-8b", {"accumulates": True, "ranks": 4, "tokens": 16384, "patches": 30720, "responses": 2560}),
    ("qwen3-vl-8b", {"freeze_vision": False, "tokens": 16384, "patches": 30912}),
    ("qwen3-vl-8b", {"activation_checkpointing": False}),
    ("qwen3-vl-8b", {"reshard_after_forward": False}),
    ("qwen3-vl-8b", {"checkpointed_share": 0.5, "accumulates": True}),
    ("qwen3-vl-8b", {"checkpointed_share": 0.25, "reshard_after_forward": False}),
    ("qwen3-vl-8b", {"lora": 64, "checkpointed_share": 0.5}),
    ("qwen3-vl-8b", {"lora": 64, "activation_checkpointing": False}),
    ("qwen2.5-vl-7b", {"freeze_vision": False}),
    ("qwen2.5-vl-3b", {"freeze_vision": False, "tokens": 16384}),
]


@pytest.mark.parametrize(("name", "settings"), FULL, ids=str)
def test_a_whole_model_takes_what_the_closed_form_says(name: str, settings: dict[str, Any]) -> None:
    compared(config(name).to_dict(), **settings)


@pytest.mark.long
@pytest.mark.parametrize(("name", "settings"), A_THIRD, ids=str)
def test_a_third_of_a_model_takes_what_the_closed_form_says(name: str, settings: dict[str, Any]) -> None:
    compared(config(name, 12, 9).to_dict(), **settings)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(published()))
def test_every_known_configuration_can_be_traced(name: str) -> None:
    document = dict(published()[name])
    text = document.get("text_config", document)
    fewer = {"num_hidden_layers": 3}
    if "text_config" in document:
        document["text_config"] = {**text, **fewer}
    else:
        document |= fewer
    compared(document, tokens=4096, patches=1024)
