"""Releases of the Helm chart on a real API server: from an older chart to this one, back, gone and come again, and in
the place of what kustomize applied.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.cluster import Cluster, Options, Refused

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
CHART = ROOT / "charts" / "tapforge"
OURS = "tapforge-system"
Object = dict[str, Any]
Helm = Callable[..., subprocess.CompletedProcess[str]]


POOLS = "/apis/tapforge.dev/v1alpha1/namespaces/default/emulatorpools"
RUNS = "/apis/tapforge.dev/v1alpha1/namespaces/default/trainingruns"
POOL: Object = {
    "apiVersion": "tapforge.dev/v1alpha1",
    "kind": "EmulatorPool",
    "metadata": {"name": "devices"},
    "spec": {"external": {"urls": ["http://127.0.0.1:9"]}},
}


@pytest.fixture(scope="module")
def own(built: None) -> Iterator[Cluster]:
    """A control plane of its own: the kinds of the shared one are every test's, and here they come and go."""
    with Cluster(Options(nodes=0)) as own:
        yield own


@pytest.fixture
def release(own: Cluster, helm: Helm) -> Iterator[Helm]:
    """Helm against that control plane; nothing is left of the release and of the kinds."""

    def run(verb: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return helm(verb, *arguments, f"--kubeconfig={own.kubeconfig}", "-n", OURS, check=check)

    yield run
    run("uninstall", "tapforge", "--ignore-not-found", "--wait")
    own.kubectl("delete", "crd", "emulatorpools.tapforge.dev", "trainingruns.tapforge.dev", "--ignore-not-found")


def older(place: Path) -> Path:
    """The chart as it was before pools had `updateStrategy` and runs `evaluation.sampledTemperature`."""
    shutil.copytree(CHART, place)
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (place / "Chart.yaml").write_text(yaml.safe_dump(about | {"version": "0.0.9", "appVersion": "0.0.9"}))
    for name, forget in (
        ("emulatorpools", ("updateStrategy",)),
        ("trainingruns", ("evaluation", "sampledTemperature")),
    ):
        kind = yaml.safe_load((ROOT / "crds" / f"{name}.yaml").read_text())
        schema = kind["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        _forget(schema, *forget)
        kind["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
        (place / "templates" / "crds" / f"{name}.yaml").write_text(yaml.safe_dump(kind))
    return place


def _forget(schema: Object, name: str, *below: str) -> None:
    """Takes a field out, and what defaults say about it."""
    default = schema.get("default", {})
    if below:
        _forget(schema["properties"][name], *below)
        for inner in below[:-1]:
            default = default.get(name, {}).get(inner, {})
        default.get(name, {}).pop(below[-1], None)
    else:
        del schema["properties"][name]
        default.pop(name, None)


def kinds_of(own: Cluster) -> dict[str, Object]:
    """Schemas of both kinds' specs, as they are served."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    return {
        kind["metadata"]["name"].partition(".")[0]: kind["spec"]["versions"][0]["schema"]["openAPIV3Schema"][
            "properties"
        ]["spec"]["properties"]
        for kind in own.api("GET", path)["items"]
    }


def takes(own: Cluster, field: Object) -> bool:
    """Whether a pool with the field is taken, where unknown fields are refused."""
    try:
        pool = {**POOL, "metadata": {"name": "probe"}, "spec": {**POOL["spec"], **field}}
        own.api("POST", f"{POOLS}?dryRun=All&fieldValidation=Strict", pool)
    except Refused as error:
        assert "unknown field" in str(error), error
        return False
    return True


NEW = {"updateStrategy": {"maxSurge": 1}}


def test_from_an_older_chart_to_this_one_and_back_and_gone(own, release, tmp_path):
    first = release("install", "tapforge", str(older(tmp_path / "older")), "--create-namespace").stdout
    assert "rollout status deployment/tapforge-operator" in first
    own.wait_kinds()
    own.wait_for("strict reading", lambda: not takes(own, NEW))
    assert "sampledTemperature" not in kinds_of(own)["trainingruns"]["evaluation"]["properties"]
    pool = own.api("POST", POOLS, POOL)["metadata"]
    own.kubectl("apply", "-f", str(MANIFESTS / "samples" / "run-phones.yaml"))
    run = own.api("GET", f"{RUNS}/practise")["metadata"]

    release("upgrade", "tapforge", str(CHART))
    own.wait_for("the new field", lambda: takes(own, NEW))
    assert "sampledTemperature" in kinds_of(own)["trainingruns"]["evaluation"]["properties"]
    own.api("POST", POOLS, {**POOL, "metadata": {"name": "newer"}, "spec": {**POOL["spec"], **NEW}})
    assert own.api("GET", f"{POOLS}/newer")["spec"]["updateStrategy"]["maxSurge"] == 1

    release("rollback", "tapforge", "1")
    own.wait_for("the older kinds", lambda: not takes(own, NEW))
    release("upgrade", "tapforge", str(CHART))
    own.wait_for("the newer kinds", lambda: takes(own, NEW))

    said = release("uninstall", "tapforge", "--wait").stdout
    assert "emulatorpools.tapforge.dev" in said, "Helm names what it leaves"
    deployment = f"/apis/apps/v1/namespaces/{OURS}/deployments/tapforge-operator"
    assert not own.exists(deployment)
    survived = [own.api("GET", path)["metadata"]["uid"] for path in (f"{POOLS}/devices", f"{RUNS}/practise")]
    assert survived == [pool["uid"], run["uid"]]

    # The kinds are there already: Helm 4.0 refuses those in an install by server-side apply.
    release("install", "tapforge", str(CHART), "--server-side=false")
    release("upgrade", "tapforge", str(CHART), "--server-side=true", "--force-conflicts")
    assert own.exists(deployment) and own.exists(f"{POOLS}/devices")
    own.api("DELETE", POOLS)
    own.api("DELETE", RUNS)


def test_a_release_takes_the_place_of_what_kustomize_applied(own, release):
    own.kubectl("apply", "--server-side", "-k", str(MANIFESTS / "overlays" / "cluster"))
    own.wait_kinds()
    pool = own.api("POST", POOLS, POOL)["metadata"]["uid"]
    refused = release("install", "tapforge", str(CHART), check=False)
    assert "exists and cannot be imported into the current release" in refused.stderr
    release("install", "tapforge", str(CHART), "--take-ownership", "--server-side=false")
    release("upgrade", "tapforge", str(CHART), "--server-side=true", "--force-conflicts")
    assert own.api("GET", f"{POOLS}/devices")["metadata"]["uid"] == pool
    # kubectl stays an owner of the fields that it applied.
    changed = ("--set", "replicas=1", "--set", "namespaces={default}")
    assert 'conflicts with "kubectl"' in release("upgrade", "tapforge", str(CHART), *changed, check=False).stderr
    release("upgrade", "tapforge", str(CHART), *changed, "--force-conflicts")
    deployment = own.api("GET", f"/apis/apps/v1/namespaces/{OURS}/deployments/tapforge-operator")["spec"]
    assert deployment["replicas"] == 1
    (container,) = deployment["template"]["spec"]["containers"]
    assert container["args"][-2:] == ["--namespace=default", "--no-nodes"]
    wide = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/tapforge-operator-pools"
    assert not own.exists(wide), "rights that the values no longer give are taken back"
    own.api("DELETE", POOLS)
