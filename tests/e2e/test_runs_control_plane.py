"""Runs on a real control plane with KubeRay's kinds in it. KubeRay itself is played by the tests: they write what it
would write into RayJobs' status."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import next_release
import pytest
import yaml
from claiming import Caller, Denied, caller
from e2e.cluster import MERGE, Cluster, Options, Refused, binaries, fake, kuberay
from live_pool import LivePool, phone, ready, stays, uids
from live_run import SMALL, LiveRun, pool_source
from operator_process import Ground, Operator, label
from operators_part import RUN_FILES, made, pods_of, ray_job, seen, written

from tapforge_api import load
from tapforge_api.gpus import gpus_offered
from tapforge_operator import labels as wellknown
from tapforge_operator.trainingrun.rayjob import RUN_KEY

ROOT = Path(__file__).parents[2]
CRDS = sorted((ROOT / "crds").glob("*.yaml"))
SAFE = {"storage": {"volumeClaim": {"claimName": "lasting"}}}
OWN = {"environment": {"source": {"ownPool": {"slots": 2, "spec": {"replicas": 2, "template": phone()}}}}}
Space = str


@pytest.fixture(scope="module")
def cluster(addons: None) -> Iterator[Cluster]:
    """One of this file's own: the others' knows no RayJobs."""
    with Cluster(Options(nodes=3, qps=200)) as up:
        up.apply(*CRDS)
        up.wait_kinds()
        yield up


@pytest.fixture(scope="module")
def ray_kinds(cluster: Cluster) -> None:
    kuberay.install(cluster)


@pytest.fixture
def space(cluster: Cluster, space: str, request: pytest.FixtureRequest) -> str:
    """With a volume for checkpoints, and with KubeRay's kinds in the cluster, unless the test brings them."""
    if "absent" not in request.node.name:
        request.getfixturevalue("ray_kinds")
    _claim_volume(cluster, space, "lasting", "ReadWriteMany")
    return space


def _claim_volume(cluster: Cluster, space: Space, name: str, mode: str) -> None:
    claim = {
        "metadata": {"name": name},
        "spec": {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}},
    }
    cluster.api("POST", f"/api/v1/namespaces/{space}/persistentvolumeclaims", claim)


def test_absent_kuberay_and_one_that_is_too_old_are_named_and_waited_for(
    cluster: Cluster, ground: Ground, space: Space, operator: Operator, request: pytest.FixtureRequest
) -> None:
    """First: afterwards KubeRay's kinds are there, and the operator knows so in all its namespaces. Before, they
    are those of a release that is too old."""
    run = LiveRun(cluster, space)
    run.wait("word of it", lambda: run.says("Stalled", "True", "KubeRayMissing"))
    assert "install KubeRay" in run.status()["message"]

    # One that knows no token authentication would make a Ray cluster that takes work from anybody.
    kind = yaml.safe_load((binaries.ensure(of=binaries.kuberay()).parent / "crds" / "ray.io_rayjobs.yaml").read_text())
    older = copy.deepcopy(kind)
    for version in older["spec"]["versions"]:
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        spec["rayClusterSpec"]["properties"].pop("authOptions", None)
    kinds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    made = cluster.api("POST", kinds, older)
    run.wait("word of it", lambda: run.says("Stalled", "True", "KubeRayTooOld"))
    assert "upgrade KubeRay to 1.5.1" in run.status()["message"] and not run.jobs()
    kind["metadata"]["resourceVersion"] = cluster.api("GET", f"{kinds}/{made['metadata']['name']}")["metadata"][
        "resourceVersion"
    ]
    cluster.api("PUT", f"{kinds}/{made['metadata']['name']}", kind)
    request.getfixturevalue("ray_kinds")
    run.wait_job()
    run.wait("the status to say so", lambda: run.says("Stalled", "False"))
    everywhere = [f"runs: RayJobs can be made (in namespace {each})" for each in ground.spaces]
    run.wait("the other namespaces", lambda: {*everywhere} <= {one.message for one in operator.records()})


def test_a_run_waits_for_the_label_of_its_namespace(
    cluster: Cluster, ground: Ground, space: Space, operator: Operator
) -> None:
    label(cluster, ground.own, space, "")
    head = {"template": {"spec": {"containers": [{"name": "ray", "securityContext": {"privileged": True}}]}}}
    runs = LiveRun(cluster, space), LiveRun(cluster, space, "host", cluster={**SMALL, "head": head})
    for run in runs:
        run.wait("word of it", lambda run=run: run.says("Stalled", "True", "NamespaceNotEnabled"))
        assert f"kubectl label namespace {space} tapforge.dev/workloads=enabled" in run.status()["message"]
    label(cluster, ground.own, space, "enabled")
    runs[0].wait_job()
    wanted = f"kubectl label --overwrite namespace {space} tapforge.dev/workloads=privileged"
    runs[1].wait("word of the host", lambda: wanted in runs[1].status()["message"])
    assert not runs[1].jobs()
    label(cluster, ground.own, space, "privileged")
    runs[1].wait_job()


# --- from begin to end ------------------------------------------------------------------------------------------------


