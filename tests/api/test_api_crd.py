"""The CRDs are structural, bounded, current, and say the same as the models."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tapforge_api import (
    KINDS,
    Metadata,
    SpecError,
    TrainingRun,
    crd,
    dump_set,
    from_object,
    load,
    load_pool,
    resolve,
    to_yaml,
)
from tapforge_api.__main__ import text_of
from tapforge_api.shapes import model_of

CRDS = Path(__file__).parents[2] / "crds"
HEAD: dict[str, Any] = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "x"}}
Schema = dict[str, Any]


def schema_of(kind: str) -> Schema:
    return crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in node:
            yield from nodes(node[name], f"{path}[{name}]")


def faults(path: str, node: Schema) -> Iterator[str]:
    """What keeps a node from being structural and bounded."""
    kind = node.get("type")
    if node.get("x-kubernetes-int-or-string"):
        if kind is not None or "maxLength" not in node:
            yield f"{path}: int-or-string with a type or without maxLength"
        return
    if kind not in ("object", "array", "string", "integer", "number", "boolean"):
        yield f"{path}: type {kind!r}"
    for word in ("$ref", "$defs", "anyOf", "oneOf", "allOf", "not", "const", "title", "definitions"):
        if word in node:
            yield f"{path}: {word}"
    if isinstance(node.get("exclusiveMinimum", False), bool) is False:
        yield f"{path}: exclusiveMinimum is no flag"
    if "properties" in node and "additionalProperties" in node:
        yield f"{path}: properties and additionalProperties"
    if kind == "array" and ("maxItems" not in node or "items" not in node):
        yield f"{path}: array without maxItems or items"
    if kind == "string" and not {"maxLength", "enum"} & set(node):
        yield f"{path}: string without maxLength"
    if kind in ("integer", "number") and not {"minimum", "maximum"} <= set(node):
        yield f"{path}: number without bounds"
    if kind == "object" and path not in ("", ".metadata"):
        if not {"properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"} & set(node):
            yield f"{path}: object without properties"
        if "additionalProperties" in node and "maxProperties" not in node:
            yield f"{path}: map without maxProperties"
    if (
        "[items]" not in path
        and "[additional" not in path
        and path not in ("", ".metadata")
        and "description" not in node
    ):
        yield f"{path}: no description"


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_is_structural_bounded_and_described(kind: str) -> None:
    found = [fault for path, node in nodes(schema_of(kind)) for fault in faults(path, node)]
    assert not found, "\n".join(found)
    assert len(list(nodes(schema_of(kind)))) > 50


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "string"},
        {"type": "array", "items": {"type": "boolean"}},
        {"type": "object", "maxProperties": 1, "properties": {}, "additionalProperties": {"type": "boolean"}},
        {"anyOf": [{"type": "string"}]},
        {"type": "boolean", "anyOf": []},
        {"$ref": "#/x"},
        {"type": "integer", "minimum": 0},
    ],
)
def test_the_checker_above_sees(bad: Schema) -> None:
    assert list(faults(".x", {**bad, "description": "d"}))


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_current_and_small(kind: str) -> None:
    path = CRDS / f"{kind.lower()}s.yaml"
    assert path.read_text() == text_of(kind), "stale: run `python -m tapforge_api --write crds`"
    # `kubectl apply` keeps it as JSON in an annotation, and annotations have 256 KiB.
    assert len(json.dumps(crd(kind), separators=(",", ":"))) < 200_000


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="unknown kind 'Pod'; known: TrainingRun, EmulatorPool"):
        crd("Pod")


@pytest.mark.parametrize("kind", KINDS)
def test_rules_speak_of_fields_that_exist(kind: str) -> None:
    rules = 0
    for path, node in nodes(schema_of(kind)):
        for rule in node.get("x-kubernetes-validations", []):
            rules += 1
            for name in re.findall(r"self\.([A-Za-z.]+)", rule["rule"]):
                here = node
                for part in name.split("."):
                    if part in ("exists_one", "exists", "all", "matches"):
                        break
                    assert part in here["properties"], f"{path}: {rule['rule']}"
                    here = here["properties"][part]
    assert rules >= 5


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_of_the_models_is_in_the_schema(kind: str) -> None:
    written = [r["message"] for _, n in nodes(schema_of(kind)) for r in n.get("x-kubernetes-validations", [])]
    of_models = [
        r.message
        for model in models(KINDS[kind])
        for r in (*getattr(model, "rules", ()), *getattr(model, "changes", ()))
    ]
    assert sorted(written) == sorted(of_models)


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """All structs of a kind but its metadata, which the API server checks itself."""
    if issubclass(model, Metadata):
        return
    yield model
    for field in model.model_fields.values():
        if (inner := model_of(field.annotation)) is not None:
            yield from models(inner)


# --- the same verdicts and the same defaults --------------------------------------------------------------------------


def filled(value: Any, node: Schema) -> Any:
    """The API server's defaulting: absent fields get their default, then the same inside."""
    if isinstance(value, dict) and "properties" in node:
        absent = {k: c["default"] for k, c in node["properties"].items() if "default" in c and k not in value}
        return {k: filled(v, node["properties"].get(k, {})) for k, v in {**value, **absent}.items()}
    if isinstance(value, list):
        return [filled(v, node["items"]) for v in value]
    return value


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("TrainingRun", "{}"),
        (
            "TrainingRun",
            "{warmStart: {}, algorithm: {advantage: {grpo: {}}}, environment: {source: {urls: {file: f}}}}",
        ),
        (
            "TrainingRun",
            "{model: {source: {huggingFace: {repo: a/b}}}, environment: {source: {processes: {latency: {}}}}}",
        ),
        ("EmulatorPool", "{external: {urls: [http://a]}}"),
        ("EmulatorPool", "{scaling: {maxReplicas: 4}, template: {spec: {containers: [{name: emulator, image: i}]}}}"),
    ],
)
def test_the_server_fills_in_what_the_models_fill_in(kind: str, spec: str) -> None:
    text = f"apiVersion: tapforge.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: x}}\nspec: {spec}\n"
    run = load(text) if kind == "TrainingRun" else load_pool(text)
    assert filled(dump_set(run)["spec"], schema_of(kind)["properties"]["spec"]) == dump_set(resolve(run))["spec"]


