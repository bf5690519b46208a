"""The operator as a process of its own, with the rights that the manifests give it and no others.

It belongs to the cluster: it ends with it, whatever ends the tests. Its ports are its own as long as the tests run: it
takes the same at every start, as behind a Service. What it logs lies beside the logs of the components.

It has the flags that users have: a leadership that is to end takes as long as theirs.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from e2e.cluster import PATIENCE, Cluster
from e2e.cluster.processes import free_ports
from e2e.installed import ENABLED

MANIFESTS = Path(__file__).parents[2] / "manifests"
ACCOUNT = "tapforge-operator"
#: namespace that the manifests are written for
_THEIRS = "tapforge-system"
_BINDINGS = (
    "overlays/namespaced/binding.yaml",
    "overlays/namespaced/logs.yaml",
    "components/devices/namespaced/binding.yaml",
)
_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Record:
    """A line that the operator logged (`observability/logging.py`)."""

    level: str
    logger: str
    message: str
    #: kind, namespace, name and uid of what it speaks of
    object: Mapping[str, str]
    exception: str

    @staticmethod
    def of(said: Mapping[str, Any]) -> Record:
        words = {name: str(said.get(name, "")) for name in ("level", "logger", "message", "exception")}
        return Record(object=said.get("object", {}), **words)


def _parsed(line: str) -> Mapping[str, Any]:
    """A line that is being written has no fields yet."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


