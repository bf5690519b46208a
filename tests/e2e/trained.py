"""Runs that really train, on the real node: small ones, their volumes, and what their Ray Pods are made of."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from e2e.cluster import Cluster
from e2e.installed import MANIFESTS
from live_run import LiveRun
from real_cluster import phone_container

from tapforge_api.attempt import RUN_FILE

Object = dict[str, Any]

#: until Ray, engine and learner are up, on two cores that others use too, seconds
START = 420.0
#: what a run is about doesn't matter here; that each of its parts is there does
_SMALL: Object = {
    "seed": 3,
    "model": {"source": {"tiny": {}}, "contextTokens": 256, "adapter": {"prompt": "compact", "historySteps": 8}},
    "warmStart": {"demonstrations": 20, "steps": 2, "batchSize": 8},
    "rollout": {"groupSize": 4, "groupsPerUpdate": 2, "responseTokens": 24, "groupDeadlineSeconds": 60},
    "learner": {"ranks": 1},
    "engine": {"maxConcurrentSequences": 8, "kvCacheMiB": 64},
    "evaluation": {"episodes": 4, "everyUpdates": 0},
}


def phones(size: int) -> Object:
    """The sample's pool, small."""
    spec: Object = yaml.safe_load((MANIFESTS / "samples" / "pool-phones.yaml").read_text())["spec"]
    del spec["scaling"]
    spec["template"]["spec"]["containers"][0]["resources"] = phone_container()["resources"]
    return {**spec, "replicas": size}


def volume(cluster: Cluster, namespace: str, name: str = "checkpoints") -> Path:
    """A claim with a volume of this machine behind it. Returns the folder."""
    folder = cluster.folder / "node" / "volumes" / f"{namespace}-{name}"
    folder.mkdir()
    folder.chmod(0o777)
    size, modes = {"storage": "1Gi"}, ["ReadWriteOnce"]
    claim = {"namespace": namespace, "name": name}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": folder.name},
            "spec": {
                "capacity": size,
                "accessModes": modes,
                "storageClassName": "",
                "claimRef": claim,
                "hostPath": {"path": str(folder), "type": "Directory"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": claim,
            "spec": {
                "storageClassName": "",
                "volumeName": folder.name,
                "accessModes": modes,
                "resources": {"requests": size},
            },
        },
    )
    return folder


class Trained(LiveRun):
    """A run of the small kind; `spec` replaces parts of it."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, /, **spec: Any) -> None:
        ray = {"name": "ray", "resources": {"requests": {"cpu": "300m", "memory": "2Gi"}, "limits": {"memory": "6Gi"}}}
        machines = {
            "image": "tapforge/trainer:dev",
            "head": {"template": {"spec": {"containers": [ray]}}},
            **spec.pop("cluster", {}),
        }
        super().__init__(cluster, namespace, name, **{**_SMALL, **spec, "cluster": machines})

    # --- looking ------------------------------------------------------------------------------------------------------

    def update(self) -> int:
        return int(self.status().get("progress", {}).get("update", 0))

    def heads(self) -> list[Object]:
        """Pods of its attempts' heads, oldest first."""
        label = f"labelSelector=ray.io%2Fnode-type%3Dhead%2Ctapforge.dev%2Frun%3D{self.name}"
        pods = self.cluster.api("GET", f"/api/v1/namespaces/{self.namespace}/pods?{label}")["items"]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def head(self) -> Object:
        return self.heads()[-1]

    def driver_pid(self) -> int:
        """The process that trains, as this machine counts."""
        found = []
        for pid in self.cluster.node.pids(self.head(), "ray"):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                process = psutil.Process(pid)
                words = process.cmdline()
                if "run" in words and RUN_FILE in words and "-c" not in words:
                    found.append((process.create_time(), pid))
        if found:
            return max(found)[1]  # a supervisor is older
        raise AssertionError(f"no driver in {self.head()['metadata']['name']}\n{self.describe()}")

    def log(self) -> str:
        """The end of what the drivers of its attempts said."""
        label = ("-l", f"tapforge.dev/run={self.name}", "--all-containers", "--prefix", "--tail=60")
        return self.cluster.kubectl("logs", "-n", self.namespace, *label, check=False).stdout

    # --- waiting ------------------------------------------------------------------------------------------------------

    def wait_update(self, update: int, seconds: float = START) -> int:
        """Returns the update that it has by then; fails at once when the run ends before."""

        def there() -> bool:
            assert not self.over() or self.update() >= update, f"ended before update {update}: {self.describe()}"
            return self.update() >= update

        self.wait(f"update {update}", there, seconds)
        return self.update()

    def over(self) -> bool:
        return self.says("Complete", "True") or self.says("Failed", "True")

    def wait_complete(self, seconds: float = START) -> None:
        self.wait("its end", self.over, seconds)
        assert self.says("Complete", "True"), self.describe()

    def describe(self) -> str:
        return f"{super().describe()}\n{self.log()}"


class Times:
    """How long what a user waits for took, seconds: printed, so that a report of the tests can say it."""

    def __init__(self) -> None:
        self._took: dict[str, float] = {}

    def of(self, what: str, deed: Callable[[], Any]) -> None:
        begin = time.monotonic()
        deed()
        self._took[what] = round(time.monotonic() - begin, 1)
        print(f"{what}: {self._took[what]:g} s")

    def __str__(self) -> str:
        return json.dumps(self._took)
