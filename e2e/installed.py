"""A cluster as users have it: a real node, KubeRay, and the operator in its Deployment, with the rights that the
manifests give it, from the image that the Dockerfile makes.

Two things are not as users have them: KubeRay is a process beside the cluster, and the trainer's image is an almost
empty one that every Pod which asks for it gets this machine's environment in (`cluster/node/host.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from . import images
from .cluster import Cluster, Options, kuberay
from .cluster.node import host

MANIFESTS: Final = Path(__file__).parents[1] / "manifests"
OPERATOR_NAMESPACE: Final = "tapforge-system"
#: labels of a namespace that the operator may create in
ENABLED: Final = {"tapforge.dev/workloads": "enabled"}
_OPERATOR = f"/apis/apps/v1/namespaces/{OPERATOR_NAMESPACE}/deployments/tapforge-operator"
#: of the samples
_TRAINER = "tapforge/trainer:dev"

Object = dict[str, Any]


def prepare() -> Path:
    """Builds what it is made of: minutes, once. Returns the images."""
    return images.ensure("operator", "phone")


@contextmanager
def up(built: Path, say: Callable[[str], None] = lambda line: None) -> Iterator[Cluster]:
    """`built`: the images."""
    with Cluster(Options(real_node=True, qps=100)) as cluster:
        say("a real node is there; images are loaded, KubeRay starts")
        with ThreadPoolExecutor(1) as beside:
            trainer = host.image(cluster.folder / "trainer.tar", images.IMAGES["trainer"])
            loading = beside.submit(cluster.node.load, built, trainer)
            kuberay.start(cluster)
            cluster.apply(*host.stand_in(_TRAINER))
            loading.result()
        say("the operator is installed")
        cluster.kubectl("apply", "--server-side", "-k", str(MANIFESTS / "overlays" / "cluster"))
        cluster.kubectl("label", "namespace", "default", *(f"{key}={value}" for key, value in ENABLED.items()))
        try:
            cluster.wait_for("the operator's Deployment", lambda: operator_is_ready(cluster), 120)
        except RuntimeError as error:
            error.add_note(describe(cluster))
            raise
        yield cluster


def operator_is_ready(cluster: Cluster) -> bool:
    """It has as many Pods as it should, all of them Ready."""
    found = cluster.api("GET", _OPERATOR)
    status, wanted = found.get("status", {}), found["spec"]["replicas"]
    current = status.get("observedGeneration") == found["metadata"]["generation"]
    return current and status.get("readyReplicas") == status.get("replicas") == wanted


def room(cluster: Cluster, name: str) -> str:
    """A namespace in which Pods may be made."""
    cluster.api("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": ENABLED}})
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    cluster.wait_for("the namespace's service account", lambda: cluster.exists(account))
    return name


def describe(cluster: Cluster) -> str:
    """For the report of a test that failed."""
    asked = [
        ("get", "pods", "-A", "-o", "wide"),
        ("get", "events", "-A", "--sort-by=.lastTimestamp"),
        ("logs", "-n", OPERATOR_NAMESPACE, "-l", "app.kubernetes.io/name=tapforge-operator", "--tail=30", "--prefix"),
    ]
    answers = [cluster.kubectl(*words, check=False) for words in asked]
    return "\n\n".join("\n".join(answer.stdout.splitlines()[-60:]) or answer.stderr for answer in answers)
