"""What the cluster last reported, kept small: an index per kind, fed by watches, lists and answers to our own writes.

Promises:
1. An object never goes back in time: what carries an older resourceVersion than is known is passed over, also when it
   comes late out of a list or out of the answer to one of our own writes.
2. What was deleted stays deleted, whatever comes late out of a list or an answer. What merely went out of sight (it
   lost the label that is selected by, which a watch calls deleted too) is known again when it is seen at a later
   version: of an object that was deleted there is none.
3. A whole list (`replace`) also removes what is not in it any more: a watch that was cut doesn't report what vanished
   meanwhile. What was written after the list was read is kept.
4. The controllers that a change concerns receive the pool or run that it was, nothing else.

Not thread-safe; everything happens in one event loop. Times are seconds.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from tapforge_api.environment import PoolReference
from tapforge_operator.kube.leaderelection import since_boot
from tapforge_operator.kube.objectmeta import Unavailable, version
from tapforge_operator.kube.types import (
    LeaseObject,
    NodeObject,
    PoolObject,
    RayHead,
    RayJob,
    RunObject,
    Slot,
    observe,
    observe_lease,
    observe_node,
    observe_pool,
    observe_ray_head,
    observe_ray_job,
    observe_run,
)

_DEFAULT_SLOTS: Final = int(PoolReference.model_fields["slots"].default)
#: how long a node is followed while it is silent until it counts as lost. Its kubelet was silent for 50 s before (the
#: node controller's default), and a claim whose holder died with it has to be over within two minutes. Kubelets that
#: an API server's outage had cut off are back within 10 s
NODE_GRACE: Final = 30.0

Listen = Callable[[Mapping[str, Any], bool], None]


class Record(Protocol):
    """What an index can hold: a record of an object."""

    @property
    def uid(self) -> str: ...
    @property
    def resource_version(self) -> str: ...


K = TypeVar("K", bound=Record)
#: UIDs of deleted objects that are remembered: more than can be under way in any list or answer
_GRAVES = 20_000


class Index(Generic[K]):
    """Objects of a kind by UID, and by `group` (the pool's UID for slots)."""

    def __init__(self, group: Callable[[K], str], changed: Callable[[str, K | None, K | None], None] | None = None):
        self._group = group
        #: called with (group, before, after) for every change
        self._changed = changed
        self._objects: dict[str, K] = {}
        self._groups: dict[str, dict[str, K]] = {}
        #: the version at which each went; -1: for ever
        self._graves: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._objects)

    def get(self, uid: str) -> K | None:
        return self._objects.get(uid)

    def all(self) -> Iterable[K]:
        return self._objects.values()

    def of(self, group: str) -> Mapping[str, K]:
        """The objects of a group by UID: a view, not a copy."""
        return MappingProxyType(self._groups.get(group, {}))

    def newer(self, uid: str, resource_version: str) -> K | None:
        """What is known of an object, where that is not older than this version of it; None for no version."""
        known, then = self._objects.get(uid), version(resource_version)
        return known if known is not None and 0 < then <= version(known.resource_version) else None

    def put(self, thing: K) -> bool:
        """True when it was a change."""
        went = self._graves.get(thing.uid)
        if went is not None and not 0 <= went < version(thing.resource_version):
            return False
        self._graves.pop(thing.uid, None)
        before = self._objects.get(thing.uid)
        if before is not None and version(before.resource_version) >= version(thing.resource_version):
            return False
        group = self._group(thing)
        if before is not None and (old := self._group(before)) != group:
            self._leave(old, thing.uid)
        self._objects[thing.uid] = thing
        self._groups.setdefault(group, {})[thing.uid] = thing
        self._notify(group, before, thing)
        return True

    def drop(self, uid: str, at: str = "") -> K | None:
        """It was deleted, or went out of sight at the version `at`. Returns what was known of it."""
        before = self._graves.get(uid, 0)
        self._graves[uid] = -1 if before < 0 or not at else max(before, version(at))
        while len(self._graves) > _GRAVES:
            self._graves.popitem(last=False)
        thing = self._objects.pop(uid, None)
        if thing is not None:
            group = self._group(thing)
            self._leave(group, uid)
            self._notify(group, thing, None)
        return thing

    def replace(self, listed: set[str], resource_version: str, among: Callable[[K], bool] | None = None) -> list[str]:
        """Drops what a list of that version doesn't have any more: UIDs that are not `listed`, of objects that the list
        speaks of (`among`; all without it), unless they were written later. Returns them."""
        as_of = version(resource_version)
        gone = [
            uid
            for uid, thing in self._objects.items()
            if uid not in listed and version(thing.resource_version) <= as_of and (among is None or among(thing))
        ]
        for uid in gone:
            self.drop(uid, resource_version)
        return gone

    def forget(self, among: Callable[[K], bool] | None = None) -> None:
        """They can't be read any more, deleted or not: each is known again as soon as it is seen."""
        for uid, thing in list(self._objects.items()):
            if among is None or among(thing):
                del self._objects[uid]
                group = self._group(thing)
                self._leave(group, uid)
                self._notify(group, thing, None)

    def _leave(self, group: str, uid: str) -> None:
        members = self._groups[group]
        del members[uid]
        if not members:
            del self._groups[group]

    def _notify(self, group: str, before: K | None, after: K | None) -> None:
        if self._changed is not None:
            self._changed(group, before, after)


