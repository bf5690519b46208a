"""What only a real node can show: images from the Dockerfile run as they should, real probes make phones Ready, dead
processes are noticed and replaced, claims are served over TLS by the operator's own Deployment, and nothing stays
behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.cluster import PATIENCE, Cluster
from e2e.cluster.node import network
from e2e.installed import MANIFESTS, OPERATOR_NAMESPACE, operator_is_ready, room
from live_pool import LivePool, name, ready, uid, uids
from real_cluster import operator_pods, phone_container, run_python, start_pod

from tapforge_api.claims import AUDIENCE
from tapforge_operator import labels

pytestmark = pytest.mark.node

ROOT = Path(__file__).parents[2]
Object = dict[str, Any]


@pytest.fixture(scope="module")
def space(real: Cluster) -> str:
    return room(real, "real-phones")


@pytest.fixture(scope="module")
def pool(real: Cluster, space: str) -> LivePool:
    """Three simulated phones, as the sample has them but for its size."""
    sample = yaml.safe_load((MANIFESTS / "samples" / "pool-phones.yaml").read_text())["spec"]
    del sample["scaling"]
    sample["template"]["spec"]["containers"][0]["resources"] = phone_container()["resources"]
    return LivePool(real, space, replicas=3, **sample)


def _until(cluster: Cluster, what: str, path: str, phase: str, seconds: float = PATIENCE) -> Object:
    def there() -> Object | None:
        pod = cluster.api("GET", path)
        good = ready(pod) if phase == "Ready" else pod["status"].get("phase") == phase
        return pod if good else None

    return cluster.wait_for(what, there, seconds)


# --- the node ---------------------------------------------------------------------------------------------------------

_CALLS = """
import json, ssl, time, urllib.request
place = "/var/run/secrets/kubernetes.io/serviceaccount/"
token = open(place + "token").read()
review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
ask = urllib.request.Request(
    "https://kubernetes.default.svc/apis/authentication.k8s.io/v1/selfsubjectreviews",
    data=json.dumps(review).encode(),
    headers={"Authorization": "Bearer " + token, "Content-Type": "application/json"},
)
trusted = ssl.create_default_context(cafile=place + "ca.crt")

def soon(url, **how):
    # The node hears of Services, and of Pods that have become Ready, a moment later.
    end = time.monotonic() + 100
    while True:
        try:
            return json.load(urllib.request.urlopen(url, timeout=20, **how))
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(1)

me = soon(ask, context=trusted)["status"]["userInfo"]["username"]
phone = soon("http://a-phone:8000/health")
try:
    urllib.request.urlopen("http://192.0.2.1", timeout=20)
    outside = "reached"
except OSError as error:
    outside = str(error)
