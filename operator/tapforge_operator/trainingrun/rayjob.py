"""A run's objects as plain dicts: ConfigMaps, its own pool, the RayJob of an attempt.

What the user's templates say stands; where they are silent a Pod is unprivileged (`podsecurity.py`); its volumes belong
to the group of the trainer's image, caches are in the work folder, and a root that is read-only has a `/tmp`; node
autoscalers are asked to leave it where it is.

Always the operator's are `restartPolicy: Never`, the owner, the run's labels, what the driver has to find
(`tapforge_api.attempt`), and of the RayJob everything but the cluster.

* The driver runs in the head. Only the head gets a token for the broker and the broker's certificates.
* A worker that is lost is replaced by KubeRay, and the driver starts again in place. A head that is lost is not: its
  successor would know nothing, and the same attempt would run twice. Its RayJob fails, and the next attempt begins.
* When a Ray Pod is ended in order (by a queue, or to drain its node), its driver has `suspendGraceSeconds` for a
  checkpoint, and the Pods of its ranks wait for that.
* A caller without a token of the Ray cluster starts nothing in it (`tapforge_api.ray_authentication`).
* Two more submitters may follow a driver's log when the first one loses its connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tapforge_api import attempt as place
from tapforge_api.base import API_VERSION
from tapforge_api.claims import AUDIENCE
from tapforge_api.cluster import RAY, SUBMITTER, ClusterSpec, RayTemplate
from tapforge_api.document import to_yaml
from tapforge_api.environment import EnvironmentSource, PoolReference
from tapforge_api.gpus import counted
from tapforge_api.loading import dump_set
from tapforge_api.ray_authentication import MODE, TOKEN, TOKEN_MODE
from tapforge_api.training_run import RunMetadata, TrainingRun
from tapforge_operator import labels as wellknown
from tapforge_operator.kube.objectmeta import controller_reference
from tapforge_operator.podsecurity import harden
from tapforge_operator.trainingrun import templates
from tapforge_operator.trainingrun.state import Run

Json = dict[str, Any]

RUN_KEY: Final = "run.yaml"
TEMPLATES_KEY: Final = "templates.json"
CA_KEY: Final = "ca.crt"
#: labels of a run that are passed on to its RayJobs: queues and gang schedulers read them there
PASSED_ON: Final = (
    "kueue.x-k8s.io/",
    "ray.io/scheduler-name",
    "ray.io/gang-scheduling-enabled",
    "ray.io/priority-class-name",
    "volcano.sh/",
    "yunikorn.apache.org/",
    "kai.scheduler/",
)
#: of a RayCluster, by way of its RayJob's annotations
_NO_SECOND_HEAD: Final = "ray.io/disable-provisioned-head-restart"
_TOKEN_SECONDS: Final = 3600
_SUBMITTER_RETRIES: Final = 2
#: beyond the grace, seconds: for a driver to clean up and say how it ended; and then for Ray to end
_FAREWELL: Final = 30
_RAY_ENDS: Final = 15
#: how long Ray waits for a driver that it has asked to stop; its own 3 s are too short for a checkpoint
_RAY_STOP: Final = "RAY_JOB_STOP_WAIT_TIME_S"
#: how long `ray start` waits at its end for traffic of Ray Serve to go elsewhere, half a minute by itself. A run has
#: none, and the hook has waited for what there is
_RAY_DRAIN: Final = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
#: seconds; its shell is the container's first process and so deaf to SIGTERM: this long the driver's last words still
#: come to its log
_SUBMITTER_GRACE: Final = 5
_SUBMITTER_RESOURCES: Final = {
    "requests": {"cpu": "100m", "memory": "200Mi"},
    "limits": {"cpu": "1", "memory": "1Gi"},
}


@dataclass(frozen=True, slots=True)
class Broker:
    """Where a run's Pods find the broker, and its certificates (PEM)."""

    url: str
    ca: str