#: the leader Lease is renewed every 3 s, and an answer to that is one
GAP: Final = 10.0
#: a step of the wall clock that counts as one: graces are longer, and clocks that are kept right make smaller ones
_STEP: Final = 5.0


class WatchFreshness:
    """Since when this process has followed the cluster without a gap: it can't know for how long something was so
    before.

    1. A gap is a time longer than `gap` in which the API server said nothing: it was away, or this process was stopped.
       An age that a plan reckons with counts from `since` at the earliest, so that an outage ages nothing; in a gap
       nothing has any age.
    2. Gaps are measured on a clock that can't be set and goes on while the machine sleeps. A wall clock that is set is
       a gap too: ages are differences between its time and timestamps of the cluster, and would jump with it.
    3. A new leader begins anew (`reset`): what was reported was reported to another process.

    `since` is of the epoch, as the wall clock has it now.
    """

    def __init__(
        self, gap: float = GAP, wall: Callable[[], float] = time.time, clock: Callable[[], float] = since_boot
    ):
        self._gap = gap
        self._wall = wall
        self._clock = clock
        self._began = self._last_event = clock()
        self._offset = wall() - self._began

    def refresh(self) -> None:
        """The API server said something, just now."""
        if self._lapsed:
            self.reset()
        self._last_event = self._clock()

    def reset(self) -> None:
        """Nothing is any older than this moment."""
        self._began = self._last_event = self._clock()
        self._offset = self._wall() - self._began

    @property
    def since(self) -> float:
        """Epoch time since which there was no gap; now, while there is one."""
        return self._wall() - self.watched(self._began)

    def moment(self) -> float:
        """Now, on the clock that can't be set: something was seen for the first time, to be asked for in `watched`."""
        return self._clock()

    @property
    def offset(self) -> float:
        """What makes a moment a time of the epoch, as the wall clock has it now."""
        return self._wall() - self._clock()

    def watched(self, moment: float) -> float:
        """For how long something has been followed that was first seen at that moment."""
        return 0.0 if self._lapsed else max(0.0, self._clock() - max(moment, self._began))

    @property
    def _lapsed(self) -> bool:
        now = self._clock()
        return now - self._last_event > self._gap or abs(self._wall() - now - self._offset) > _STEP


class Telemetry(Protocol):
    """Where the cache reports, and where it reads for how long something was followed."""

    freshness: WatchFreshness

    def booted(self, pool: str, seconds: float) -> None: ...


