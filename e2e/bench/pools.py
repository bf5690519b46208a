"""The pools of the benchmarks, and Pods that are equal to theirs."""

from __future__ import annotations

import json
from typing import Any

from tapforge_api.base import API_VERSION
from tapforge_api.reading import read_pool
from tapforge_operator.emulatorpool.pod import slot_pods
from tapforge_operator.emulatorpool.state import NewSlot, Pool

Json = dict[str, Any]

POOLS = f"/apis/{API_VERSION}/namespaces/{{}}/emulatorpools"
#: slots that a fake node takes
PER_NODE = 100

_PADDING = "example.com/padding"


def template(padding: int = 0) -> Json:
    """What a user might write for a phone; `padding` characters more as an annotation."""
    made: Json = {
        "metadata": {"labels": {"app": "phone"}},
        "spec": {
            "containers": [
                {
                    "name": "emulator",
                    "image": "example.com/phone:1",
                    "env": [{"name": "WIDTH", "value": "1080"}, {"name": "HEIGHT", "value": "2400"}],
                    "ports": [{"containerPort": 8000}],
                    "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
                }
            ],
            "terminationGracePeriodSeconds": 5,
        },
    }
    if padding:
        made["metadata"]["annotations"] = {_PADDING: "x" * padding}
    return made


def pool(name: str, namespace: str, replicas: int, padding: int = 0, **spec: Any) -> Json:
    return {
        "apiVersion": API_VERSION,
        "kind": "EmulatorPool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"replicas": replicas, "template": template(padding), **spec},
    }


def equal_pods(made: Json, count: int, first: int = 0) -> list[Json]:
    """Pods as the operator would make them for a pool that is on the API server; names of their own."""
    reading = read_pool(made)
    if reading.spec is None:
        raise ValueError(reading.message)
    of = Pool.of(made, reading.spec)
    build = slot_pods(of)
    return [build(NewSlot(f"{of.name}-{n:010d}", n, "")) for n in range(first, first + count)]


def replica_set(name: str, namespace: str) -> Json:
    """A ReplicaSet of the same Pod, as far as one can be: its Pods are restarted in place."""
    pod = equal_pods({**pool(name, namespace, 0), "metadata": _named(name, namespace)}, 1)[0]
    labels = {**pod["metadata"]["labels"], "set": name}
    # Not one of the operator's, which would otherwise receive their events.
    labels = {key: value for key, value in labels.items() if not key.startswith("tapforge.dev/")}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"set": name}},
            "template": {
                "metadata": {"labels": labels, "annotations": pod["metadata"]["annotations"]},
                "spec": {**pod["spec"], "restartPolicy": "Always"},
            },
        },
    }


def _named(name: str, namespace: str) -> Json:
    return {"name": name, "namespace": namespace, "uid": "0", "generation": 1, "resourceVersion": "0"}


def size(thing: Json) -> int:
    """Bytes of an object as JSON without spaces, as the API server sends it."""
    return len(json.dumps(thing, separators=(",", ":")).encode())
