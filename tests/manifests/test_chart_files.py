"""The chart's files: templates and the table of values are what `python -m charts` writes, every value is described,
checked and used, and the versions are the package's.

What Helm makes of them is asked in tests/e2e/test_chart.py.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from charts.__main__ import CHART, ROOT, Template, rows, text_of, written

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
ROWS = list(rows((CHART / "values.yaml").read_text()))
BY_HAND = {"_helpers.tpl", "NOTES.txt", "certificate.yaml"}


def test_what_is_generated_is_fresh():
    stale = [str(path.relative_to(ROOT)) for path, text in written().items() if path.read_text() != text]
    assert not stale, "run `python -m charts`"
    templates = {path for path in (CHART / "templates").rglob("*") if path.is_file()}
    assert {path.name for path in templates - set(written())} == BY_HAND


def test_a_template_whose_source_lacks_what_it_exchanges_is_not_written():
    template = Template("x.yaml", "manifests/base/operator.yaml", ("Deployment",), exchange={"  replicas: 77\n": ""})
    with pytest.raises(ValueError, match=r"operator\.yaml has 0 times, not once, what x\.yaml exchanges"):
        text_of(template)


def test_its_versions_are_the_packages():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)


def _leaves(values: dict[str, Any], schema: dict[str, Any], above: str = "") -> Iterator[str]:
    """Names of what may be set, by the schema; it knows the same ones as values.yaml."""
    known = set(schema["properties"]) - {"global"}
    assert known == set(values), above
    for name, value in values.items():
        inner = schema["properties"][name]
        if isinstance(value, dict) and "properties" in inner and f"{above}{name}" not in {row[0] for row in ROWS}:
            yield from _leaves(value, inner, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def test_every_value_is_described_and_checked():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    assert list(_leaves(VALUES, SCHEMA)) == [name for name, _, _ in ROWS]


def test_no_object_takes_what_it_does_not_know():
    def objects(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(schema, dict):
            if "properties" in schema and schema.get("type") == "object":
                yield path, schema
            for name, inner in schema.items():
                yield from objects(inner, f"{path}/{name}")

    open_ones = [path for path, schema in objects(SCHEMA) if schema.get("additionalProperties") is not False]
    # Kubernetes adds fields to these.
    assert open_ones == []


def test_every_value_is_required_so_that_none_is_null():
    groups = {name.partition(".")[0] for name, _, _ in ROWS if "." in name}
    for schema, values in [(SCHEMA, VALUES), *((SCHEMA["properties"][name], VALUES[name]) for name in groups)]:
        # A digest may take the tag's place.
        assert set(schema["required"]) == set(values) - {"tag"}


def test_every_value_does_something():
    text = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    used = set(re.findall(r"\.Values\.([\w.]*\w)", text))
    assert used == {name for name, _, _ in ROWS}
