"""The API server takes our kinds without a webhook, refuses what the models refuse, and says what and where."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_objects import PLURALS, Object, document, entries, place
from e2e.cluster import Cluster

from tapforge_api import KINDS, crd, dump_set, from_object, load_pool, resolve, to_yaml
from tapforge_operator.emulatorpool.pod import slot_pods
from tapforge_operator.emulatorpool.state import NewSlot, Pool

ROOT = Path(__file__).parents[2]


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


#: that of Kueue's kinds is taken where Kueue runs (test_kueue.py)
SAMPLES = sorted(path for path in (ROOT / "manifests" / "samples").glob("*.yaml") if path.stem != "queue-kueue")


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.name)
def test_samples_are_taken(cluster: Cluster, namespace: str, path: Path) -> None:
    things = list(yaml.safe_load_all(path.read_text()))
    known = [thing for thing in things if thing["kind"] != "ScaledObject"]  # KEDA's kind isn't here
    options = ("apply", "-n", namespace, "--dry-run=server", "--validate=strict", "-f", "-")
    said = cluster.kubectl(*options, input=yaml.safe_dump_all(known)).stdout
    assert said.count("created (server dry run)") == len(known) > 0


@pytest.mark.parametrize("path", sorted((ROOT / "manifests" / "samples").glob("pool-*.yaml")), ids=lambda p: p.name)
def test_the_slots_of_the_samples_are_taken(cluster: Cluster, namespace: str, path: Path) -> None:
    """The Pods that the operator makes of them, by what the API server knows of Pods: every field, every value."""
    pool = load_pool(path)
    if pool.spec.template is None:
        return
    place = f"/api/v1/namespaces/{namespace}/pods?dryRun=All&fieldValidation=Strict"
    record = Pool(namespace, pool.metadata.name, "7e0c8d26-0000-4000-8000-000000000000", 1, pool.spec)
    made = cluster.api("POST", place, slot_pods(record)(NewSlot("a-slot", 0)))
    assert [c["name"] for c in made["spec"]["containers"]] == [c.name for c in pool.spec.template.spec.containers]