print(json.dumps({"me": me, "phone": phone["status"], "outside": outside}))
"""


def test_pods_reach_services_by_name_and_the_api_server_by_its(real: Cluster) -> None:
    here = room(real, "real-network")
    probe = {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1}
    phone = start_pod(real, here, "phone", {"containers": [phone_container(readinessProbe=probe)]}, {"app": "phone"})
    caller = start_pod(real, here, "caller", {"containers": [phone_container()]})
    spec = {"selector": {"app": "phone"}, "ports": [{"port": 8000}]}
    real.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a-phone", "namespace": here}, "spec": spec}
    )
    for path in (phone, caller):
        _until(real, path, path, "Ready")
    said = run_python(real, here, "caller", _CALLS)
    assert said["me"] == f"system:serviceaccount:{here}:default"
    assert said["phone"] == "ok"
    assert "unreachable" in said["outside"]
    assert '"slots": 1' in real.kubectl("logs", "-n", here, "phone").stdout


def test_fake_nodes_beside_it_are_played_and_it_is_not(real: Cluster) -> None:
    here = room(real, "real-and-fake")
    taint = {"key": "fake", "value": "true", "effect": "NoSchedule"}
    (fake,) = real.nodes.add(1, prefix="beside", taints=[taint])
    pretended = start_pod(
        real,
        here,
        "pretended",
        {
            "containers": [{"name": "emulator", "image": "there/is-no-such-image:1"}],
            "nodeSelector": {"kubernetes.io/hostname": fake},
            "tolerations": [{"key": "fake", "operator": "Exists"}],
        },
    )
    refused = start_pod(real, here, "refused", {"containers": [{"name": "emulator", "image": "no/such-image:1"}]})
    _until(real, "the fake Pod", pretended, "Ready")

    def reason() -> str:
        statuses = real.api("GET", refused)["status"].get("containerStatuses", [{}])
        return str(statuses[0].get("state", {}).get("waiting", {}).get("reason", ""))

    real.wait_for("the refusal to pull", lambda: reason() in ("ErrImagePull", "ImagePullBackOff"))
    real.nodes.remove(fake)


# --- phones -----------------------------------------------------------------------------------------------------------


def test_a_pool_of_real_phones_is_ready_and_its_phones_conform(real: Cluster, pool: LivePool) -> None:
    phones = pool.wait_ready(3)
    for phone in phones:
        (status,) = phone["status"]["containerStatuses"]
        assert status["image"].endswith("tapforge/phone:dev")
        # The server says it, the kubelet asks it: startup, readiness and liveness are real probes.
        assert {"startupProbe", "readinessProbe"} <= set(phone["spec"]["containers"][0])
    tapforge = Path(sys.executable).with_name("tapforge")
    check = [str(tapforge), "env", "check", f"http://{phones[0]['status']['podIP']}:8000"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_phone_whose_process_dies_is_replaced(real: Cluster, pool: LivePool) -> None:
    phones = pool.wait_ready(3)
    before = pool.status()["replacedTotal"]
    real.node.kill(phones[1])

    def replaced() -> bool:
        now = [pod for pod in pool.pods() if ready(pod)]
        return len(now) == 3 and uid(phones[1]) not in uids(now)

    pool.wait("the dead phone's successor", replaced)
    now = pool.wait_ready(3)
    assert {uid(phones[0]), uid(phones[2])} < set(uids(now))
    pool.wait("it to be counted", lambda: pool.status()["replacedTotal"] > before)
    assert pool.status()["replacedTotal"] == before + 1


# --- claims -----------------------------------------------------------------------------------------------------------

_PLAYER = """
import asyncio, json, os, urllib.request
from tapforge_api.claims import Acquire, Given, Release
from tapforge_envs.check import check
from tapforge_envs.slots.broker_calls import Access, BrokerCalls

async def play():
    async with BrokerCalls(Access.of(os.environ)) as broker:
        acquired = await broker.acquire("phones", Acquire(request=os.environ["HOSTNAME"], wait_seconds=30), 60)
        (claim,) = acquired.claims
        violations = await check(claim.url)
        with urllib.request.urlopen(claim.url + "/health", timeout=30) as phone:
            slot = json.load(phone)["slot"]
        await broker.release(Release(claims=(Given(id=claim.id, secret=claim.secret, episodes=1),)), 30)
        uids, violations = [claim.slot_uid, slot], [str(v) for v in violations]
        print(json.dumps({"slot": claim.slot, "url": claim.url, "uids": uids, "violations": violations}))