class Operator:
    """One that is not started yet. `namespaces`: what it watches."""

    def __init__(
        self,
        cluster: Cluster,
        own_namespace: str,
        namespaces: Sequence[str],
        *,
        identity: str = "operator-0",
        kubeconfig: Path | None = None,
        arguments: Sequence[str] = (),
        program: Sequence[str] = ("-m", "tapforge_operator.main"),
    ) -> None:
        """`kubeconfig`: another way to the API server than that of its service account. `program`: another release."""
        self.cluster = cluster
        self.own_namespace = own_namespace
        self.identity = identity
        self.name = f"{identity}-{next(_NUMBERS)}"
        self._namespaces = tuple(namespaces)
        self._kubeconfig = kubeconfig
        self._more = tuple(arguments)
        self._program = tuple(program)
        self._ports = dict(zip(("broker", "health"), free_ports(2), strict=True))
        #: where in its log the present process begins
        self._began = 0

    # --- coming and going ---------------------------------------------------------------------------------------------

    def start(self) -> Operator:
        """Returns at once."""
        if self._kubeconfig is None:
            token = self.cluster.token(self.own_namespace, ACCOUNT)
            self._kubeconfig = self.cluster.user_with_token(self.name, token)
        log = self.cluster.log(self.name)
        self._began = log.stat().st_size if log.exists() else 0
        command = [sys.executable, *self._program]
        command += [f"--identity={self.identity}", f"--own-namespace={self.own_namespace}", "--host=127.0.0.1"]
        command += [f"--{name}-port={port}" for name, port in self._ports.items()]
        command += ["--advertise-address=127.0.0.1"]
        command += ["--devices", *self._more]
        command += [f"--namespace={namespace}" for namespace in self._namespaces]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("KUBERNETES_", "POD_", "TAPFORGE_"))}
        self.cluster.run(self.name, command, environment | {"KUBECONFIG": str(self._kubeconfig)})
        return self

    def wait_ready(self, *, leads: bool = True, seconds: float = PATIENCE) -> Operator:
        """Until it answers and (or not) leads."""
        self.cluster.wait_for(f"the ports of {self.name}", self._listens, seconds)
        self.cluster.wait_for(f"{self.name} to be ready", lambda: self.health("readyz") == "", seconds)
        if leads:
            self.cluster.wait_for(f"{self.name} to lead", lambda: self.term > 0, seconds)
        return self

    def kill9(self) -> None:
        self.cluster.stop_component(self.name, signal.SIGKILL)

    def stop(self) -> None:
        """As a Pod is stopped: it may finish what it does."""
        self.cluster.stop_component(self.name, signal.SIGTERM)

    def restart(self, number: signal.Signals = signal.SIGKILL) -> Operator:
        self.cluster.stop_component(self.name, number)
        return self.start().wait_ready()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It stands still inside the block; its connections stay open."""
        with self.cluster.paused(self.name):
            yield

    # --- asking it ----------------------------------------------------------------------------------------------------

    @property
    def broker(self) -> str:
        return f"https://127.0.0.1:{self._ports['broker']}"

    @property
    def ca(self) -> Path:
        """What the broker's certificate is checked against, as users get it."""
        file = self.cluster.folder / f"{self.own_namespace}-broker-ca.crt"
        where = f"/api/v1/namespaces/{self.own_namespace}/configmaps/tapforge-broker-ca"
        file.write_text(self.cluster.api("GET", where)["data"]["ca.crt"])
        return file

    def health(self, path: str) -> str:
        """Why it is not well; "" when it is."""
        try:
            self._get(path)
        except urllib.error.HTTPError as error:
            return error.read().decode() or str(error.code)
        return ""

    @property
    def role(self) -> str:
        """What it says that it is ready for."""
        return self._get("readyz").strip()

    def metrics(self, name: str, **labels: str) -> float:
        """The sum of what is measured under the name, of the series with these labels."""
        total = 0.0
        for line in self._get("metrics").splitlines():
            series, _, value = line.rpartition(" ")
            word, _, said = series.partition("{")
            if word == name and all(f'{label}="{wanted}"' in said for label, wanted in labels.items()):
                total += float(value)
        return total

    @property
    def term(self) -> int:
        """Number of its leadership; 0 while it does not lead."""
        return int(self.metrics("tapforge_leader_term"))

    def log(self) -> str:
        """What the present process said."""
        with self.cluster.log(self.name).open("rb") as file:
            file.seek(self._began)
            return file.read().decode(errors="replace")

    def records(self, logger: str = "") -> list[Record]:
        """What the present process logged, of one logger below `tapforge_operator` or of all. A time or a port may look
        like any word that is searched in a line: tests read fields."""
        lines = [line for line in self.log().splitlines() if line.startswith("{")]
        found = [Record.of(said) for said in map(_parsed, lines)]
        return [one for one in found if logger in ("", one.logger.removeprefix("tapforge_operator."))]

    def trouble(self) -> list[Record]:
        """What the present process said of itself as an error."""
        errors = [one for one in self.records() if one.level in ("ERROR", "CRITICAL")]
        return [one for one in errors if one.logger.startswith(("tapforge_operator", "asyncio"))]

    def last_words(self, space: str = "", lines: int = 60) -> str:
        """What it and those before it said last, of a namespace and of trouble elsewhere."""
        file = self.cluster.log(self.name)
        said = file.read_text(errors="replace").splitlines() if file.exists() else []
        told = [line for line in said if space in line or '"level":"INFO"' not in line]
        return "\n".join(line[:1000] for line in told[-lines:]) or "(nothing)"

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._ports['health']}/{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def _listens(self) -> bool:
        said = "\n".join(one.message for one in self.records())
        for name, words in (("health", r"^health and metrics on port (\d+)$"), ("broker", r"^claims on port (\d+)$")):
            found = re.search(words, said, re.MULTILINE)
            if found is None:
                return False
            self._ports[name] = int(found[1])
        return True


@dataclass
class Ground:
    """An operator's own namespace, and one for each test of a file: the operator watches these alone, so that operators
    of several files don't meet."""

    own: str
    spaces: list[str]
    left: list[str] = field(default_factory=list)


# --- what it may ------------------------------------------------------------------------------------------------------


def install(cluster: Cluster, own_namespace: str, namespaces: Sequence[str]) -> None:
    """What the manifests install for an operator in `own_namespace`, but its Deployment; and its rights in the
    namespaces."""
    documents: list[dict[str, Any]] = []
    for file in ("rbac", "operator", "user-roles", "protection"):
        documents += _read(MANIFESTS / "base" / f"{file}.yaml", own_namespace)
    documents += _read(MANIFESTS / "components" / "nodes" / "nodes.yaml", own_namespace)
    documents += _read(MANIFESTS / "components" / "kueue" / "rbac.yaml", own_namespace)
    documents += _read(MANIFESTS / "components" / "confinement" / "policy.yaml", own_namespace)
    documents = [d for d in documents if d["kind"] not in ("Deployment", "Service")]
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": own_namespace}}
    cluster.apply(space, *documents, *_bindings(own_namespace, namespaces))


def enabled(name: str) -> dict[str, Any]:
    """A namespace in which the operator may create."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(ENABLED)}}


def label(cluster: Cluster, own_namespace: str, namespace: str, value: str) -> None:
    """Sets what the operator of `own_namespace` may create in a namespace, "" for nothing, and waits until the API
    server goes by it: it reads labels some time after they are there."""
    word = f"tapforge.dev/workloads={value}" if value else "tapforge.dev/workloads-"
    cluster.kubectl("label", "--overwrite", "namespace", namespace, word)
    account = f"--as=system:serviceaccount:{own_namespace}:{ACCOUNT}"
    probe = ("create", "configmap", "probe", "--dry-run=server", account, "-n", namespace)
    # Never taken: it has no owner.
    cluster.wait_for(
        "the label",
        lambda: (f"label namespace {namespace} " in cluster.kubectl(*probe, check=False).stderr) != bool(value),
    )


def let_in(cluster: Cluster, own_namespace: str, namespaces: Sequence[str]) -> None:
    """Its rights in more namespaces."""
    cluster.apply(*_bindings(own_namespace, namespaces))


def let_in_everywhere(cluster: Cluster, own_namespace: str) -> None:
    """Its rights as the overlay `cluster` and the component `devices` give them."""
    for file in ("overlays/cluster/binding.yaml", "components/devices/binding.yaml"):
        cluster.apply(*_read(MANIFESTS / file, own_namespace))


def _bindings(own_namespace: str, namespaces: Sequence[str]) -> list[dict[str, Any]]:
    documents = []
    for namespace in namespaces:
        for file in _BINDINGS:
            for document in _read(MANIFESTS / file, own_namespace):
                document["metadata"]["namespace"] = namespace
                documents.append(document)
    return documents


def uninstall(cluster: Cluster, own_namespace: str) -> None:
    """What is an operator's alone, beside its namespace."""
    mine = f"tapforge.dev/installed={own_namespace}"
    kinds = "clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings"
    cluster.kubectl("delete", kinds, "-l", mine, "--wait=false")


def _read(file: Path, own_namespace: str) -> list[dict[str, Any]]:
    documents = list(yaml.safe_load_all(file.read_text().replace(_THEIRS, own_namespace)))
    for document in documents:
        if document["kind"] in ("ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"):
            metadata = document["metadata"]
            metadata["name"] += f".{own_namespace}"
            metadata.setdefault("labels", {})["tapforge.dev/installed"] = own_namespace
            if "policyName" in document["spec" if "spec" in document else "roleRef"]:
                document["spec"]["policyName"] += f".{own_namespace}"
    return documents