def test_a_run_goes_from_its_file_to_complete(cluster: Cluster, space: Space, operator: Operator) -> None:
    run = LiveRun(cluster, space, checkpoints=SAFE, **pool_source())
    run.wait_ready("False", "PoolNotFound")
    pool = LivePool(cluster, space, replicas=2)
    job = run.wait_job()
    # By the Pods: the pool's status may be a moment behind what the operator knows of them.
    assert any(ready(pod) for pod in pool.pods()), "the machines wait for phones"
    written = load(run.config()["data"][RUN_KEY])
    assert written.metadata.name == "run" and run.config()["immutable"] is True
    run.runs()
    driver = run.driver(operator)
    assert driver.report(update=3).stop == ""
    driver.report(update=4, checkpoint={"update": 4, "path": "/storage/4"})
    assert run.status()["checkpoint"]["update"] == 4, "answered when it stands in the status"
    columns = cluster.kubectl("get", "trainingruns", "run", "-n", space).stdout.splitlines()
    assert columns[0].split() == ["NAME", "STATUS", "UPDATE", "SUCCESS", "PHONES", "AGE"]
    assert columns[1].split()[:5] == ["run", "Running", "4", "0.5", "1"]
    driver.report(update=10, final="complete")
    assert run.status()["progress"]["update"] == 10
    run.kuberay_says(1, "SUCCEEDED", "Complete")
    done = run.wait_ready("True", "Complete")
    assert run.says("Complete", "True") and run.says("Failed", "False") and done["completionTime"]
    run.wait("its last word", lambda: told(run, "Complete") or untold(run, operator))
    words = [reason for reason, _ in run.events() if reason != "WaitingForPhones"]  # it may not have to
    all_of_it = ["PoolNotFound", "Starting", "AttemptStarted", "Running", "Finishing", "Complete"]
    assert words == [word for word in all_of_it if word in words or not untold(run, operator)]
    assert run.attempts() == [1] and run.jobs()[0]["spec"] == job["spec"], "made once, never written again"


def test_a_run_brings_its_own_pool_and_takes_everything_with_it(
    cluster: Cluster, space: Space, operator: Operator
) -> None:
    run = LiveRun(cluster, space, checkpoints=SAFE, **OWN)
    run.wait_job()
    pools = f"/apis/tapforge.dev/v1alpha1/namespaces/{space}/emulatorpools"
    pool = cluster.api("GET", f"{pools}/run")
    assert pool["metadata"]["ownerReferences"][0]["uid"] == run.uid and pool["spec"]["replicas"] == 2
    source = load(run.config()["data"][RUN_KEY]).spec.environment.source
    assert source.pool is not None and (source.pool.name, source.pool.slots) == ("run", 2)
    run.runs()
    claims = run.driver(operator).caller.acquire("run", slots=2, waitSeconds=120)
    assert claims, "a Pod of the run may claim its own pool's phones"
    run.delete()

    def left() -> list[str]:
        mine = f"labelSelector={wellknown.RUN_UID}%3D{run.uid}"
        kinds = [
            f"/api/v1/namespaces/{space}/configmaps",
            f"/apis/ray.io/v1/namespaces/{space}/rayjobs",
            f"/apis/networking.k8s.io/v1/namespaces/{space}/networkpolicies",
            pools,
        ]
        found = [thing["metadata"]["name"] for kind in kinds for thing in cluster.api("GET", f"{kind}?{mine}")["items"]]
        pods = cluster.api("GET", f"/api/v1/namespaces/{space}/pods")["items"]
        return found + [pod["metadata"]["name"] for pod in pods]

    cluster.wait_for("nothing to be left", lambda: left() == [])


def test_pods_of_a_run_are_let_in_where_none_may_be_root(cluster: Cluster, space: Space, operator: Operator) -> None:
    enforced = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    cluster.api("PATCH", f"/api/v1/namespaces/{space}", enforced, MERGE)
    groups = {"image": "trainer:1", "workers": [{"name": "gpu"}]}
    spec = LiveRun(cluster, space, checkpoints=SAFE, cluster=groups).wait_job()["spec"]
    ray = spec["rayClusterSpec"]
    for group, template in {
        "head": ray["headGroupSpec"]["template"],
        "worker": ray["workerGroupSpecs"][0]["template"],
        "submitter": spec["submitterPodTemplate"],
    }.items():
        pod = {**template, "metadata": {**template["metadata"], "name": group}}
        cluster.api("POST", f"/api/v1/namespaces/{space}/pods?dryRun=All", pod)
    # Who reaches them: as it was written, so that it is not written again at each look.
    (policy,) = cluster.api("GET", f"/apis/networking.k8s.io/v1/namespaces/{space}/networkpolicies")["items"]
    peers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
    assert policy["metadata"]["generation"] == 1 and len(peers) == 4


def test_the_driver_of_a_run_that_is_deleted_waits_for_no_status(
    cluster: Cluster, space: Space, operator: Operator
) -> None:
    run = LiveRun(cluster, space, checkpoints=SAFE)
    run.runs()
    driver = run.driver(operator)
    driver.report(update=2)
    cluster.api("PATCH", run.path, {"metadata": {"finalizers": ["example.com/kept-for-now"]}}, MERGE)
    run.delete()
    for update in (3, 4):  # it may not have been seen at once
        driver.report(update=update, final="stopped", checkpoint={"update": update, "path": f"/storage/{update}"})
    cluster.api("PATCH", run.path, {"metadata": {"finalizers": None}}, MERGE)
    run.wait("its end", lambda: not cluster.exists(run.path))


