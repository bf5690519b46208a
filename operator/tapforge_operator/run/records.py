"""What the planner of a run is told and what it answers: plain records, no behaviour beyond reading an object.

Times are seconds since the epoch. `uid` is always metadata.uid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from tapforge_api.progress import Orders, Progress
from tapforge_api.run_status import TrainingRunStatus
from tapforge_api.training_run import TrainingRunSpec

from .. import names
from ..disruption import disruption

#: largest number of an attempt whose RayJob's name KubeRay takes
MAX_ATTEMPTS = 999


def seconds(text: str) -> float:
    """A time of the cluster; 0 for none and for what is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def timestamp(now: float) -> str:
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_status(written: Mapping[str, Any] | None) -> TrainingRunStatus:
    """A status as the API server gave it; an empty one when it can't be read."""
    try:
        return TrainingRunStatus.model_validate(written or {})
    except ValidationError:
        return TrainingRunStatus()


@dataclass(frozen=True, slots=True)
class Run:
    """A TrainingRun as its user wrote it, and the status that was last written to it."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: float
    spec: TrainingRunSpec
    labels: Mapping[str, str] = field(default_factory=dict)
    deleting: bool = False
    status: TrainingRunStatus = field(default_factory=TrainingRunStatus)

    @classmethod
    def of(cls, body: Mapping[str, Any], spec: TrainingRunSpec) -> Run:
        """An object of the API server, whose spec was read already."""
        metadata = body["metadata"]
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            created=seconds(metadata.get("creationTimestamp") or ""),
            spec=spec,
            labels=metadata.get("labels") or {},
            deleting="deletionTimestamp" in metadata,
            status=read_status(body.get("status")),
        )


@dataclass(frozen=True, slots=True)
class RayJob:
    """A RayJob of a run: what KubeRay says of it."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    run_uid: str
    attempt: int
    deleting: bool = False
    #: spec.suspend: somebody (a queue) holds it
    suspended: bool = False
    job_status: str = ""
    deployment: str = ""
    reason: str = ""
    message: str = ""
    cluster: str = ""
    dashboard: str = ""
    #: why Pods of its Ray cluster could not be made: one word and a sentence; "" when they could
    trouble: tuple[str, str] = ("", "")


def observe_ray_job(body: Mapping[str, Any]) -> RayJob | None:
    """The record of a RayJob; None when no TrainingRun is its controller."""
    metadata, status = body["metadata"], body.get("status") or {}
    owner = next((o for o in metadata.get("ownerReferences") or () if o.get("controller")), None)
    attempt = (metadata.get("labels") or {}).get(names.ATTEMPT, "")
    if owner is None or owner.get("kind") != "TrainingRun" or not (attempt.isascii() and attempt.isdigit()):
        return None
    return RayJob(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        run_uid=owner["uid"],
        attempt=int(attempt),
        deleting="deletionTimestamp" in metadata,
        suspended=bool((body.get("spec") or {}).get("suspend")),
        job_status=status.get("jobStatus") or "",
        deployment=status.get("jobDeploymentStatus") or "",
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        cluster=status.get("rayClusterName") or "",
        dashboard=status.get("dashboardURL") or "",
        trouble=_trouble((status.get("rayClusterStatus") or {}).get("conditions") or ()),
    )


