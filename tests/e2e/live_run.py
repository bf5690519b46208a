"""A run on the test cluster, as its user sees it, and its RayJobs, as KubeRay would write their status. KubeRay itself
doesn't run: the test plays it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from claiming import Caller, Denied
from e2e.cluster import JSON_PATCH, MERGE, PATIENCE, Cluster, Refused
from operator_process import Operator

from tapforge_api.claims import AUDIENCE
from tapforge_api.progress import Orders
from tapforge_operator import labels as wellknown

Object = dict[str, Any]
T = TypeVar("T")

#: the smallest Ray cluster that a run can ask for
SMALL: Object = {"image": "trainer:1"}


def pool_source(name: str = "phones", slots: int = 2) -> Object:
    return {"environment": {"source": {"pool": {"name": name, "slots": slots}}}}


class LiveRun:
    def __init__(
        self, cluster: Cluster, namespace: str, name: str = "run", /, labels: Object | None = None, **spec: Any
    ) -> None:
        """Creates it, with a Ray cluster of one Pod if nothing is said."""
        self.cluster = cluster
        self.namespace = namespace
        self.name = name
        self._group = f"/apis/tapforge.dev/v1alpha1/namespaces/{namespace}"
        self.path = f"{self._group}/trainingruns/{name}"
        spec = {"cluster": SMALL, **spec}
        made = cluster.api(
            "POST",
            f"{self._group}/trainingruns",
            {
                "apiVersion": "tapforge.dev/v1alpha1",
                "kind": "TrainingRun",
                "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
                "spec": {k: v for k, v in spec.items() if v is not None},
            },
        )
        self.uid: str = made["metadata"]["uid"]
        self._sequence = 0

    @classmethod
    def found(cls, cluster: Cluster, namespace: str, name: str) -> LiveRun:
        """One that somebody else has made."""
        run = cls.__new__(cls)
        run.cluster, run.namespace, run.name, run._sequence = cluster, namespace, name, 0
        run._group = f"/apis/tapforge.dev/v1alpha1/namespaces/{namespace}"
        run.path = f"{run._group}/trainingruns/{name}"
        run.uid = run.object()["metadata"]["uid"]
        return run

    # --- looking ------------------------------------------------------------------------------------------------------

    def object(self) -> Object:
        return self.cluster.api("GET", self.path)

    def status(self) -> Object:
        return self.object().get("status") or {}

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

    def job_path(self, attempt: int = 1) -> str:
        name = wellknown.ray_job_name(self.name, attempt)
        return f"/apis/ray.io/v1/namespaces/{self.namespace}/rayjobs/{name}"

    def jobs(self) -> list[Object]:
        """Its RayJobs by attempt, those on their way out too."""
        found = self.cluster.api("GET", f"/apis/ray.io/v1/namespaces/{self.namespace}/rayjobs")["items"]
        mine = [job for job in found if job["metadata"]["ownerReferences"][0]["uid"] == self.uid]
        return sorted(mine, key=lambda job: int(job["metadata"]["labels"][wellknown.ATTEMPT]))

    def attempts(self) -> list[int]:
        return [int(job["metadata"]["labels"][wellknown.ATTEMPT]) for job in self.jobs()]

    def config(self) -> Object:
        name = wellknown.config_name(self.name, self.uid)
        return self.cluster.api("GET", f"/api/v1/namespaces/{self.namespace}/configmaps/{name}")

    def events(self) -> list[tuple[str, str]]:
        """(reason, message) of what was told about it, oldest first."""
        found = self.cluster.api("GET", f"/api/v1/namespaces/{self.namespace}/events")["items"]
        mine = [e for e in found if e["involvedObject"].get("uid") == self.uid]
        mine.sort(key=lambda e: int(e["metadata"]["resourceVersion"]))
        return [(e["reason"], e["message"]) for e in mine]

    # --- its user -----------------------------------------------------------------------------------------------------

    def edit(self, **spec: Any) -> None:
        steps = [
            {"op": "remove", "path": f"/spec/{field}"}
            if value is None
            else {"op": "add", "path": f"/spec/{field}", "value": value}
            for field, value in spec.items()
        ]
        self.cluster.api("PATCH", self.path, steps, JSON_PATCH)

    def delete(self) -> None:
        self.cluster.api("DELETE", self.path, {"propagationPolicy": "Background"})

    # --- KubeRay ------------------------------------------------------------------------------------------------------

    def kuberay_says(self, attempt: int = 1, job: str = "", deployment: str = "", **more: Any) -> None:
        status = {"jobStatus": job, "jobDeploymentStatus": deployment, **more}
        self.cluster.api("PATCH", f"{self.job_path(attempt)}/status", {"status": status}, MERGE)

    def runs(self, attempt: int = 1) -> None:
        """The RayJob is there by now, and its driver runs."""
        self.wait_job(attempt)
        name = f"{wellknown.ray_job_name(self.name, attempt)}-abcde"
        address = f"{name}-head-svc.{self.namespace}.svc.cluster.local:8265"
        self.kuberay_says(attempt, "RUNNING", "Running", rayClusterName=name, dashboardURL=address)
        self.wait("the run to run", lambda: self.says("Ready", "True", "Running"))

    # --- its driver ---------------------------------------------------------------------------------------------------

    def driver(self, operator: Operator, attempt: int = 1) -> Driver:
        return Driver(self, operator, attempt)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait_job(self, attempt: int = 1, seconds: float = PATIENCE) -> Object:
        self.wait(f"RayJob of attempt {attempt}", lambda: attempt in self.attempts(), seconds)
        return self.cluster.api("GET", self.job_path(attempt))

    def wait(self, what: str, probe: Callable[[], T], seconds: float = PATIENCE) -> T:
        try:
            return self.cluster.wait_for(what, probe, seconds)
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from error

    def wait_ready(self, status: str, reason: str, seconds: float = PATIENCE) -> Object:
        self.wait(f"Ready {status} {reason}", lambda: self.says("Ready", status, reason), seconds)
        return self.status()

    def describe(self) -> str:
        try:
            status = {k: v for k, v in self.status().items() if k != "resolved"}
            return f"status of {self.name}: {status}\nRayJobs: {self.attempts()}\nEvents: {self.events()}"
        except Refused as error:
            return str(error)


class Driver:
    """A Pod of an attempt that reports. It stands for the head: the chain of its owners is a real one."""

    def __init__(self, run: LiveRun, operator: Operator, attempt: int):
        self.run = run
        self.attempt = attempt
        job = run.wait_job(attempt)
        pods = f"/api/v1/namespaces/{run.namespace}/pods"
        owner = {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
            "controller": True,
        }
        name = f"{job['metadata']['name']}-head"
        labels = {"ray.io/group": "headgroup", "ray.io/node-type": "head"}
        labels |= {wellknown.RUN_UID: run.uid, wellknown.ATTEMPT: str(attempt)}
        body = {
            "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
            "spec": {"containers": [{"name": "ray", "image": "trainer:1"}]},
        }
        made = run.cluster.api("POST", pods, body)
        token = run.cluster.token(run.namespace, "default", AUDIENCE, pod=(name, made["metadata"]["uid"]))
        self.caller = Caller(operator, run.namespace, token)

    def report(
        self, *, run: str = "", update: int = 0, attempt: int = 0, patience: float = PATIENCE, **more: Any
    ) -> Orders:
        """`patience`: seconds for which it is sent again where the broker says: not now, or
        nothing."""
        self.run._sequence += 1
        body = {
            "attempt": attempt or self.attempt,
            "sequence": int(time.time() * 1000) + self.run._sequence,
            "advance": {"update": update, "maxUpdates": 10, "episodes": update * 8, "success": 0.5},
            "leases": {"wanted": 2, "held": 1},
            **more,
        }
        path = f"/v1/runs/{self.run.namespace}/{run or self.run.name}/progress"
        end = time.monotonic() + patience
        while True:
            try:
                return Orders.model_validate(self.caller.post(path, body))
            except (Denied, OSError) as error:
                if (isinstance(error, Denied) and error.status != 503) or time.monotonic() > end:
                    raise
            time.sleep(0.1)
