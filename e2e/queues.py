"""`make demo-queues`: runs in a queue of Kueue's, from quota to Complete, for a person to watch; tests see the same.

Kubernetes' control plane, Kueue, KubeRay and the operator are real; nodes, phones and Ray Pods are fake, and what Ray's
dashboard would say of a driver is written into its RayJob. Two stories:

- `turns`: a run is let in when its phones are there, preempted by another of a higher priority, and goes on afterwards.
- `sick_phones`: phones that don't boot give the quota back, and another run gets it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tapforge_operator import labels
from tapforge_operator.trainingrun.kueue import CONTROLLER

from .cluster import CannotBuild, Cluster, NotInTime, Options, Refused, binaries, fake, kuberay, kueue
from .cluster.api import MERGE
from .cluster.processes import free_ports

Object = dict[str, Any]

#: of a node and of the whole queue; each run takes them all
GPUS: Final = 8
#: of phones that never boot, seconds
DEADLINE: Final = 10
_CRDS: Final = Path(__file__).parents[1] / "crds"
_OWN: Final = "tapforge-system"
_SPACE: Final = "team"
#: KubeRay ends a job of which Ray says that it has ended
KUBERAY_SETTINGS: Final = {"RAYJOB_DEPLOYMENT_STATUS_TRANSITION_GRACE_PERIOD_SECONDS": "0"}

_began = time.monotonic()


class Lab:
    """One namespace's queue, pools and runs. `say` is called with each change."""

    def __init__(self, cluster: Cluster, space: str, say: Callable[[str], None] = lambda line: None) -> None:
        self.cluster = cluster
        self._space = space
        self._say = say
        self._shown: dict[str, str] = {}
        self._runs: list[str] = []
        self._pools: list[str] = []

    # --- what there is ------------------------------------------------------------------------------------------------

    def queue(self) -> None:
        """A queue of one node's GPUs, whose AdmissionCheck waits for phones, and two priorities."""
        name, covered = self._space, ["cpu", "memory", "nvidia.com/gpu"]
        quota = zip(covered, ("100", "100Gi", GPUS), strict=True)
        flavor = {"name": name, "resources": [{"name": what, "nominalQuota": much} for what, much in quota]}
        self._apply("ResourceFlavor", name)
        self._apply("AdmissionCheck", name, {"controllerName": CONTROLLER})
        self._apply(
            "ClusterQueue",
            name,
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self._space}},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "admissionChecksStrategy": {"admissionChecks": [{"name": name}]},
                "resourceGroups": [{"coveredResources": covered, "flavors": [flavor]}],
            },
        )
        self._apply("LocalQueue", "gpus", {"clusterQueue": name}, namespace=self._space)
        for priority, value in (("low", 10), ("high", 100)):
            thing = {"apiVersion": kueue.VERSION, "kind": "WorkloadPriorityClass", "metadata": {"name": priority}}
            self.cluster.apply({**thing, "value": value})

    def pool(self, name: str, boots: bool = True) -> None:
        """As many phones as are asked for, none before."""
        boot = "2" if boots else "never"
        container = {"name": labels.CONTAINER, "image": "phone:1"}
        template = {"metadata": {"annotations": {fake.BOOT: boot}}, "spec": {"containers": [container]}}
        scaling = {"minReplicas": 0, "maxReplicas": 4, "warmSpares": 0, "idleSeconds": 1}
        spec = {"scaling": scaling, "template": template, "boot": {"deadlineSeconds": DEADLINE}}
        self._make("emulatorpools", "EmulatorPool", name, {}, spec)
        self._pools.append(name)

    def run(self, name: str, priority: str, pool: str) -> None:
        self._say(f"run {name} is submitted: priority {priority}, {GPUS} GPUs, two phones of pool {pool}")
        ray = {"name": "ray", "resources": {"limits": {"nvidia.com/gpu": str(GPUS)}}}
        spec = {
            "environment": {"source": {"pool": {"name": pool, "slots": 2}}},
            "cluster": {
                "image": "trainer:1",
                "minReadySlots": 2,
                "head": {"template": {"spec": {"containers": [ray]}}},
            },
        }
        marks = {labels.QUEUE: "gpus", "kueue.x-k8s.io/priority-class": priority}
        self._make("trainingruns", "TrainingRun", name, marks, spec)
        self._runs.append(name)

    # --- what is the case ---------------------------------------------------------------------------------------------

    def status(self, run: str) -> Object:
        return self.cluster.api("GET", self._path("trainingruns", run)).get("status") or {}

    def reason(self, run: str) -> str:
        return next((c["reason"] for c in self.status(run).get("conditions", ()) if c["type"] == "Ready"), "")

    def job(self, run: str, attempt: int = 1) -> Object:
        """Empty while there is none."""
        path = f"/apis/ray.io/v1/namespaces/{self._space}/rayjobs/{labels.ray_job_name(run, attempt)}"
        return self.cluster.api("GET", path) if self.cluster.exists(path) else {}

    def workload(self, run: str) -> Object:
        """Empty while there is none."""
        where = f"/apis/{kueue.VERSION}/namespaces/{self._space}/workloads"
        name = labels.ray_job_name(run, 1)
        found = self.cluster.api("GET", where)["items"]
        return next((w for w in found if w["metadata"]["ownerReferences"][0]["name"] == name), {})

    def check(self, run: str) -> Object:
        """The Workload's entry of the AdmissionCheck."""
        return next(iter(self.workload(run).get("status", {}).get("admissionChecks") or ()), {})

    def holds(self, run: str) -> bool:
        """Whether quota is reserved for it."""
        found = self.workload(run).get("status", {}).get("conditions") or ()
        return any(c["type"] == "QuotaReserved" and c["status"] == "True" for c in found)

    def phones(self, pool: str) -> int:
        where = f"/api/v1/namespaces/{self._space}/pods?labelSelector={labels.POOL}%3D{pool}"
        return len(self.cluster.api("GET", where)["items"])

    # --- what happens -------------------------------------------------------------------------------------------------

    def until(self, what: str, probe: Callable[[], object]) -> None:
        def look() -> object:
            self._show()
            return probe()

        self.cluster.wait_for(what, look)

    def ray_reports(self, run: str, status: str) -> None:
        """What KubeRay would read from Ray's dashboard."""
        more = (
            {}
            if status == "RUNNING"
            else {"rayJobInfo": {"endTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}
        )
        path = f"{self.job(run)['metadata']['namespace']}/rayjobs/{labels.ray_job_name(run, 1)}/status"
        self.cluster.api(
            "PATCH", f"/apis/ray.io/v1/namespaces/{path}", {"status": {"jobStatus": status, **more}}, MERGE
        )

    def starts(self, run: str) -> None:
        """Its Ray cluster is there, and its driver runs."""
        self.until(f"the Ray cluster of {run}", lambda: self._deployed(run) == "Running")
        self.ray_reports(run, "RUNNING")
        self.until(f"{run} to run", lambda: self.reason(run) == "Running")

    def _deployed(self, run: str) -> str:
        return str(self.job(run).get("status", {}).get("jobDeploymentStatus", ""))

    def ends(self, run: str) -> None:
        self.ray_reports(run, "SUCCEEDED")
        self.until(f"{run} to be complete", lambda: self.reason(run) == "Complete")

    def _show(self) -> None:
        for run in self._runs:
            status = self.status(run)
            self._changed(f"run {run}", f"{self.reason(run) or '-'}: {status.get('message', '')}")
            check, quota = self.check(run), "quota reserved" if self.holds(run) else "no quota"
            rest = f", requeue after {check['requeueAfterSeconds']} s" if check.get("state") == "Retry" else ""
            self._changed(f"workload of {run}", f"{quota}, check {check.get('state', '-')}{rest}")
        for pool in self._pools:
            status = self.cluster.api("GET", self._path("emulatorpools", pool)).get("status") or {}
            self._changed(f"pool {pool}", f"{self.phones(pool)} phones, {status.get('ready', 0)} ready")

    def _changed(self, what: str, now: str) -> None:
        if self._shown.get(what) != now:
            self._shown[what] = now
            self._say(f"{what}: {now}")

    # --- objects ------------------------------------------------------------------------------------------------------

    def _path(self, plural: str, name: str = "") -> str:
        return f"/apis/tapforge.dev/v1alpha1/namespaces/{self._space}/{plural}" + (f"/{name}" if name else "")

    def _make(self, plural: str, kind: str, name: str, marks: Object, spec: Object) -> None:
        metadata = {"name": name, "namespace": self._space, "labels": marks}
        body = {"apiVersion": "tapforge.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
        self.cluster.api("POST", self._path(plural), body)

    def _apply(self, kind: str, name: str, spec: Object | None = None, **metadata: str) -> None:
        thing = {"apiVersion": kueue.VERSION, "kind": kind, "metadata": {"name": name, **metadata}}
        self.cluster.apply({**thing, "spec": spec or {}})


# --- the stories ------------------------------------------------------------------------------------------------------


def turns(lab: Lab) -> None:
    """Leaves `patient` complete and no run behind that holds GPUs."""
    for pool in ("a", "b"):
        lab.pool(pool)
    lab.run("patient", "low", "a")
    lab.until("phones of patient", lambda: lab.phones("a") == 2)
    lab.starts("patient")
    lab.run("urgent", "high", "b")
    lab.until("patient to be preempted", lambda: lab.reason("patient") == "Queued")
    lab.until("patient to keep no phones", lambda: lab.phones("a") == 0)
    lab.starts("urgent")
    lab.ends("urgent")
    lab.starts("patient")
    lab.ends("patient")


def sick_phones(lab: Lab) -> None:
    """Leaves `next` complete."""
    lab.pool("sick", boots=False)
    lab.pool("well")
    lab.run("unlucky", "low", "sick")
    lab.until("phones of unlucky", lambda: lab.phones("sick") == 2)
    lab.run("next", "low", "well")
    lab.until("next to wait", lambda: lab.reason("next") == "Queued")
    lab.until("the quota to be given back", lambda: lab.holds("next"))
    lab.starts("next")
    lab.ends("next")


def main() -> int:
    try:
        for programs in (binaries.CONTROL_PLANE, binaries.ADDONS, binaries.KUEUE):
            binaries.ensure(of=programs)
        say("a control plane comes up on this machine, and Kueue, KubeRay and the operator beside it")
        with Cluster(Options(nodes=2, qps=200)) as cluster:
            install(cluster)
            _operator(cluster)
            lab = Lab(cluster, _SPACE, say)
            lab.queue()
            turns(lab)
            sick_phones(lab)
        say("everything is taken down")
        return 0
    except KeyboardInterrupt:
        say("given up")
        return 130
    except (CannotBuild, NotInTime) as error:
        print(f"demo-queues: {error}", file=sys.stderr)
        return 1


def say(line: str) -> None:
    print(f"{time.monotonic() - _began:7.1f} s  {line}", flush=True)


def install(cluster: Cluster) -> None:
    """KubeRay, Kueue and a node with GPUs."""
    kuberay.start(cluster, KUBERAY_SETTINGS)
    kueue.start(cluster)
    cluster.nodes.add(1, prefix="gpu", resources={"nvidia.com/gpu": str(GPUS)})


def _operator(cluster: Cluster) -> None:
    """As an administrator; returns when it leads."""
    cluster.apply(*(_CRDS / f"{kind}.yaml" for kind in ("emulatorpools", "trainingruns")))
    cluster.wait_kinds()
    for space in (_OWN, _SPACE):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
    accounts = [f"/api/v1/namespaces/{space}/serviceaccounts/default" for space in (_OWN, _SPACE)]
    cluster.wait_for("the service accounts", lambda: all(map(cluster.exists, accounts)))
    broker, health = free_ports(2)
    command = [sys.executable, "-m", "tapforge_operator.main", "--identity=operator-0", f"--own-namespace={_OWN}"]
    command += ["--host=127.0.0.1", "--advertise-address=127.0.0.1"]
    command += [f"--broker-port={broker}", f"--health-port={health}"]
    cluster.run("operator", command, {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)})
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{_OWN}/leases/tapforge-operator"
    cluster.wait_for("the operator to lead", lambda: _leads(cluster, lease))


def _leads(cluster: Cluster, lease: str) -> bool:
    try:
        return bool(cluster.api("GET", lease)["spec"].get("holderIdentity"))
    except Refused as error:
        if error.status != 404:
            raise
        return False


if __name__ == "__main__":
    sys.exit(main())
