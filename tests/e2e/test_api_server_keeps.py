"""What the API server keeps: what may not change does not, old objects can be mended, and kubectl shows the state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from api_objects import POD, Object, document, entries, place
from e2e.cluster import APPLY, MERGE, PATIENCE, Cluster, Refused

from tapforge_api import crd, read_pool, to_yaml


@pytest.fixture
def apply(cluster: Cluster, namespace: str) -> Callable[..., str]:
    """Does what a person does, and returns what the person reads."""

    def apply(data: Object, *options: str) -> str:
        done = cluster.kubectl("apply", "-n", namespace, *options, "-f", "-", input=to_yaml(data), check=False)
        return done.stdout if done.returncode == 0 else f"REFUSED {done.stderr}"

    return apply


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
            # The operator has to be able to report it. Kubernetes 1.30 judges the rules of an unchanged spec once more.
            if name == "both" and int(cluster.api("GET", "/version")["minor"]) == 30:
                continue
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
        ("tr.spec.engine", ["kvCacheMiB <integer>", "MiB; without it 128 on CPUs", "default 64"]),
        ("tr.spec.environment.source.pool", ["metadata.name of the EmulatorPool"]),
        ("tr.spec.suspend", ["after a checkpoint", "default false"]),
    ],
)
def test_explain_says_what_and_in_which_unit(cluster: Cluster, path: str, words: list[str]) -> None:
    said = " ".join(cluster.kubectl("explain", path).stdout.split())
    assert not [word for word in words if word not in said], said
