"""agent-sandbox on a testbed: built once from its Go module, run with its own flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from e2e.cluster import binaries
from e2e.cluster.processes import free_ports

from .. import pools
from ..raw import job
from ..testbed import NAMESPACE, Testbed
from . import sandbox_load

#: `agent-sandbox-controller`; its kinds lie in `crds` beside `bin`
SOURCES: Final = binaries.Sources(
    "agent-sandbox, the peer of the benchmark",
    Path(__file__).parent,
    ("go.mod", "go.sum"),
    ("tool",),
    carried=(("sigs.k8s.io/agent-sandbox", "k8s/crds", "crds"),),
)

_GROUP: Final = "extensions.agents.x-k8s.io/v1alpha1"
_OVER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Workers:
    """Objects of a kind that are reconciled at once."""

    sandbox: int
    claim: int
    warm_pool: int

    def figures(self) -> dict[str, int]:
        return asdict(self)


class AgentSandbox:
    name: Final = "agent-sandbox"

    def __init__(self, bed: Testbed):
        self._bed = bed
        programs = binaries.ensure(of=SOURCES)
        self._program, self._kinds = programs / "agent-sandbox-controller", programs.parent / "crds"

    def start(self, workers: Workers) -> None:
        """Returns when it is ready."""
        cluster = self._bed.cluster
        cluster.apply(*sorted(self._kinds.glob("*.yaml")))
        cluster.wait_kinds()
        metrics, health = free_ports(2)
        flags = [
            "--extensions",
            "--leader-elect=false",
            f"--sandbox-concurrent-workers={workers.sandbox}",
            f"--sandbox-claim-concurrent-workers={workers.claim}",
            f"--sandbox-warm-pool-concurrent-workers={workers.warm_pool}",
            f"--metrics-bind-address=127.0.0.1:{metrics}",
            f"--health-probe-bind-address=127.0.0.1:{health}",
        ]
        kubeconfig = self._bed.administrator(self.name)
        cluster.run(self.name, [str(self._program), *flags], {**os.environ, "KUBECONFIG": str(kubeconfig)})
        cluster.wait_for("agent-sandbox", lambda: _answers(f"http://127.0.0.1:{health}/readyz"))

    def make_pool(self, name: str, replicas: int) -> None:
        made = {"apiVersion": _GROUP, "metadata": {"name": name, "namespace": NAMESPACE}}
        self._create("sandboxtemplates", {**made, "kind": "SandboxTemplate", "spec": {"podTemplate": pools.template()}})
        spec = {"replicas": replicas, "sandboxTemplateRef": {"name": name}}
        self._create("sandboxwarmpools", {**made, "kind": "SandboxWarmPool", "spec": spec})

    def claim(self, template: str, rate: float, seconds: float, warm_up: float) -> sandbox_load.Measured:
        """In an open loop."""
        path = f"/apis/{_GROUP}/namespaces/{NAMESPACE}/sandboxclaims"
        body = {"apiVersion": _GROUP, "kind": "SandboxClaim", "spec": {"sandboxTemplateRef": {"name": template}}}
        load = sandbox_load.Load(job(self._bed.cluster, "bench-claims", ()), path, body, rate, seconds, warm_up)
        done = subprocess.run(
            [sys.executable, "-m", sandbox_load.__name__],
            input=json.dumps(asdict(load)).encode(),
            stdout=subprocess.PIPE,
            timeout=seconds + load.patience + _OVER_SECONDS,
            check=True,
        )
        return sandbox_load.Measured(**json.loads(done.stdout))

    def _create(self, kind: str, body: dict[str, Any]) -> None:
        self._bed.cluster.api("POST", f"/apis/{_GROUP}/namespaces/{NAMESPACE}/{kind}", body)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False
