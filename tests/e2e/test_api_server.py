"""What the API server makes of our kinds, without a webhook: it refuses what the models refuse, says what and where,
fills in the same defaults, keeps what may not change, and shows the state at a glance.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.cluster import APPLY, MERGE, PATIENCE, Cluster, Refused
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tapforge_api import KINDS, SpecError, crd, dump_set, from_object, read_pool, resolve, to_yaml

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "tests" / "api" / "tables"
PLURALS = {"EmulatorPool": "emulatorpools", "TrainingRun": "trainingruns"}
POD = {"spec": {"containers": [{"name": "emulator", "image": "i"}]}}
Object = dict[str, Any]
Schema = dict[str, Any]


def entries(name: str) -> list[Any]:
    read = yaml.safe_load((TABLES / name).read_text())
    return [pytest.param(entry, id=f"{entry['kind']}: {entry['case']}") for entry in read]


def document(kind: str, spec: Any, name: str = "x") -> Object:
    return {"apiVersion": "tapforge.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def place(namespace: str, kind: str, name: str = "", group: str = "tapforge.dev") -> str:
    return f"/apis/{group}/v1alpha1/namespaces/{namespace}/{PLURALS[kind]}{name and '/'}{name}"


@pytest.fixture
def apply(cluster: Cluster, namespace: str) -> Callable[..., str]:
    """Does what a person does, and returns what the person reads."""

    def apply(data: Object, *options: str) -> str:
        done = cluster.kubectl("apply", "-n", namespace, *options, "-f", "-", input=to_yaml(data), check=False)
        return done.stdout if done.returncode == 0 else f"REFUSED {done.stderr}"

    return apply


# --- installing -------------------------------------------------------------------------------------------------------


def without_empty(value: Any) -> Any:
    """A struct without fields has no properties for the server."""
    if isinstance(value, dict):
        return {k: without_empty(v) for k, v in value.items() if (k, v) != ("properties", {})}
    return [without_empty(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_takes_the_whole_schema_and_its_rules(cluster: Cluster, kind: str) -> None:
    stored = cluster.api("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURALS[kind]}.tapforge.dev")
    conditions = {c["type"]: c["status"] for c in stored["status"]["conditions"]}
    assert conditions == {"Established": "True", "NamesAccepted": "True"}
    ours, theirs = crd(kind)["spec"]["versions"][0], stored["spec"]["versions"][0]
    assert theirs == without_empty(ours), "the server left something out"
    rules = json.dumps(theirs).count('"rule": ')
    assert rules >= 10, "rules that are too expensive, or don't compile, are refused with the whole definition"


def test_short_names_are_nobody_elses(cluster: Cluster) -> None:
    lists = [cluster.api("GET", "/api/v1")]
    for group in cluster.api("GET", "/apis")["groups"]:
        lists += [cluster.api("GET", f"/apis/{version['groupVersion']}") for version in group["versions"]]
    foreign = {
        short
        for found in lists
        if not found["groupVersion"].startswith("tapforge.dev/")
        for resource in found["resources"]
        for short in (resource["name"], *resource.get("shortNames", []))
    }
    assert "ep" in foreign, "Endpoints"
    ours = {short for kind in KINDS for short in crd(kind)["spec"]["names"]["shortNames"]}
    assert ours == {"epool", "tr", "trun"}
    assert not ours & foreign


# --- right and wrong --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a person reads who applies a folder with all the wrong files at once, by file."""
    folder = tmp_path_factory.mktemp("wrong")
    files = {f"{number:03}.yaml": entry.values[0] for number, entry in enumerate(entries("wrong.yaml"))}
    for name, entry in files.items():
        data = document(entry["kind"], entry["spec"], entry.get("name", f"wrong-{name[:3]}"))
        (folder / name).write_text(to_yaml(data))
    done = cluster.kubectl("apply", "-n", "default", "-f", str(folder), check=False)
    assert done.stdout == "", "nothing is taken"
    answers: dict[str, str] = {}
    for answer in re.split(r"^(?=The |Error from server)", done.stderr, flags=re.MULTILINE)[1:]:
        first = answer.splitlines()[0]
        said_of = [
            entry["case"]
            for name, entry in files.items()
            if f"/{name}" in first or f'"{entry.get("name", f"wrong-{name[:3]}")}"' in first
        ]
        assert len(said_of) == 1, answer
        answers[said_of[0]] = answer
    return answers


