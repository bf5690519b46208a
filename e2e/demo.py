"""`make demo-cluster`: a run on a cluster, from nothing to Complete, for a person to watch.

It brings up a Kubernetes with a real node and KubeRay (`installed`), applies a sample as it is, shows what kubectl
shows, ends the process of a phone in the middle of an episode, and takes everything down again. What the run leaves on
its volume is copied to runs/.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tapforge_operator import labels

from . import installed
from .cluster import CannotBuild, Cluster, NotInTime, binaries
from .cluster.node import CannotRun

SAMPLE: Final = "manifests/samples/run-volume.yaml"
RUN: Final = "practise-alone"
_SPACE: Final = "default"
_RUN = f"/apis/tapforge.dev/v1alpha1/namespaces/{_SPACE}/trainingruns/{RUN}"
_POOL = f"/apis/tapforge.dev/v1alpha1/namespaces/{_SPACE}/emulatorpools/{RUN}"
_PODS = f"/api/v1/namespaces/{_SPACE}/pods"
_RUNS: Final = Path("runs")
#: updates after which a phone dies; until a dead one has a successor, until the run has ended, seconds
_MOMENT, _HEALING, _PATIENCE = 3, 120.0, 1800.0

_began = time.monotonic()


def main() -> int:
    try:
        binaries.ensure()
        binaries.ensure(of=binaries.ADDONS)
        built = installed.prepare()
        say("a Kubernetes with a real node comes up on this machine")
        with installed.up(built, say) as cluster:
            code = _show(cluster)
        say("everything is taken down")
        return code
    except KeyboardInterrupt:
        say("given up")
        return 130
    except (CannotBuild, CannotRun, NotInTime) as error:
        print(f"demo-cluster: {error}", file=sys.stderr)
        return 1


def say(line: str) -> None:
    print(f"{time.monotonic() - _began:7.1f} s  {line}", flush=True)


def _show(cluster: Cluster) -> int:
    disk = _disk(cluster)
    _kubectl(cluster, "apply", "-f", SAMPLE)
    with _watching(cluster):
        _phone_dies(cluster)
        cluster.wait_for("the run's end", lambda: _ended(_status(cluster)), _PATIENCE)
        time.sleep(1)  # the watch shows it too
    _kubectl(cluster, "get", "epool,tr")
    status = _status(cluster)
    if not _is(status, "Complete"):
        say(f"the run failed: {status['message']}")
        print(installed.describe(cluster))
        return 1
    (left,) = disk.glob(f"{_SPACE}/*/attempt-*/{RUN}")
    target = _RUNS / RUN
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(left, target, ignore=shutil.ignore_patterns("checkpoints"))
    summary = json.loads((target / "summary.json").read_text())
    for when in ("success_before", "success_after"):
        rates = ", ".join(f"{how} {found['success']:.1%}" for how, found in sorted(summary[when].items()))
        say(f"{when.replace('_', ' ')}: {rates}")
    say(f"{summary['episodes']} episodes counted; {summary['invalid_episodes']} did not, because of their phones")
    say(f"watch it: {target}/replay.html")
    return 0


def _disk(cluster: Cluster) -> Path:
    """The node's only disk for volumes, which the sample's claim will get."""
    folder = cluster.folder / "node" / "volumes" / "disk"
    folder.mkdir()
    folder.chmod(0o777)
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "disk"},
            "spec": {
                "capacity": {"storage": "10Gi"},
                "accessModes": ["ReadWriteOnce"],
                "hostPath": {"path": str(folder), "type": "Directory"},
            },
        }
    )
    return folder


def _phone_dies(cluster: Cluster) -> None:
    def moment() -> dict[str, Any] | None:
        status = _status(cluster)
        if status.get("progress", {}).get("update", 0) < _MOMENT:
            return {"none": "it ended before"} if _ended(status) else None
        pods = cluster.api("GET", _PODS)["items"]
        return next((pod for pod in pods if labels.CLAIM in pod["metadata"].get("annotations", {})), None)

    phone = cluster.wait_for(f"update {_MOMENT}", moment, _PATIENCE)
    if phone is None or "metadata" not in phone:
        return
    name, begin = phone["metadata"]["name"], time.monotonic()
    say(f"the process of phone {name} is killed, in the middle of an episode")
    cluster.node.kill(phone)

    def healed() -> bool:
        there = {pod["metadata"]["name"] for pod in cluster.api("GET", _PODS)["items"]}
        status = cluster.api("GET", _POOL)["status"]
        return name not in there and status["ready"] == status["desiredReplicas"] and status["replacedTotal"] >= 1

    cluster.wait_for("the phone's successor", healed, _HEALING)
    say(f"its successor is ready, {time.monotonic() - begin:.1f} s later")


def _kubectl(cluster: Cluster, *words: str) -> None:
    say(f"$ kubectl {' '.join(words)}")
    print(cluster.kubectl(*words).stdout, end="", flush=True)


@contextmanager
def _watching(cluster: Cluster) -> Iterator[None]:
    """Shows kubectl's watch until the block ends."""
    words = ["get", "trainingruns", "-w"]
    say(f"$ kubectl {' '.join(words)}")
    command = [str(binaries.ensure() / "kubectl"), "--kubeconfig", str(cluster.kubeconfig), *words]
    with subprocess.Popen(command) as watch:
        try:
            yield
        finally:
            watch.terminate()


def _status(cluster: Cluster) -> dict[str, Any]:
    return cluster.api("GET", _RUN).get("status") or {}


def _ended(status: dict[str, Any]) -> bool:
    return _is(status, "Complete") or _is(status, "Failed")


def _is(status: dict[str, Any], kind: str) -> bool:
    return any(c["type"] == kind and c["status"] == "True" for c in status.get("conditions", ()))


if __name__ == "__main__":
    sys.exit(main())
