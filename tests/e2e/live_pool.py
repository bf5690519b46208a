"""A pool on the test cluster, as its user sees it: the object, its Pods, and waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from e2e.cluster import JSON_PATCH, MERGE, PATIENCE, STRATEGIC, Cluster, Refused

from tapforge_api.pool import EmulatorPoolStatus
from tapforge_operator import labels as wellknown

Object = dict[str, Any]
_NOTHING = EmulatorPoolStatus().model_dump(mode="json", by_alias=True)
T = TypeVar("T")


def phone(image: str = "phone:1", notes: Mapping[str, str] | None = None, **pod: Any) -> Object:
    """A pod template; `notes` are annotations, which tell the fake node how the Pod lives."""
    metadata = {"annotations": dict(notes)} if notes else {}
    return {"metadata": metadata, "spec": {"containers": [{"name": "emulator", "image": image}], **pod}}


def own_nodes(cluster: Cluster, group: str, count: int, *, prefix: str = "", **more: Any) -> list[str]:
    """Nodes that take nobody's Pods but those of `only_on(group)`."""
    taints = [{"key": "group", "value": group, "effect": "NoSchedule"}]
    more = {"seconds": PATIENCE, **more}
    return cluster.nodes.add(count, prefix=prefix or group, labels={"group": group}, taints=taints, **more)


def only_on(group: str) -> Object:
    """What a Pod's spec says to be on the group's nodes and no others."""
    tolerations = [{"key": "group", "value": group, "effect": "NoSchedule"}]
    return {"nodeSelector": {"group": group}, "tolerations": tolerations}