@pytest.mark.parametrize("entry", entries("wrong.yaml"))
def test_what_is_wrong_is_refused_with_what_and_where(answers: dict[str, str], entry: Object) -> None:
    said = answers[entry["case"]]
    words = [entry[key] for key in ("where", "what", "server") if key in entry]
    assert any(all(word in line for word in words) for line in said.splitlines()), said


@pytest.mark.parametrize("entry", entries("right.yaml"))
def test_what_is_right_is_taken_and_gets_the_same_defaults(cluster: Cluster, namespace: str, entry: Object) -> None:
    data = document(entry["kind"], entry["spec"], entry.get("name", "x"))
    stored = cluster.api("POST", f"{place(namespace, entry['kind'])}?fieldValidation=Strict", data)
    model = KINDS[entry["kind"]]
    assert stored["spec"] == dump_set(resolve(from_object(model, data)))["spec"]
    assert from_object(model, stored).spec == from_object(model, data).spec


@pytest.mark.parametrize("path", sorted((ROOT / "manifests" / "samples").glob("*.yaml")), ids=lambda p: p.name)
def test_samples_are_taken(cluster: Cluster, namespace: str, path: Path) -> None:
    things = list(yaml.safe_load_all(path.read_text()))
    known = [thing for thing in things if thing["kind"] != "ScaledObject"]  # KEDA's kind isn't here
    options = ("apply", "-n", namespace, "--dry-run=server", "--validate=strict", "-f", "-")
    said = cluster.kubectl(*options, input=yaml.safe_dump_all(known)).stdout
    assert said.count("created (server dry run)") == len(known) > 0


# --- the models and the server judge alike ----------------------------------------------------------------------------

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


# --- updates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", entries("changes.yaml"))
def test_what_may_not_change_does_not(cluster: Cluster, namespace: str, entry: Object) -> None:
    kind = entry["kind"]
    path = place(namespace, kind, "x")

    def apply(spec: str) -> Object:
        return cluster.api("PATCH", f"{path}?fieldManager=test", document(kind, entry[spec]), APPLY)

    apply("before")
    if entry.get("started"):
        cluster.api("PATCH", f"{path}/status", {"status": {"startTime": "2026-01-01T00:00:00Z"}}, MERGE)
    if "what" not in entry:
        assert apply("after")["metadata"]["generation"] == 2
    else:
        with pytest.raises(Refused) as refused:
            apply("after")
        assert f"{entry['where']}: Forbidden: {entry['what']}" in str(refused.value)


def test_scaling_goes_through_the_subresource(cluster: Cluster, namespace: str, apply: Callable[..., str]) -> None:
    apply(document("EmulatorPool", {"replicas": 1, "template": POD}))
    status = {"status": {"pods": 1, "selector": "tapforge.dev/pool-uid=u"}}
    cluster.api("PATCH", f"{place(namespace, 'EmulatorPool', 'x')}/status", status, MERGE)
    assert "scaled" in cluster.kubectl("scale", "-n", namespace, "epool/x", "--replicas", "3").stdout
    assert cluster.api("GET", place(namespace, "EmulatorPool", "x"))["spec"]["replicas"] == 3
    scale = cluster.api("GET", f"{place(namespace, 'EmulatorPool', 'x')}/scale")
    assert (scale["spec"], scale["status"]) == (
        {"replicas": 3},
        {"replicas": 1, "selector": "tapforge.dev/pool-uid=u"},
    ), "what a HorizontalPodAutoscaler reads"

    apply(document("EmulatorPool", {"scaling": {"maxReplicas": 4}, "template": POD}, "y"))
    refused = cluster.kubectl("scale", "-n", namespace, "epool/y", "--replicas", "3", check=False)
    assert refused.returncode != 0
    assert "exactly one of replicas, scaling, external must be set" in refused.stderr, "two must not size one pool"


