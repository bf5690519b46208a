"""What the operator knows of the cluster's objects: small records that are read off them. Pure.

1. The objects themselves are not kept (a pool's is: its spec and status are needed whole). A record holds what the API
   server reported last.
2. What can't be read as ours is None, never a guess.

Times are seconds since the epoch, as the cluster's clocks wrote them (whole seconds). None of these clocks has to be
right: a time is good for an order among times of the same clock, and never for an age. For ages a slot has `since`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from sys import intern
from typing import Any, Final, Literal

from tapforge_api.base import API_VERSION
from tapforge_api.pool import FENCED_PROTOCOLS, EmulatorPoolSpec
from tapforge_operator import labels as wellknown
from tapforge_operator.kube.disruption import disruption
from tapforge_operator.kube.objectmeta import readable_conditions, reading, seconds, stored_conditions

_GROUP: Final = API_VERSION.partition("/")[0]
_PROTOCOL: Final = EmulatorPoolSpec.model_fields["protocol"].default

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reference:
    """Which object of our two kinds an Event is about."""

    kind: Literal["EmulatorPool", "TrainingRun"]
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a person may want to read in `kubectl describe`."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PoolObject:
    """An EmulatorPool as the API server has it; the spec is not checked yet."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    deleting: bool
    #: the object itself, without its `managedFields`
    body: Object

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    @property
    def spec(self) -> Object:
        """As it is stored: not checked."""
        return self.body.get("spec") or {}

    @property
    def checks_fences(self) -> bool:
        """A phone of it refuses a caller whose claim is older than the newest it has seen. Its process keeps what it
        has seen, so this is promised of Pods alone: they are never restarted in place, a device may be."""
        return "external" not in self.spec and self.spec.get("protocol", _PROTOCOL) in FENCED_PROTOCOLS


@dataclass(frozen=True, slots=True)
class RunObject:
    """A TrainingRun as the API server has it, and what it wants of a pool; the spec is not checked yet."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    #: name of the EmulatorPool; "" when its phones come from elsewhere
    pool: str
    #: phones that it wants now: 0 when it is suspended, queued, stalled or at its end
    wanted: int
    #: it is Complete or Failed, or being deleted
    ended: bool = False
    #: nothing of it runs: its user suspended it, or a queue holds it
    suspended: bool = False
    #: the object itself, without its `managedFields`
    body: Object = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class NodeObject:
    """Whether slots on a node have a future."""

    name: str
    uid: str
    resource_version: str
    #: nothing new is scheduled there, a drain may follow; autoscalers say so by a taint of theirs
    cordoned: bool = False
    #: its kubelet does not answer, the API server says
    silent: bool = False


@dataclass(frozen=True, slots=True)
class LeaseObject:
    """The Lease that carries the claim of an external URL."""

    namespace: str
    uid: str
    resource_version: str
    body: Object


@reading
def observe_lease(lease: Object) -> LeaseObject:
    metadata = lease["metadata"]
    return LeaseObject(metadata["namespace"], metadata["uid"], metadata["resourceVersion"], lease)


@reading
def observe_pool(pool: Object) -> PoolObject:
    metadata = pool["metadata"]
    return PoolObject(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        deleting="deletionTimestamp" in metadata,
        body={**pool, "metadata": {k: v for k, v in metadata.items() if k != "managedFields"}},
    )


@reading
def observe_run(run: Object, default_slots: int) -> RunObject:
    """`default_slots`: phones that a run wants which doesn't say how many."""
    metadata, spec = run["metadata"], run.get("spec") or {}
    source = (spec.get("environment") or {}).get("source") or {}
    own = source.get("ownPool")
    reference = {**own, "name": metadata["name"]} if own else source.get("pool") or {}
    status = run.get("status")  # maybe one that only another release can read
    conditions = readable_conditions(stored_conditions(status))
    attempt = status.get("attempt") if isinstance(status, Mapping) else None
    true = {c.type for c in conditions if c.status == "True"}
    ended = not true.isdisjoint(("Complete", "Failed")) or "deletionTimestamp" in metadata
    suspended = "Suspended" in true
    # What runs goes on when its spec is broken afterwards.
    active = isinstance(attempt, Mapping) and attempt.get("phase") in ("Active", "Stopping")
    stalled = "Stalled" in true and not active
    # Before a queue has it, a run with a queue wants phones only if its status says that it waits for them.
    waits = any(c.type == "Ready" and c.reason == "WaitingForPhones" for c in conditions)
    queued = wellknown.QUEUE in (metadata.get("labels") or {}) and not (active or waits)
    idle = ended or suspended or stalled or queued or bool(spec.get("suspend")) or not reference.get("name")
    return RunObject(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        pool=reference.get("name") or "",
        wanted=0 if idle else int(reference.get("slots") or default_slots),
        ended=ended,
        suspended=suspended,
        body={**run, "metadata": {k: v for k, v in metadata.items() if k != "managedFields"}},
    )


