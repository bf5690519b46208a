"""Which Pods of a run hold what a user asks for; and the one that reads a run's volume once its own are gone. Pure.

1. The driver's log is that of the submitter: of an attempt's submitters the newest follows from the beginning.
2. Files are read in the head while it runs. After that a Job's Pod reads the volume: the run's image, unprivileged,
   with the volume mounted read-only and without credentials. It belongs to the run, ends by itself after
   `READER_SECONDS`, and is removed when it has ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tapforge_api import GROUP, TrainingRun
from tapforge_api.attempt import RUN, STORAGE, STORAGE_MOUNT, USER
from tapforge_api.cluster import RAY, SUBMITTER

Json = dict[str, Any]

RUN_UID_LABEL: Final = f"{GROUP}/run-uid"
_ATTEMPT_LABEL: Final = f"{GROUP}/attempt"
#: how long a reader lives at most
READER_SECONDS: Final = 3600
READER: Final = "reader"
#: of a head that say where its Pod may run, and how its image is got
_PASSED_ON: Final = ("affinity", "imagePullSecrets", "nodeSelector", "tolerations")


@dataclass(frozen=True, slots=True)
class LogPod:
    name: str
    attempt: int
    #: nothing more will come
    ended: bool


def log_pods(pods: Sequence[Mapping[str, Any]], attempt: int | None = None) -> list[LogPod]:
    """One for each attempt, or for the one that is asked for, in order."""
    found: dict[int, Mapping[str, Any]] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
        number = int(pod["metadata"]["labels"].get(_ATTEMPT_LABEL, 0))
        if attempt in (None, number) and any(c["name"] == SUBMITTER for c in pod["spec"]["containers"]):
            found[number] = pod
    return [LogPod(pod["metadata"]["name"], number, _ended(pod)) for number, pod in sorted(found.items())]


def running_head(pods: Sequence[Mapping[str, Any]]) -> str | None:
    """Name of the Pod that the newest attempt's driver is in."""
    heads = [
        pod
        for pod in pods
        if pod["metadata"]["labels"].get("ray.io/node-type") == "head"
        and "deletionTimestamp" not in pod["metadata"]
        and any(c["name"] == RAY and "running" in c["state"] for c in pod["status"].get("containerStatuses") or ())
    ]
    heads.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    return heads[-1]["metadata"]["name"] if heads else None


def why_waiting(pod: Mapping[str, Any]) -> str:
    """What a Pod that doesn't run waits for, or ended by, in the cluster's words."""
    status = pod.get("status") or {}
    states = [c["state"] for c in status.get("containerStatuses") or ()]
    waiting = [state[kind] for state in states for kind in ("waiting", "terminated") if kind in state]
    unmet = [c for c in status.get("conditions") or () if c["type"] == "PodScheduled" and c["status"] != "True"]
    words = [f"{one.get('reason', '')} {one.get('message', '')}".strip() for one in [*waiting, *unmet]]
    return "; ".join(filter(None, words)) or f"it is {status.get('phase', 'not there yet')}"


def _ended(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def reader_job(run: TrainingRun, namespace: str, uid: str) -> Json:
    """Of a run with a volume."""
    cluster, storage = run.spec.cluster, run.spec.checkpoints.storage
    assert cluster is not None and storage is not None
    head: Json = cluster.head.template.spec.model_dump(
        mode="json", by_alias=True, exclude_unset=True, exclude_none=True
    )
    ray: Json = next((one for one in head.get("containers") or () if one["name"] == RAY), {})
    claim = storage.volume_claim
    name = f"{run.metadata.name}-fetch-{secrets.token_hex(3)}"
    labels = {"app.kubernetes.io/name": "tapforge-fetch"}
    owner = {"apiVersion": run.api_version, "kind": run.kind, "name": run.metadata.name, "uid": uid}
    mount = {"name": "storage", "mountPath": STORAGE_MOUNT, "readOnly": True}
    container = {
        "name": READER,
        "image": ray.get("image", cluster.image),
        **({"imagePullPolicy": ray["imagePullPolicy"]} if "imagePullPolicy" in ray else {}),
        "command": ["sleep", str(READER_SECONDS)],
        "env": [
            {"name": RUN, "value": run.metadata.name},
            {"name": STORAGE, "value": f"{STORAGE_MOUNT}/{namespace}/{uid}"},
        ],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{**mount, **({"subPath": claim.sub_path} if claim.sub_path else {})}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace, "labels": labels, "ownerReferences": [owner]},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": READER_SECONDS,
            "ttlSecondsAfterFinished": 60,  # why it failed can be read until then
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    **{field: head[field] for field in _PASSED_ON if field in head},
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    "terminationGracePeriodSeconds": 1,
                    "securityContext": _identity(head, ray),
                    "containers": [container],
                    "volumes": [{"name": "storage", "persistentVolumeClaim": {"claimName": claim.claim_name}}],
                },
            },
        },
    }


def _identity(head: Mapping[str, Any], ray: Mapping[str, Any]) -> Json:
    """The user who wrote the files, unless that was root: root's can be read by others."""
    given = {**(head.get("securityContext") or {}), **(ray.get("securityContext") or {})}
    groups = [given.get("fsGroup", USER), *given.get("supplementalGroups", ())]
    return {
        "runAsNonRoot": True,
        "runAsUser": given.get("runAsUser") or USER,
        "runAsGroup": given.get("runAsGroup") or USER,
        "supplementalGroups": groups,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