def test_status_is_the_operators_alone(cluster: Cluster, namespace: str, apply: Callable[..., str]) -> None:
    apply({**document("EmulatorPool", {"replicas": 1, "template": POD}), "status": {"ready": 7}})
    path = place(namespace, "EmulatorPool", "x")
    filled = cluster.api("GET", path)["status"]
    assert (filled["observedGeneration"], filled["ready"]) == (0, 0), "nobody has looked at it yet"
    found = cluster.api("PATCH", f"{path}/status", {"spec": {"replicas": 9}, "status": {"ready": 1}}, MERGE)
    assert found["spec"]["replicas"] == 1
    assert found["status"]["ready"] == 1
    assert found["metadata"]["generation"] == 1, "a status is no news to whoever waits for a generation"
    with pytest.raises(Refused, match="Duplicate value"):
        twice = [{"type": "Ready", "status": "True"}] * 2
        cluster.api("PATCH", f"{path}/status", {"status": {"conditions": twice}}, MERGE)


# --- an object from another time --------------------------------------------------------------------------------------


def lax(kind: str, group: str) -> Object:
    """The kind's definition in a group of its own, as an older release may have had it: it knows no rules, takes any
    field, and requires nothing."""
    definition = crd(kind)
    names = definition["spec"]["names"]
    definition["metadata"]["name"] = f"{names['plural']}.{group}"
    definition["spec"] |= {"group": group, "names": {**names, "shortNames": [], "categories": []}}
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return definition


def test_a_pool_of_an_older_schema_is_read_reported_and_can_be_mended(cluster: Cluster, namespace: str) -> None:
    group = f"{namespace}.tapforge.dev"
    old, new = lax("EmulatorPool", group), lax("EmulatorPool", group)
    new["spec"]["versions"] = crd("EmulatorPool")["spec"]["versions"]
    definition = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/emulatorpools.{group}"
    cluster.apply(old)
    cluster.kubectl("wait", "--for=condition=Established", f"--timeout={PATIENCE:.0f}s", f"crd/emulatorpools.{group}")
    pools = place(namespace, "EmulatorPool", group=group)
    bare = {"spec": {"containers": [{"name": "emulator"}]}}
    specs: dict[str, Object] = {
        "unknown": {"replicas": 1, "template": POD, "bootSeconds": 3},
        "both": {"replicas": 1, "scaling": {"maxReplicas": 2}, "template": POD},
        "image": {"replicas": 1, "template": bare},
        "bounds": {"replicas": 1, "port": 0, "template": POD},
    }

    def object_of(name: str, spec: Object) -> Object:
        return {**document("EmulatorPool", spec, name), "apiVersion": f"{group}/v1alpha1"}

    try:
        cluster.wait_for("the old kind", lambda: cluster.exists(pools))
        for name, spec in specs.items():
            cluster.api("POST", pools, object_of(name, spec))
        cluster.apply(new)

        def strict() -> bool:
            try:
                cluster.api("POST", f"{pools}?dryRun=All", object_of("probe", {}))
            except Refused as error:
                return error.status == 422
            return False

        cluster.wait_for("the new schema", strict)
        for name in specs:
            stored = cluster.api("GET", f"{pools}/{name}")
            read = read_pool(stored)
            assert bool(read.problems) == (name != "unknown"), read.message
            # the operator has to be able to say so
            stalled = {"type": "Stalled", "status": "True", "reason": "InvalidSpec", "message": read.message}
            said = cluster.api("PATCH", f"{pools}/{name}/status", {"status": {"conditions": [stalled]}}, MERGE)
            assert said["status"]["conditions"][0]["reason"] == "InvalidSpec"
        mended = cluster.api("PATCH", f"{pools}/both", {"spec": {"replicas": None}}, MERGE)
        assert read_pool(mended).problems == ()
    finally:
        cluster.api("DELETE", definition)
        cluster.wait_for("the end of the kind", lambda: not cluster.exists(definition))


# --- what a person sees -----------------------------------------------------------------------------------------------


def table(text: str) -> list[dict[str, str]]:
    """kubectl's table, by column: cells begin where their headers do."""
    header, *lines = text.rstrip().splitlines()
    starts = [i for i, c in enumerate(header) if c != " " and (i == 0 or header[i - 1] == " ")]
    cuts = list(zip(starts, [*starts[1:], None], strict=True))
    return [{header[a:b].strip(): line[a:b].strip() for a, b in cuts} for line in lines]