def _trouble(conditions: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    for condition in conditions:
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return condition.get("reason") or "ReplicaFailure", condition.get("message") or "KubeRay does not say why"
    return "", ""


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """The EmulatorPool of a run, as far as the run is concerned."""

    name: str
    uid: str
    #: its controller is the run
    owned: bool = False
    deleting: bool = False
    #: phones that the run can have now: ready, and not claimed by others beyond what they would give up for it
    ready: int = 0
    #: those that others keep
    taken: int = 0
    #: what its phones speak
    protocol: str = "tapforge"
    #: slots that it can have at most
    largest: int = 0
    #: of an own pool: hash of what its run said about it
    spec: str = ""
    #: why it is not ready, in its own words
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class VolumeSeen:
    """A PersistentVolumeClaim."""

    found: bool
    modes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RayPod:
    """A Pod of a run's attempt: of its Ray cluster, or the submitter's."""

    name: str
    #: head, or the group of workers
    group: str
    phase: str
    #: one word: Unschedulable, ImagePullBackOff, OOMKilled, ...; "" when nothing is wrong with it
    reason: str = ""
    message: str = ""
    head: bool = False
    ready: bool = False
    deleting: bool = False

    @property
    def gone(self) -> bool:
        """It has ended or is on its way out."""
        return self.deleting or self.phase in ("Succeeded", "Failed")


def observe_ray_pod(pod: Mapping[str, Any]) -> RayPod:
    status, labels = pod.get("status") or {}, pod["metadata"].get("labels") or {}
    reason = message = ""
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        reason, message = scheduled.get("reason") or "Unschedulable", scheduled.get("message") or "no node has room"
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        state = container.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason") and waiting["reason"] not in ("PodInitializing", "ContainerCreating"):
            reason, message = waiting["reason"], waiting.get("message") or f"image {container.get('image')}"
        elif ended.get("exitCode"):
            reason = ended.get("reason") or "Error"
            message = f"container {container.get('name')} ended with {ended['exitCode']} ({reason})"
    return RayPod(
        name=pod["metadata"]["name"],
        group=labels.get("ray.io/group") or "submitter",
        phase=status.get("phase") or "Pending",
        reason=reason,
        message=message,
        head=labels.get("ray.io/node-type") == "head",
        ready=conditions.get("Ready", {}).get("status") == "True",
        deleting="deletionTimestamp" in pod["metadata"],
    )


@dataclass(frozen=True, slots=True)
class RayHead:
    """The Pod of a Ray cluster's head, as it was last heard of; it may be gone."""

    namespace: str
    name: str
    uid: str
    version: str
    run_uid: str
    attempt: int
    created: float = 0.0
    #: "" while none was found
    node: str = ""
    #: why the cluster took it away, as one word, and what was said about it; "" when it did not
    disruption: str = ""
    message: str = ""
    gone: bool = False


def observe_ray_head(pod: Mapping[str, Any]) -> RayHead | None:
    """The record of a head; None for a Pod that says of no attempt of a run that it is one."""
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    run_uid, attempt = labels.get(names.RUN_UID, ""), labels.get(names.ATTEMPT, "")
    if labels.get("ray.io/node-type") != "head" or not run_uid or not (attempt.isascii() and attempt.isdigit()):
        return None
    reason, message = disruption(pod)
    return RayHead(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata["resourceVersion"],
        run_uid=run_uid,
        attempt=int(attempt),
        created=seconds(metadata.get("creationTimestamp") or ""),
        node=(pod.get("spec") or {}).get("nodeName") or "",
        disruption=reason,
        message=message,
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the API server refused to make."""

    reason: str
    message: str
    #: nobody but a person can help
    stalls: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """What the API server says to a RayJob of the run that it is not to keep."""

    #: of the run that it was made of
    generation: int
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What is the case now, as far as the operator knows."""

    #: RayJobs whose controller is the run
    jobs: tuple[RayJob, ...] = ()
    #: why there can't be any; "" when there can
    no_ray_jobs: str = ""
    pool: PoolSeen | None = None
    #: None: not looked at
    volume: VolumeSeen | None = None
    #: of the present attempt; None: not looked at
    pods: tuple[RayPod, ...] | None = None
    #: the newest head of the run
    head: RayHead | None = None
    #: what the ConfigMap of the run holds; None: not looked at, "": there is none
    config: str | None = None
    #: the driver's newest report, and when it came
    report: Progress | None = None
    reported: float = 0.0
    #: why the last create was refused
    refusal: Refusal | None = None
    trial: Trial | None = None
    #: newest attempt whose RayJob this process has made
    made: int = 0
    #: since when the cluster was followed without a gap, and reports could come: nobody was silent for any longer
    watching_since: float = 0.0


@dataclass(frozen=True, slots=True)
class History:
    """What this process remembers; lost with it, and with no harm."""

    #: attempt that this process put down before it creates its RayJob
    intended: int = 0
    #: when the attempt was last seen to be held by a queue: what its driver said before is of no use any more
    queued: float = 0.0
    #: since when the driver is silent and its head not there; 0 when it is
    headless: float = 0.0
    #: attempts that the cluster took away since the run last got further
    disrupted: int = 0


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What to do now, and what to say. The status is written first; what is to be done was decided on the status that
    stands there already."""

    status: TrainingRunStatus
    history: History
    create_pool: bool = False
    #: UIDs that may be deleted
    delete_pool: str = ""
    #: make what the attempt needs and then its RayJob
    create_job: int = 0
    delete_jobs: tuple[RayJob, ...] = ()
    orders: Orders = field(default_factory=Orders)
    #: what to look at before the next plan
    look_at_volume: bool = False
    look_at_pods: bool = False
    look_at_config: bool = False
    #: ask the API server what it would say to the RayJob
    try_job: bool = False
    #: seconds until time alone changes the plan; None: only news do
    look_again: float | None = None