def test_an_own_pool_goes_with_the_end_of_its_run(cluster: Cluster, space: Space, operator: Operator) -> None:
    run = LiveRun(cluster, space, checkpoints=SAFE, **OWN)
    run.runs()
    run.kuberay_says(1, "FAILED", "Failed", reason="AppFailed", message="exit code 1, last logs:\nno such suite")
    run.wait("Failed", lambda: run.says("Failed", "True", "DriverFailed"))
    assert "no such suite" in run.status()["message"] and run.says("Stalled", "True", "DriverFailed")
    pool = f"/apis/tapforge.dev/v1alpha1/namespaces/{space}/emulatorpools/run"
    run.wait("its pool to go", lambda: not cluster.exists(pool))
    assert run.attempts() == [1], "its RayJob and the logs of its Pods stay"


def test_a_name_at_the_limit_fits_everywhere(cluster: Cluster, space: Space, operator: Operator) -> None:
    name = "a" + "-b23456789" * 4 + "-c"
    assert len(name) == 43
    run = LiveRun(cluster, space, name, cluster={**SMALL, "backoffLimit": 1}, checkpoints=SAFE, **OWN)
    run.runs()
    cluster.api("DELETE", run.job_path(1))
    assert run.wait_job(2)["metadata"]["name"] == f"{name}-2"
    with pytest.raises(Refused, match=r"metadata.name.*43"):
        LiveRun(cluster, space, f"{name}d")
    with pytest.raises(Refused, match="must begin with a letter"):
        LiveRun(cluster, space, "1st")


def test_a_run_that_is_made_again_begins_anew(cluster: Cluster, space: Space, operator: Operator) -> None:
    first = LiveRun(cluster, space, checkpoints=SAFE)
    first.runs()
    first.kuberay_says(1, "SUCCEEDED", "Complete")
    done = first.wait_ready("True", "Complete")
    again = {k: v for k, v in first.object().items() if k in ("apiVersion", "kind", "spec")}
    cluster.apply({**again, "metadata": {"name": "run", "namespace": space, "labels": {"applied": "again"}}})
    stays("applied again, a finished run stays so", lambda: first.status() == done and first.attempts() == [1])
    first.delete()
    first.wait("its end", lambda: not cluster.exists(first.path))
    second = LiveRun(cluster, space, checkpoints=SAFE)
    job = second.wait_job()
    env = {e["name"]: e.get("value") for e in _head(job)["containers"][0]["env"]}
    assert env["TAPFORGE_STORAGE"] == f"/var/lib/tapforge/storage/{space}/{second.uid}" and second.uid != first.uid
    assert env["TAPFORGE_ATTEMPT"] == "1"


def _head(job: dict) -> dict:
    return job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]


# --- suspended, lost, restarted ---------------------------------------------------------------------------------------


def test_a_run_is_suspended_and_goes_on(cluster: Cluster, space: Space, operator: Operator) -> None:
    run = LiveRun(cluster, space, checkpoints=SAFE)
    run.runs()
    driver = run.driver(operator)
    assert driver.report(update=2).stop == ""
    run.edit(suspend=True)
    run.wait_ready("False", "Stopping")
    # What the driver is told is settled a moment after the status says so.
    run.wait("the order", lambda: driver.report(update=2).stop)
    orders = driver.report(update=2)
    assert orders.stop == "suspend" and 0 < orders.grace_seconds <= 60
    driver.report(update=3, final="stopped", checkpoint={"update": 3, "path": "/storage/3"})
    status = run.wait_ready("True", "Suspended")
    assert run.jobs() == [] and status["rayJob"] == "" and "update 3" in status["message"]
    assert run.says("Suspended", "True") and status["lostClusters"] == 0
    with pytest.raises(Refused, match="can't be changed after the run's start"):
        run.edit(seed=5)
    run.edit(suspend=False, stop={"maxUpdates": 5})
    run.runs(2)
    limits = run.driver(operator, 2).report(update=3).limits
    assert limits is not None and limits.max_updates == 5
    run.wait("word of both", lambda: told(run, "AttemptStarted") == 2 or untold(run, operator))


def test_a_lost_cluster_is_followed_by_another_attempt(cluster: Cluster, space: Space, operator: Operator) -> None:
    run = LiveRun(cluster, space, cluster={**SMALL, "backoffLimit": 1}, checkpoints=SAFE)
    run.runs()
    old = run.driver(operator)
    old.report(update=2)
    first = run.config()
    cluster.api("DELETE", f"/api/v1/namespaces/{space}/configmaps/{first['metadata']['name']}")
    run.kuberay_says(1, "RUNNING", "Failed", reason="SubmissionFailed", message="BackoffLimitExceeded")
    run.wait("the loss to be counted", lambda: run.status()["lostClusters"] == 1)
    run.runs(2)
    assert run.attempts() == [2], "the first one is gone"
    again = run.config()
    assert again["data"] == first["data"] and again["metadata"]["uid"] != first["metadata"]["uid"]
    assert old.attempt == 1 and run.driver(operator, 2).report(update=2, attempt=1).stop == "superseded"
    run.kuberay_says(2, "FAILED", "Failed", reason="AppFailed", message="The actor died unexpectedly")
    run.wait("Failed", lambda: run.says("Failed", "True", "BackoffLimitExceeded"))
    assert "The actor died" in run.status()["message"]
    run.wait("word of both", lambda: told(run, "ClusterLost") == 2 or untold(run, operator))


