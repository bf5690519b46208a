"""The command line of every component: pure functions of where a cluster lies and what was asked of it.

What is switched on is what a user's cluster has (RBAC, quotas, Pod Security, service-account tokens with an issuer), so
that a test meets the refusals that users meet. What is left out is only what costs time: fsync, election of a leader
among one, ports that are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

ETCD: Final = "etcd"
API_SERVER: Final = "kube-apiserver"
CONTROLLER_MANAGER: Final = "kube-controller-manager"
SCHEDULER: Final = "kube-scheduler"
KWOK: Final = "kwok"

#: first address of SERVICES: what `kubernetes.default.svc` resolves to
SERVICE_ADDRESS: Final = "10.0.0.1"
SERVICES: Final = "10.0.0.0/16"
#: addresses of fake pods; nothing answers there
FAKE_PODS: Final = "10.64.0.0/10"
ISSUER: Final = "https://kubernetes.default.svc.cluster.local"
#: nodes with this label are played by kwok. A label and not an annotation: the watch then shows kwok when it is taken
#: away, which is how a node gets lost here
FAKE_NODE: Final = ("kwok.x-k8s.io/node", "fake")


@dataclass(frozen=True, slots=True)
class Options:
    """What a test may ask of its cluster."""

    #: fake nodes to begin with
    nodes: int = 0
    #: requests per second of the scheduler and of the controller manager, each; 0: Kubernetes' own limits
    qps: int = 0
    #: one real node, beside the fake ones: containers that run. Takes root (node/prerequisites.py)
    real_node: bool = False
    #: seconds without a sign of a node until it counts as lost
    node_grace_seconds: int = 40
    #: write users and their requests into `audit.log` (Metadata level; no reads)
    audit: bool = False
    #: address that the API server listens on; 0.0.0.0 with `advertise` for nodes that have networks of their own
    bind: str = "127.0.0.1"
    #: address that pods of real nodes reach the API server by; empty: the service `kubernetes` leads nowhere
    advertise: str = ""
    #: component -> flag without dashes -> value; added to what is set here or in its place
    flags: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster lies: its folder's files and its ports."""

    folder: Path
    programs: Path
    #: programs of the API server, the controllers and the scheduler
    kubernetes: Path
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    kwok_port: int

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.api_port}"

    def file(self, name: str) -> str:
        return str(self.folder / name)


def etcd(place: Place, options: Options) -> list[str]:
    client, peer = f"http://127.0.0.1:{place.etcd_port}", f"http://127.0.0.1:{place.etcd_peer_port}"
    flags = {
        "data-dir": place.file("etcd"),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
        "unsafe-no-fsync": "true",
        "quota-backend-bytes": str(8 << 30),
        "log-level": "warn",
    }
    return _command(place, options, ETCD, flags)


def api_server(place: Place, options: Options) -> list[str]:
    flags = {
        "etcd-servers": f"http://127.0.0.1:{place.etcd_port}",
        "bind-address": options.bind,
        "secure-port": str(place.api_port),
        "tls-cert-file": place.file("server.crt"),
        "tls-private-key-file": place.file("server.key"),
        "client-ca-file": place.file("ca.crt"),
        "service-account-issuer": ISSUER,
        "service-account-signing-key-file": place.file("accounts.key"),
        "service-account-key-file": place.file("accounts.pub"),
        "service-cluster-ip-range": SERVICES,
        "authorization-mode": "Node,RBAC",
        # The second one is not on everywhere: a client that sets blockOwnerDeletion needs the right to update the
        # owner's finalizers.
        "enable-admission-plugins": "NodeRestriction,OwnerReferencesPermissionEnforcement",
        "allow-privileged": "true",
        "kubelet-preferred-address-types": "InternalIP",
        "profiling": "false",
    }
    if options.advertise:
        flags["advertise-address"] = options.advertise
    else:
        # A loopback address is not allowed in Endpoints.
        flags |= {"advertise-address": "192.0.2.1", "endpoint-reconciler-type": "none"}
    if options.audit:
        flags |= {"audit-policy-file": place.file("audit.yaml"), "audit-log-path": place.file("audit.log")}
        # One file, however long: a reader that follows it would miss what is written after a rotation (at 100 MB).
        flags["audit-log-maxsize"] = str(1 << 20)
    return _command(place, options, API_SERVER, flags)


def controller_manager(place: Place, options: Options) -> list[str]:
    flags = {
        "kubeconfig": place.file("controller-manager.kubeconfig"),
        "service-account-private-key-file": place.file("accounts.key"),
        "root-ca-file": place.file("ca.crt"),
        "use-service-account-credentials": "true",
        "leader-elect": "false",
        "node-monitor-grace-period": f"{options.node_grace_seconds}s",
        "node-monitor-period": "1s" if options.node_grace_seconds < 20 else "5s",
        "secure-port": "0",
        "profiling": "false",
    }
    if options.qps:
        flags |= {"kube-api-qps": str(options.qps), "kube-api-burst": str(2 * options.qps)}
    return _command(place, options, CONTROLLER_MANAGER, flags)


def scheduler(place: Place, options: Options) -> list[str]:
    flags = {"config": place.file("scheduler.yaml"), "secure-port": "0"}
    return _command(place, options, SCHEDULER, flags)


def kwok(place: Place, options: Options) -> list[str]:
    flags = {
        "kubeconfig": place.file("admin.kubeconfig"),
        "config": place.file("kwok.yaml"),
        "v": "WARN",
        "cidr": FAKE_PODS,
        "node-ip": "127.0.0.1",
        "node-port": str(place.kwok_port),
        "server-address": f"127.0.0.1:{place.kwok_port}",
        "manage-all-nodes": "false",
        "manage-nodes-with-label-selector": "=".join(FAKE_NODE),
        "node-lease-duration-seconds": str(max(4, min(40, options.node_grace_seconds))),
    }
    return _command(place, options, KWOK, flags)


def scheduler_configuration(place: Place, options: Options) -> dict[str, Any]:
    connection: dict[str, Any] = {"kubeconfig": place.file("scheduler.kubeconfig")}
    if options.qps:
        connection |= {"qps": options.qps, "burst": 2 * options.qps}
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": connection,
        "leaderElection": {"leaderElect": False},
        "enableProfiling": False,
    }


def audit_policy() -> dict[str, Any]:
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "None", "verbs": ["get", "list", "watch"]},
            {"level": "Metadata"},
        ],
    }


def _command(place: Place, options: Options, component: str, flags: dict[str, str]) -> list[str]:
    merged = flags | dict(options.flags.get(component, {}))
    versioned = component in (API_SERVER, CONTROLLER_MANAGER, SCHEDULER)
    program = (place.kubernetes if versioned else place.programs) / component
    return [str(program), *(f"--{name}={value}" for name, value in merged.items())]
