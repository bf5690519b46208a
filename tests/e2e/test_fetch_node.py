"""Files and logs of a run by way of real Pods: commands in the head, a Job that reads the volume, logs from a kubelet.
Nothing trains here: the run's Pods are programs of the test, and its files are the test's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import MERGE, Cluster
from e2e.installed import room
from live_run import LiveRun
from trained import volume

from tapforge_api.attempt import STORAGE_MOUNT
from tapforge_operator import labels
from tapforge_trainer.remote import Cluster as Remote

pytestmark = pytest.mark.node

Object = dict[str, Any]
IMAGE = {"image": "tapforge/trainer:dev"}
UPDATE = {"event": "update", "update": 1, "success_rate_all": 0.25, "learner": {"loss": 2.0}}
FILES = {
    "spec.yaml": "kind: TrainingRun\n",
    "events.jsonl": json.dumps({"event": "update", "update": 1, "success_rate_all": 0.25, "learner": {"loss": 2.0}})
    + "\n",
    "summary.json": "{}",
    "rollout/rollout-000001.jsonl": "step\n" * 1000,
    "checkpoints/latest": "update-00000007",
    "checkpoints/update-00000007/state.json": "{}",
    # several frames of a connection
    "checkpoints/update-00000007/__0_0.distcp": "".join(chr(33 + n % 90) for n in range(9_000_000)),
}


@pytest.fixture
def run(real: Cluster, monkeypatch: pytest.MonkeyPatch) -> LiveRun:
    """One that was started once and is suspended."""
    monkeypatch.setenv("KUBECONFIG", str(real.kubeconfig))
    space = room(real, "real-files")
    disk = volume(real, space)
    storage = {"volumeClaim": {"claimName": "checkpoints"}}
    found = LiveRun(real, space, "files", suspend=True, checkpoints={"storage": storage}, cluster=IMAGE)
    found.wait_ready("True", "Suspended")
    real.api("PATCH", f"{found.path}/status", {"status": {"startTime": "2026-01-01T00:00:00Z"}}, MERGE)
    folder = disk / space / found.uid / "attempt-00000001-1795176000000" / "files"
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return found


def test_what_a_run_keeps_and_says_comes_to_a_laptop(real: Cluster, run: LiveRun, tmp_path: Path) -> None:
    remote = Remote(namespace=run.namespace).run("files")
    found = remote.fetch(tmp_path)
    assert found.checkpoint == 7 and found.missing == ()
    assert _contents(tmp_path / "files") == FILES
    jobs = f"/apis/batch/v1/namespaces/{run.namespace}/jobs"
    pods = f"/api/v1/namespaces/{run.namespace}/pods"

    def items(path: str) -> list[Object]:
        return real.api("GET", path)["items"]

    real.wait_for("the reader to be gone", lambda: not items(jobs) and not items(pods))

    # While the head runs, everything comes from there.
    storage = {"name": "storage", "persistentVolumeClaim": {"claimName": "checkpoints"}}
    environment = {"TAPFORGE_STORAGE": f"{STORAGE_MOUNT}/{run.namespace}/{run.uid}", "TAPFORGE_RUN": "files"}
    ray = {
        "name": "ray",
        **IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sleep", "600"],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "volumeMounts": [{"name": "storage", "mountPath": STORAGE_MOUNT}],
    }
    _pod(real, run, "head", ray, {"ray.io/node-type": "head"}, volumes=[storage])
    program = "for n in 1 2 3; do echo line $n; sleep 1; done"
    _pod(real, run, "submitter", {"name": "ray-job-submitter", **IMAGE, "command": ["sh", "-c", program]}, {})

    def running() -> bool:
        phases = {pod["metadata"]["name"]: pod["status"]["phase"] for pod in items(pods)}
        return phases["head"] == "Running" and phases["submitter"] in ("Running", "Succeeded")

    real.wait_for("the Pods", running)
    assert list(remote.logs(follow=True)) == ["--- attempt 1: Pod submitter", "line 1", "line 2", "line 3"]
    assert remote.fetch(tmp_path, ["summary"]).files == 3
    assert items(jobs) == [] and _contents(tmp_path / "files") == FILES
    events, end = remote.events()
    assert events[0]["update"] == 1 and remote.events(end) == ([], end)
    assert remote.metrics() == [{"update": 1, "rollout/success_rate": 0.25, "learner/loss": 2.0}]


def _contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".fetched.json")
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def _pod(real: Cluster, run: LiveRun, name: str, container: Object, more: dict[str, str], **spec: Any) -> None:
    mine = {labels.RUN_UID: run.uid, labels.ATTEMPT: "1", **more}
    container = {"imagePullPolicy": "Never", **container}
    body = {
        "metadata": {"name": name, "labels": mine},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container], **spec},
    }
    real.api("POST", f"/api/v1/namespaces/{run.namespace}/pods", body)
