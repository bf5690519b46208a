"""Kueue beside a cluster, and its kinds in it.

It is a process of the cluster like others (`kueue`), outside of it like an administrator. The API server reaches its
webhooks by URL, those of conversion between versions of its kinds too: without the process none of its objects can be
read. It queues RayJobs and RayClusters, so KubeRay's kinds have to be there first.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from . import binaries
from .certificates import Pair, self_signed
from .cluster import Cluster
from .processes import free_ports

KUEUE: Final = "kueue"
#: the version of its kinds that clients here speak; the webhooks are of it too
VERSION: Final = "kueue.x-k8s.io/v1beta2"
NAMESPACE: Final = "kueue-system"
#: names that it looks for
_SECRET = "kueue-webhook-server-cert"
_SERVICE = "kueue-webhook-service"
_AUTHORITY = "kueue-ca"
#: of the kinds with several versions
_CONVERTED = ("localqueues", "clusterqueues", "cohorts", "workloads", "multikueueclusters")
_FRAMEWORKS = ("ray.io/rayjob", "ray.io/raycluster")
#: (group/version, kind, its plural, further resources that are checked, whether it is filled in at its creation)
_WEBHOOKS = (
    ("ray.io/v1", "rayjob", "rayjobs", (), True),
    ("ray.io/v1", "raycluster", "rayclusters", (), True),
    (VERSION, "clusterqueue", "clusterqueues", (), True),
    (VERSION, "resourceflavor", "resourceflavors", (), True),
    (VERSION, "workload", "workloads", ("workloads/status",), True),
    (VERSION, "cohort", "cohorts", (), False),
)

Object = dict[str, Any]


def start(cluster: Cluster) -> None:
    """Returns when its kinds are served and its webhooks answer."""
    build = binaries.ensure(of=binaries.KUEUE)
    folder = cluster.folder / KUEUE
    folder.mkdir(exist_ok=True)
    webhook, metrics, health = free_ports(3)
    pair = self_signed([_AUTHORITY, f"{_SERVICE}.{NAMESPACE}.svc", "127.0.0.1"])
    (folder / "tls.crt").write_bytes(pair.certificate)
    (folder / "tls.key").write_bytes(pair.key)
    configuration = folder / "configuration.yaml"
    configuration.write_text(yaml.safe_dump(_configuration(folder, webhook, metrics, health)))
    _install(cluster, build.parent / "crds", f"https://127.0.0.1:{webhook}", pair)
    # Its server of pending workloads has a fixed port.
    command = [str(build / "kueue"), f"--config={configuration}", "--feature-gates=VisibilityOnDemand=false"]
    cluster.run(KUEUE, command, {"KUBECONFIG": str(cluster.kubeconfig)})
    trial = {"apiVersion": VERSION, "kind": "ResourceFlavor", "metadata": {"name": "trial"}}
    cluster.wait_for("Kueue's webhooks", lambda: cluster.api("POST", _path("resourceflavors", "?dryRun=All"), trial))
    cluster.wait_for("Kueue's conversions", lambda: cluster.exists(_path("workloads")))


def stop(cluster: Cluster) -> None:
    """The process; what it queued stays held, and its kinds can't be read any more."""
    cluster.stop_component(KUEUE)


def _path(plural: str, more: str = "") -> str:
    return f"/apis/{VERSION}/{plural}{more}"


def _install(cluster: Cluster, crds: Path, url: str, pair: Pair) -> None:
    bundle = base64.b64encode(pair.certificate).decode()
    secret = {"ca.crt": pair.certificate, "ca.key": pair.key, "tls.crt": pair.certificate, "tls.key": pair.key}
    kinds = [yaml.safe_load(file.read_text()) for file in sorted(crds.glob("*.yaml"))]
    for kind in kinds:
        if kind["spec"]["names"]["plural"] in _CONVERTED:
            webhook = {
                "clientConfig": {"url": f"{url}/convert", "caBundle": bundle},
                "conversionReviewVersions": ["v1"],
            }
            kind["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": _SECRET, "namespace": NAMESPACE},
            "data": {name: base64.b64encode(value).decode() for name, value in secret.items()},
        },
        *kinds,
    )
    cluster.wait_kinds()
    cluster.apply(
        _webhooks("Mutating", "mutate", ["CREATE"], url, bundle),
        _webhooks("Validating", "validate", ["CREATE", "UPDATE"], url, bundle),
    )


def _webhooks(what: str, verb: str, operations: list[str], url: str, bundle: str) -> Object:
    def each() -> Iterator[Object]:
        for api, kind, plural, more, filled in _WEBHOOKS:
            if verb == "mutate" and not filled:
                continue
            group, version = api.split("/")
            resources = [plural] if verb == "mutate" else [plural, *more]
            rule = {"apiGroups": [group], "apiVersions": [version], "operations": operations, "resources": resources}
            path = f"{verb}-{group.replace('.', '-')}-{version}-{kind}"
            yield {
                "name": f"{verb[0]}{kind}.kb.io",
                "clientConfig": {"url": f"{url}/{path}", "caBundle": bundle},
                "rules": [rule],
                "failurePolicy": "Fail",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
            }

    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": f"{what}WebhookConfiguration",
        "metadata": {"name": f"kueue-{what.lower()}-webhook-configuration"},
        "webhooks": list(each()),
    }


def _configuration(folder: Path, webhook: int, metrics: int, health: int) -> Object:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": f"127.0.0.1:{metrics}"},
        "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(folder)},
        "leaderElection": {"leaderElect": False},
        # It finds certificates in the Secret that will do, and makes none; without this it wants some in /etc.
        "internalCertManagement": {"enable": True, "webhookServiceName": _SERVICE, "webhookSecretName": _SECRET},
        "clientConnection": {"qps": 100, "burst": 200},
        "integrations": {"frameworks": list(_FRAMEWORKS)},
    }
