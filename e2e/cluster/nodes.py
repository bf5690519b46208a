"""Fake nodes as objects: made, taken away, lost and found. kwok gives them and their pods a life (fake.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .api import MERGE, STRATEGIC, Api, Refused
from .components import FAKE_NODE

_LABEL, _FAKE = FAKE_NODE


def manifest(
    name: str,
    *,
    pods: int = 110,
    cpu: str = "64",
    memory: str = "256Gi",
    labels: Mapping[str, str] | None = None,
    resources: Mapping[str, str] | None = None,
    taints: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """A Node object. `resources` are extended ones, such as a device plugin's."""
    room = {"cpu": cpu, "memory": memory, "ephemeral-storage": "1Ti", "pods": str(pods), **(resources or {})}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                **(labels or {}),
                _LABEL: _FAKE,
            },
            "annotations": {_LABEL: _FAKE},
        },
        "spec": {"taints": [dict(taint) for taint in taints]} if taints else {},
        "status": {"capacity": room, "allocatable": room},
    }


class FakeNodes:
    """Those of one cluster. `wait_for` is the cluster's."""

    def __init__(self, api: Api, wait_for: Callable[[str, Callable[[], bool], float], bool]) -> None:
        self._api = api
        self._wait_for = wait_for

    def add(
        self,
        count: int,
        *,
        prefix: str = "fake",
        pods: int = 110,
        labels: Mapping[str, str] | None = None,
        resources: Mapping[str, str] | None = None,
        taints: Sequence[Mapping[str, str]] = (),
        seconds: float = 60.0,
    ) -> list[str]:
        """Returns their names when pods can be scheduled on them. Numbers that the prefix has already are left out."""
        there = {item["metadata"]["name"] for item in self._all()}
        numbers = (number for number in range(len(there) + count) if f"{prefix}-{number}" not in there)
        names = [f"{prefix}-{next(numbers)}" for _ in range(count)]
        for name in names:
            made = manifest(name, pods=pods, labels=labels, resources=resources, taints=taints)
            self._api("POST", "/api/v1/nodes", made)
        self._wait_for(f"{count} fake nodes", lambda: set(names) <= self.ready(), seconds)
        return names

    def remove(self, name: str) -> None:
        """As a cloud does it: the Node goes, its pods are collected about a minute later."""
        self._api("DELETE", f"/api/v1/nodes/{name}")

    def lose(self, name: str, *, at_once: bool = True) -> None:
        """The machine has gone silent. `at_once`: its Node says so now, not after `node_grace_seconds`, and its pods
        are no longer Ready, as the node lifecycle controller has it."""
        path = f"/api/v1/nodes/{name}"
        self._api("PATCH", path, {"metadata": {"labels": {_LABEL: None}}}, MERGE)
        if at_once:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            silent = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "lastTransitionTime": now}
            silent["message"] = "Kubelet stopped posting node status."
            self._api("PATCH", f"{path}/status", {"status": {"conditions": [silent]}}, STRATEGIC)
            # The controller does this only where it has found out about the node itself.
            unready = {"status": {"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": now}]}}
            for pod in self._api("GET", f"/api/v1/pods?fieldSelector=spec.nodeName={name}")["items"]:
                if pod["status"].get("phase") == "Running":
                    meta = pod["metadata"]
                    own = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
                    with _may_be_gone():
                        self._api("PATCH", own, unready, STRATEGIC)

    def find(self, name: str) -> None:
        """A lost one is back."""
        self._api("PATCH", f"/api/v1/nodes/{name}", {"metadata": {"labels": {_LABEL: _FAKE}}}, MERGE)

    def ready(self) -> set[str]:
        """Names of those that are Ready and no longer tainted as new or silent ones are."""
        return {
            item["metadata"]["name"]
            for item in self._all()
            for condition in item["status"].get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] == "True"
            if not any(taint["key"].startswith("node.kubernetes.io/") for taint in item["spec"].get("taints", []))
        }

    def _all(self) -> list[dict[str, Any]]:
        return list(self._api("GET", "/api/v1/nodes")["items"])


@contextmanager
def _may_be_gone() -> Iterator[None]:
    """Another client may have been faster."""
    try:
        yield
    except Refused as error:
        if error.status != 404:
            raise
