"""The KubeRay operator beside a cluster, and its kinds in it.

It is a process of the cluster like others (`kuberay`), outside of it like an administrator: it asks Ray's heads through
the API server, because it can't resolve the names of services.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from . import binaries
from .cluster import Cluster
from .processes import free_ports

KUBERAY: Final = "kuberay"
#: it ends when one of them isn't served
_KINDS = ("rayclusters", "rayjobs", "rayservices")


def install(cluster: Cluster) -> None:
    """Its kinds alone; returns when they are served. Those that are there already are left as they are."""
    folder = binaries.ensure(of=binaries.kuberay()).parent / "crds"
    for kind in _KINDS:
        if not cluster.exists(f"/apis/ray.io/v1/{kind}"):
            # As large as they are, they are quicker to create than to apply.
            cluster.kubectl("create", "-f", str(folder / f"ray.io_{kind}.yaml"))
    cluster.wait_for("KubeRay's kinds", lambda: all(cluster.exists(f"/apis/ray.io/v1/{kind}") for kind in _KINDS))


def start(cluster: Cluster, environment: Mapping[str, str] | None = None) -> None:
    """Returns when the kinds are served and the operator was started. `environment`: its settings."""
    build = binaries.ensure(of=binaries.kuberay())
    install(cluster)
    metrics, health = free_ports(2)
    command = [
        str(build / "ray-operator"),
        f"--kubeconfig={cluster.kubeconfig}",
        "--enable-leader-election=false",
        "--use-kubernetes-proxy",
        f"--metrics-addr=127.0.0.1:{metrics}",
        f"--health-probe-bind-address=127.0.0.1:{health}",
    ]
    cluster.run(KUBERAY, command, environment or {})
