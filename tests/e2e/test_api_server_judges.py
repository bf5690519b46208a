"""The API server and the models judge any object alike, and fill in the same defaults."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from api_objects import POD, Object, document, place
from e2e.cluster import Cluster, Refused
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tapforge_api import KINDS, SpecError, crd, dump_set, from_object, resolve

Schema = dict[str, Any]
Step = str | int


def schema_of(kind: str) -> Schema:
    return crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def fields(node: Schema, path: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], Schema]]:
    """Every place below `node` that a value can be written to; of lists the first item, of maps a key."""
    for name, child in node.get("properties", {}).items():
        yield (*path, name), child
        yield from fields(child, (*path, name))
    for name, step in (("items", 0), ("additionalProperties", "key")):
        if name in node:
            yield (*path, step), node[name]
            yield from fields(node[name], (*path, step))


FIELDS = {kind: dict(fields(schema_of(kind))) for kind in KINDS}
STARTS = {
    "TrainingRun": [{}, {"environment": {"source": {"pool": {"name": "p"}}}}, {"warmStart": {}}],
    "EmulatorPool": [
        {"replicas": 1, "template": POD},
        {"scaling": {"maxReplicas": 3}, "template": POD},
        {"external": {"urls": ["http://a", "http://b"]}},
    ],
}
TEXTS = [
    "",
    "a",
    "A",
    "a b",
    "a/b",
    "x/y/z",
    "/p",
    "http://a",
    "http://é",
    "10%",
    "101%",
    "é" * 63,
    "é" * 64,
    "x" * 2049,
]


def fitting(node: Schema) -> st.SearchStrategy[Any]:
    """Values that the schema takes, mostly: `$` in Python's patterns also allows a line's end."""
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if "pattern" in node:
        return st.from_regex(node["pattern"])
    if node.get("type") in ("integer", "number"):
        low, high = node["minimum"], node["maximum"]
        return st.integers(low, high) if node["type"] == "integer" else st.floats(low, high).filter(lambda x: x % 1)
    kinds: dict[Any, st.SearchStrategy[Any]] = {
        "boolean": st.booleans(),
        "object": st.just({}),
        "array": st.just([]),
        "string": st.text(max_size=9),
    }
    return kinds[node.get("type")]


def values(node: Schema) -> st.SearchStrategy[Any]:
    """Values of any type, and those at the bounds and beyond them."""
    some: list[st.SearchStrategy[Any]] = [st.sampled_from(TEXTS), st.booleans(), st.just({}), st.integers(-1, 70)]
    some += [st.floats(0.01, 0.99), st.just([]), st.just(["http://a", "http://a"])]
    if "minimum" in node:
        low, high = node["minimum"], node["maximum"]
        some += [st.sampled_from([low, high, low - 1, high + 1])] * 3
    if "maxLength" in node:
        longest = min(node["maxLength"], 5000)
        some += [st.sampled_from(["x" * longest, "x" * (longest + 1), "é" * longest, "é" * (longest + 1)])]
    if node.get("type") == "object":
        some += [st.just({"unknown": 1}), st.just({"name": "a"}), st.just({"tapforge.dev/x": "y", "b": "c"})]
    return st.one_of(*some)


def written(spec: Any, path: tuple[Step, ...], value: Any) -> Any:
    """`spec` with a value at a path; what leads there is made where it is missing."""
    if not path:
        return value
    head, *rest = path
    if isinstance(head, int):
        items = list(spec) if isinstance(spec, list) else []
        return [written(items[0] if items else None, tuple(rest), value), *items[1:]]
    around = dict(spec) if isinstance(spec, dict) else {}
    return {**around, head: written(around.get(head), tuple(rest), value)}


@st.composite
def documents(draw: st.DrawFn) -> Object:
    kind = draw(st.sampled_from(sorted(KINDS)))
    spec: Any = copy.deepcopy(draw(st.sampled_from(STARTS[kind])))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(FIELDS[kind])))
        drawn = values if draw(st.integers(0, 2)) == 0 else fitting
        spec = written(spec, path, draw(drawn(FIELDS[kind][path])))
    names = ["x"] * 24 + ["a" * 43, "a" * 44, "a" * 63, "a" * 64, "a.b", "-a", "A"]
    return document(kind, spec, draw(st.sampled_from(names)))


@settings(max_examples=250, suppress_health_check=list(HealthCheck))
@given(data=documents())
def test_models_and_server_judge_alike_and_fill_in_the_same(cluster: Cluster, data: Object) -> None:
    here = there = "taken"
    spec = stored = None
    try:
        spec = dump_set(resolve(from_object(KINDS[data["kind"]], data)))["spec"]
    except SpecError as error:
        here = str(error)
    try:
        stored = cluster.api("POST", f"{place('default', data['kind'])}?dryRun=All&fieldValidation=Strict", data)[
            "spec"
        ]
    except Refused as error:
        assert error.status in (400, 422), error
        there = str(error)
    note(f"laptop: {here}\nserver: {there}")
    assert stored == spec
