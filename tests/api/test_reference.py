"""The reference: pages are what the models say, and editors' schemas take what the API takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft7Validator

from tapforge_api.document import parse
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
    """As the API reads them, and editors: `1e-3` is a number."""
    files = sorted((ROOT / "manifests" / "samples").glob("*.yaml"))
    found = [(file.name, one.data) for file in files for one in parse(file.read_text(), file.name)]
    return [(name, one) for name, one in found if isinstance(one, dict) and one.get("kind") in KINDS]


def _wrong(thing: dict[str, Any]) -> list[tuple[str, str]]:
    """Path and rule of what the schema refuses."""
    found = Draft7Validator(json_schema(thing["kind"])).iter_errors(thing)
    return [(".".join(map(str, error.absolute_path)), str(error.validator)) for error in found]


@pytest.mark.parametrize(("name", "thing"), _objects(), ids=lambda one: one if isinstance(one, str) else "")
def test_the_schema_takes_every_sample(name: str, thing: dict[str, Any]) -> None:
    Draft7Validator.check_schema(json_schema(thing["kind"]))
    assert _wrong(thing) == []


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("spec.rollout", {"groupsize": 8}, "additionalProperties"),
        ("spec.rollout.groupSize", 1, "minimum"),
        ("spec.rollout.temperature", 0, "exclusiveMinimum"),
        ("spec.device", "tpu", "enum"),
        ("spec.seed", "3", "type"),
        ("spec.model.source.huggingFace", {}, "required"),
        ("apiVersion", "tapforge.dev/v2", "const"),
    ],
)
def test_the_schema_finds_what_the_api_refuses(path: str, value: Any, rule: str) -> None:
    """That, and nothing else, of a sample that is right otherwise."""
    sample = dict(next(thing for name, thing in _objects() if name == "quickstart.yaml"))
    here, (*above, last) = sample, path.split(".")
    for name in above:
        here[name] = dict(here[name])
        here = here[name]
    here[last] = value
    assert _wrong(sample) == [(path, rule)]


def test_the_command_prints_the_schema_of_a_kind() -> None:
    for words, kind in ((("spec",), "TrainingRun"), (("epool.spec",), "EmulatorPool")):
        done = CliRunner().invoke(cli, ["explain", "--schema", *words])
        assert done.exit_code == 0 and json.loads(done.output)["title"] == kind
