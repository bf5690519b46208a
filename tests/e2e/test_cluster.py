"""What the other tests rely on: the control plane is a real one, fake pods say what real ones say, its components can
be taken away and come back, and nothing of it is left behind.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import API_SERVER, MERGE, PATIENCE, SCHEDULER, Cluster, Options, Refused, fake
from e2e.cluster.processes import Family, free_ports

ROOT = Path(__file__).parents[2]
BROKER = "tapforge.dev/broker"


def _pod(name: str, notes: dict[str, str] | None = None, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": notes or {}, **metadata},
        "spec": {
            "restartPolicy": "Never",
            "initContainers": [{"name": "prepare", "image": "prepare:1"}],
            "containers": [{"name": "emulator", "image": "phone:1"}],
        },
    }


def _create(cluster: Cluster, namespace: str, pod: dict[str, Any]) -> str:
    cluster.api("POST", f"/api/v1/namespaces/{namespace}/pods", pod)
    return f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"


def _annotate(cluster: Cluster, path: str, notes: dict[str, str | None]) -> None:
    cluster.api("PATCH", path, {"metadata": {"annotations": notes}}, MERGE)


def _ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def _until_ready(cluster: Cluster, path: str) -> dict[str, Any]:
    cluster.wait_for(f"{path} to be Ready", lambda: _ready(cluster.api("GET", path)))
    return cluster.api("GET", path)


# --- a real control plane ---------------------------------------------------------------------------------------------


def test_a_pod_of_a_replica_set_is_ready_and_its_status_is_complete(cluster: Cluster, namespace: str) -> None:
    template = {"metadata": {"labels": {"app": "phone"}}, "spec": {"containers": [{"name": "emulator", "image": "x"}]}}
    made = cluster.api(
        "POST",
        f"/apis/apps/v1/namespaces/{namespace}/replicasets",
        {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {"name": "phones"},
            "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "phone"}}, "template": template},
        },
    )
    path = f"/apis/apps/v1/namespaces/{namespace}/replicasets/phones"
    cluster.wait_for("2 ready replicas", lambda: cluster.api("GET", path)["status"].get("readyReplicas") == 2)

    pods = cluster.api("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
    assert [pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods] == [made["metadata"]["uid"]] * 2
    assert len({pod["status"]["podIP"] for pod in pods}) == 2
    for pod in pods:
        status = pod["status"]
        assert status["phase"] == "Running" and status["hostIP"] and status["startTime"]
        assert {c["type"] for c in status["conditions"] if c["status"] == "True"} == {
            "PodScheduled",
            "PodReadyToStartContainers",
            "Initialized",
            "ContainersReady",
            "Ready",
        }
        (container,) = status["containerStatuses"]
        assert container["started"] and container["ready"] and container["restartCount"] == 0
        assert container["state"]["running"]["startedAt"] and container["containerID"]

    cluster.api("DELETE", path)
    cluster.wait_for(
        "the garbage collector", lambda: not cluster.api("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
    )


def test_tapforges_kinds_are_served(cluster: Cluster, namespace: str) -> None:
    assert cluster.kubectl("get", "emulatorpools,trainingruns", "-n", namespace).returncode == 0
    assert "replicas" in cluster.kubectl("explain", "emulatorpool.spec").stdout


def test_a_broker_token_is_known_by_its_audience_and_is_none_for_the_api(cluster: Cluster, namespace: str) -> None:
    cluster.api("POST", f"/api/v1/namespaces/{namespace}/pods", _pod("run"))
    pod = _until_ready(cluster, f"/api/v1/namespaces/{namespace}/pods/run")
    token = cluster.token(namespace, "default", BROKER, pod=("run", pod["metadata"]["uid"]))

    def review(*audiences: str) -> dict[str, Any]:
        spec = {"token": token, "audiences": list(audiences)}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        return cluster.api("POST", "/apis/authentication.k8s.io/v1/tokenreviews", body)["status"]

    known = review(BROKER)
    assert known["authenticated"] and known["audiences"] == [BROKER]
    assert known["user"]["username"] == f"system:serviceaccount:{namespace}:default"
    assert known["user"]["extra"]["authentication.kubernetes.io/pod-name"] == ["run"]
    assert known["user"]["extra"]["authentication.kubernetes.io/pod-uid"] == [pod["metadata"]["uid"]]
    assert not review("somebody.else").get("authenticated")

    refused = cluster.kubectl("get", "pods", kubeconfig=cluster.user_with_token("broker", token), check=False)
    assert refused.returncode != 0 and "Unauthorized" in refused.stderr


def test_a_user_may_do_what_rbac_says_and_nothing_else(cluster: Cluster, namespace: str) -> None:
    alice = cluster.user("alice")
    assert "forbidden" in cluster.kubectl("get", "pods", "-n", namespace, kubeconfig=alice, check=False).stderr
    cluster.kubectl("create", "rolebinding", "alice", "--clusterrole=view", "--user=alice", "-n", namespace)
    cluster.wait_for(
        "alice's role",
        lambda: cluster.kubectl("get", "pods", "-n", namespace, kubeconfig=alice, check=False).returncode == 0,
    )
    denied = cluster.kubectl("create", "configmap", "hers", "-n", namespace, kubeconfig=alice, check=False)
    assert "forbidden" in denied.stderr


def test_quota_and_pod_security_refuse(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "quota", "few", "--hard=pods=1", "-n", namespace)
    used = f"/api/v1/namespaces/{namespace}/resourcequotas/few"
    cluster.wait_for("the quota to be counted", lambda: "used" in cluster.api("GET", used)["status"])
    # The API server itself hears of both, and of the label below, a moment after they are written.
    cluster.wait_for("room for the first", lambda: _create(cluster, namespace, _pod("first")))
    with pytest.raises(Refused, match="exceeded quota") as refused:
        _create(cluster, namespace, _pod("second"))
    assert refused.value.status == 403

    cluster.kubectl("delete", "quota", "few", "-n", namespace)
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")

    def answer() -> str:
        """To a Pod that would not stay."""
        try:
            return str(cluster.api("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", _pod("third"))["kind"])
        except Refused as error:
            return str(error)

    cluster.wait_for("Pod Security to refuse it", lambda: "violates PodSecurity" in answer())


# --- the lives of fake pods -------------------------------------------------------------------------------------------


def test_a_slow_pod_starts_first_and_is_ready_later(cluster: Cluster, namespace: str) -> None:
    path = _create(cluster, namespace, _pod("slow", {fake.BOOT: "3600"}))
    cluster.wait_for("its container's start", lambda: cluster.api("GET", path)["status"]["phase"] == "Running")
    booting = cluster.api("GET", path)["status"]["containerStatuses"][0]
    assert booting["state"]["running"]["startedAt"] and not booting["ready"]
    # To be changed meanwhile doesn't make it wait again, nor does it change its start.
    cluster.api("PATCH", path, {"metadata": {"labels": {"seen": "yes"}}}, MERGE)
    _annotate(cluster, path, {fake.BOOT: "1"})
    pod = _until_ready(cluster, path)
    assert pod["status"]["containerStatuses"][0]["state"] == booting["state"]
    assert all("reason" not in condition for condition in pod["status"]["conditions"])
    (ready,) = [c["lastTransitionTime"] for c in pod["status"]["conditions"] if c["type"] == "Ready"]
    assert ready > booting["state"]["running"]["startedAt"], "RFC 3339, both in UTC"


@pytest.mark.parametrize(
    ("note", "phase"), [({fake.PULL: "never"}, "Pending"), ({fake.BOOT: "never"}, "Running")], ids=["pull", "boot"]
)
def test_a_pod_that_hangs_is_never_ready_and_can_be_deleted(
    cluster: Cluster, namespace: str, note: dict[str, str], phase: str
) -> None:
    path = _create(cluster, namespace, _pod("hangs", note))
    cluster.wait_for("its node", lambda: cluster.api("GET", path)["spec"].get("nodeName"))
    cluster.wait_for(f"it to be {phase}", lambda: cluster.api("GET", path)["status"]["phase"] == phase)
    # One that was made later has been through everything.
    _until_ready(cluster, _create(cluster, namespace, _pod("later", {fake.BOOT: "1"})))
    pod = cluster.api("GET", path)
    assert pod["status"]["phase"] == phase and not _ready(pod)
    cluster.api("DELETE", path)
    cluster.wait_for("its end", lambda: not cluster.exists(path))


@pytest.mark.parametrize(("code", "phase"), [("1", "Failed"), ("137", "Failed"), ("0", "Succeeded")])
def test_a_pod_ends_when_told_also_while_it_runs(cluster: Cluster, namespace: str, code: str, phase: str) -> None:
    path = _create(cluster, namespace, _pod("ends"))
    started = _until_ready(cluster, path)["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    _annotate(cluster, path, {fake.EXIT: "0", fake.EXIT_CODE: code})
    cluster.wait_for("its end", lambda: cluster.api("GET", path)["status"]["phase"] == phase)
    status = cluster.api("GET", path)["status"]
    ended = status["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["startedAt"]) == (int(code), started)
    assert not _ready({"status": status}) and ended["finishedAt"]


def test_a_pod_gets_sick_and_well_again(cluster: Cluster, namespace: str) -> None:
    path = _create(cluster, namespace, _pod("sick"))
    _until_ready(cluster, path)
    _annotate(cluster, path, {fake.UNREADY: "true"})
    cluster.wait_for("it to be unready", lambda: not _ready(cluster.api("GET", path)))
    assert cluster.api("GET", path)["status"]["phase"] == "Running"
    _annotate(cluster, path, {fake.UNREADY: None})
    _until_ready(cluster, path)


def test_a_pod_that_can_not_stop_stays_until_it_is_let_go(cluster: Cluster, namespace: str) -> None:
    path = _create(cluster, namespace, _pod("stuck", {fake.STOP: "never"}))
    _until_ready(cluster, path)
    cluster.api("DELETE", path)
    assert cluster.api("GET", path)["metadata"]["deletionTimestamp"]
    _annotate(cluster, path, {fake.STOP: None})
    cluster.wait_for("its end", lambda: not cluster.exists(path))


def test_logs_of_fake_pods_can_be_read(cluster: Cluster, namespace: str) -> None:
    path = _create(cluster, namespace, _pod("talks"))
    _until_ready(cluster, path)
    cluster.pod_log("one\ntwo\nthree")
    # kwok begins to serve logs some time after it began to play.
    said = cluster.wait_for("its log", lambda: cluster.api.text("GET", f"{path}/log?container=emulator&tailLines=2"))
    assert said == "two\nthree\n"


# --- things that go wrong ---------------------------------------------------------------------------------------------


def test_a_lost_node_takes_its_pods_along_and_comes_back(cluster: Cluster, namespace: str) -> None:
    (node,) = cluster.nodes.add(1, prefix="lost", labels={"for": namespace})
    pod = _pod("there")
    pod["spec"]["nodeSelector"] = {"for": namespace}
    path = _create(cluster, namespace, pod)
    _until_ready(cluster, path)
    try:
        cluster.nodes.lose(node)
        cluster.wait_for("its pod to count as unready", lambda: not _ready(cluster.api("GET", path)))
        taints = cluster.wait_for(
            "its taints", lambda: cluster.api("GET", f"/api/v1/nodes/{node}")["spec"].get("taints")
        )
        assert {taint["key"] for taint in taints} == {"node.kubernetes.io/unreachable"}
        cluster.api("DELETE", path)
        cluster.nodes.find(node)
        cluster.wait_for("the pod's end, now that somebody does it", lambda: not cluster.exists(path))
        cluster.wait_for("the node", lambda: node in cluster.nodes.ready())
    finally:
        cluster.nodes.remove(node)


def test_the_api_server_comes_back_with_its_data_and_its_address(cluster: Cluster, namespace: str) -> None:
    before, pid = cluster.server, cluster.pid(API_SERVER)
    path = _create(cluster, namespace, _pod("before"))
    uid = _until_ready(cluster, path)["metadata"]["uid"]
    cluster.restart_apiserver(signal.SIGKILL)
    assert cluster.server == before and cluster.pid(API_SERVER) != pid
    assert cluster.api("GET", path)["metadata"]["uid"] == uid
    # Everybody has found it again.
    _until_ready(cluster, _create(cluster, namespace, _pod("after")))


def test_without_a_scheduler_pods_wait(cluster: Cluster, namespace: str) -> None:
    with cluster.without(SCHEDULER):
        path = _create(cluster, namespace, _pod("waits"))
        assert "nodeName" not in cluster.api("GET", path)["spec"]
    _until_ready(cluster, path)


def test_a_paused_api_server_answers_nobody_and_goes_on(cluster: Cluster) -> None:
    with cluster.paused(API_SERVER), pytest.raises(OSError, match="timed out"):
        cluster.api.text("GET", "/readyz", seconds=0.5)
    cluster.wait_ready()


# --- nothing is left behind -------------------------------------------------------------------------------------------

_ANOTHER = """
import json, sys, time
from e2e.cluster import Cluster, Options
cluster = Cluster(Options(nodes=1, audit=True)).start()
cluster.api("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "seen"}})
pids = {name: cluster.pid(name) for name in cluster.memory()}
print(json.dumps({"folder": str(cluster.folder), "server": cluster.server, "pids": pids}), flush=True)
if sys.argv[1] == "stop":
    def seen():
        audit = (cluster.folder / "audit.log").read_text()
        return '"verb":"create"' in audit and '"name":"seen"' in audit
    cluster.wait_for("the namespace in the audit log", seen)
    cluster.stop()
    cluster.stop()
else:
    with cluster.paused("kube-apiserver"):
        print("hung", flush=True)
        time.sleep(600)
"""


def _left(said: dict[str, Any]) -> set[str]:
    """What is still there of a cluster: components that run, and its folder."""
    running = {name for name, pid in said["pids"].items() if not _gone(pid)}
    return running | ({said["folder"]} if Path(said["folder"]).exists() else set())


def _gone(pid: int) -> bool:
    try:
        # A process that has ended and that nobody has asked about yet is gone, too.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def others() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Processes with clusters of their own, all starting at once: one will stop its own, one hangs and gets killed."""
    users = {
        end: subprocess.Popen(
            [sys.executable, "-c", _ANOTHER, end],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for end in ("stop", "hung")
    }
    yield users
    for user in users.values():
        with user:
            user.kill()


def test_nothing_is_left_of_other_clusters_whatever_ends_them(
    cluster: Cluster, others: dict[str, subprocess.Popen[str]]
) -> None:
    said = {end: json.loads(user.stdout.readline()) for end, user in others.items() if user.stdout is not None}
    assert len({said["stop"]["server"], said["hung"]["server"], cluster.server}) == 3
    for one in said.values():
        assert set(one["pids"]) == {"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok"}

    assert others["stop"].wait(PATIENCE) == 0
    assert _left(said["stop"]) == set()

    assert others["hung"].stdout is not None and others["hung"].stdout.readline() == "hung\n"
    others["hung"].kill()
    others["hung"].wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while (left := _left(said["hung"])) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert cluster.api.text("GET", "/readyz") == "ok"


def test_processes_end_also_when_somebody_ended_their_guardian(tmp_path: Path) -> None:
    family = Family(tmp_path, tmp_path)
    family.start("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"])
    sleeper = family.pid("sleeper")
    os.kill(os.getpgid(sleeper), signal.SIGKILL)
    family.close()
    assert _gone(sleeper)


def test_a_port_that_was_given_out_is_kept_while_its_server_is_away() -> None:
    (port,) = free_ports(1)
    for _ in range(2):
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(server.getsockname()):
            server.accept()[0].close()


def test_a_cluster_that_can_not_start_says_why_and_leaves_nothing(cluster: Cluster) -> None:
    broken = Cluster(Options(flags={"kube-apiserver": {"no-such-flag": "1"}}))
    with pytest.raises(RuntimeError, match=r"kube-apiserver has ended by itself.*\n(.*\n)*.*no-such-flag"):
        broken.start()
    assert not broken.folder.exists()
