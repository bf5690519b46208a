"""Generated pages and schemas are what the code says, and the code that writes and serves keeps to them."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner
from e2e.reference.files import FOLDER, files
from jsonschema import Draft202012Validator

from tapforge_envs.openapi import openapi
from tapforge_envs.phone.server import serving
from tapforge_trainer.cli.main import cli
from tapforge_trainer.telemetry import schema
from tapforge_trainer.telemetry.schema import EVENTS, json_schema

TRAINER = Path(__file__).parents[2] / "trainer" / "tapforge_trainer"
FILES = files()


@pytest.mark.parametrize("name", FILES)
def test_it_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == FILES[name], "run: make reference"


def _written() -> Iterator[tuple[str, set[str], bool]]:
    """Each call by which the trainer writes an event by name: its kind, the fields that the call names, and whether it
    has others."""
    for file in sorted(TRAINER.rglob("*.py")):
        if ".event(" not in (text := file.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "event"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                named = {word.arg for word in node.keywords if word.arg is not None}
                yield str(node.args[0].value), named, len(named) < len(node.keywords)


def test_every_event_that_is_written_has_its_fields_in_the_schema() -> None:
    written = list(_written())
    assert len(written) > 10
    kinds = {kind for kind, _, _ in written}
    assert kinds | {"note", "alarm", "alarm_cleared"} == EVENTS.keys(), "telemetry/schema.py"
    for kind, fields, more in written:
        known = {field.alias or name: field for name, field in EVENTS[kind].model_fields.items()}
        assert fields <= known.keys(), f"{kind}: describe them in telemetry/schema.py"
        needed = {name for name, field in known.items() if field.is_required()} - {"at", "event"}
        assert more or needed <= fields, f"{kind}: a reader would miss {sorted(needed - fields)}"


@pytest.mark.parametrize("kind", schema.KINDS)
def test_the_command_prints_the_schema_of_what_a_run_writes(kind: str) -> None:
    done = CliRunner().invoke(cli, ["explain", "--schema", kind])
    assert done.exit_code == 0
    Draft202012Validator.check_schema(printed := json.loads(done.output))
    assert printed == json_schema(kind) and printed["x-version"] == schema.VERSION


def test_the_schema_takes_a_line_and_what_later_releases_add_and_finds_what_is_wrong() -> None:
    lines = Draft202012Validator(json_schema("events"))
    line = {"at": 1.5, "event": "stage", "stage": 2, "update": 3, "order": 8}
    assert lines.is_valid(line)
    assert lines.is_valid({**line, "more": 1})
    assert not lines.is_valid({**line, "stage": "two"})
    assert not lines.is_valid({"at": 1.5, "event": "stage"})


def test_the_description_of_the_protocol_has_the_routes_of_the_server() -> None:
    described = {(method.upper(), path) for path, calls in openapi()["paths"].items() for method in calls}
    app: web.Application = serving([])
    served = {
        (route.method, str(route.resource.canonical).removeprefix("/slot/{slot}"))
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert described <= served
    assert {path for _, path in served - described} <= {"/faults"}, "the simulated phone's own"