def test_a_started_run_is_built_from_what_it_was_started_with(
    cluster: Cluster, ground: Ground, space: Space, operator: Operator
) -> None:
    """Exchanging one field that the CRD doesn't know for another is refused by the policies; where they were left out,
    it changes nothing."""
    swapped = {**SMALL, "backoffLimit": 1, "head": {"template": {"spec": {"hostNetwork": True}}}}
    spec = {**swapped, "head": {"template": {"spec": {"nodeSelector": {"pool": "a"}}}}}
    run = LiveRun(cluster, space, cluster=spec, checkpoints=SAFE, **OWN)
    run.runs()
    run.wait("the policy", lambda: _refuses(lambda: run.edit(cluster=swapped), "started-runs.*spec.cluster cannot be"))
    pool = f"/apis/tapforge.dev/v1alpha1/namespaces/{space}/emulatorpools/run"
    (phones,) = cluster.api("GET", pool)["spec"]["template"]["spec"]["containers"]
    other = {"spec": {"template": {"spec": {"containers": [{**phones, "image": "other:1"}]}}}}
    run.wait("the other one", lambda: _refuses(lambda: cluster.api("PATCH", pool, other, MERGE), "pools-of-runs"))
    cluster.api("PATCH", pool, {"spec": {"replicas": 1}}, MERGE)
    run.edit(stop={"maxUpdates": 9})

    bindings = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
    cluster.api("DELETE", f"{bindings}/started-runs.tapforge.dev.{ground.own}")
    run.wait("the end of the policy", lambda: not _refuses(lambda: run.edit(cluster=swapped), "started-runs"))
    assert run.object()["spec"]["cluster"]["head"]["template"]["spec"] == {"hostNetwork": True}
    run.wait("word of it", lambda: run.says("SpecChanged", "True", "Ignored"))
    assert "head.template.spec.nodeSelector" in run.condition("SpecChanged")["message"]
    operator.restart()
    run.kuberay_says(1, "RUNNING", "Failed", reason="SubmissionFailed", message="BackoffLimitExceeded")
    run.runs(2)
    made = _head(run.wait_job(2))
    assert made["nodeSelector"] == {"pool": "a"} and "hostNetwork" not in made

    name = run.config()["metadata"]["name"]
    operator.stop()
    cluster.api("DELETE", f"/api/v1/namespaces/{space}/configmaps/{name}")
    operator.start().wait_ready()
    run.edit(suspend=True)
    driver = run.driver(operator, 2)
    run.wait("the order", lambda: driver.report(update=2).stop)
    driver.report(update=2, final="stopped")
    run.wait_ready("True", "Suspended")
    run.edit(suspend=False)
    run.wait("word of it", lambda: run.says("Stalled", "True", "TemplatesLost"))
    run.edit(cluster=spec)
    assert _head(run.wait_job(3))["nodeSelector"] == {"pool": "a"}
    run.wait("the end of the condition", lambda: run.condition("SpecChanged") == {})


def _refuses(edit: Callable[[], object], words: str) -> bool:
    """It takes a moment until the API server goes by a policy, or no longer does."""
    try:
        edit()
    except Refused as error:
        return re.search(words, str(error)) is not None
    return False


def test_a_head_that_is_evicted_costs_the_run_nothing(cluster: Cluster, space: Space, operator: Operator) -> None:
    """Its Pod is gone within a moment, long before anybody says what became of the attempt."""
    run = LiveRun(cluster, space, cluster={**SMALL, "backoffLimit": 0}, checkpoints=SAFE)
    run.runs()
    run.driver(operator).report(update=2)
    pod = f"/api/v1/namespaces/{space}/pods/run-1-head"
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "run-1-head", "namespace": space}}
    cluster.api("POST", f"{pod}/eviction", eviction)
    run.wait("it to be put down", lambda: run.status()["attempt"]["disruption"] == "EvictionByEvictionAPI")
    cluster.wait_for("the Pod to be gone", lambda: not cluster.exists(pod))
    assert run.says("Ready", "True", "Running")
    operator.restart()
    run.kuberay_says(1, "RUNNING", "Failed", reason="SubmissionFailed", message="BackoffLimitExceeded")
    run.runs(2)
    status = run.status()
    assert (status["disruptions"], status["lostClusters"], status["failures"]) == (1, 0, 0)
    run.wait("word of it", lambda: told(run, "Disrupted") == 1 or untold(run, operator))


def told(run: LiveRun, reason: str) -> int:
    return [said for said, _ in run.events()].count(reason)


def untold(run: LiveRun, operator: Operator) -> bool:
    """Events about it may be missing: what the API server didn't take in time is not sent again, and the log says so.
    Nor are those of a status whose write was not answered."""
    event, status = "an Event could not be written", f"run {run.namespace}/{run.name}: "
    mine = [one.message for one in operator.records() if one.object.get("namespace") == run.namespace]
    return any(event in line or (status in line and "it is tried again" in line) for line in mine)