def config_map(run: Run) -> Json:
    """The run as its status says it was resolved, and the Pod templates that it was started with."""
    resolved = run.status.resolved
    data = {RUN_KEY: resolved}
    if templates.digest_of(resolved):
        data[TEMPLATES_KEY] = run.templates or templates.written(run.spec)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": run_metadata(run, wellknown.config_name(run.name, run.uid)),
        "immutable": True,
        "data": data,
    }


def broker_config_map(run: Run, broker: Broker) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": run_metadata(run, wellknown.broker_config_name(run.name, run.uid)),
        "data": {CA_KEY: broker.ca},
    }


def pool_spec_hash(run: Run) -> str:
    """Changes when what the run says about its own pool changes."""
    return wellknown.digest(json.dumps(_pool_spec(run), sort_keys=True))


def own_pool(run: Run) -> Json:
    metadata = run_metadata(run, run.name)
    # It ends with its run, even while its phones have holders.
    metadata["annotations"] = {wellknown.ALLOW_DELETE: "true", wellknown.SPEC: pool_spec_hash(run)}
    return {"apiVersion": API_VERSION, "kind": "EmulatorPool", "metadata": metadata, "spec": _pool_spec(run)}


def storage_of(run: Run) -> tuple[str, bool]:
    """Root of the run's folder, and whether it is on a volume that outlasts a Ray cluster."""
    storage = run.spec.checkpoints.storage
    own = f"{run.namespace}/{run.uid}"
    if storage is None:
        return f"{place.WORK_MOUNT}/{own}", False
    return f"{place.STORAGE_MOUNT}/{own}", True


def ray_job(run: Run, number: int, broker: Broker, *, restricted: bool = False) -> Json:
    """`restricted`: the namespace lets no Pod in that may be root."""
    cluster = run.spec.cluster
    if cluster is None:
        raise ValueError(f"run {run.namespace}/{run.name} has no spec.cluster: there is no RayJob to make")
    metadata = run_metadata(run, wellknown.ray_job_name(run.name, number))
    passed = {k: v for k, v in run.labels.items() if k.startswith(PASSED_ON)}
    metadata["labels"] = {**passed, **metadata["labels"], wellknown.ATTEMPT: str(number)}
    metadata["annotations"] = {_NO_SECOND_HEAD: "true"}
    environment = _environment(run, number)
    head = _ray_pod(run, number, cluster.head.template, environment, restricted)
    _give_broker(run, head, broker)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": {
            "entrypoint": place.entrypoint(cluster.driver_restarts),
            "submissionMode": "K8sJobMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 0,
            "backoffLimit": 0,
            "submitterConfig": {"backoffLimit": _SUBMITTER_RETRIES},
            "submitterPodTemplate": _submitter(run, number, cluster, restricted),
            "rayClusterSpec": {
                "rayVersion": cluster.ray_version,
                "authOptions": {"mode": TOKEN_MODE},
                "headGroupSpec": {
                    "serviceType": "ClusterIP",
                    "rayStartParams": dict(cluster.head.ray_start_params),
                    "template": head,
                },
                "workerGroupSpecs": [
                    {
                        "groupName": workers.name,
                        "replicas": workers.replicas,
                        "minReplicas": workers.replicas,
                        "maxReplicas": workers.replicas,
                        "rayStartParams": dict(workers.ray_start_params),
                        "template": _ray_pod(run, number, workers.template, environment, restricted),
                    }
                    for workers in cluster.workers
                ],
            },
        },
    }


def ray_pods(cluster: ClusterSpec) -> int:
    """Pods that Ray runs in, the head among them."""
    return 1 + sum(workers.replicas for workers in cluster.workers)


# --- the run as its attempts see it -----------------------------------------------------------------------------------