def as_json_schema(node: Schema) -> Schema:
    """The structural schema in the dialect of the jsonschema package."""
    out = {k: v for k, v in node.items() if k not in ("properties", "items", "additionalProperties")}
    for bound, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if out.pop(flag, False):
            out[flag] = out.pop(bound)
    if "properties" in node:
        out["properties"] = {k: as_json_schema(v) for k, v in node["properties"].items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            out["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if name in node:
            out[name] = as_json_schema(node[name])
    return out


def scalars(node: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Scalar fields below `node`, without those inside exactly-one-of structs."""
    if "properties" not in node:
        if node["type"] not in ("object", "array"):
            yield path, node
    elif not any("exactly one of" in r["message"] for r in node.get("x-kubernetes-validations", [])):
        for name, child in node["properties"].items():
            yield from scalars(child, (*path, name))


SCALARS = dict(scalars(schema_of("TrainingRun")["properties"]["spec"]))
VALIDATOR = jsonschema.Draft202012Validator(as_json_schema(schema_of("TrainingRun")["properties"]["spec"]))


def _rules(model: type[BaseModel]) -> Iterator[str]:
    yield from (rule.message for rule in getattr(model, "rules", ()))
    for field in model.model_fields.values():
        if (inner := model_of(field.annotation)) is not None:
            yield from _rules(inner)


RULES = frozenset(_rules(TrainingRun))


def values(node: Schema) -> st.SearchStrategy[Any]:
    """Values inside the bounds, at them, and beyond."""
    inside: list[st.SearchStrategy[Any]] = [st.sampled_from(node.get("enum", ["", "a", "a b", "x" * 129, "/tmp/x"]))]
    if node["type"] in ("integer", "number"):
        low, high = node["minimum"], node["maximum"]
        inside += [st.integers(low, high) if isinstance(low, int) and isinstance(high, int) else st.floats(low, high)]
        inside += [st.sampled_from([low, high, low - 1, high + 1])]
    return st.one_of(*inside, st.booleans(), st.integers(-2, 70), st.floats(0, 2), st.lists(st.none(), max_size=1))


@given(st.data())
def test_models_and_schema_judge_every_value_alike(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(SCALARS)))
    value = data.draw(values(SCALARS[path]))
    if isinstance(value, float) and value.is_integer():
        value = value + 0.5  # 1.0 is an integer for the server and none for the models, which is allowed
    spec: Any = value
    for part in reversed(path):
        spec = {part: spec}
    try:
        from_object(TrainingRun, {**HEAD, "spec": spec})
        accepted = True
    except SpecError as error:  # rules between fields are CEL, which is not the schema's
        accepted = all(any(rule in p.message for rule in RULES) for p in error.problems)
    assert accepted == VALIDATOR.is_valid(spec), (path, value)


@given(st.dictionaries(st.sampled_from(sorted(SCALARS)), st.integers(0, 10**9), max_size=6), st.text(max_size=12))
def test_what_is_written_is_read_back_equal(chosen: dict[tuple[str, ...], int], note: str) -> None:
    spec: dict[str, Any] = {}
    for path, number in chosen.items():
        node, here = SCALARS[path], spec
        for part in path[:-1]:
            here = here.setdefault(part, {})
        if node["type"] == "string":
            options = node.get("enum", ["1e5", "1:30", "2024-01-01", "yes", "0x1", "010", "a-b"])
            here[path[-1]] = options[number % len(options)]
        elif node["type"] == "boolean":
            here[path[-1]] = bool(number % 2)
        else:
            share = number / 10**9
            wide = node["minimum"] + share * (min(node["maximum"], 10_000) - node["minimum"])
            here[path[-1]] = int(wide) if node["type"] == "integer" else wide
    metadata = {"name": "1e5", "annotations": {"note": note}}
    try:
        run = from_object(TrainingRun, {**HEAD, "metadata": metadata, "spec": spec})
    except SpecError:
        return  # a rule between fields, or an open bound
    again = load(to_yaml(dump_set(run)))
    assert again.spec == run.spec and again.metadata.name == "1e5"
    assert again.metadata.annotations["note"] == note
    assert dump_set(again) == dump_set(run)
    assert resolve(run) == run
