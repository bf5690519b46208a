"""Pods of a test's own on the real node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from e2e.cluster import Cluster
from e2e.cluster.node import LABEL
from e2e.installed import OPERATOR_NAMESPACE

Object = dict[str, Any]


def operator_pods(cluster: Cluster) -> list[Object]:
    """The leader's Pod first."""
    pods = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods?labelSelector=app.kubernetes.io%2Fname%3Dtapforge-operator"
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases/tapforge-operator"
    leader = cluster.api("GET", lease)["spec"].get("holderIdentity")
    found = cluster.api("GET", pods)["items"]
    assert len(found) == 2, [pod["metadata"]["name"] for pod in found]
    return sorted(found, key=lambda pod: pod["metadata"]["name"] != leader)


def phone_container(**more: Any) -> Object:
    """A simulated phone, small, of the image that the Dockerfile makes."""
    return {
        "name": "emulator",
        "image": "tapforge/phone:dev",
        "args": ["python", "-m", "tapforge_envs.phone.server", "--host=::", "--port=8000"],
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        **more,
    }


def start_pod(
    cluster: Cluster, namespace: str, name: str, spec: Object, labels: Mapping[str, str] | None = None
) -> str:
    """Returns its path."""
    label, value = LABEL
    spec = {"restartPolicy": "Never", "nodeSelector": {label: value}, **spec}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace, "labels": dict(labels or {})},
            "spec": spec,
        }
    )
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def run_python(cluster: Cluster, namespace: str, pod: str, program: str) -> Any:
    """What a program says, as JSON, that runs inside a Pod's first container."""
    done = cluster.kubectl("exec", "-n", namespace, pod, "--", "python", "-c", program, seconds=300)
    return json.loads(done.stdout)
