"""What is wrong with a run's adapter is said before anything starts, all of it at once."""

import json
from pathlib import Path

import pytest

from tapforge_api import load
from tapforge_trainer.run.adapters import adapter_errors
from tapforge_trainer.run.assembly import ConfigurationError, inspect

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "quickstart.yaml"
PROCESSOR = {"patch_size": 14, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"min_pixels": 3136, "max_pixels": 12845056}))
    (made / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    return made


def errors(folder: Path | None, *overrides: str) -> list[str]:
    return adapter_errors(load(SAMPLE, overrides=("spec.model.adapter.prompt=full", *overrides)), folder)


def test_nothing_is_wrong_with_the_samples(folder: Path) -> None:
    assert errors(None) == []
    assert errors(folder) == []
    assert errors(folder, "spec.model.minPixels=3136", "spec.model.maxPixels=1003520") == []


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["spec.model.adapter.name=qwen3vl"], "spec.model.adapter.name: unknown agent 'qwen3vl'; did you mean"),
        (["spec.model.adapter.name=ui-tars"], "spec.model.adapter.name: the adapter ui-tars is for models built on"),
        (["spec.model.adapter.context=memory"], "spec.model.adapter.context: unknown context 'memory'"),
        (["spec.model.adapter.promptFile=/no.jinja"], "spec.model.adapter.promptFile: the prompt file /no.jinja can't"),
        (["spec.model.maxPixels=784"], "spec.model: maxPixels 784 is less than the 3,136 pixels"),
        (["spec.model.minPixels=784"], "spec.model: minPixels 784 is less than the 3,136 pixels"),
        (["spec.model.minPixels=20000000"], "spec.model: minPixels 20,000,000 are 25,511 visual tokens of 28x28"),
    ],
)
def test_what_is_wrong_is_named_with_its_field(folder: Path, overrides: list[str], part: str) -> None:
    found = errors(folder, *overrides)
    assert len(found) == 1 and part in found[0]


def test_all_of_it_is_said_at_once(tmp_path: Path) -> None:
    wrong = ("spec.model.adapter.name=qwen", "spec.model.adapter.context=memory", "spec.model.adapter.promptFile=/no")
    with pytest.raises(ConfigurationError) as said:
        inspect(load(SAMPLE, overrides=wrong), tmp_path)
    for part in ("adapter.name: ", "adapter.context: ", "adapter.promptFile: the", "needs adapter.prompt full"):
        assert part in str(said.value)