asyncio.run(play())
"""


@pytest.mark.parametrize("through", ["service", "standby"])
def test_a_pod_claims_a_phone_over_tls_through_the_service(
    real: Cluster, space: str, pool: LivePool, through: str
) -> None:
    """`standby`: the Service's name leads to the replica that passes callers on; its certificate is as good."""
    pool.wait_ready(3)
    group = "rbac.authorization.k8s.io"
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "player", "namespace": space}}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "player", "namespace": space},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "tapforge-claimer"},
        "subjects": [{"kind": "ServiceAccount", "name": "player", "namespace": space}],
    }
    published = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/configmaps/tapforge-broker-ca"
    trusted = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "broker-ca", "namespace": space},
        "data": real.api("GET", published)["data"],
    }
    real.apply(account, binding, trusted)
    token = {"serviceAccountToken": {"audience": AUDIENCE, "path": "token", "expirationSeconds": 3600}}
    broker, me = f"tapforge-broker.{OPERATOR_NAMESPACE}.svc", f"player-{through}"
    environment = {
        "TAPFORGE_BROKER_URL": f"https://{broker}:8443",
        "TAPFORGE_BROKER_CA": "/broker/ca.crt",
        "TAPFORGE_BROKER_TOKEN_FILE": "/broker/token",
        "TAPFORGE_NAMESPACE": space,
    }
    player = {
        "name": "player",
        "image": "tapforge/phone:dev",
        "command": ["python", "-c", _PLAYER],
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "volumeMounts": [{"name": "broker", "mountPath": "/broker", "readOnly": True}],
        "securityContext": {"readOnlyRootFilesystem": True},
    }
    sources = [token, {"configMap": {"name": "broker-ca"}}]
    volumes = [{"name": "broker", "projected": {"sources": sources}}]
    spec = {"serviceAccountName": "player", "containers": [player], "volumes": volumes}
    if through == "standby":
        _, other = operator_pods(real)
        spec["hostAliases"] = [{"ip": other["status"]["podIP"], "hostnames": [broker]}]
    path = start_pod(real, space, me, spec)
    try:
        _until(real, "the player", path, "Succeeded")
    finally:
        log = real.kubectl("logs", "-n", space, me, check=False).stdout
        print(log)
    said = json.loads(log)
    slots = {name(pod): pod for pod in pool.pods()}
    assert said["url"] == f"http://{slots[said['slot']]['status']['podIP']}:8000"
    assert said["uids"] == [uid(slots[said["slot"]])] * 2, "the claim's slot is the one that the phone says it is"
    assert said["violations"] == []
    pool.wait("the claim's end", lambda: labels.CLAIM not in pool.pod(said["slot"])["metadata"]["annotations"])


# --- the operator's own pod -------------------------------------------------------------------------------------------


def test_the_operators_image_runs_as_its_manifest_says(real: Cluster) -> None:
    pod, other = operator_pods(real)
    for one in (pod, other):
        (status,) = one["status"]["containerStatuses"]
        assert status["image"].endswith("tapforge/operator:dev") and status["ready"]
    pids = real.node.pids(pod)
    owners = {line.split()[1] for pid in pids for line in _status(pid) if line.startswith("Uid:")}
    assert owners == {"65532"}
    # It holds no right that a container can do without.
    assert {line.split()[1] for pid in pids for line in _status(pid) if line.startswith("CapEff:")} == {"0" * 16}


def test_an_operator_that_dies_is_started_again_and_goes_on(real: Cluster, pool: LivePool) -> None:
    phones = pool.wait_ready(3)
    pod, _ = operator_pods(real)
    real.node.kill(pod)
    path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{name(pod)}"

    def again() -> bool:
        (status,) = real.api("GET", path)["status"]["containerStatuses"]
        return status["restartCount"] > pod["status"]["containerStatuses"][0]["restartCount"]

    real.wait_for("the operator's next life", again)
    real.wait_for("the operator to be ready", lambda: operator_is_ready(real))
    real.node.kill(phones[0])
    pool.wait("its first deed", lambda: uid(phones[0]) not in uids([p for p in pool.pods() if ready(p)]))
    pool.wait_ready(3)


def test_a_machine_without_power_comes_back_and_so_do_its_phones(real: Cluster, pool: LivePool) -> None:
    before = pool.wait_ready(3)
    real.node.lose()
    real.node.find()
    real.wait_for("the operator to be ready", lambda: operator_is_ready(real))
    pool.wait("other phones", lambda: not set(uids(before)) & set(uids(pool.pods())))
    pool.wait_ready(3)