def test_get_tells_the_truth_at_a_glance(cluster: Cluster, namespace: str, apply: Callable[..., str]) -> None:
    apply(document("EmulatorPool", {"replicas": 4, "template": POD}, "phones"))
    ready = {"type": "Ready", "status": "False", "reason": "Booting", "message": "2 of 4 slots start"}
    status = {
        "desiredReplicas": 4,
        "pods": 4,
        "ready": 2,
        "claimed": 1,
        "booting": 2,
        "updated": 4,
        "replacedTotal": 9,
        "conditions": [{"type": "Reconciling", "status": "True", "reason": "Other"}, ready],
    }
    cluster.api("PATCH", f"{place(namespace, 'EmulatorPool', 'phones')}/status", {"status": status}, MERGE)
    apply(document("EmulatorPool", {"replicas": 1, "template": POD}, "untouched"))
    seen = table(cluster.kubectl("get", "-n", namespace, "epool").stdout)
    assert list(seen[0]) == ["NAME", "DESIRED", "READY", "CLAIMED", "STATUS", "AGE"]
    assert {**seen[0], "AGE": ""} == {
        "NAME": "phones",
        "DESIRED": "4",
        "READY": "2",
        "CLAIMED": "1",
        "STATUS": "Booting",
        "AGE": "",
    }
    assert seen[1]["NAME"] == "untouched" and seen[1]["STATUS"] == "", "no operator has seen it: nothing is said"
    wide = table(cluster.kubectl("get", "-n", namespace, "epool", "phones", "-o", "wide").stdout)[0]
    assert {k: wide[k] for k in ("BOOTING", "UNHEALTHY", "UPDATED", "REPLACED", "PROTOCOL", "MESSAGE")} == {
        "BOOTING": "2",
        "UNHEALTHY": "0",
        "UPDATED": "4",
        "REPLACED": "9",
        "PROTOCOL": "tapforge",
        "MESSAGE": "2 of 4 slots start",
    }

    source = {"environment": {"source": {"pool": {"name": "phones"}}}}
    apply(document("TrainingRun", source, "learner"))
    running = {"type": "Ready", "status": "True", "reason": "Training"}
    path = place(namespace, "TrainingRun", "learner")
    progress = {"progress": {"update": 7, "success": 0.625}, "leases": {"wanted": 4, "held": 3}}
    cluster.api("PATCH", f"{path}/status", {"status": {"conditions": [running], **progress}}, MERGE)
    run = table(cluster.kubectl("get", "-n", namespace, "tr").stdout)[0]
    assert {**run, "AGE": ""} == {
        "NAME": "learner",
        "STATUS": "Training",
        "UPDATE": "7",
        "SUCCESS": "0.625",
        "PHONES": "3",
        "AGE": "",
    }
    both = cluster.kubectl("get", "-n", namespace, "tapforge", "-o", "name").stdout.split()
    assert both == [
        "emulatorpool.tapforge.dev/phones",
        "emulatorpool.tapforge.dev/untouched",
        "trainingrun.tapforge.dev/learner",
    ]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("epool", ["Pod that the operator makes", "spec <Object> -required-"]),
        ("epool.spec", ["exactly one of replicas, scaling and external", "default tapforge"]),
        ("epool.spec.boot", ["deadlineSeconds <number>", "until Ready, seconds; default 600"]),
        ("epool.spec.kvm", ["enum: None, DevicePlugin, HostPath", "default devices.kubevirt.io/kvm"]),
        ("epool.spec.health", ["percent of the desired slots", "default 100"]),
        ("epool.spec.recycle", ["age, seconds; without it never"]),
        ("epool.status", ["lastFailures <[]Object>", "slots that a run holds"]),
        ("tr.spec.stop.maxSeconds", ["seconds; without it none"]),
        ("tr.spec.engine", ["kvCacheMiB <integer>", "MiB; default 128"]),
        ("tr.spec.environment.source.pool", ["metadata.name of the EmulatorPool"]),
        ("tr.spec.suspend", ["after a checkpoint", "default false"]),
    ],
)
def test_explain_says_what_and_in_which_unit(cluster: Cluster, path: str, words: list[str]) -> None:
    said = " ".join(cluster.kubectl("explain", path).stdout.split())
    assert not [word for word in words if word not in said], said