def test_a_restarted_operator_takes_up_the_run_where_it_is(cluster: Cluster, space: Space, operator: Operator) -> None:
    run = LiveRun(cluster, space, checkpoints=SAFE)
    job = run.wait_job()
    operator.restart()
    run.runs()
    driver = run.driver(operator)
    driver.report(update=6, checkpoint={"update": 6, "path": "/storage/6"})
    before = run.status()
    assert before["progress"]["update"] == 6
    operator.restart()
    driver.report(update=6)
    stays("nothing is begun again", lambda: run.attempts() == [1] and run.status()["attempts"] == 1)
    assert run.status()["resolved"] == before["resolved"]
    assert run.jobs()[0]["metadata"]["uid"] == job["metadata"]["uid"]


@pytest.fixture
def newer_kinds(cluster: Cluster) -> Iterator[None]:
    """The kinds of the next release, which a rollback of the operator leaves in the cluster."""
    kinds = [yaml.safe_load(file.read_text()) for file in CRDS]
    for kind in kinds:
        for version in kind["spec"]["versions"]:
            next_release.allow(version["schema"]["openAPIV3Schema"]["properties"]["status"])
    cluster.apply(*kinds)
    yield
    cluster.apply(*CRDS)


def test_a_rollback_of_the_operator_begins_nothing_again(
    cluster: Cluster, ground: Ground, space: Space, operator: Operator, newer_kinds: None
) -> None:
    """The next release has led, and written a field more into every struct of the statuses, when a replica of this one
    leads that an upgrade had not yet exchanged or a rollback has brought back."""
    # Before there is anything to begin: what this one had begun, the next would count as an attempt of its own.
    operator.stop()
    pool = LivePool(cluster, space, replicas=2)
    done, active = LiveRun(cluster, space, "done"), LiveRun(cluster, space, "active", checkpoints=SAFE, **pool_source())
    for thing in (pool, done):
        thing.wait("the newer kinds", lambda path=thing.path: _takes_newer(cluster, path))
    program = (str(Path(__file__).with_name("next_release.py")),)
    later = Operator(cluster, ground.own, ground.spaces, identity="operator-1", program=program).start().wait_ready()
    try:
        done.runs()
        done.driver(later).report(update=9, final="complete")
        done.kuberay_says(1, "SUCCEEDED", "Complete")
        active.runs()
        active.kuberay_says(1, "RUNNING", "Failed", reason="SubmissionFailed", message="BackoffLimitExceeded")
        active.runs(2)
        driver = active.driver(later, 2)
        driver.report(update=3, checkpoint={"update": 3, "path": "/storage/3"})
        pool.annotate(pool.pods()[0]["metadata"]["name"], {fake.EXIT: "1"})
        pool.wait("its successor", lambda: pool.status()["replacedTotal"] == 1 and pool.status()["ready"] == 2)
        done.wait_ready("True", "Complete")
        cluster.api("DELETE", done.job_path())
        done.wait("the end of its RayJob", lambda: not done.attempts())
        operator.start().wait_ready(leads=False)
    finally:
        later.stop()
        if not cluster.running(operator.name):  # the tests after this one need it
            operator.start()
    operator.wait_ready()

    driver.caller = Caller(operator, space, driver.caller.token)
    driver.report(update=4, checkpoint={"update": 4, "path": "/storage/4"})
    status = active.status()
    assert (status["attempts"], status["attempt"]["number"], status["lostClusters"]) == (2, 2, 1)
    assert status["checkpoint"]["update"] == 4 and active.attempts() == [2]
    written = {"since": "then"}
    assert written == status["later"] == status["attempt"]["later"] == status["checkpoint"]["later"], (
        "left as they were"
    )
    spent = pool.status()["sickReplacements"]
    assert spent[0]["slots"] == 1 and spent[0]["later"] == written, "no news"
    pool.edit(replicas=3)
    pool.wait_ready(3)
    assert pool.status()["replacedTotal"] == 1 and pool.status()["later"] == written
    assert [(r["time"], r["slots"]) for r in pool.status()["sickReplacements"]] == [(spent[0]["time"], 1)]
    stays("a finished run begins again", lambda: not done.attempts() and done.says("Ready", "True", "Complete"))
    assert done.status()["attempts"] == 1


def _takes_newer(cluster: Cluster, path: str) -> bool:
    """The API server needs a moment to take a schema over."""
    said = cluster.api("PATCH", f"{path}/status?dryRun=All", {"status": {next_release.FIELD: {"since": "now"}}}, MERGE)
    return next_release.FIELD in said["status"]


