"""The reference: pages are what the models say, and editors' schemas take what the API takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft7Validator

from tapforge_api.loading import KINDS
from tapforge_api.reference import json_schema, page
from tapforge_trainer.cli.main import cli

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_what_the_models_say(kind: str) -> None:
    written = ROOT / "docs" / "reference" / f"{kind.lower()}.md"
    assert written.read_text() == page(kind), "run: python -m tapforge_api --reference docs/reference"


def test_a_page_says_type_bounds_default_and_rules_and_explains_what_is_the_same_once() -> None:
    said = page("TrainingRun")
    assert (
        "| `groupSize` | integer | episodes of the same task, compared with each other; default 8 (at least 2" in said
    )
    assert "- minValid must be \\<= groupSize" in said
    assert said.count("\n## ") == len({line for line in said.splitlines() if line.startswith("## ")})
    assert (
        "\n## spec.stages[].rewards.streams[]\n" in said and "As [spec.rewards.streams[]](#specrewardsstreams)." in said
    )


def _objects() -> list[tuple[str, dict[str, Any]]]:
    files = sorted((ROOT / "manifests" / "samples").glob("*.yaml"))
    found = [(file.name, one) for file in files for one in yaml.safe_load_all(file.read_text())]
    return [(name, one) for name, one in found if isinstance(one, dict) and one.get("kind") in KINDS]


@pytest.mark.parametrize(("name", "thing"), _objects(), ids=lambda one: one if isinstance(one, str) else "")
def test_the_schema_takes_every_sample(name: str, thing: dict[str, Any]) -> None:
    Draft7Validator.check_schema(json_schema(thing["kind"]))
    # PyYAML reads 1e-3 as a text, editors and the API read a number
    text = json.dumps(thing).replace('"1e-', '"0e-')
    wrong = [error.message for error in Draft7Validator(json_schema(thing["kind"])).iter_errors(json.loads(text))]
    assert [one for one in wrong if "0e-" not in one and "is not of type 'number'" not in one] == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"rollout": {"groupsize": 8}}, "groupsize"),
        ({"rollout": {"groupSize": 1}}, "less than the minimum"),
        ({"device": "tpu"}, "tpu"),
        ({"seed": "3"}, "not of type"),
        ({"rollout": {"temperature": 0}}, "exclusive"),
    ],
)
def test_the_schema_finds_what_the_api_refuses(spec: dict[str, Any], words: str) -> None:
    sample = yaml.safe_load((ROOT / "manifests" / "samples" / "quickstart.yaml").read_text())
    sample["spec"] |= spec
    found = [error.message for error in Draft7Validator(json_schema("TrainingRun")).iter_errors(sample)]
    assert any(words in message or "is less than or equal" in message for message in found), found


def test_the_command_prints_the_schema_of_a_kind() -> None:
    for words, kind in ((("spec",), "TrainingRun"), (("epool.spec",), "EmulatorPool")):
        done = CliRunner().invoke(cli, ["explain", "--schema", *words])
        assert done.exit_code == 0 and json.loads(done.output)["title"] == kind
