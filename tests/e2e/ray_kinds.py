"""KubeRay's kinds in a cluster, without KubeRay: whatever is written of them is kept as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2e.cluster import Cluster

KINDS = ("RayJob", "RayCluster")
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@contextmanager
def ray_kinds(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """They are served, and gone again behind it: somebody else may want the real ones, and finds out whether they are
    there."""
    plurals = [f"{kind.lower()}s" for kind in KINDS]
    paths = [f"{_DEFINITIONS}/{plural}.ray.io" for plural in plurals]
    cluster.apply(*map(_definition, KINDS))
    cluster.wait_for("the kinds", lambda: all(cluster.exists(f"/apis/ray.io/v1/{plural}") for plural in plurals))
    try:
        yield KINDS
    finally:
        for path in paths:
            cluster.api("DELETE", path)
        cluster.wait_for("the end of the kinds", lambda: not any(map(cluster.exists, paths)))


def _definition(kind: str) -> dict[str, Any]:
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.ray.io"},
        "spec": {
            "group": "ray.io",
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": anything}}],
        },
    }