class Heads:
    """The Pods that Ray's heads are in. A head that the cluster takes away says so (`disruption` in types.py) for as
    long as it exists, which can be a moment. So of each run the newest head is remembered also after it is gone, until
    its run is. Any client may write labels: a Pod speaks for runs of its own namespace only.

    Where heads could not be listed (`unread`), that none is known says nothing."""

    def __init__(self, changed: Callable[[str], None], exists: Callable[[str], bool]):
        """`changed` is called with the UID of a run whose head changed, `exists` returns whether there is a run."""
        self._changed = changed
        self._exists = exists
        self._heads: dict[tuple[str, str], RayHead] = {}
        #: namespaces whose last list failed; "" for all of them
        self._unread: set[str] = set()

    def unread(self, namespace: str) -> None:
        """They could not be listed."""
        self._unread.add(namespace)

    def known(self, namespace: str) -> bool:
        return self._unread.isdisjoint((namespace, ""))

    def of(self, namespace: str, run_uid: str) -> RayHead | None:
        """The newest head of the run, which may be gone."""
        return self._heads.get((namespace, run_uid))

    def observe(self, pod: Mapping[str, Any], deleted: bool = False) -> None:
        head = observe_ray_head(pod)
        if head is None:
            return
        key = head.namespace, head.run_uid
        known = self._heads.get(key)
        if known is not None and _order(head) < _order(known):
            return
        if deleted and not self._exists(head.run_uid):
            self._heads.pop(key, None)
            return
        self._heads[key] = replace(head, gone=deleted)
        if known is None or _news(known) != _news(self._heads[key]):
            self._changed(head.run_uid)

    def replace(self, listed: set[str], as_of: str, namespace: str) -> None:
        """A list of a namespace ("": of all) has no other ones."""
        self._unread.discard(namespace)
        for key, head in self._heads.items():
            missing = head.uid not in listed and version(head.version) <= version(as_of)
            if missing and not head.gone and namespace in ("", head.namespace):
                self._heads[key] = replace(head, gone=True)
                self._changed(head.run_uid)

    def forget(self, run_uid: str) -> None:
        """The run is gone."""
        for key in [key for key in self._heads if key[1] == run_uid]:
            del self._heads[key]


def _order(head: RayHead) -> tuple[int, float, int]:
    return head.attempt, head.created, version(head.version)


def _news(head: RayHead) -> tuple[str, str, str, bool]:
    return head.uid, head.node, head.disruption, head.gone


