"""Which models may teach a policy, by their folders alone: what each difference is reported as."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapforge_api import TrainingRun, load
from tapforge_trainer.model_source.tiny_base import base_folder
from tapforge_trainer.run.assembly import ConfigurationError, inspect
from tapforge_trainer.run.plan import plan, render
from tapforge_trainer.run.teacher_check import teacher_errors

RUN = """\
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: x}
spec:
  environment: {source: {processes: {count: 2}}}
  algorithm: {distillation: {teacher: {path: {folder: PLACE}}}}
"""


def changed(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return write


def _swap(document: dict[str, Any]) -> None:
    vocabulary = document["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def _of_any_size(config: dict[str, Any]) -> None:
    config["text_config"] |= {"hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 152_000}


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return Path(shutil.copytree(base_folder(), tmp_path / "teacher"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: None, None),
        (changed("config.json", _of_any_size), None),
        (changed("preprocessor_config.json", lambda found: found.pop("min_pixels", None)), None),
        (changed("config.json", lambda found: found.update(model_type="qwen2_vl")), "is of another family"),
        (changed("tokenizer.json", _swap), "which is .* of the policy"),
        (changed("tokenizer.json", lambda found: found["added_tokens"].pop()), "lacks 1 tokens of the policy"),
        (changed("config.json", lambda c: c["text_config"].update(vocab_size=100)), "has 100 rows in its embedding"),
        (changed("config.json", lambda c: c.update(image_token_id=3)), "has image_token_id 3, where the policy has"),
        (changed("preprocessor_config.json", lambda found: found.update(patch_size=14)), "cuts screens otherwise"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "can't be compared with the policy"),
        # sentencepiece's: a list, ids by place
        (changed("tokenizer.json", lambda found: found["model"].update(vocab=[["a", 0.0]])), "has no vocabulary"),
        (lambda folder: (folder / "tokenizer.json").write_text("[]"), "has no vocabulary"),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_a_teacher_has_to_mean_the_same_by_every_token(
    teacher: Path, change: Callable[[Path], None], said: str | None
) -> None:
    change(teacher)
    errors = teacher_errors(load(RUN), base_folder(), teacher)
    if said is None:
        assert errors == []
        return
    (error,) = errors
    assert re.search(said, error)
    assert error.startswith(f"spec.algorithm.distillation.teacher: {teacher} ")
    assert "imitate them" in error or "can't be compared" in error


def test_a_plan_names_the_teacher_and_what_it_costs_and_refuses_one_that_cannot_teach(
    teacher: Path, tmp_path: Path
) -> None:
    run = load(RUN.replace("PLACE", str(teacher)))
    assert isinstance(run, TrainingRun)
    text = render(plan(run, inspect(run, tmp_path)))
    assert f"the model in {teacher}, frozen beside the policy on each rank; a forward pass of it" in text
    assert "no KL term, distillation 1 (forward_kl over 64 tokens) in the loss" in text
    sampled = load(RUN.replace("PLACE", str(teacher)), ("spec.algorithm.distillation.kind=k1",))
    assert "no KL term, distillation 1 (k1) added to advantages" in render(plan(sampled, inspect(sampled, tmp_path)))
    changed("tokenizer.json", _swap)(teacher)
    with pytest.raises(ConfigurationError, match="collect its answers and imitate them"):
        inspect(run, tmp_path)
    with pytest.raises(ConfigurationError, match=r"distillation\.teacher\.path\.folder: .*none"):
        inspect(load(RUN.replace("PLACE", str(tmp_path / "none"))), tmp_path)
