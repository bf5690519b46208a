"""What a run's objects are: every field that somebody else reads, and KubeRay's own rules."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from runs_made import BUCKET, SAFE, UID, Story, made

from tapforge_api import MAX_RUN_NAME, load, load_pool, to_yaml
from tapforge_api.cluster import RAY, SUBMITTER
from tapforge_operator import labels as wellknown
from tapforge_operator.kube.types import observe_ray_job, observe_ray_pod
from tapforge_operator.trainingrun import rayjob
from tapforge_operator.trainingrun.rayjob import Broker, resolve, storage_of
from tapforge_operator.trainingrun.state import MAX_ATTEMPTS, Run, checkpoints_last

BROKER = Broker("https://broker:8443", "CERTIFICATE")


def job_of(run: Run | None = None, number: int = 1) -> dict[str, Any]:
    return rayjob.ray_job(run or made(), number, BROKER)


def pods_of(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Pod templates by group, and the submitter's."""
    cluster = job["spec"]["rayClusterSpec"]
    workers = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], "submitter": job["spec"]["submitterPodTemplate"], **workers}


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in pod["spec"]["containers"][0].get("env", ())}


FULL = {
    "image": "trainer:2",
    "head": {
        "rayStartParams": {"num-cpus": "0"},
        "template": {
            "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
            "spec": {
                "serviceAccountName": "trainer",
                "priorityClassName": "high",
                "imagePullSecrets": [{"name": "pull"}],
                "containers": [
                    {"name": "log", "image": "log:1"},
                    {
                        "name": "ray",
                        "env": [{"name": "A", "value": "1"}, {"name": "TAPFORGE_ATTEMPT", "value": "9"}],
                        "resources": {"limits": {"nvidia.com/gpu": "1"}},
                        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                    },
                ],
                "volumes": [{"name": "tmp", "emptyDir": {}}],
            },
        },
    },
    "workers": [
        {"name": "gpu", "replicas": 3, "template": {"spec": {"tolerations": [{"operator": "Exists"}]}}},
        {"name": "cpu", "replicas": 0},
    ],
    "submitter": {"template": {"spec": {"schedulerName": "gang"}}},
    "driverRestarts": 7,
}


def test_its_ray_cluster_has_no_field_that_the_confinement_policy_refuses() -> None:
    policy = Path(__file__).parents[2] / "manifests" / "components" / "confinement" / "policy.yaml"
    rules = [rule["expression"] for rule in next(yaml.safe_load_all(policy.read_text()))["spec"]["validations"]]
    [admitted] = [ast.literal_eval(found) for rule in rules for found in re.findall(r"field in (\[.*?\])", rule)]
    assert job_of(made(cluster=FULL))["spec"]["rayClusterSpec"].keys() <= set(admitted)


def test_the_driver_finds_what_it_was_promised() -> None:
    pods = pods_of(job_of(made(cluster=FULL, checkpoints=SAFE), 4))
    told = environment(pods["head"])
    assert told == {
        "A": "1",
        "TAPFORGE_RUN": "run",
        "TAPFORGE_NAMESPACE": "team",
        "TAPFORGE_RUN_UID": UID,
        "TAPFORGE_ATTEMPT": "4",
        "TAPFORGE_STORAGE": f"/var/lib/tapforge/storage/team/{UID}",
        "TAPFORGE_STORAGE_LASTS": "true",
        "TAPFORGE_WORK": "/var/lib/tapforge/work",
        "XDG_CACHE_HOME": "/var/lib/tapforge/work/cache",
        "HF_HOME": "/var/lib/tapforge/work/cache/huggingface",
        "TAPFORGE_GRACE_SECONDS": "60",
        "RAY_JOB_STOP_WAIT_TIME_S": "90",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_AUTH_MODE": "token",
        "TAPFORGE_BROKER_URL": "https://broker:8443",
        "TAPFORGE_BROKER_CA": "/var/run/tapforge/broker/ca.crt",
        "TAPFORGE_BROKER_TOKEN_FILE": "/var/run/tapforge/broker/token",
    }
    assert {k: v for k, v in told.items() if "BROKER" not in k and k != "A"} == environment(pods["gpu"])
    assert environment(pods["submitter"]) == {"RAY_AUTH_MODE": "token"}