class Cache:
    def __init__(self, telemetry: Telemetry, requeue: Callable[[str], None]):
        """`requeue` is called with the UID of a pool that something happened to."""
        self._telemetry = telemetry
        self._requeue = requeue
        self.pools: Index[PoolObject] = Index(lambda p: f"{p.namespace}/{p.name}", self._pool_changed)
        self.slots: Index[Slot] = Index(lambda s: s.pool_uid, self._slot_changed)
        self.runs: Index[RunObject] = Index(lambda r: f"{r.namespace}/{r.pool}", self._run_changed)
        self.leases: Index[LeaseObject] = Index(lambda lease: lease.namespace)
        self.nodes: Index[NodeObject] = Index(lambda n: n.name, self._node_changed)
        self.ray_jobs: Index[RayJob] = Index(lambda job: f"{job.namespace}/{job.run_uid}", self._ray_job_changed)
        self.heads = Heads(
            lambda run_uid: self._notify_runs([run_uid]), lambda run_uid: self.runs.get(run_uid) is not None
        )
        #: why RayJobs can't be read, by namespace ("": all of them); none where they can
        self.no_ray_jobs: dict[str, Unavailable] = {}
        #: called with every slot that is new, changed or gone: (before, after)
        self.slot_listeners: list[Callable[[Slot | None, Slot | None], None]] = []
        #: called with Leases of external URLs: the object, and whether it was deleted
        self.lease_listeners: list[Listen] = []
        #: called with pools that are new, changed or gone: (before, after)
        self.pool_listeners: list[Callable[[PoolObject | None, PoolObject | None], None]] = []
        #: called with the UID of a run that something happened to, or to its RayJobs or its pool
        self.run_listeners: list[Callable[[str], None]] = []
        #: called when all such Leases were listed and are in `leases`: namespace ("": all of them), version of the list
        self.leases_listed: list[Callable[[str, str], None]] = []
        #: when silent nodes were first seen to be so (a moment of `freshness`), by UID
        self._silent: dict[str, float] = {}
        #: since when one node at least has answered (another such moment); None while none does
        self._answered: float | None = None

    # --- questions ----------------------------------------------------------------------------------------------------

    def pool(self, namespace: str, name: str) -> PoolObject | None:
        """The pool of that name; the newest, should the old one's end not have been seen yet."""
        return max(
            self.pools.of(f"{namespace}/{name}").values(), key=lambda p: version(p.resource_version), default=None
        )

    def ray_jobs_of(self, namespace: str, run_uid: str) -> tuple[RayJob, ...]:
        """Any client may write owner references, and they don't lead out of a namespace: what names the run in another
        one is not its RayJob."""
        return tuple(self.ray_jobs.of(f"{namespace}/{run_uid}").values())

    def wanted(self, namespace: str, name: str) -> int:
        """Phones that runs want of the pool now, held ones included."""
        return sum(run.wanted for run in self.runs.of(f"{namespace}/{name}").values())

    @property
    def clock_offset(self) -> float:
        """What makes a moment at which something was seen a time of the epoch."""
        return self._telemetry.freshness.offset

    @property
    def watching_since(self) -> float:
        """Epoch time from which ages count at the earliest: how something was before is unknown."""
        return self._telemetry.freshness.since

    def bad_nodes(self) -> dict[str, Literal["cordoned", "lost"]]:
        """Lost are those that were silent for `NODE_GRACE` while this process watched and another node answered: where
        all are silent at once, what died is the way to them, and there is nowhere to move to."""
        bad: dict[str, Literal["cordoned", "lost"]] = {}
        for node in self.nodes.all():
            if node.silent and self._silence(node.uid) >= NODE_GRACE:
                bad[node.name] = "lost"
            elif node.cordoned:
                bad[node.name] = "cordoned"
        return bad

    def ready_elsewhere(self, node: str) -> bool:
        """Whether a slot on another node is ready."""
        return any(slot.ready and slot.node not in ("", node) for slot in self.slots.all())

    def next_lost_node(self) -> float | None:
        """Seconds until a node that is silent counts as lost, should it stay so; None when there is none."""
        if self._answered is None:
            return None
        left = (NODE_GRACE - self._silence(uid) for uid in self._silent)
        return min((seconds for seconds in left if seconds > 0), default=None)

    def _silence(self, node_uid: str) -> float:
        freshness = self._telemetry.freshness
        if self._answered is None:
            return 0.0
        return freshness.watched(max(self._answered, self._silent.get(node_uid, freshness.moment())))

    # --- what happened ------------------------------------------------------------------------------------------------

    def observe_pod(self, pod: Mapping[str, Any], deleted: bool = False) -> Slot | None:
        """For watches, lists and the answers to our own writes alike."""
        uid, version = pod["metadata"]["uid"], pod["metadata"].get("resourceVersion", "")
        if deleted:
            return self.slots.drop(uid, version)
        if newer := self.slots.newer(uid, version):
            return newer  # most of what a watch reports of claimed slots was in the answer to the claim
        slot = observe(pod)
        known = self.slots.get(uid)
        if slot is None or self._is_foreign(slot, self.pools.get(slot.pool_uid)):
            # Its label or its owner was taken away: it is not a slot until they are back.
            return self.slots.drop(uid, version) if known else None
        same = known is not None and known.stage == slot.stage
        slot = replace(slot, since=known.since if known and same else self._telemetry.freshness.moment())
        self.slots.put(slot)
        return slot

    def observe_pool(self, pool: Mapping[str, Any], deleted: bool = False) -> None:
        if deleted:
            self.pools.drop(pool["metadata"]["uid"])
        else:
            self.pools.put(observe_pool(pool))

    def observe_run(self, run: Mapping[str, Any], deleted: bool = False) -> None:
        if deleted:
            self.runs.drop(run["metadata"]["uid"])
        else:
            self.runs.put(observe_run(run, _DEFAULT_SLOTS))

    def observe_ray_job(self, job: Mapping[str, Any], deleted: bool = False) -> None:
        seen = observe_ray_job(job)
        if deleted or seen is None:
            self.ray_jobs.drop(job["metadata"]["uid"], job["metadata"].get("resourceVersion", ""))
        else:
            self.ray_jobs.put(seen)

    def observe_node(self, node: Mapping[str, Any], deleted: bool = False) -> None:
        if deleted:
            self.nodes.drop(node["metadata"]["uid"])
        else:
            self.nodes.put(observe_node(node))

    def observe_lease(self, lease: Mapping[str, Any], deleted: bool = False) -> None:
        if deleted:
            self.leases.drop(lease["metadata"]["uid"], lease["metadata"].get("resourceVersion", ""))
        elif not self.leases.put(observe_lease(lease)):
            return
        for listener in self.lease_listeners:
            listener(lease, deleted)

    @staticmethod
    def _is_foreign(slot: Slot, pool: PoolObject | None) -> bool:
        """Another namespace's Pod that names the pool its owner."""
        return pool is not None and slot.namespace != pool.namespace

    def _slot_changed(self, pool_uid: str, before: Slot | None, after: Slot | None) -> None:
        if before and after and after.ready and not before.ever_ready and after.turned and after.started:
            self._telemetry.booted(f"{after.namespace}/{after.pool}", after.turned - after.started)
        for listener in self.slot_listeners:
            listener(before, after)
        self._requeue(pool_uid)

    def _pool_changed(self, _: str, before: PoolObject | None, after: PoolObject | None) -> None:
        if before is None and after is not None:
            for slot in [slot for slot in self.slots.of(after.uid).values() if self._is_foreign(slot, after)]:
                self.slots.drop(slot.uid, slot.resource_version)
        for listener in self.pool_listeners:
            listener(before, after)
        for pool in (before, after):
            if pool is not None:
                self._requeue(pool.uid)
                self._notify_runs(run.uid for run in self.runs.of(f"{pool.namespace}/{pool.name}").values())
                break

    def _run_changed(self, _: str, before: RunObject | None, after: RunObject | None) -> None:
        for run in (before, after):
            if run is not None and run.pool and (pool := self.pool(run.namespace, run.pool)):
                self._requeue(pool.uid)
        if after is None and before is not None:
            self.heads.forget(before.uid)
        if (run := after or before) is not None:
            self._notify_runs([run.uid])

    def _ray_job_changed(self, _: str, before: RayJob | None, after: RayJob | None) -> None:
        self._notify_runs(job.run_uid for job in (after or before,) if job is not None)

    def _notify_runs(self, uids: Iterable[str]) -> None:
        for uid in list(uids):
            for listener in self.run_listeners:
                listener(uid)

    def _node_changed(self, _: str, before: NodeObject | None, after: NodeObject | None) -> None:
        node = after or before
        answered, self._answered = self._answered, self._answering_since()
        if answered is None and self._answered is not None and self._silent:  # now the others may be lost
            for uid in {slot.pool_uid for slot in self.slots.all()}:
                self._requeue(uid)
        if node is None or _concern(before) == _concern(after):  # a node's heartbeat changes nothing
            return
        if after is None or not after.silent:
            self._silent.pop(node.uid, None)
        else:
            self._silent.setdefault(node.uid, self._telemetry.freshness.moment())
        for uid in {slot.pool_uid for slot in self.slots.all() if slot.node == node.name}:
            self._requeue(uid)

    def _answering_since(self) -> float | None:
        if all(node.silent for node in self.nodes.all()):
            return None
        return self._telemetry.freshness.moment() if self._answered is None else self._answered


def _concern(node: NodeObject | None) -> tuple[bool, bool]:
    return (node.cordoned, node.silent) if node is not None else (False, False)