def _status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/status").read_text().splitlines()


# --- KubeRay ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_ray_job_runs_in_this_machines_environment(real: Cluster) -> None:
    here = room(real, "real-ray")
    requests = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}}
    image = "tapforge/trainer:dev"
    head = {"name": "ray-head", "image": image, "resources": requests}
    parameters = {"num-cpus": "1", "object-store-memory": "100000000", "dashboard-host": "0.0.0.0"}
    program = "import ray; ray.init(); print('the answer is', ray.get(ray.remote(lambda: 6 * 7).remote()))"
    submitter = {"containers": [{"name": "ray-job-submitter", "image": image}], "restartPolicy": "Never"}
    real.apply(
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": "answer", "namespace": here},
            "spec": {
                "entrypoint": f'python -c "{program}"',
                "submitterPodTemplate": {"spec": submitter},
                "shutdownAfterJobFinishes": True,
                "rayClusterSpec": {
                    "rayVersion": "2.60.0",
                    "headGroupSpec": {
                        "rayStartParams": parameters,
                        "template": {"spec": {"containers": [head]}},
                    },
                },
            },
        }
    )
    path = f"/apis/ray.io/v1/namespaces/{here}/rayjobs/answer"

    def ended() -> Object | None:
        status = real.api("GET", path).get("status", {})
        return status if status.get("jobDeploymentStatus") in ("Complete", "Failed") else None

    status = real.wait_for("the Ray job", ended, 240)
    said = real.kubectl("logs", "-n", here, "-l", "job-name=answer", "--tail=-1").stdout
    assert status["jobStatus"] == "SUCCEEDED", said
    assert "the answer is 42" in said


# --- coming and going -------------------------------------------------------------------------------------------------

_ANOTHER = """
import json, sys, time
from e2e.cluster import Cluster, Options
from e2e.cluster.node import host
with Cluster(Options(real_node=True)) as cluster:
    cluster.node.load(host.image(cluster.folder / "host.tar"))
    spec = host.pod_spec([{"name": "sleeper", "command": ["sleep", "1000"]}])
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "default"}, "spec": spec})
    path = "/api/v1/namespaces/default/pods/p"
    def running():
        return cluster.api("GET", path)["status"].get("phase") == "Running"
    cluster.wait_for("the Pod", running)
    print(json.dumps({"folder": str(cluster.folder), "pids": cluster.node.pids(cluster.api("GET", path))}), flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def another(real_node: None) -> Iterator[subprocess.Popen[str]]:
    """A process with a real node of its own."""
    command = [sys.executable, "-c", _ANOTHER]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as user:
        yield user
        user.kill()


def test_nothing_is_left_of_a_real_node_whose_user_was_killed(another: subprocess.Popen[str]) -> None:
    assert another.stdout is not None
    said = json.loads(another.stdout.readline())
    folder = Path(said["folder"])
    assert said["pids"] and all(Path(f"/proc/{pid}").exists() for pid in said["pids"])
    (block,) = [way for way in network.routes() if _in_use(folder, way)]

    another.kill()
    another.wait(60)
    deadline = time.monotonic() + PATIENCE
    while (left := _left(folder, said["pids"], block)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _in_use(folder: Path, way: Any) -> bool:
    return str(way) == json.loads((folder / "node" / "plan.json").read_text())["cable"]["block"]


def _left(folder: Path, pids: list[int], block: Any) -> list[str]:
    """What still speaks of the cluster: processes, mounts, cgroups, files, the way to its Pods."""
    found = [f"route {block}"] if block in network.routes() else []
    found += [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words:
            found.append(words)
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]
    cgroups = Path("/sys/fs/cgroup")
    found += map(str, (*cgroups.glob(folder.name), *cgroups.glob(f"*/{folder.name}")))
    return found + ([str(folder)] if folder.exists() else [])
