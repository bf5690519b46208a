"""What the operator knows of objects that are no slots: small records read off them, the objects themselves are not
kept (a pool's is: its spec and status are needed whole)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tapforge_api.pool import FENCED_PROTOCOLS, EmulatorPoolSpec

_PROTOCOL: Final = EmulatorPoolSpec.model_fields["protocol"].default

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PoolObject:
    """An EmulatorPool as the API server has it; the spec is not checked yet."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    deleting: bool
    #: the object itself, without the notes of who wrote which field
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
        """A phone of it refuses whoever has an older claim than the newest it has seen. Its process keeps what it has
        seen, so this is promised of Pods alone: they are never restarted in place, a device may be."""
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
    #: the object itself, without the notes of who wrote which field
    body: Object = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class NodeObject:
    """Whether slots on a node have a future."""

    name: str
    uid: str
    resource_version: str
    #: nothing new is scheduled there, a drain may follow
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


def observe_lease(lease: Object) -> LeaseObject:
    metadata = lease["metadata"]
    return LeaseObject(metadata["namespace"], metadata["uid"], metadata["resourceVersion"], lease)


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


def observe_run(run: Object, default_slots: int) -> RunObject:
    """`default_slots`: phones that a run wants which doesn't say how many."""
    metadata, spec = run["metadata"], run.get("spec") or {}
    source = (spec.get("environment") or {}).get("source") or {}
    own = source.get("ownPool")
    reference = {**own, "name": metadata["name"]} if own else source.get("pool") or {}
    status = run.get("status") or {}
    true = {c.get("type") for c in status.get("conditions") or () if c.get("status") == "True"}
    ended = not true.isdisjoint(("Complete", "Failed")) or "deletionTimestamp" in metadata
    suspended = "Suspended" in true
    # What runs goes on when its spec is broken afterwards.
    stalled = "Stalled" in true and (status.get("attempt") or {}).get("phase") not in ("Active", "Stopping")
    idle = ended or suspended or stalled or bool(spec.get("suspend")) or not reference.get("name")
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


def observe_node(node: Object) -> NodeObject:
    metadata, spec = node["metadata"], node.get("spec") or {}
    ready = next((c for c in (node.get("status") or {}).get("conditions") or () if c["type"] == "Ready"), None)
    # The node controller writes Unknown when the kubelet has been silent for its grace period (50 s by default). False
    # means that the kubelet speaks and complains: its Pods' own conditions tell the rest.
    silent = ready is not None and ready.get("status") == "Unknown"
    cordoned = bool(spec.get("unschedulable"))
    return NodeObject(metadata["name"], metadata["uid"], metadata["resourceVersion"], cordoned, silent)


def belongs(metadata: Object, pool_uid: str) -> bool:
    """The object was made by the operator for this pool: its controller is the pool."""
    return any(o.get("controller") and o.get("uid") == pool_uid for o in metadata.get("ownerReferences") or ())