#: taints of nodes that Karpenter and cluster-autoscaler are about to take away: neither of them cordons
_LEAVING = frozenset({"karpenter.sh/disrupted", "ToBeDeletedByClusterAutoscaler"})


@reading
def observe_node(node: Object) -> NodeObject:
    metadata, spec = node["metadata"], node.get("spec") or {}
    ready = next((c for c in (node.get("status") or {}).get("conditions") or () if c["type"] == "Ready"), None)
    # The node controller writes Unknown when the kubelet has been silent for its grace period (50 s by default). False
    # means that the kubelet speaks and complains: its Pods' own conditions say the rest.
    silent = ready is not None and ready.get("status") == "Unknown"
    cordoned = bool(spec.get("unschedulable")) or any(t.get("key") in _LEAVING for t in spec.get("taints") or ())
    return NodeObject(metadata["name"], metadata["uid"], metadata["resourceVersion"], cordoned, silent)


def belongs(metadata: Object, pool_uid: str) -> bool:
    """The object was made by the operator for this pool: its controller is the pool."""
    return any(o.get("controller") and o.get("uid") == pool_uid for o in metadata.get("ownerReferences") or ())


# --- slots ------------------------------------------------------------------------------------------------------------

#: of the largest number that the operator writes
_DIGITS = 19

Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A Pod of a pool. Every field is what the API server said last."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    pool: str
    pool_uid: str
    ordinal: int
    #: hash of the user's template that it was made of
    template: str
    created: float
    phase: Phase
    #: "" while no node was found
    node: str = ""
    ip: str = ""
    #: the scheduler found no node with room, or a gate holds the Pod: left to the autoscaler and the queue
    unschedulable: bool = False
    #: when a node was found
    scheduled: float | None = None
    #: start of the emulator's container; None while its image is pulled
    started: float | None = None
    #: why the container does not start, as one word: ImagePullBackOff, CreateContainerConfigError, ...; "" otherwise
    waiting: str = ""
    ready: bool = False
    #: when `ready` last changed; None when it never did
    turned: float | None = None
    #: it was ready at least once, as far as the Pod shows
    ever_ready: bool = False
    deleting: bool = False
    #: why it is Failed or Succeeded, as one word: OOMKilled, Error, Evicted, ...; "" otherwise
    end: str = ""
    #: container beside the emulator that ended with an error: its log says why the slot is sick. "" for none
    broken: str = ""
    #: raw value of the claim annotation; "" when there is none. Only broker/claim_record.py reads it
    claim: str = ""
    fence: int = 0
    episodes: int = 0
    retained: bool = False
    #: fence of a claim of an earlier leader that was reported; "" on nearly all
    confirmed: str = ""
    #: when this process saw it come to its present `stage`, on its own clock (a moment of `WatchFreshness`)
    since: float = 0.0

    @property
    def terminal(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def stage(self) -> tuple[str, float | None]:
        """What it is waited for in, and what distinguishes this time from an earlier one."""
        if self.ready:
            return "ready", None
        if self.ever_ready:
            return "unready", self.turned
        if self.started is not None:
            return "booting", self.started
        return ("pulling" if self.node else "unscheduled"), None


@reading
def observe(pod: Mapping[str, Any]) -> Slot | None:
    """The slot that a Pod is, or None for a Pod that is none: without the labels, or without a pool as its controller.
    Any client may write labels, so the controller's UID decides, and has to agree with them."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    owner = next((o for o in metadata.get("ownerReferences") or () if o.get("controller")), None)
    if owner is None or owner.get("kind") != "EmulatorPool" or labels.get(wellknown.POOL_UID) != owner["uid"]:
        return None
    if "resourceVersion" not in metadata:
        return None  # a write that met a delete is answered with the Pod that was: it is nowhere any more
    ordinal = labels.get(wellknown.ORDINAL, "")
    if not (ordinal.isascii() and ordinal.isdigit()):
        return None
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    containers = {c["name"]: c.get("state") or {} for c in status.get("containerStatuses") or ()}
    state = containers.get(wellknown.CONTAINER, {})
    ended = [name for name, of in containers.items() if (of.get("terminated") or {}).get("exitCode")]
    started = _time((state.get("running") or state.get("terminated") or {}).get("startedAt"))
    ready = conditions.get("Ready", {}).get("status") == "True"
    turned = _time(conditions.get("Ready", {}).get("lastTransitionTime"))
    scheduled = conditions.get("PodScheduled", {})
    phase = status.get("phase") or "Pending"
    return Slot(
        namespace=intern(metadata["namespace"]),
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        pool=intern(owner["name"]),
        pool_uid=intern(owner["uid"]),
        ordinal=int(ordinal),
        template=intern(labels.get(wellknown.TEMPLATE, "")),
        created=_time(metadata.get("creationTimestamp")) or 0.0,
        phase=intern(phase),  # type: ignore[arg-type]
        node=intern((pod.get("spec") or {}).get("nodeName") or ""),
        ip=status.get("podIP") or "",
        unschedulable=scheduled.get("status") == "False"
        and scheduled.get("reason") in ("Unschedulable", "SchedulingGated"),
        scheduled=_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        started=started,
        waiting=intern((state.get("waiting") or {}).get("reason") or ""),
        ready=ready and phase == "Running",
        turned=turned,
        # Ready is False from the Pod's first moment on, so a turn after the container's start means that it was True.
        ever_ready=ready or (turned is not None and started is not None and turned > started),
        deleting="deletionTimestamp" in metadata,
        end=_end(phase, status, state),
        broken=intern(ended[0]) if ended and wellknown.CONTAINER not in ended else "",
        claim=annotations.get(wellknown.CLAIM, ""),
        fence=written_number(annotations.get(wellknown.FENCE)),
        episodes=written_number(annotations.get(wellknown.EPISODES)),
        retained=wellknown.RETAINED in annotations,
        confirmed=annotations.get(wellknown.CONFIRMED, ""),
    )


def _end(phase: str, status: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    if phase not in ("Succeeded", "Failed"):
        return ""
    return status.get("reason") or (state.get("terminated") or {}).get("reason") or phase


def written_number(text: str | None) -> int:
    """A number that the operator wrote; anything else counts as none written. Any client may write annotations, and one
    of thousands of digits would be an error to Python."""
    return int(text) if text and len(text) <= _DIGITS and text.isascii() and text.isdigit() else 0


def _time(text: str | None) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None


def _is_of_our_group(owner: Object) -> bool:
    return str(owner.get("apiVersion")).partition("/")[0] == _GROUP


# --- what KubeRay makes -----------------------------------------------------------------------------------------------


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
    #: spec.suspend: a queue or a person holds it
    suspended: bool = False
    job_status: str = ""
    deployment: str = ""
    reason: str = ""
    message: str = ""
    cluster: str = ""
    dashboard: str = ""
    #: why Pods of its Ray cluster could not be made: one word and a sentence; "" when they could
    trouble: tuple[str, str] = ("", "")

    @property
    def queued(self) -> bool:
        """A queue holds it, or takes its Ray cluster."""
        return self.suspended or self.deployment in ("Suspending", "Suspended")


@reading
def observe_ray_job(body: Mapping[str, Any]) -> RayJob | None:
    """The record of a RayJob; None when no TrainingRun is its controller."""
    metadata, status = body["metadata"], body.get("status") or {}
    owner = next((o for o in metadata.get("ownerReferences") or () if o.get("controller")), None)
    attempt = (metadata.get("labels") or {}).get(wellknown.ATTEMPT, "")
    ours = owner is not None and owner.get("kind") == "TrainingRun" and _is_of_our_group(owner)
    if owner is None or not ours or not (attempt.isascii() and attempt.isdigit()):
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
        trouble=_ray_trouble((status.get("rayClusterStatus") or {}).get("conditions") or ()),
    )


def _ray_trouble(conditions: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    for condition in conditions:
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return condition.get("reason") or "ReplicaFailure", condition.get("message") or "KubeRay does not say why"
    return "", ""


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


@reading
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
    """The Pod of a Ray cluster's head, as it was last observed; it may be gone."""

    namespace: str
    name: str
    uid: str
    version: str
    run_uid: str
    attempt: int
    created: float = 0.0
    #: "" while none was found
    node: str = ""
    #: why the cluster took it away, as one word, and as a message; "" when it did not
    disruption: str = ""
    message: str = ""
    gone: bool = False


@reading
def observe_ray_head(pod: Mapping[str, Any]) -> RayHead | None:
    """The record of a head; None for a Pod that says of no attempt of a run that it is one."""
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    run_uid, attempt = labels.get(wellknown.RUN_UID, ""), labels.get(wellknown.ATTEMPT, "")
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
