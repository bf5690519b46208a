"""Access to a run's Pods: a NetworkPolicy for each run, where the cluster's network enforces them.

1. Head and workers reach each other on every port: Ray, NCCL and Gloo choose theirs.
2. The submitter and KubeRay reach Ray's dashboard, by which jobs are started. KubeRay is a Pod that its chart or its
   kustomization labels, in any namespace, unless `kuberay` says in which: neither has a namespace of its own.
3. Prometheus reaches Ray's metrics.
4. No other traffic is admitted. Policies add up: a user that needs more adds another one.
5. Where a run's Pods go is not limited: storage, hubs and judges are anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tapforge_operator import labels as wellknown
from tapforge_operator.clusternetwork import NamespaceLabels, RunNetwork
from tapforge_operator.trainingrun.rayjob import run_metadata
from tapforge_operator.trainingrun.state import Run

Json = dict[str, Any]

#: of every Pod in a Ray cluster, written by KubeRay whatever a template says
_RAY_NODE: Final = "ray.io/node-type"
_KUBERAY: Final = {"app.kubernetes.io/component": "kuberay-operator"}
#: parameters of `ray start` that choose a port, and the port without them
_DASHBOARD: Final = ("dashboard-port", 8265)
_METRICS: Final = ("metrics-export-port", 8080)


def network_policy(run: Run, network: RunNetwork) -> Json:
    mine: Json = {"matchLabels": {wellknown.RUN_UID: run.uid}}
    ray = {**mine, "matchExpressions": [{"key": _RAY_NODE, "operator": "Exists"}]}
    kuberay = {**_namespaces(network.kuberay), "podSelector": {"matchLabels": _KUBERAY}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": run_metadata(run, wellknown.network_name(run.name, run.uid)),
        "spec": {
            "podSelector": mine,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": ray}]},
                {"from": [{"podSelector": mine}, kuberay], "ports": _ports(run, *_DASHBOARD)},
                {"from": list(map(_namespaces, network.metrics)), "ports": _ports(run, *_METRICS)},
            ],
        },
    }


def _namespaces(labels: NamespaceLabels) -> Json:
    return {"namespaceSelector": {"matchLabels": dict(labels)} if labels else {}}


def _ports(run: Run, parameter: str, usual: int) -> list[Json]:
    """Of head and workers."""
    cluster = run.spec.cluster
    given: list[Mapping[str, str]] = []
    if cluster is not None:
        given = [cluster.head.ray_start_params, *(group.ray_start_params for group in cluster.workers)]
    numbers = {int(text) if (text := each.get(parameter, "")).isdecimal() else usual for each in given}
    return [{"protocol": "TCP", "port": number} for number in sorted(numbers or {usual})]