def resolve(run: Run) -> str:
    """YAML of the TrainingRun as all its attempts see it: fixed at its start, whatever release of the operator or edit
    of the spec comes. Everything is in it that the driver reads. What is the operator's alone is not: the Pod templates
    (of the machines only their GPUs are there, counted), `suspend`, and an own pool's slots; the driver sees that pool
    by its name, as any other."""
    spec, start = run.spec, {wellknown.POD_TEMPLATES: templates.digest(templates.written(run.spec))}
    if spec.cluster is not None:
        spec = spec.model_copy(update={"cluster": counted(spec.cluster)})
    source = spec.environment.source
    if source.own_pool is not None:
        reference = PoolReference(name=run.name, slots=source.own_pool.slots)
        environment = spec.environment.model_copy(update={"source": EnvironmentSource(pool=reference)})
        spec = spec.model_copy(update={"environment": environment})
    whole = TrainingRun(
        api_version=API_VERSION,
        metadata=RunMetadata(name=run.name, namespace=run.namespace, annotations=start),
        spec=spec,
    )
    data: dict[str, Any] = dump_set(whole)
    data["spec"].pop("suspend", None)
    return to_yaml(data)


# --- Pods -------------------------------------------------------------------------------------------------------------


def _environment(run: Run, number: int) -> dict[str, str]:
    root, lasts = storage_of(run)
    return {
        place.RUN: run.name,
        place.NAMESPACE: run.namespace,
        place.RUN_UID: run.uid,
        place.ATTEMPT: str(number),
        place.STORAGE: root,
        place.STORAGE_LASTS: "true" if lasts else "false",
        place.WORK: place.WORK_MOUNT,
    }


def _ray_pod(run: Run, number: int, template: RayTemplate, environment: Mapping[str, str], restricted: bool) -> Json:
    cluster = run.spec.cluster
    assert cluster is not None
    pod = _pod(run, number, template, RAY, restricted)
    ray = pod["spec"]["containers"][0]
    _set_environment(ray, {**_unset(ray, place.CACHES), **environment})
    _let_leave(pod["spec"], ray, cluster.suspend_grace_seconds)
    _mount(pod["spec"], ray, {"name": "tapforge-work", "emptyDir": {}}, place.WORK_MOUNT)
    storage = run.spec.checkpoints.storage
    if storage is not None:
        claim = storage.volume_claim
        volume = {"name": "tapforge-storage", "persistentVolumeClaim": {"claimName": claim.claim_name}}
        more = {"subPath": claim.sub_path} if claim.sub_path else {}
        _mount(pod["spec"], ray, volume, place.STORAGE_MOUNT, **more)
        group = {"fsGroup": place.USER, "fsGroupChangePolicy": "OnRootMismatch"}
        pod["spec"]["securityContext"] = {**group, **pod["spec"]["securityContext"]}
    return pod


def _submitter(run: Run, number: int, cluster: ClusterSpec, restricted: bool) -> Json:
    pod = _pod(run, number, cluster.submitter.template, SUBMITTER, restricted)
    pod["spec"]["containers"][0].setdefault("resources", _SUBMITTER_RESOURCES)
    pod["spec"].setdefault("terminationGracePeriodSeconds", _SUBMITTER_GRACE)
    return pod