def test_only_the_head_has_a_token() -> None:
    pods = pods_of(job_of(made(cluster=FULL)))
    volumes = {group: {v["name"]: v for v in pod["spec"].get("volumes", ())} for group, pod in pods.items()}
    assert set(volumes["head"]) == {"tmp", "tapforge-work", "tapforge-broker", "tapforge-run"}
    assert set(volumes["gpu"]) == {"tapforge-work"} and not volumes["submitter"]
    token, ca = volumes["head"]["tapforge-broker"]["projected"]["sources"]
    assert token["serviceAccountToken"]["audience"] == "tapforge.dev/broker"
    assert ca["configMap"]["name"] == rayjob.broker_config_map(made(), BROKER)["metadata"]["name"]
    assert volumes["head"]["tapforge-run"]["configMap"]["name"] == rayjob.config_map(made())["metadata"]["name"]
    mounts = {m["mountPath"] for m in pods["head"]["spec"]["containers"][0]["volumeMounts"]}
    assert mounts == {"/tmp", "/var/lib/tapforge/work", "/var/run/tapforge/broker", "/etc/tapforge/run"}


def test_a_ray_cluster_takes_work_from_holders_of_its_token_only() -> None:
    """KubeRay 1.6 leaves a mode and a token that it finds in a template; those of a run that began before it was
    refused are the operator's afterwards."""
    assert job_of(made(cluster=FULL))["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    given = [{"name": "RAY_AUTH_MODE", "value": "disabled"}, {"name": "RAY_AUTH_TOKEN", "value": "mine"}]
    ray, submitter = ({"template": {"spec": {"containers": [{"name": n, "env": given}]}}} for n in (RAY, SUBMITTER))
    cluster = {"image": "i", "head": ray, "workers": [{"name": "gpu", **ray}], "submitter": submitter}
    for pod in pods_of(job_of(made(cluster=cluster))).values():
        told = environment(pod)
        assert told["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in told


def test_what_the_user_wrote_stands() -> None:
    job = job_of(made(cluster=FULL))
    pods = pods_of(job)
    head = pods["head"]
    assert head["metadata"]["labels"]["team"] == "a" and head["metadata"]["annotations"]["note"] == "b"
    assert head["spec"]["serviceAccountName"] == "trainer" and head["spec"]["priorityClassName"] == "high"
    assert head["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    ray, log = head["spec"]["containers"]
    assert (ray["name"], ray["image"], ray["resources"]) == ("ray", "trainer:2", {"limits": {"nvidia.com/gpu": "1"}})
    assert (log["name"], log["image"]) == ("log", "log:1")
    assert pods["gpu"]["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert pods["submitter"]["spec"]["schedulerName"] == "gang"
    assert job["spec"]["entrypoint"] == "tapforge run -f /etc/tapforge/run/run.yaml --restarts 7"
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [(g["groupName"], g["replicas"], g["minReplicas"], g["maxReplicas"]) for g in groups] == [
        ("gpu", 3, 3, 3),
        ("cpu", 0, 0, 0),
    ]
    assert job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}


def test_autoscalers_are_asked_to_leave_a_runs_pods_where_they_are() -> None:
    leave = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
    for pod in pods_of(job_of(made(cluster=FULL))).values():
        assert leave.items() <= pod["metadata"]["annotations"].items()
    spot = {"template": {"metadata": {"annotations": {"karpenter.sh/do-not-disrupt": "false"}}}}
    head = pods_of(job_of(made(cluster={**FULL, "head": spot})))["head"]
    assert head["metadata"]["annotations"] == {**leave, "karpenter.sh/do-not-disrupt": "false"}


def test_pods_may_do_little_where_nothing_is_said() -> None:
    privileged = {"template": {"spec": {"containers": [{"name": "ray", "securityContext": {"privileged": True}}]}}}
    for group, pod in pods_of(job_of(made(cluster={**FULL, "head": privileged}))).items():
        assert pod["spec"]["restartPolicy"] == "Never" and pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        context = pod["spec"]["containers"][0]["securityContext"]
        if group == "head":
            assert context == {"privileged": True}
        else:
            assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_pods_are_let_in_where_none_may_be_root() -> None:
    """Elsewhere an image of Ray's may be root, which can't be told from its user's name."""
    root = {"template": {"spec": {"containers": [{"name": "ray", "securityContext": {"runAsUser": 0}}]}}}
    run = made(cluster={**FULL, "workers": [{"name": "gpu"}, {"name": "root", **root}]})
    for restricted in (False, True):
        pods = pods_of(rayjob.ray_job(run, 1, BROKER, restricted=restricted))
        said = {
            group: pod["spec"]["containers"][0]["securityContext"].get("runAsNonRoot") for group, pod in pods.items()
        }
        kept = True if restricted else None
        assert said == {"head": kept, "submitter": kept, "gpu": kept, "root": None}


def test_who_adds_a_capability_still_drops_all_others() -> None:
    ray = {"name": "ray", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
    for group in ("head", "submitter"):
        name = {"head": "ray", "submitter": "ray-job-submitter"}[group]
        more = {group: {"template": {"spec": {"containers": [{**ray, "name": name}]}}}}
        (container,) = pods_of(job_of(made(cluster={**FULL, **more})))[group]["spec"]["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
        }


@pytest.mark.parametrize("sub", [None, "runs/a"])
def test_a_volume_is_mounted_wherever_ray_runs(sub: str | None) -> None:
    claim = {"claimName": "disk"} | ({"subPath": sub} if sub else {})
    pods = pods_of(job_of(made(cluster=FULL, checkpoints={"storage": {"volumeClaim": claim}})))
    for group in ("head", "gpu", "cpu"):
        volumes = {v["name"]: v for v in pods[group]["spec"]["volumes"]}
        assert volumes["tapforge-storage"]["persistentVolumeClaim"] == {"claimName": "disk"}
        mounts = {m["mountPath"]: m for m in pods[group]["spec"]["containers"][0]["volumeMounts"]}
        assert mounts["/var/lib/tapforge/storage"].get("subPath") == sub
        assert environment(pods[group])["TAPFORGE_STORAGE"] == f"/var/lib/tapforge/storage/team/{UID}"
    assert "volumes" not in pods["submitter"]["spec"]


def test_what_a_user_says_of_groups_and_caches_stands() -> None:
    pods = pods_of(job_of(made(cluster=FULL, checkpoints=SAFE)))
    for group in ("head", "gpu", "cpu"):
        context = pods[group]["spec"]["securityContext"]
        assert (context["fsGroup"], context["fsGroupChangePolicy"]) == (65532, "OnRootMismatch")
    assert "fsGroup" not in pods["submitter"]["spec"]["securityContext"]
    assert "fsGroup" not in pods_of(job_of(made(cluster=FULL)))["head"]["spec"]["securityContext"]
    ray = {"name": "ray", "env": [{"name": "HF_HOME", "value": "/models"}]}
    template = {"spec": {"containers": [ray], "securityContext": {"fsGroup": 7}}}
    cluster = {"image": "i", "head": {"template": template}}
    head = pods_of(job_of(made(cluster=cluster, checkpoints=SAFE)))["head"]
    assert head["spec"]["securityContext"]["fsGroup"] == 7 and environment(head)["HF_HOME"] == "/models"
    assert environment(head)["XDG_CACHE_HOME"] == "/var/lib/tapforge/work/cache"


@pytest.mark.parametrize("own", [False, True])
def test_a_root_that_is_read_only_has_a_place_for_rays_files(own: bool) -> None:
    ray: dict[str, Any] = {"name": "ray", "securityContext": {"readOnlyRootFilesystem": True}}
    spec: dict[str, Any] = {"containers": [ray]}
    if own:
        ray["volumeMounts"] = [{"name": "fast", "mountPath": "/tmp"}]
        spec["volumes"] = [{"name": "fast", "emptyDir": {"medium": "Memory"}}]
    pods = pods_of(job_of(made(cluster={"image": "i", "head": {"template": {"spec": spec}}})))
    mounts = {m["mountPath"]: m["name"] for m in pods["head"]["spec"]["containers"][0]["volumeMounts"]}
    volumes = {v["name"] for v in pods["head"]["spec"]["volumes"]}
    assert mounts["/tmp"] == ("fast" if own else "tapforge-tmp") and mounts["/tmp"] in volumes
    assert ("tapforge-tmp" in volumes) is not own
    assert "volumeMounts" not in pods["submitter"]["spec"]["containers"][0]


def test_without_storage_everything_is_lost_with_the_cluster_and_the_driver_knows() -> None:
    told = environment(pods_of(job_of())["head"])
    assert told["TAPFORGE_STORAGE"] == f"/var/lib/tapforge/work/team/{UID}"
    assert told["TAPFORGE_STORAGE_LASTS"] == "false"


def test_object_storage_needs_no_volume_and_credentials_come_by_the_template() -> None:
    """From a Secret, as its head and workers have it."""
    secret = {"name": "AWS_ACCESS_KEY_ID", "valueFrom": {"secretKeyRef": {"name": "bucket", "key": "id"}}}
    template = {"template": {"spec": {"containers": [{"name": "ray", "env": [secret]}]}}}
    workers = [{"name": "gpu", "replicas": 2, **template}]
    run = made(checkpoints=BUCKET, cluster={"image": "i", "head": template, "workers": workers})
    assert storage_of(run) == (f"/var/lib/tapforge/work/team/{UID}", False) and checkpoints_last(run)
    pods = pods_of(job_of(run))
    for group in ("head", "gpu"):
        assert secret in pods[group]["spec"]["containers"][0]["env"]
        assert "tapforge-storage" not in {volume["name"] for volume in pods[group]["spec"]["volumes"]}


def test_a_mount_of_the_users_own_is_left_alone() -> None:
    ray = {"name": "ray", "volumeMounts": [{"name": "fast", "mountPath": "/var/lib/tapforge/work"}]}
    spec = {"containers": [ray], "volumes": [{"name": "fast", "hostPath": {"path": "/nvme"}}]}
    head = pods_of(job_of(made(cluster={"image": "i", "head": {"template": {"spec": spec}}})))["head"]
    mounts = [m for m in head["spec"]["containers"][0]["volumeMounts"] if m["mountPath"].endswith("work")]
    assert mounts == [{"name": "fast", "mountPath": "/var/lib/tapforge/work"}]
    assert "tapforge-work" not in {v["name"] for v in head["spec"]["volumes"]}


def test_ray_pods_are_left_in_order() -> None:
    cluster = {**FULL, "suspendGraceSeconds": 200}
    pods = pods_of(job_of(made(cluster=cluster)))
    for group in ("head", "gpu", "cpu"):
        spec = pods[group]["spec"]
        hook = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert hook == ["tapforge", "prestop", "--seconds", "230"] and spec["terminationGracePeriodSeconds"] == 245
        told = environment(pods[group])
        assert (told["TAPFORGE_GRACE_SECONDS"], told["RAY_JOB_STOP_WAIT_TIME_S"]) == ("200", "230")
        # Ray itself waits for nobody: the hook has.
        assert told["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"
    assert "lifecycle" not in pods["submitter"]["spec"]["containers"][0]
    # The submitter's shell doesn't hear SIGTERM: nobody waits half a minute for it.
    assert pods["submitter"]["spec"]["terminationGracePeriodSeconds"] == 5
    own = {"postStart": {"exec": {"command": ["a"]}}, "preStop": {"exec": {"command": ["b"]}}}
    template = {"spec": {"containers": [{"name": "ray", "lifecycle": own}], "terminationGracePeriodSeconds": 7}}
    head = pods_of(job_of(made(cluster={**cluster, "head": {"template": template}})))["head"]["spec"]
    assert head["containers"][0]["lifecycle"] == own and head["terminationGracePeriodSeconds"] == 7
    assert "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" not in {e["name"] for e in head["containers"][0]["env"]}


def test_labels_for_queues_and_gangs_are_passed_on_and_no_others() -> None:
    run = made(
        labels={
            "kueue.x-k8s.io/queue-name": "gpus",
            "kueue.x-k8s.io/priority-class": "high",
            "volcano.sh/queue-name": "q",
            "team": "a",
            "tapforge.dev/attempt": "7",
        }
    )
    labels = job_of(run, 2)["metadata"]["labels"]
    assert labels == {
        "kueue.x-k8s.io/queue-name": "gpus",
        "kueue.x-k8s.io/priority-class": "high",
        "volcano.sh/queue-name": "q",
        wellknown.RUN: "run",
        wellknown.RUN_UID: UID,
        wellknown.ATTEMPT: "2",
        wellknown.MANAGED_BY: wellknown.OPERATOR,
    }


def test_everything_belongs_to_the_run() -> None:
    run = made(environment={"source": {"ownPool": {"spec": {"external": {"urls": ["http://a"]}}}}})
    for body in (
        job_of(run),
        rayjob.config_map(run),
        rayjob.broker_config_map(run, BROKER),
        rayjob.own_pool(run),
    ):
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("TrainingRun", UID, True)
        assert body["metadata"]["namespace"] == "team" and body["metadata"]["labels"][wellknown.RUN_UID] == UID


def test_a_rayjob_is_known_again_by_its_labels_and_its_owner() -> None:
    body = job_of(made(), 3)
    body["metadata"] |= {"uid": "u", "resourceVersion": "5"}
    seen = observe_ray_job({**body, "status": {"jobStatus": "RUNNING", "jobDeploymentStatus": "Running"}})
    assert seen is not None
    assert (seen.attempt, seen.run_uid, seen.job_status, seen.deployment) == (3, UID, "RUNNING", "Running")
    body["metadata"]["ownerReferences"] = []
    assert observe_ray_job(body) is None


# --- KubeRay's own rules ----------------------------------------------------------------------------------------------

LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
letters = st.sampled_from("abz")
inner = st.text("abz019-", max_size=MAX_RUN_NAME - 2)
run_names = st.one_of(letters, st.builds(lambda a, b, c: a + b + c, letters, inner, letters))


@given(run_names, st.integers(1, MAX_ATTEMPTS))
def test_every_name_fits(name: str, number: int) -> None:
    """RayJob: 47 characters and a DNS-1035 label; RayCluster: five or six more."""
    run = made(name=name)
    job = job_of(run, number)
    assert len(job["metadata"]["name"]) <= 47 and LABEL_1035.fullmatch(job["metadata"]["name"])
    for body in (rayjob.config_map(run), rayjob.broker_config_map(run, BROKER)):
        assert len(body["metadata"]["name"]) <= 63 and LABEL_1035.fullmatch(body["metadata"]["name"])
    assert all(len(v) <= 63 for v in job["metadata"]["labels"].values())


def test_kuberay_takes_the_rayjob() -> None:
    """`ValidateRayJobSpec` and `ValidateRayClusterSpec` of KubeRay 1.4 to 1.7, as far as they speak of what is here."""
    spec = job_of(made(cluster=FULL))["spec"]
    assert spec["shutdownAfterJobFinishes"] is True and "suspend" not in spec and "clusterSelector" not in spec
    assert spec["backoffLimit"] == 0 and spec["ttlSecondsAfterFinished"] == 0
    assert spec["submitterPodTemplate"]["spec"]["restartPolicy"] == "Never"
    assert "command" not in spec["submitterPodTemplate"]["spec"]["containers"][0]
    for group in [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]:
        assert group["template"]["spec"]["containers"][0]["name"] == "ray"
        assert not {"labels", "redis-username", "redis-password"} & set(group["rayStartParams"])
        assert "resources" not in group and "labels" not in group


# --- the run as its attempts see it -----------------------------------------------------------------------------------


def test_the_resolved_run_is_a_file_that_the_trainer_reads() -> None:
    own = {"slots": 3, "spec": {"external": {"urls": ["http://a"]}}}
    run = made(environment={"source": {"ownPool": own}}, stop={"maxUpdates": 5}, suspend=False, cluster=FULL)
    read = load(resolve(run))
    assert read.metadata.name == "run" and read.metadata.namespace == "team"
    assert read.spec.stop.max_updates == 5
    pool = read.spec.environment.source.pool
    assert pool is not None and (pool.name, pool.slots) == ("run", 3)
    assert "suspend" not in resolve(run)


def test_the_resolved_run_has_the_gpus_of_every_pod_and_nothing_else_of_the_templates() -> None:
    """What is in templates may be secret, and the ConfigMap is not."""
    secret = {"name": "TOKEN", "value": "hush"}
    gpu = {"name": "ray", "env": [secret], "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    workers = [{"name": "gpu", "replicas": 2, "template": {"spec": {"containers": [gpu]}}}]
    params = {"num-cpus": "0", "storage": "hush"}
    text = resolve(made(cluster={"image": "i", "head": {"rayStartParams": params}, "workers": workers}))
    assert load(text).spec.cluster is not None and yaml.safe_load(text)["spec"]["cluster"] == {
        "image": "i",
        "head": {"rayStartParams": {"num-gpus": "0"}},
        "workers": [{"name": "gpu", "replicas": 2, "rayStartParams": {"num-gpus": "4"}}],
    }
    assert "hush" not in text


def test_an_own_pool_is_as_the_file_says() -> None:
    template = {"spec": {"containers": [{"name": "emulator", "image": "phone:1"}]}}
    own = {"spec": {"replicas": 2, "template": template, "recycle": {"afterEpisodes": 3}}}
    body = rayjob.own_pool(made(environment={"source": {"ownPool": own}}))
    assert body["spec"] == own["spec"] and body["metadata"]["name"] == "run"
    metadata = {k: v for k, v in body["metadata"].items() if k in ("name", "namespace", "labels", "annotations")}
    assert load_pool(to_yaml({**body, "metadata": metadata})).spec.replicas == 2


def test_the_config_map_is_equal_for_equal_statuses() -> None:
    story = Story().started()
    text = rayjob.config_map(story.run)["data"][rayjob.RUN_KEY]
    assert text == story.run.status.resolved and yaml.safe_load(text)["kind"] == "TrainingRun"
    assert rayjob.config_map(story.run) == rayjob.config_map(story.run)
    assert rayjob.config_map(story.run)["immutable"] is True


# --- Pods -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "reason", "gone"),
    [
        ({}, "", False),
        ({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}, "", False),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3"}]},
            "Unschedulable",
            False,
        ),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}, "ImagePullBackOff", False),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, "", False),
        (
            {
                "phase": "Failed",
                "containerStatuses": [
                    {"name": "ray", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
                ],
            },
            "OOMKilled",
            True,
        ),
        ({"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": {"exitCode": 0}}}]}, "", True),
    ],
)
def test_what_keeps_a_pod_from_running(status: dict[str, Any], reason: str, gone: bool) -> None:
    labels = {"ray.io/group": "gpu", "ray.io/node-type": "worker"}
    seen = observe_ray_pod({"metadata": {"name": "a", "labels": labels}, "status": status})
    assert (seen.group, seen.reason, seen.gone, seen.head) == ("gpu", reason, gone, False)