def test_a_queue_may_edit_the_rayjob(cluster: Cluster, space: Space, operator: Operator) -> None:
    run = LiveRun(cluster, space, labels={"kueue.x-k8s.io/queue-name": "gpus", "team": "a"}, checkpoints=SAFE)
    labels = run.wait_job()["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "gpus" and "team" not in labels
    cluster.api("PATCH", run.job_path(), {"spec": {"suspend": True}}, MERGE)
    run.kuberay_says(1, "", "Suspended")
    run.wait_ready("False", "Queued")
    assert run.says("Suspended", "True", "Queued") and run.says("Reconciling", "True")
    head = {"headGroupSpec": {"template": {"spec": {"nodeSelector": {"gpu": "a100"}}}}}
    cluster.api("PATCH", run.job_path(), {"spec": {"suspend": False, "rayClusterSpec": head}}, MERGE)
    run.runs()
    run.driver(operator)  # whoever looks for the head of a driver that is silent for so long finds it
    operator.restart()
    run.edit(stop={"maxUpdates": 3})
    run.wait("the operator to have seen it", lambda: run.says("Ready", "True", "Running"))
    job = run.wait_job()
    assert _head(job)["nodeSelector"] == {"gpu": "a100"} and job["spec"]["suspend"] is False
    assert run.status()["lostClusters"] == 0


# --- its phones -------------------------------------------------------------------------------------------------------


def test_an_idle_pool_has_no_slots_and_wakes_for_runs_that_can_use_them(
    cluster: Cluster, space: Space, operator: Operator
) -> None:
    scaling = {"minReplicas": 0, "maxReplicas": 5, "warmSpares": 1, "idleSeconds": 3}
    pool = LivePool(cluster, space, scaling=scaling)
    pool.wait("its status", lambda: pool.says("Ready", "True"))
    assert pool.pods() == [] and pool.status()["desiredReplicas"] == 0
    small = LiveRun(cluster, space, "small", **pool_source(slots=2))
    few = uids(pool.wait_ready(3))
    large = LiveRun(cluster, space, "large", **pool_source(slots=9))
    assert set(few) < set(uids(pool.wait_ready(5))), "maxReplicas"
    large.delete()
    pool.wait_ready(3)

    # A run that a queue holds, one that needs a person and one that is suspended have nothing of phones.
    small.wait_job()
    cluster.api("PATCH", small.job_path(), {"spec": {"suspend": True}}, MERGE)
    small.kuberay_says(1, "", "Suspended")
    small.wait_ready("False", "Queued")
    stalled = LiveRun(cluster, space, "stalled", cluster={**SMALL, "minReadySlots": 9}, **pool_source(slots=9))
    stalled.wait("word of it", lambda: stalled.says("Stalled", "True", "PoolTooSmall"))
    pool.wait("nobody to need it", lambda: pool.all_pods() == [])
    cluster.api("PATCH", small.job_path(), {"spec": {"suspend": False}}, MERGE)
    small.runs()
    pool.wait_ready(3)
    small.edit(suspend=True)
    pool.wait("nobody to need it", lambda: pool.all_pods() == [])
    assert pool.status()["lastFailures"] == []


def test_a_run_waits_for_phones_that_others_keep_and_gets_no_more_than_its_spec_says(
    cluster: Cluster, space: Space, operator: Operator
) -> None:
    pool = LivePool(cluster, space, replicas=3)
    pool.wait_ready(3)
    other = caller(operator, space)
    kept = other.acquire(slots=3, priority=5, ttlSeconds=600)
    assert len(kept) == 3
    pool.wait("the claims to be counted", lambda: pool.status()["claimed"] == 3)
    run = LiveRun(cluster, space, cluster={**SMALL, "minReadySlots": 2}, **pool_source(slots=2))
    run.wait_ready("False", "WaitingForPhones")
    assert "0 of 2 phones" in run.status()["message"] and "3 are claimed by others" in run.status()["message"]
    other.release(*kept)
    driver = run.driver(operator)
    assert len(driver.caller.acquire(slots=3, priority=900, waitSeconds=60)) == 2
    assert driver.caller.acquire(slots=1, priority=900, waitSeconds=1) == []
    assert len(other.acquire(slots=3)) == 1
    pool.wait("the claims to be counted", lambda: pool.status()["claimed"] == 3)
    equal = LiveRun(cluster, space, "equal", **pool_source(slots=2))
    equal.wait_job()


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_a_volume_for_one_node_is_refused_for_several(cluster: Cluster, space: Space, operator: Operator) -> None:
    _claim_volume(cluster, space, "disk", "ReadWriteOnce")
    workers = [{"name": "gpu", "replicas": 2}]
    checkpoints = {"storage": {"volumeClaim": {"claimName": "disk"}}}
    run = LiveRun(cluster, space, cluster={**SMALL, "workers": workers}, checkpoints=checkpoints)
    run.wait("word of it", lambda: run.says("Stalled", "True", "VolumeNotShared"))
    assert "3 Ray Pods" in run.status()["message"] and run.jobs() == []
    run.edit(cluster=SMALL)
    assert _head(run.wait_job())["volumes"][-1]["name"] in ("tapforge-run", "tapforge-storage", "tapforge-broker")


def test_a_template_that_no_rayjob_can_have_is_put_right_before_the_start(
    cluster: Cluster, space: Space, operator: Operator
) -> None:
    ray = {"name": "ray", "resources": {"limits": {"cpu": "many"}}}
    wrong = {**SMALL, "head": {"template": {"spec": {"containers": [ray]}}}}
    run = LiveRun(cluster, space, cluster=wrong)
    run.wait("word of it", lambda: run.says("Stalled", "True", "Invalid"))
    assert "many" in run.status()["message"] or "cpu" in run.status()["message"]
    assert run.status()["startTime"] == "", "nothing has begun: everything may still be edited"
    run.edit(cluster=SMALL)
    run.wait_job()


def test_a_field_that_no_ray_pod_has_is_named(cluster: Cluster, space: Space, operator: Operator) -> None:
    """The API server would leave it out of the RayJob without a word."""
    wrong = {**SMALL, "head": {"template": {"spec": {"nodeSelektor": {"gpu": "a100"}}}}}
    run = LiveRun(cluster, space, cluster=wrong)
    run.wait("word of it", lambda: run.says("Stalled", "True", "Invalid"))
    assert "nodeSelektor" in run.status()["message"] and run.jobs() == []
    run.edit(cluster=SMALL)
    run.wait_job()


def test_a_quota_holds_the_run_until_it_is_raised(cluster: Cluster, space: Space, operator: Operator) -> None:
    cluster.kubectl("create", "quota", "few", "--hard=count/rayjobs.ray.io=0", "-n", space)
    used = f"/api/v1/namespaces/{space}/resourcequotas/few"
    cluster.wait_for("the quota to be counted", lambda: "used" in cluster.api("GET", used)["status"])
    run = LiveRun(cluster, space)
    run.wait_ready("False", "QuotaExceeded")
    assert run.says("Stalled", "False"), "it may pass by itself"
    cluster.kubectl("delete", "quota", "few", "-n", space)
    run.wait_job()


def test_ray_pods_without_a_node_say_what_they_lack(cluster: Cluster, space: Space, operator: Operator) -> None:
    run = LiveRun(cluster, space)
    job = run.wait_job()
    run.kuberay_says(1, "", "Initializing")
    pod = {
        "metadata": {
            "name": "run-1-head",
            "labels": {
                wellknown.RUN_UID: run.uid,
                wellknown.ATTEMPT: "1",
                "ray.io/group": "headgroup",
                "ray.io/node-type": "head",
            },
        },
        "spec": {**_head(job), "volumes": []},
    }
    container = pod["spec"]["containers"][0]
    container["volumeMounts"], container["resources"] = [], {"limits": {"nvidia.com/gpu": "8"}}
    cluster.api("POST", f"/api/v1/namespaces/{space}/pods", pod)
    run.wait_ready("False", "Unschedulable")
    assert "nvidia.com/gpu" in run.status()["message"] and "headgroup" in run.status()["message"]


def test_a_foreign_pool_under_the_runs_name_is_left_alone(cluster: Cluster, space: Space, operator: Operator) -> None:
    pool = LivePool(cluster, space, "run")
    run = LiveRun(cluster, space, **OWN)
    run.wait("word of it", lambda: run.says("Stalled", "True", "PoolNameTaken"))
    run.delete()
    run.wait("its end", lambda: not cluster.exists(run.path))
    stays("the pool is somebody else's", lambda: pool.object()["metadata"]["uid"] == pool.uid)


def test_only_the_runs_own_pods_report_for_it(cluster: Cluster, space: Space, operator: Operator) -> None:
    one, two = (LiveRun(cluster, space, name) for name in ("one", "two"))
    driver = one.driver(operator)
    two.wait_job()
    with pytest.raises(Denied) as caught:
        driver.report(run="two")
    assert caught.value.status == 403 and "TrainingRun two" in caught.value.message
    with pytest.raises(Denied) as caught:
        driver.report(run="three")
    assert caught.value.status == 403
    with pytest.raises(Denied) as caught:
        driver.report(attempt=2, patience=0)
    assert caught.value.status == 503, "an attempt that nobody has begun"
    with pytest.raises(Denied) as caught:
        driver.report(checkpoint={"update": -1, "path": "x"})
    assert caught.value.status == 400
    assert driver.report().stop == ""


# --- what comes with it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((ROOT / "manifests" / "samples").glob("run-*.yaml")), ids=lambda f: f.stem)
def test_the_samples_are_taken(cluster: Cluster, space: Space, file: Path) -> None:
    cluster.kubectl("apply", "--server-side", "--dry-run=server", "-n", space, "-f", str(file))
    kinds = [document["kind"] for document in yaml.safe_load_all(file.read_text())]
    assert "TrainingRun" in kinds


@pytest.mark.parametrize("version", sorted(binaries.KUBERAY), ids=lambda version: version or "usual")
def test_every_kuberay_knows_every_field_of_a_rayjob(
    cluster: Cluster, space: Space, ray_kinds: None, version: str
) -> None:
    """`trainingrun.rayjob` -> RayJobs' schema, strictly, for every sample and for a run that says all that a run can.
    KubeRay of the other version is there under another group, so that this file's tests keep theirs."""
    group = "ray.io"
    if (sources := binaries.KUBERAY[version]) is not binaries.kuberay():
        group = f"{version or 'usual'}.example.com"
        kind = yaml.safe_load((binaries.carried(sources, "crds") / "ray.io_rayjobs.yaml").read_text())
        kind["metadata"]["name"], kind["spec"]["group"] = f"rayjobs.{group}", group
        cluster.api("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", kind)
    place = f"/apis/{group}/v1/namespaces/{space}/rayjobs"
    cluster.wait_for("RayJobs", lambda: cluster.exists(place))
    for run in (*map(written, RUN_FILES), made(EVERYTHING)):
        if run.spec.cluster is None:
            continue
        job = {**ray_job(seen(run, space)), "apiVersion": f"{group}/v1"}
        taken = cluster.api("POST", f"{place}?dryRun=All&fieldValidation=Strict", job)
        assert taken["spec"]["entrypoint"] == job["spec"]["entrypoint"]
        for name, template in pods_of(job).items():
            assert pods_of(taken)[name]["spec"].items() >= template["spec"].items(), "nothing was pruned"
    wrong = {**job, "spec": {**job["spec"], "noSuchField": 1}}
    with pytest.raises(Refused, match="noSuchField"):
        cluster.api("POST", f"{place}?dryRun=All&fieldValidation=Strict", wrong)


#: what makes the operator write something into a RayJob
EVERYTHING = {
    "checkpoints": {"storage": {"volumeClaim": {"claimName": "lasting", "subPath": "runs"}}},
    "cluster": {
        "image": "trainer:1",
        "suspendGraceSeconds": 90,
        "driverRestarts": 0,
        "head": {
            "rayStartParams": {"num-cpus": "0"},
            "template": {
                "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
                "spec": {
                    "serviceAccountName": "trainer",
                    "containers": [
                        {
                            "name": "ray",
                            "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
                            "resources": {"limits": {"nvidia.com/gpu": "1"}, "claims": [{"name": "nic"}]},
                            "securityContext": {"readOnlyRootFilesystem": True},
                            "lifecycle": {"postStart": {"exec": {"command": ["a"]}}},
                        },
                        {"name": "judge", "image": "judge:1"},
                    ],
                    "initContainers": [{"name": "wait", "image": "wait:1"}],
                    "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "rdma"}],
                },
            },
        },
        "workers": [{"name": "gpu", "replicas": 2, "template": {"spec": {"tolerations": [{"operator": "Exists"}]}}}],
        "submitter": {"template": {"spec": {"schedulerName": "gang"}}},
    },
}

GPUS = {"name": "ray", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
JUDGE = {"name": "judge", "image": "judge:1", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
WORKERS = [
    {
        "name": "gpu",
        "replicas": 2,
        "rayStartParams": {"num-cpus": "1"},
        "template": {"spec": {"containers": [JUDGE, GPUS]}},
    },
    {"name": "none", "replicas": 0},
]


def _gpus_of_ray(pod: dict[str, Any]) -> int:
    """As KubeRay tells `ray start` in the Pod."""
    found = re.search(r"--num-gpus=(\d+)", " ".join(pod["spec"]["containers"][0]["args"]))
    return int(found[1]) if found else 0


def test_kuberay_takes_what_is_made(cluster: Cluster, space: Space, operator: Operator) -> None:
    """KubeRay itself, as far as it gets with Pods that only pretend to run."""
    name = "a" + "-b23456789" * 4 + "-c"
    run = LiveRun(cluster, space, name, checkpoints=SAFE, cluster={**SMALL, "workers": WORKERS})
    run.wait_job()
    kuberay.start(cluster)
    try:
        status = run.wait("its Ray cluster", lambda: run.status() if run.status().get("rayCluster") else None)
        pods = f"/api/v1/namespaces/{space}/pods?labelSelector={wellknown.RUN_UID}%3D{run.uid}"
        run.wait("a head and two workers", lambda: len(cluster.api("GET", pods)["items"]) == 3)
        made = cluster.api("GET", f"/apis/ray.io/v1/namespaces/{space}/rayclusters/{status['rayCluster']}")
        assert made["metadata"]["annotations"]["ray.io/disable-provisioned-head-restart"] == "true"
        groups = sorted(pod["metadata"]["labels"]["ray.io/group"] for pod in cluster.api("GET", pods)["items"])
        assert groups == ["gpu", "gpu", "headgroup"]
        spec = load(run.config()["data"][RUN_KEY]).spec.cluster
        assert spec is not None and sorted(gpus_offered(spec)) == sorted(
            map(_gpus_of_ray, cluster.api("GET", pods)["items"])
        )
        job = run.wait_job()
        assert job["status"]["jobDeploymentStatus"] in ("Initializing", "Running"), job["status"]
        assert run.says("Ready", "False") and run.says("Stalled", "False")
        run.edit(suspend=True)
        run.wait_ready("True", "Suspended")
        assert run.jobs() == [], "KubeRay has let go of it"
    finally:
        cluster.stop_component(kuberay.KUBERAY)


@pytest.mark.long
def test_every_command_of_the_runbook_is_answered(
    cluster: Cluster, ground: Ground, space: Space, operator: Operator
) -> None:
    pool, run = LivePool(cluster, space, replicas=2), LiveRun(cluster, space, checkpoints=SAFE, **pool_source())
    run.runs()
    pool.wait("both phones", lambda: pool.status()["ready"] == 2)
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("runbook*.md")))
    blocks = re.findall(r"```sh\n(.*?)```", pages, re.DOTALL)
    commands = {line.split(" | ")[0] for block in blocks for line in block.splitlines()}
    assert len(commands) > 15
    for command in sorted(commands):
        here = command.replace("-n lab", f"-n {space}").replace("-n tapforge-system", f"-n {ground.own}")
        program, *arguments = shlex.split(here)
        assert program == "kubectl"
        cluster.kubectl(*arguments)


def test_the_operator_saw_no_trouble(operator: Operator) -> None:
    """Last: after everything above."""
    assert operator.trouble() == []