def _pod(run: Run, number: int, template: RayTemplate, main: str, restricted: bool) -> Json:
    """With its main container first, as KubeRay wants it."""
    cluster = run.spec.cluster
    assert cluster is not None
    spec: Json = template.spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    containers = spec.get("containers") or []
    own: Json = next((c for c in containers if c["name"] == main), {"name": main})
    own.setdefault("image", cluster.image)
    spec["containers"] = [own, *(c for c in containers if c["name"] != main)]
    spec["restartPolicy"] = "Never"
    # KubeRay adds its own where a template is silent; one that it finds there would stand.
    _set_environment(own, {MODE: TOKEN_MODE}, without=(TOKEN,))
    # Images of Ray name their user, and whether that is root can't be inferred from a name: their Pods may be, where
    # the namespace lets such Pods in. Where it doesn't, nothing is lost; the trainer's own image has a number.
    harden(spec, non_root=restricted)
    if own["securityContext"].get("readOnlyRootFilesystem"):
        _mount(spec, own, {"name": "tapforge-tmp", "emptyDir": {}}, "/tmp")
    labels = {**template.metadata.labels, **_labels(run), wellknown.ATTEMPT: str(number)}
    annotations = {wellknown.SAFE_TO_EVICT: "false", wellknown.DO_NOT_DISRUPT: "true", **template.metadata.annotations}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def _let_leave(spec: Json, ray: Json, grace: int) -> None:
    _set_environment(ray, {place.GRACE: str(grace), _RAY_STOP: str(grace + _FAREWELL)})
    own = ray.get("lifecycle") or {}
    if "preStop" not in own:
        _set_environment(ray, _unset(ray, {_RAY_DRAIN: "0"}))
    hook = {"preStop": {"exec": {"command": place.prestop(grace + _FAREWELL)}}}
    ray["lifecycle"] = {**hook, **own}
    spec.setdefault("terminationGracePeriodSeconds", grace + _FAREWELL + _RAY_ENDS)


def _give_broker(run: Run, pod: Json, broker: Broker) -> None:
    ray = pod["spec"]["containers"][0]
    _set_environment(
        ray,
        {
            place.BROKER_URL: broker.url,
            place.BROKER_CA: place.CA_FILE,
            place.BROKER_TOKEN_FILE: place.TOKEN_FILE,
        },
    )
    token = {"audience": AUDIENCE, "expirationSeconds": _TOKEN_SECONDS, "path": "token"}
    ca = {"name": wellknown.broker_config_name(run.name, run.uid), "items": [{"key": CA_KEY, "path": CA_KEY}]}
    sources = [{"serviceAccountToken": token}, {"configMap": ca}]
    _mount(
        pod["spec"],
        ray,
        {"name": "tapforge-broker", "projected": {"sources": sources}},
        place.BROKER_MOUNT,
        readOnly=True,
    )
    own = {"name": wellknown.config_name(run.name, run.uid), "items": [{"key": RUN_KEY, "path": RUN_KEY}]}
    config = {"name": "tapforge-run", "configMap": own}
    folder = place.RUN_FILE.rpartition("/")[0]
    _mount(pod["spec"], ray, config, folder, readOnly=True)


def _set_environment(container: Json, values: Mapping[str, str], without: Sequence[str] = ()) -> None:
    kept = [e for e in container.get("env") or () if e.get("name") not in (*values, *without)]
    container["env"] = [*kept, *({"name": name, "value": value} for name, value in values.items())]


def _unset(container: Json, values: Mapping[str, str]) -> dict[str, str]:
    """Those that the user has not set."""
    given = {e.get("name") for e in container.get("env") or ()}
    return {name: value for name, value in values.items() if name not in given}


def _mount(spec: Json, container: Json, volume: Json, where: str, **more: Any) -> None:
    """Unless the user has mounted something of their own there."""
    mounts = container.get("volumeMounts") or []
    if any(mount.get("mountPath") == where for mount in mounts):
        return
    container["volumeMounts"] = [*mounts, {"name": volume["name"], "mountPath": where, **more}]
    spec["volumes"] = [*(spec.get("volumes") or ()), volume]


# --- metadata ---------------------------------------------------------------------------------------------------------


def _labels(run: Run) -> dict[str, str]:
    return {wellknown.RUN: run.name, wellknown.RUN_UID: run.uid, wellknown.MANAGED_BY: wellknown.OPERATOR}


def run_metadata(run: Run, name: str) -> Json:
    owner = controller_reference("TrainingRun", run.name, run.uid)
    return {"name": name, "namespace": run.namespace, "labels": _labels(run), "ownerReferences": [owner]}


def _pool_spec(run: Run) -> Json:
    own = run.spec.environment.source.own_pool
    if own is None:
        raise ValueError(f"run {run.namespace}/{run.name} has no own pool")
    return own.spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
