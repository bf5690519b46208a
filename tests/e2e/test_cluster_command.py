"""`tapforge cluster` against a real API server and operator, with no more rights than the role `edit` in a namespace.
KubeRay and the driver are played, as in test_runs_control_plane.py; what needs a Pod that runs is tested on the real
node (test_training_runs_node.py).

KubeRay's kinds are in the shared cluster while these tests run, and removed behind them."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from claiming import may
from e2e.cluster import MERGE, Cluster, Refused, kuberay
from live_pool import phone
from live_run import SMALL, LiveRun
from operator_process import Operator

from tapforge_api import load
from tapforge_trainer.remote import Cluster as Remote
from tapforge_trainer.remote import ClusterError
from tapforge_trainer.remote.pods import reader_job

ROOT = Path(__file__).parents[2]
#: for a command
SECONDS = 120


@pytest.fixture(scope="module", autouse=True)
def ray_kinds(cluster: Cluster, addons: None) -> Iterator[None]:
    kuberay.install(cluster)
    yield
    kinds = [f"{kind}.ray.io" for kind in ("rayclusters", "rayjobs", "rayservices")]
    cluster.kubectl("delete", "crd", *kinds, "--wait=false")


@pytest.fixture
def researcher(cluster: Cluster, space: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubeconfig of somebody who has the role `edit` in the test's namespace, and no other right."""
    name = f"researcher-{space}"
    cluster.apply(_binding(space, {"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"}))
    verbs = (("create", "tapforge.dev", "trainingruns"), ("create", "batch", "jobs"))
    cluster.wait_for("the rights", lambda: all(may(cluster, name, *verb, space) for verb in verbs))
    kubeconfig = cluster.user(name)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    return kubeconfig


def _binding(space: str, subject: dict[str, str]) -> dict[str, object]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "researcher", "namespace": space},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
        "subjects": [subject],
    }


def _file(tmp_path: Path, **spec: object) -> Path:
    """A pool and a run."""
    lasting = {
        "environment": {"source": {"pool": {"name": "phones", "slots": 2}}},
        "checkpoints": {"uri": "s3://bucket/runs"},
        "stop": {"maxUpdates": 10},
    }
    kinds = {
        "EmulatorPool": ("phones", {"replicas": 2, "template": phone()}),
        "TrainingRun": ("practise", {"cluster": SMALL, **lasting, **spec}),
    }
    documents = [
        {"apiVersion": "tapforge.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": content}
        for kind, (name, content) in kinds.items()
    ]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


