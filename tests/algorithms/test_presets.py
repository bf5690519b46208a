"""Presets: each is a file that can be, gives way to what a file says, and is what `tapforge preset` prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tapforge_api import TrainingRun, load
from tapforge_trainer.algorithms.composition import estimator_of, objective_of
from tapforge_trainer.algorithms.presets import PRESETS, UnknownPreset, preset
from tapforge_trainer.batch import BatchRules, build_batch
from tapforge_trainer.cli.main import cli

ROOT = Path(__file__).parents[2]
RUN = """\
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: x}
spec: {environment: {source: {processes: {count: 3}}}}
"""


def read(name: str, text: str = RUN, *sets: str) -> TrainingRun:
    return load(text, [*sets, *(value.override for value in preset(name).values)])


def as_file(name: str) -> dict:
    """What `tapforge preset` prints."""
    said = CliRunner().invoke(cli, ["preset", name])
    assert said.exit_code == 0, said.output
    return yaml.load(said.output, yaml.CSafeLoader)


def merged(one: dict, other: dict) -> dict:
    both = {key: merged(one[key], other[key]) for key in one.keys() & other.keys() if isinstance(one[key], dict)}
    return {**one, **other, **both}


@pytest.mark.parametrize("name", PRESETS)
def test_each_is_an_algorithm(name: str) -> None:
    run = read(name)
    estimator_of(run.spec.algorithm)
    objective_of(run.spec.algorithm, run.spec.rollout.response_tokens)
    assert build_batch((), BatchRules.of(run.spec.algorithm, min_valid=2)).samples == ()


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_printed_is_what_is_set(name: str) -> None:
    printed = json.dumps(merged(yaml.safe_load(RUN), as_file(name)), indent=1)
    assert load(printed).spec == read(name).spec


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gigpo", {"gamma": 0.95, "clips": (0.2, 0.2), "dual": 3, "kl": 0.01, "temperature": 1.0, "steps": 1}),
        (
            "clawgui",
            {
                "gamma": 0.95,
                "clips": (0.2, 0.28),
                "dual": 3,
                "bonus": 0.001,
                "kl": 0.01,
                "temperature": 0.7,
                "rounds": 10,
            },
        ),
        ("zerogui", {"clips": (0.2, 0.2), "dual": None, "kl": 0.1, "temperature": 0.5, "rounds": 64, "steps": 1}),
        ("verl", {"clips": (0.2, 0.2), "dual": 3, "kl": 0.01, "temperature": 0.7, "steps": 8}),
        ("dapo", {"clips": (0.2, 0.28), "dual": None, "kl": 0, "temperature": 1.0}),
    ],
)
def test_what_scripts_were_published_with(name: str, values: dict) -> None:
    spec = read(name).spec
    algorithm = spec.algorithm
    have = {
        "gamma": getattr(algorithm.advantage.gigpo, "gamma", None),
        "clips": (algorithm.loss.clip_low, algorithm.loss.clip_high),
        "dual": algorithm.loss.dual_clip,
        "kl": algorithm.kl.coefficient,
        "bonus": algorithm.loss.entropy_bonus,
        "temperature": spec.rollout.temperature,
        "rounds": spec.rollout.dynamic_sampling.max_rounds,
        "steps": spec.learner.mini_batches,
    }
    assert {**have, **values} == have


@pytest.mark.parametrize("name", PRESETS)
def test_every_value_says_where_it_is_from_and_is_set_once(name: str) -> None:
    values = preset(name).values
    assert all(value.source for value in values)
    assert len({value.path for value in values}) == len(values)


def test_what_a_file_and_set_say_wins() -> None:
    said = RUN.replace(
        "spec: {", "spec: {algorithm: {advantage: {rloo: {}}, loss: {clipLow: 0.1}, kl: {estimator: k3}}, "
    )
    run = read("zerogui", said, "rollout.temperature=0.9", "algorithm.kl.advantageCap=false")
    algorithm = run.spec.algorithm
    assert algorithm.advantage.kind == "rloo", "another member is said"
    assert (algorithm.loss.clip_low, algorithm.loss.clip_high) == (0.1, 0.2)
    assert (algorithm.kl.estimator, algorithm.kl.coefficient) == ("k3", 0.1)
    assert run.spec.rollout.temperature == 0.9


def test_a_plan_says_each_value_and_what_was_not_taken() -> None:
    words = ["plan", "-f", str(ROOT / "manifests" / "samples" / "quickstart.yaml"), "--preset", "clawgui"]
    said = CliRunner().invoke(cli, words)
    assert said.exit_code == 0, said.output
    assert "  algorithm.loss.dualClip 3 (ClawGUI-RL, gigpo_dynamic/mobileworld)\n" in said.output
    assert "  algorithm.loss.clipHigh 0.28 (ClawGUI-RL, gigpo_dynamic/mobileworld): not taken" in said.output
    assert "  left out: the step judge\n" in said.output
    assert "dual clip 3" in next(line for line in said.output.splitlines() if line.startswith("algorithm "))


def test_what_contradicts_the_file_is_named(tmp_path: Path) -> None:
    """The author of the file has never seen these values."""
    text = RUN.replace("spec: {", "spec: {algorithm: {loss: {plugin: {name: cispo}}}, ")
    (tmp_path / "x.yaml").write_text(text)
    said = CliRunner().invoke(cli, ["plan", "-f", str(tmp_path / "x.yaml"), "--preset", "clawgui"])
    assert said.exit_code == 2 and "must be left out with plugin" in said.output
    note = said.output.splitlines()[-1]
    assert note.startswith(
        "set there because the file says nothing (--preset, PATH?=VALUE): spec.algorithm.loss.clipLow"
    )
    assert "spec.algorithm.loss.dualClip 3" in note and "kl" not in note
    said = CliRunner().invoke(cli, ["plan", "-f", str(tmp_path / "x.yaml"), "--set", "seed=x", "--preset", "gspo"])
    assert said.exit_code == 2 and "set there" not in said.output


def test_a_plan_of_standard_input_says_them_too() -> None:
    said = CliRunner().invoke(cli, ["plan", "-f", "-", "--preset", "clawgui"], input=RUN)
    assert said.exit_code == 0, said.output
    assert said.output.startswith("preset clawgui: ") and "not taken" not in said.output


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownPreset, match="did you mean 'zerogui'"):
        preset("zerogu")
    for words in (["preset", "gsop"], ["plan", "-f", "x.yaml", "--preset", "gsop"]):
        said = CliRunner().invoke(cli, words)
        assert said.exit_code == 2 and "did you mean 'gspo'" in said.output


def test_the_page_has_them_all() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| `--preset ")]
    assert {
        name.strip(" `").removeprefix("--preset "): (about.strip(), left.strip()) for name, about, left in rows
    } == {name: (one.about, "; ".join(one.left_out) or "–") for name, one in PRESETS.items()}