class LivePool:
    def __init__(self, cluster: Cluster, namespace: str, name: str = "phones", **spec: Any) -> None:
        """Creates it. Without a template it gets one, without a size one slot."""
        if "external" not in spec:
            spec.setdefault("template", phone())
            if "scaling" not in spec:
                spec.setdefault("replicas", 1)
        self.cluster = cluster
        self.namespace = namespace
        self.name = name
        pools = f"/apis/tapforge.dev/v1alpha1/namespaces/{namespace}/emulatorpools"
        self.path = f"{pools}/{name}"
        made = cluster.api(
            "POST",
            pools,
            {
                "apiVersion": "tapforge.dev/v1alpha1",
                "kind": "EmulatorPool",
                "metadata": {"name": name, "namespace": namespace},
                "spec": spec,
            },
        )
        self.uid = made["metadata"]["uid"]

    # --- looking ------------------------------------------------------------------------------------------------------

    def object(self) -> Object:
        return self.cluster.api("GET", self.path)

    def status(self) -> Object:
        """With every counter as a number, also before the first one was written."""
        return {**_NOTHING, **(self.object().get("status") or {})}

    def condition(self, kind: str) -> Object:
        """Of a status that speaks of the present spec; empty while there is none."""
        found = self.object()
        status = found.get("status") or {}
        if status.get("observedGeneration") != found["metadata"]["generation"]:
            return {}
        return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})

    def says(self, kind: str, status: str, reason: str = "") -> bool:
        found = self.condition(kind)
        return found.get("status") == status and reason in ("", found["reason"])

    def failure(self, pod: Object) -> Object:
        """What its status says of the Pod's failure; empty while it says nothing."""
        return next((failure for failure in self.status()["lastFailures"] if failure["pod"] == name(pod)), {})

    def all_pods(self) -> list[Object]:
        """Also those that are being deleted or kept aside, by ordinal."""
        where = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={wellknown.POOL_UID}%3D{self.uid}"
        found = [pod for pod in self.cluster.api("GET", where)["items"] if self._owns(pod)]
        return sorted(found, key=lambda pod: int(pod["metadata"]["labels"][wellknown.ORDINAL]))

    def marked(self) -> list[str]:
        """Slots with a claim record, which goes a moment after the claim is over."""
        return [name(pod) for pod in self.pods() if wellknown.CLAIMED in pod["metadata"]["labels"]]

    def pods(self) -> list[Object]:
        """Those that are its slots."""
        return [
            pod
            for pod in self.all_pods()
            if "deletionTimestamp" not in pod["metadata"]
            and wellknown.RETAINED not in pod["metadata"].get("annotations", {})
        ]

    def pod(self, name: str) -> Object:
        return self.cluster.api("GET", self.place(name))

    def place(self, pod: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{pod}"

    def _owns(self, pod: Object) -> bool:
        return any(o["uid"] == self.uid and o.get("controller") for o in pod["metadata"].get("ownerReferences", ()))

    # --- doing --------------------------------------------------------------------------------------------------------

    def edit(self, **spec: Any) -> None:
        """Puts these fields into the spec, each whole; None takes one away."""
        steps = [
            {"op": "remove", "path": f"/spec/{field}"}
            if value is None
            else {"op": "add", "path": f"/spec/{field}", "value": value}
            for field, value in spec.items()
        ]
        self.cluster.api("PATCH", self.path, steps, JSON_PATCH)

    def annotate(self, pod: str, notes: Mapping[str, str | None]) -> None:
        self.cluster.api("PATCH", self.place(pod), {"metadata": {"annotations": dict(notes)}}, MERGE)

    def kubelet_says(self, pod: Object, *, since: float, ready: bool) -> None:
        """For how many seconds the Pod has been (un)ready; if it is ready, its container has run for as long."""
        status: Object = {"conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": _ago(since)}]}
        if ready:
            (container,) = pod["status"]["containerStatuses"]
            status["containerStatuses"] = [container | {"state": {"running": {"startedAt": _ago(since)}}}]
        self.cluster.api("PATCH", f"{self.place(name(pod))}/status", {"status": status}, STRATEGIC)

    def delete(self, *, claimed: bool = False) -> None:
        """`claimed`: also when somebody holds slots."""
        if claimed:
            notes = {wellknown.ALLOW_DELETE: "true"}
            self.cluster.api("PATCH", self.path, {"metadata": {"annotations": notes}}, MERGE)
        self.cluster.api("DELETE", self.path)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, what: str, probe: Callable[[], T], seconds: float = PATIENCE) -> T:
        try:
            return self.cluster.wait_for(what, probe, seconds)
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from error

    def wait_gone(self, pod: str) -> None:
        self.wait(f"the end of Pod {pod}", lambda: pod not in [name(p) for p in self.all_pods()])

    def wait_ready(self, slots: int, seconds: float = PATIENCE) -> list[Object]:
        """Until it has so many slots, all of them Ready, and its status says so. Returns their Pods."""

        found: list[Object] = []

        def settled() -> bool:
            status = self.status()
            found[:] = self.pods()
            counted = status.get("ready") == status.get("pods") == status.get("desiredReplicas") == slots
            return counted and len(found) == slots and all(map(ready, found)) and self.says("Ready", "True")

        self.wait(f"{slots} slots of {self.name} to be ready", settled, seconds)
        return found

    def describe(self) -> str:
        """For a message."""
        try:
            pods = [
                f"  {p['metadata']['name']} {uid(p)} {p['status'].get('phase')}"
                f"{' ready' if ready(p) else ''}{' deleting' if 'deletionTimestamp' in p['metadata'] else ''}"
                for p in self.all_pods()
            ]
            return "\n".join([f"status of {self.name}: {self.status()}", *pods[:40]])
        except Refused as error:
            return str(error)


def _ago(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds))


def ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def uid(pod: Object) -> str:
    return str(pod["metadata"]["uid"])


def uids(pods: list[Object]) -> list[str]:
    return [uid(pod) for pod in pods]


def name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def note_of(pod: Object, key: str) -> str | None:
    """The value of an annotation."""
    return (pod["metadata"].get("annotations") or {}).get(key)


def stays(what: str, probe: Callable[[], bool], seconds: float = 1.5) -> None:
    """Looks for a while whether something stays as it is. What takes longer to change goes unnoticed: a test with this
    can be too kind, never too strict."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert probe(), what
        time.sleep(0.1)