def tapforge(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tapforge_trainer.cli.main", "cluster", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


@contextmanager
def beside(*words: object) -> Iterator[Future[subprocess.CompletedProcess[str]]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(tapforge, *words)


def test_a_run_is_submitted_watched_suspended_and_resumed_to_its_end(
    cluster: Cluster, space: str, operator: Operator, researcher: Path, tmp_path: Path
) -> None:
    file = _file(tmp_path)
    made = tapforge("submit", "-f", file, "-n", space, "--set", "seed=3")
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines() == ["EmulatorPool phones: created", "TrainingRun practise: created"]
    again = tapforge("submit", "-f", file, "-n", space, "--set", "seed=3")
    assert again.stdout.splitlines()[-1] == "TrainingRun practise: unchanged"
    run = LiveRun.found(cluster, space, "practise")
    assert run.object()["spec"]["seed"] == 3
    assert {entry["manager"] for entry in run.object()["metadata"]["managedFields"]} >= {"tapforge"}
    run.runs()
    driver = run.driver(operator)
    other = tapforge("submit", "-f", file, "-n", space, "--set", "seed=4")
    assert other.returncode == 1 and "can't be changed after the run's start" in other.stderr, other.stderr
    assert f"delete that one first (kubectl delete trainingrun practise -n {space})" in other.stderr

    with beside("watch", "practise", "-n", space) as watching:
        driver.report(update=3, phase="Training", checkpoint={"update": 3, "path": "s3://bucket/3"})
        listed = tapforge("list", "-n", space).stdout.splitlines()
        assert listed[0].split() == ["NAME", "STATUS", "UPDATE", "SUCCESS", "PHONES", "ATTEMPT"]
        assert listed[1].split()[:3] == ["practise", "Running", "3/10"]
        asked = tapforge("suspend", "practise", "-n", space)
        assert asked.stdout == "practise stops after a checkpoint\n", asked.stderr
        run.wait("the order", lambda: driver.report(update=3).stop)
        driver.report(update=4, final="stopped", checkpoint={"update": 4, "path": "s3://bucket/4"})
        run.wait_ready("True", "Suspended")
    ended = watching.result()
    assert ended.returncode == 75, ended
    assert "update 4/10" in ended.stdout and "tapforge cluster resume practise" in ended.stderr, ended

    assert tapforge("resume", "practise", "-n", space).stdout == "practise resumes after update 4\n"
    run.runs(2)
    driver = run.driver(operator, 2)
    with beside("watch", "practise", "-n", space) as watching:
        driver.report(update=10, final="complete")
        run.kuberay_says(2, "SUCCEEDED", "Complete")
    ended = watching.result()
    assert ended.returncode == 0 and ended.stdout.splitlines()[-1].startswith("practise: Complete"), ended
    assert "can't be suspended or resumed any more" in tapforge("suspend", "practise", "-n", space).stderr
    # What `resume` wrote is no other tool's.
    last = tapforge("submit", "-f", file, "-n", space, "--set", "seed=3", "--set", "suspend=true")
    assert last.stdout.splitlines()[-1:] == ["TrainingRun practise: changed"], last.stderr


def test_what_can_not_work_is_refused_in_words_and_nothing_is_made(
    cluster: Cluster, space: str, operator: Operator, researcher: Path, tmp_path: Path
) -> None:
    file = _file(tmp_path)
    typo = tapforge("submit", "-f", file, "-n", space, "--set", "spec.seeed=3")
    assert typo.returncode == 2 and "did you mean seed?" in typo.stderr
    text = file.read_text()
    file.write_text(text.replace("slots: 2", "slots: 0"))
    wrong = tapforge("submit", "-f", file, "-n", space)
    assert wrong.returncode == 2 and "spec.environment.source.pool.slots" in wrong.stderr
    # What only the API server can tell: the pool isn't made either.
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none", "namespace": space}}
    file.write_text(f"{text}---\n{json.dumps({**quota, 'spec': {'hard': {'pods': '1'}}})}\n")
    refused = tapforge("submit", "-f", file, "-n", space)
    assert refused.returncode == 1 and "forbidden" in refused.stderr and "the role `edit`" in refused.stderr
    remote = Remote(namespace=space)
    assert remote.runs() == [] and cluster.api("GET", _pools(space))["items"] == []

    file.write_text(text)
    # Suspended, so that the operator doesn't start it beside the lines below.
    run = remote.submit(file, {"metadata.name": "practice", "spec.suspend": True})
    LiveRun.found(cluster, space, "practice").wait_ready("True", "Suspended")
    with pytest.raises(ClusterError, match=f"no run practise in namespace {space}; did you mean practice"):
        remote.run("practise")
    with pytest.raises(ClusterError, match="has not started yet: it is Suspended"):
        run.fetch(tmp_path / "runs")
    with pytest.raises(ClusterError, match="has no logs: it is Suspended"):
        list(run.logs())
    elsewhere = tapforge("list", "-n", "kube-system")
    assert elsewhere.returncode == 1 and "forbidden" in elsewhere.stderr


class Plugin:
    """A program that a kubeconfig names. Its tokens are those of a service account with the role `edit`."""

    def __init__(self, cluster: Cluster, space: str, folder: Path):
        self._cluster, self._space = cluster, space
        self._answer, self._log = folder / "answer.json", folder / "asked"
        self._log.touch()
        account = {"name": "researcher", "namespace": space}
        subject = {"kind": "ServiceAccount", **account}
        cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account}, _binding(space, subject))
        user = f"system:serviceaccount:{space}:researcher"
        cluster.wait_for("the rights", lambda: may(cluster, user, "create", "tapforge.dev", "trainingruns", space))
        program = folder / "plugin"
        program.write_text(f"#!/bin/sh\ncat {self._answer} | tee -a {self._log}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.kubeconfig = folder / "kubeconfig"
        config = yaml.safe_load(cluster.user_with_token(f"plugin-{space}", "none").read_text())
        version = "client.authentication.k8s.io/v1"
        run = {"apiVersion": version, "command": str(program), "interactiveMode": "Never"}
        config["users"][0]["user"] = {"exec": run}
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def issue(self, name: str, **more: str) -> None:
        """The token that is handed out from now on; it is worth nothing without the Secret of its name."""
        secrets = f"/api/v1/namespaces/{self._space}/secrets"
        made = self._cluster.api("POST", secrets, {"metadata": {"name": name}})
        secret = {"apiVersion": "v1", "kind": "Secret", "name": name, "uid": made["metadata"]["uid"]}
        body = {"spec": {"audiences": [], "boundObjectRef": secret}}
        path = f"/api/v1/namespaces/{self._space}/serviceaccounts/researcher/token"
        token = self._cluster.api("POST", path, body)["status"]["token"]
        status = {"token": token, **more}
        version = "client.authentication.k8s.io/v1"
        document = {"apiVersion": version, "kind": "ExecCredential", "spec": {}, "status": status}
        written = self._answer.with_name("next.json")
        written.write_text(json.dumps(document) + "\n")
        written.replace(self._answer)
        self._token = token

    def asked(self) -> int:
        """How often the present token was handed out."""
        return self._log.read_text().count(self._token)

    def expire(self, name: str) -> None:
        self._cluster.api("DELETE", f"/api/v1/namespaces/{self._space}/secrets/{name}")


def _pools(space: str) -> str:
    return f"/apis/tapforge.dev/v1alpha1/namespaces/{space}/emulatorpools"


def test_a_token_that_expires_and_a_connection_that_breaks_do_not_end_a_watch(
    cluster: Cluster, space: str, operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubeconfig runs a program for each token, as those of EKS, GKE and AKS do."""
    plugin = Plugin(cluster, space, tmp_path)
    plugin.issue("first")
    monkeypatch.setenv("KUBECONFIG", str(plugin.kubeconfig))
    remote = Remote(namespace=space)
    run = remote.submit(_file(tmp_path))
    live = LiveRun.found(cluster, space, "practise")
    live.runs()
    driver = live.driver(operator)
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(run.watch)
        # Of the first one nobody knew that it expires; of the next one its time says so.
        soon = (datetime.now(UTC) + timedelta(minutes=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        plugin.issue("second", expirationTimestamp=soon)
        plugin.expire("first")
        cluster.wait_for("the program to be asked again and again", lambda: plugin.asked() > 2)
        cluster.restart_apiserver()
        driver.report(update=10, final="complete")
        live.kuberay_says(1, "SUCCEEDED", "Complete")
        assert watching.result(SECONDS).exit_code == 0


def test_the_pod_that_reads_a_volume_may_be_made_where_pod_security_is_strictest(
    cluster: Cluster, space: str, researcher: Path
) -> None:
    level = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    cluster.api("PATCH", f"/api/v1/namespaces/{space}", level, MERGE)
    job = reader_job(load(ROOT / "manifests" / "samples" / "run-volume.yaml"), space, "u-1")
    pod = {**job["spec"]["template"], "metadata": {"name": "reader"}}
    pods = f"/api/v1/namespaces/{space}/pods?dryRun=All"
    assert cluster.api("POST", pods, pod)["metadata"]["name"] == "reader"
    with pytest.raises(Refused, match="restricted"):
        cluster.api("POST", pods, {**pod, "spec": {**pod["spec"], "securityContext": {}}})
