"""Samples, components and what Argo CD gets, put together by kustomize as people do and shown to a real API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from e2e.cluster import Cluster

MANIFESTS = Path(__file__).parents[2] / "manifests"


def kustomize(cluster: Cluster, place: Path, **content: Any) -> str:
    """What a kustomization beside a checkout becomes; `resources` and `components` are folders of manifests."""
    up = "/".join([".."] * len(place.parts[1:]))
    for kind in {"resources", "components"} & set(content):
        content[kind] = [name if (place / name).exists() else f"{up}{MANIFESTS}/{name}" for name in content[kind]]
    (place / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return cluster.kubectl("kustomize", str(place)).stdout


def test_the_samples_are_taken_also_with_images_of_ones_own(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    cluster.kubectl("apply", "--dry-run=server", "-k", str(MANIFESTS / "samples"))
    rendered = kustomize(
        cluster,
        tmp_path,
        resources=["samples"],
        images=[{"name": "tapforge/phone", "newName": "mine/phone", "newTag": "7"}],
    )
    assert "image: mine/phone:7" in rendered and "tapforge/phone" not in rendered


def test_components_are_taken_beside_an_overlay(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    """In another namespace than the operator's own, so that nothing has to be there before."""
    components = [f"components/{name}" for name in ("keep-kinds", "prometheus", "servicemonitor", "monitoring")]
    text = kustomize(cluster, tmp_path, namespace=namespace, resources=["overlays/cluster"], components=components)
    rendered = list(yaml.safe_load_all(text))
    kinds = [thing for thing in rendered if thing["kind"] == "CustomResourceDefinition"]
    notes = {"argocd.argoproj.io/sync-options": "Prune=false", "kustomize.toolkit.fluxcd.io/prune": "disabled"}
    assert [thing["metadata"]["annotations"] for thing in kinds] == [notes, notes]
    monitors = [thing for thing in rendered if thing["apiVersion"].startswith("monitoring.coreos.com/")]
    assert sorted(thing["kind"] for thing in monitors) == ["PodMonitor", "PrometheusRule", "ServiceMonitor"], (
        "kinds that aren't here"
    )
    known = yaml.safe_dump_all([thing for thing in rendered if thing not in monitors])
    options = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts", "-f", "-")
    said = cluster.kubectl(*options, input=known)
    assert "networkpolicy.networking.k8s.io/tapforge-operator serverside-applied (server dry run)" in said.stdout
    assert "configmap/tapforge-dashboard serverside-applied" in said.stdout
    assert "service/tapforge-metrics serverside-applied" in said.stdout and "Warning" not in said.stderr


def test_phones_are_closed_in_as_their_namespace_says(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    rendered = kustomize(cluster, tmp_path, namespace=namespace, components=["components/network/phones"])
    said = cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", input=rendered).stdout
    assert len(said.splitlines()) == 2
    assert {thing["metadata"]["namespace"] for thing in yaml.safe_load_all(rendered)} == {namespace}


def test_argo_cd_gets_its_health_checks(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    """As in Argo CD's own manifests: a ConfigMap without a namespace, and a kustomization that gives it one."""
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "argocd-cm"}, "data": {"url": "https://cd"}}
    (tmp_path / "argocd.yaml").write_text(yaml.safe_dump(config))
    rendered = kustomize(
        cluster, tmp_path, namespace=namespace, resources=["argocd.yaml"], components=["gitops/argocd"]
    )
    cluster.kubectl("apply", "-f", "-", input=rendered)
    found = cluster.api("GET", f"/api/v1/namespaces/{namespace}/configmaps/argocd-cm")["data"]
    scripts = {path.stem: path.read_text() for path in (MANIFESTS / "gitops" / "argocd").glob("*.lua")}
    key = "resource.customizations.health.tapforge.dev_"
    assert found == {
        "url": "https://cd",
        f"{key}EmulatorPool": scripts["emulatorpool"],
        f"{key}TrainingRun": scripts["trainingrun"],
    }
