"""A cluster with tapforge's kinds and one operator process, for one scenario.

The operator belongs to the cluster and ends with it, and its ports stay the same when it is started again. It, the load
and a peer are service accounts with an administrator's rights: with a client certificate, as people have it, the API
server would spend a tenth of its time on checking callers.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from e2e.cluster import API_SERVER, MERGE, Cluster, NotInTime, Options, Refused
from e2e.cluster.processes import free_ports

from . import pools
from .audit import Audit
from .raw import CLIENT

Json = dict[str, Any]

OPERATOR = "operator"
#: whose writes the operator's are, in the audit log
SYSTEM = "tapforge-system"
_ACCOUNT = "bench-operator"
USER = f"system:serviceaccount:{SYSTEM}:{_ACCOUNT}"
NAMESPACE = "phones"
LEASE = "tapforge-operator"
_CRDS = Path(__file__).parents[2] / "crds"
_POLL = 0.2
#: CPU seconds in a second
_IDLE = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """What a scenario is asked for."""

    #: sizes for trying it out; the figures mean nothing
    quick: bool = False
    #: the operator runs under cProfile and leaves its profiles here; the figures mean little
    profile: Path | None = None


class Testbed:
    """`with Testbed(run, nodes=50, qps=1000) as bed`. Blocking."""

    def __init__(
        self, run: Run, *, nodes: int = 0, qps: int = 0, flags: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        # Thousands of Pods are removed between two rounds.
        merged = {API_SERVER: {"delete-collection-workers": "8"}, **(flags or {})}
        self._run = run
        self._nodes = nodes
        self.cluster = Cluster(Options(qps=qps, audit=True, flags=merged))
        self.broker_port, self.health_port = free_ports(2)
        self._starts = 0

    def __enter__(self) -> Testbed:
        self.cluster.start()
        try:
            self.audit = Audit(self.cluster.folder / "audit.log")
            self.cluster.apply(*(_CRDS / f"{kind}.yaml" for kind in ("emulatorpools", "trainingruns")))
            self.cluster.wait_kinds()
            if self._nodes:
                self.cluster.nodes.add(self._nodes, pods=pools.PER_NODE, seconds=180)
            for name in (SYSTEM, NAMESPACE):
                made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
                self.cluster.api("POST", "/api/v1/namespaces", made)
                self._wait_account(name)
            self._kubeconfig = self.administrator(_ACCOUNT)
            self.administrator(CLIENT[1])
        except BaseException:
            self.cluster.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cluster.stop()

    def administrator(self, name: str) -> Path:
        """Kubeconfig of a service account of this name in `SYSTEM`, made with an administrator's rights."""
        api, group = self.cluster.api, "rbac.authorization.k8s.io"
        metadata = {"name": name, "namespace": SYSTEM}
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}
        api("POST", f"/api/v1/namespaces/{SYSTEM}/serviceaccounts", account)
        binding = {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", **metadata}],
        }
        api("POST", f"/apis/{group}/v1/clusterrolebindings", binding)
        kubeconfig = self.cluster.user_with_token(name, self.cluster.token(SYSTEM, name))
        # Bindings are read some time after they are there.
        allowed = ("auth", "can-i", "*", "*", "--all-namespaces")
        self.cluster.wait_for(
            f"the rights of {name}",
            lambda: self.cluster.kubectl(*allowed, kubeconfig=kubeconfig, check=False).stdout == "yes\n",
        )
        return kubeconfig

    def _wait_account(self, namespace: str) -> None:
        """Pods are refused until it is there."""
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        self.cluster.wait_for(f"the service account of {namespace}", lambda: self.cluster.exists(account))

    # --- the operator -------------------------------------------------------------------------------------------------

    def start_operator(self, seconds: float = 60.0) -> None:
        """Returns when it leads and has read everything."""
        self.launch_operator()
        self.wait_leading(seconds)

    def launch_operator(self) -> None:
        """Returns when the process has begun."""
        self.launch_replica(OPERATOR, "bench", self.broker_port, self.health_port)

    def launch_replica(self, name: str, identity: str, broker_port: int, health_port: int) -> None:
        """As a process called `name`. Others reach its broker, as replicas in Pods do."""
        self._starts += 1
        command = [sys.executable]
        if self._run.profile is not None:
            self._run.profile.mkdir(parents=True, exist_ok=True)
            out = self._run.profile.resolve() / f"{os.getpid()}-{self._starts}.prof"
            command += ["-m", "cProfile", "-o", str(out)]
        command += ["-m", "tapforge_operator.main", "--identity", identity, "--own-namespace", SYSTEM]
        command += ["--host", "127.0.0.1", "--advertise-address", "127.0.0.1"]
        command += ["--broker-port", str(broker_port), "--health-port", str(health_port)]
        self.cluster.run(name, command, {**os.environ, "KUBECONFIG": str(self._kubeconfig)})

    def wait_leading(self, seconds: float = 60.0) -> None:
        try:
            self.cluster.wait_for("the operator's leadership", self._leads, seconds)
        except NotInTime as error:
            said = self.cluster.log(OPERATOR).read_text().splitlines()[-20:]
            raise NotInTime("\n".join([f"{error}; the operator said last:", *said])) from error

    def stop_operator(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.cluster.stop_component(OPERATOR, number)

    def _leads(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except (urllib.error.URLError, ConnectionError):
            return False
        return "tapforge_leader 1.0" in text.splitlines()

    def cpu_seconds(self, component: str = OPERATOR) -> float:
        """CPU time of the component's process so far."""
        fields = self._proc("stat", component).rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait_idle(self, component: str = OPERATOR, seconds: float = 60.0) -> None:
        """Until the component has hardly done anything for a second: what was seen has been digested too."""
        deadline = time.monotonic() + seconds
        before = self.cpu_seconds(component)
        while time.monotonic() < deadline:
            time.sleep(1.0)
            now = self.cpu_seconds(component)
            if now - before <= _IDLE:
                return
            before = now
        raise TimeoutError(f"{component} is still busy after {seconds:g} s")

    def peak_mib(self) -> float:
        """The largest resident size of the operator's process so far."""
        line = next(line for line in self._proc("status").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024

    def _proc(self, name: str, component: str = OPERATOR) -> str:
        return Path(f"/proc/{self.cluster.pid(component)}/{name}").read_text()

    # --- pools --------------------------------------------------------------------------------------------------------

    def make_pool(self, name: str, replicas: int, padding: int = 0, **spec: Any) -> Json:
        where = pools.POOLS.format(NAMESPACE)
        return self.cluster.api("POST", where, pools.pool(name, NAMESPACE, replicas, padding, **spec))

    def pool(self, name: str) -> Json:
        return self.cluster.api("GET", f"{pools.POOLS.format(NAMESPACE)}/{name}")

    def resize(self, name: str, replicas: int) -> None:
        body = {"spec": {"replicas": replicas}}
        self.cluster.api("PATCH", f"{pools.POOLS.format(NAMESPACE)}/{name}", body, MERGE)

    def wait_status(self, name: str, seconds: float, **counts: int) -> Json:
        """Until the status' counters are these and it speaks of the present spec; returns the pool."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.pool(name)
            status = found.get("status") or {}
            current = status.get("observedGeneration") == found["metadata"]["generation"]
            if current and all(status.get(key, 0) == value for key, value in counts.items()):
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"pool {name} has status {status}, not {counts}, after {seconds:g} s")
            time.sleep(_POLL)

    def make_fleet(self, name: str, slots: int, padding: int = 0, **spec: Any) -> Json:
        """A pool with all its slots ready."""
        self.make_pool(name, slots, padding, **spec)
        return self.wait_status(name, 120 + slots / 10, ready=slots, pods=slots)

    def pods(self) -> list[Json]:
        """All Pods of the namespace."""
        found: list[Json] = []
        token = ""
        while True:
            page = self.cluster.api("GET", f"/api/v1/namespaces/{NAMESPACE}/pods?limit=1000&continue={token}")
            found += page["items"]
            token = page["metadata"].get("continue", "")
            if not token:
                return found

    def drop_pods(self, seconds: float = 300.0) -> None:
        """Deletes all Pods of the namespace at once; a controller that would make new ones has to be stopped before."""
        where = f"/api/v1/namespaces/{NAMESPACE}/pods"
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.cluster.api("DELETE", where, {"gracePeriodSeconds": 0}, seconds=90)
            except Refused as error:
                if error.status < 500:
                    raise
            if not self.cluster.api("GET", f"{where}?limit=1")["items"]:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the Pods of {NAMESPACE} are still there after {seconds:g} s")

    # --- claims -------------------------------------------------------------------------------------------------------

    def broker_ca(self) -> str:
        """Certificate of the authority that signed the broker's, as callers find it."""
        return self.cluster.api("GET", f"/api/v1/namespaces/{SYSTEM}/configmaps/tapforge-broker-ca")["data"]["ca.crt"]

    def claimers(self, count: int) -> list[str]:
        """Tokens of so many service accounts that may claim slots of every pool of the namespace."""
        api = self.cluster.api
        base = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
        rules = [{"apiGroups": ["tapforge.dev"], "resources": ["emulatorpools/claim"], "verbs": ["create"]}]
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "claimer"}}
        api("POST", f"{base}/roles", {**role, "rules": rules})
        names = [f"claimer-{n}" for n in range(count)]
        for name in names:
            account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
            api("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", account)
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "claimers"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "claimer"},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE} for name in names],
        }
        api("POST", f"{base}/rolebindings", binding)
        return [self.cluster.token(NAMESPACE, name, "tapforge.dev/broker") for name in names]

    @property
    def broker(self) -> str:
        return f"https://127.0.0.1:{self.broker_port}"

    @property
    def claims_path(self) -> str:
        """With the pool's name as the only gap."""
        return f"/v1/namespaces/{NAMESPACE}/pools/{{}}/claims"
