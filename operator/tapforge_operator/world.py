"""What the operator sees of the cluster: stores that watches feed and lists put right.

Promises:
1. `sync` reads everything once, consistently; until then `synced` is False and nobody may decide anything.
2. Watches come from kopf (`on.event` only: no annotation, no finalizer, no change-detection). A watch that was cut and
   began again shows itself by events without a type; a list then puts right what vanished meanwhile. Where everything
   vanished there are no such events: whether anything is left of a kind is asked from time to time.
3. Whoever is concerned by a change is told which pool it was (`woken`), nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import kopf

from tapforge_api.base import GROUP, VERSION
from tapforge_api.environment import PoolReference

from . import names
from .kube.client import ApiError, Client, path
from .kube.reflector import Saw, read
from .kube.store import Store, version
from .objects import (
    LeaseObject,
    NodeObject,
    PoolObject,
    RunObject,
    observe_lease,
    observe_node,
    observe_pool,
    observe_run,
)
from .ray_heads import Heads
from .run.records import RayJob, observe_ray_job
from .slots import Slot, observe
from .telemetry import Telemetry

log = logging.getLogger(__name__)

#: slots of no other object: the selector of Pods and of external URLs' Leases
MEMBERS: Final = names.POOL_UID
LEASES: Final = "coordination.k8s.io/v1"
_DEFAULT_SLOTS: Final = int(PoolReference.model_fields["slots"].default)
#: how long a node is followed while it is silent until it counts as lost. Its kubelet was silent for 50 s before (the
#: node controller's default), and a claim whose holder died with it has to be over within two minutes. Kubelets that
#: an API server's outage had cut off are back within 10 s
NODE_GRACE: Final = 30.0
#: lists that were read while the API server was compacting begin again this often
_TRIES: Final = 3
#: between two lists, however often watches are cut
_REST_SECONDS: Final = 5.0
#: between two questions whether anything is left of a kind
_ASK_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Scope:
    """What of the cluster is this operator's."""

    #: empty: every namespace
    namespaces: tuple[str, ...] = ()
    nodes: bool = True

    @property
    def each(self) -> tuple[str, ...]:
        """Namespaces to list by; "" is all of them."""
        return self.namespaces or ("",)


Listen = Callable[[Mapping[str, Any], bool], None]


class World:
    def __init__(self, scope: Scope, telemetry: Telemetry, woken: Callable[[str], None]):
        """`woken` is called with the UID of a pool that something happened to."""
        self._scope = scope
        self._telemetry = telemetry
        self._woken = woken
        self.pools: Store[PoolObject] = Store(lambda p: f"{p.namespace}/{p.name}", self._pool_changed)
        self.slots: Store[Slot] = Store(lambda s: s.pool_uid, self._slot_changed)
        self.runs: Store[RunObject] = Store(lambda r: f"{r.namespace}/{r.pool}", self._run_changed)
        self.leases: Store[LeaseObject] = Store(lambda lease: lease.namespace)
        self.nodes: Store[NodeObject] = Store(lambda n: n.name, self._node_changed)
        self.ray_jobs: Store[RayJob] = Store(lambda job: job.run_uid, self._ray_job_changed)
        self.heads = Heads(
            lambda run_uid: self._tell_runs([run_uid]), lambda run_uid: self.runs.get(run_uid) is not None
        )
        #: why no RayJobs can be had, by namespace ("": all of them); none where they can
        self.no_ray_jobs: dict[str, str] = {}
        self.synced = False
        #: told of every slot that is new, changed or gone: (before, after)
        self.slot_listeners: list[Callable[[Slot | None, Slot | None], None]] = []
        #: told of Leases of external URLs: the object, and whether it was deleted
        self.lease_listeners: list[Listen] = []
        #: told of pools that are new, changed or gone: (before, after)
        self.pool_listeners: list[Callable[[PoolObject | None, PoolObject | None], None]] = []
        #: told the UID of a run that something happened to, or to its RayJobs or its pool
        self.run_listeners: list[Callable[[str], None]] = []
        #: told when all such Leases were listed and are in `leases`: namespace ("": all of them), version of the list
        self.leases_listed: list[Callable[[str, str], None]] = []
        #: when silent nodes were first seen to be so (a moment of `attention`), by UID
        self._silent: dict[str, float] = {}
        #: since when one node at least has answered (another such moment); None while none does
        self._answered: float | None = None
        self._stale = asyncio.Event()

    # --- questions ----------------------------------------------------------------------------------------------------

    def pool(self, namespace: str, name: str) -> PoolObject | None:
        """The pool of that name; the newest, should the old one's end not have been seen yet."""
        return max(
            self.pools.of(f"{namespace}/{name}").values(), key=lambda p: version(p.resource_version), default=None
        )

    def wanted(self, namespace: str, name: str) -> int:
        """Phones that runs want of the pool now, held ones included."""
        return sum(run.wanted for run in self.runs.of(f"{namespace}/{name}").values())

    @property
    def watching_since(self) -> float:
        """Epoch time from which ages count at the earliest: nobody here can tell how something was before."""
        return self._telemetry.attention.since

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

    def next_lost_node(self) -> float | None:
        """Seconds until a node that is silent counts as lost, should it stay so; None when there is none."""
        if self._answered is None:
            return None
        left = (NODE_GRACE - self._silence(uid) for uid in self._silent)
        return min((seconds for seconds in left if seconds > 0), default=None)

    def _silence(self, node_uid: str) -> float:
        attention = self._telemetry.attention
        if self._answered is None:
            return 0.0
        return attention.watched(max(self._answered, self._silent.get(node_uid, attention.moment())))

    # --- what happened ------------------------------------------------------------------------------------------------

    def saw_pod(self, pod: Mapping[str, Any], deleted: bool = False) -> Slot | None:
        """For watches, lists and the answers to our own writes alike."""
        uid, version = pod["metadata"]["uid"], pod["metadata"].get("resourceVersion", "")
        if deleted:
            return self.slots.drop(uid, version)
        if known := self.slots.newer(uid, version):
            return known  # most of what a watch tells of claimed slots was in the answer to the claim
        slot = observe(pod)
        if slot is None:  # somebody took its label or its owner away: it is no slot until they are back
            return self.slots.drop(uid, version) if self.slots.get(uid) else None
        self.slots.put(slot)
        return slot

    def saw_pool(self, pool: Mapping[str, Any], deleted: bool = False) -> None:
        if deleted:
            self.pools.drop(pool["metadata"]["uid"])
        else:
            self.pools.put(observe_pool(pool))

    def saw_run(self, run: Mapping[str, Any], deleted: bool = False) -> None:
        if deleted:
            self.runs.drop(run["metadata"]["uid"])
        else:
            self.runs.put(observe_run(run, _DEFAULT_SLOTS))

    def saw_ray_job(self, job: Mapping[str, Any], deleted: bool = False) -> None:
        seen = observe_ray_job(job)
        if deleted or seen is None:
            self.ray_jobs.drop(job["metadata"]["uid"])
        else:
            self.ray_jobs.put(seen)

    def saw_node(self, node: Mapping[str, Any], deleted: bool = False) -> None:
        if deleted:
            self.nodes.drop(node["metadata"]["uid"])
        else:
            self.nodes.put(observe_node(node))

    def saw_lease(self, lease: Mapping[str, Any], deleted: bool = False) -> None:
        if MEMBERS not in (lease["metadata"].get("labels") or {}):
            return  # the leader's own Lease: that it was renewed is worth knowing, and known by now
        if deleted:
            self.leases.drop(lease["metadata"]["uid"])
        elif not self.leases.put(observe_lease(lease)):
            return
        for listener in self.lease_listeners:
            listener(lease, deleted)

    def _slot_changed(self, pool_uid: str, before: Slot | None, after: Slot | None) -> None:
        if before and after and after.ready and not before.ever_ready and after.turned and after.started:
            self._telemetry.booted(f"{after.namespace}/{after.pool}", after.turned - after.started)
        for listener in self.slot_listeners:
            listener(before, after)
        self._woken(pool_uid)

    def _pool_changed(self, _: str, before: PoolObject | None, after: PoolObject | None) -> None:
        for listener in self.pool_listeners:
            listener(before, after)
        for pool in (before, after):
            if pool is not None:
                self._woken(pool.uid)
                self._tell_runs(run.uid for run in self.runs.of(f"{pool.namespace}/{pool.name}").values())
                break

    def _run_changed(self, _: str, before: RunObject | None, after: RunObject | None) -> None:
        for run in (before, after):
            if run is not None and run.pool and (pool := self.pool(run.namespace, run.pool)):
                self._woken(pool.uid)
        if after is None and before is not None:
            self.heads.forget(before.uid)
        if (run := after or before) is not None:
            self._tell_runs([run.uid])

    def _ray_job_changed(self, run_uid: str, _: RayJob | None, __: RayJob | None) -> None:
        self._tell_runs([run_uid])

    def _tell_runs(self, uids: Iterable[str]) -> None:
        for uid in list(uids):
            for listener in self.run_listeners:
                listener(uid)

    def _node_changed(self, _: str, before: NodeObject | None, after: NodeObject | None) -> None:
        node = after or before
        answered, self._answered = self._answered, self._answering_since()
        if answered is None and self._answered is not None and self._silent:  # now the others may be lost
            for uid in {slot.pool_uid for slot in self.slots.all()}:
                self._woken(uid)
        if node is None or _concern(before) == _concern(after):  # a node's heartbeat is no news
            return
        if after is None or not after.silent:
            self._silent.pop(node.uid, None)
        else:
            self._silent.setdefault(node.uid, self._telemetry.attention.moment())
        for uid in {slot.pool_uid for slot in self.slots.all() if slot.node == node.name}:
            self._woken(uid)

    def _answering_since(self) -> float | None:
        if all(node.silent for node in self.nodes.all()):
            return None
        return self._telemetry.attention.moment() if self._answered is None else self._answered

    # --- lists --------------------------------------------------------------------------------------------------------

    async def sync(self, client: Client) -> None:
        """Reads everything. Raises ApiError."""
        if self._scope.nodes:
            await self._read(client, "nodes", "", "", self.saw_node, self.nodes, "")
        for space in self._scope.each:
            try:
                await self._read_space(client, space)
            except ApiError as error:
                if error.status != 403 or not space:
                    raise
                # Rights go with their namespace. The other namespaces' pools must not wait for somebody to notice.
                log.error("namespace %s can't be read, what is in it is left as it is: %s", space, error)
        self.synced = True

    async def _read_space(self, client: Client, space: str) -> None:
        """Pools last: nobody decides about one whose slots may not be seen."""
        crd = f"{GROUP}/{VERSION}"
        as_of = await self._read(client, "leases", LEASES, MEMBERS, self.saw_lease, self.leases, space)
        for listener in self.leases_listed:
            listener(space, as_of)
        await self._read(client, "pods", "", MEMBERS, self.saw_pod, self.slots, space)
        await self._read(client, "trainingruns", crd, "", self.saw_run, self.runs, space)
        await self._read(client, "emulatorpools", crd, "", self.saw_pool, self.pools, space)

    async def keep_right(self, client: Client, every: float, silence: float) -> None:
        """Lists again `every` so many seconds, soon after a watch was cut, and after a `silence` of all watches: one of
        them hears each renewal of the leader's Lease, so nobody is left to tell anything. Until cancelled."""
        listed = asked = time.monotonic()
        while True:
            due = min(
                min(listed + every, asked + _ASK_SECONDS) - time.monotonic(), silence - self._telemetry.event_age()
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due)):
                    await self._stale.wait()
                    await asyncio.sleep(1.0)  # a cut watch begins again with an event for each object
            now = time.monotonic()
            if now >= asked + _ASK_SECONDS and not self._stale.is_set():
                await self._ask_what_is_left(client)
                asked = time.monotonic()
            if not self._stale.is_set() and now < listed + every and self._telemetry.event_age() < silence:
                continue
            self._stale.clear()
            try:
                await self.sync(client)
                listed = now
                self._telemetry.event("list")
                await asyncio.sleep(_REST_SECONDS)
            except ApiError as error:
                if not error.passing:
                    raise
                log.warning("what the cluster holds could not be listed: %s", error)
                self._stale.set()
                await asyncio.sleep(1.0)

    async def _ask_what_is_left(self, client: Client) -> None:
        """A list is due where something is known of a kind and the server has nothing of it."""
        crd = f"{GROUP}/{VERSION}"
        kinds: list[tuple[str, str, str, Store[Any]]] = [
            ("leases", LEASES, MEMBERS, self.leases),
            ("trainingruns", crd, "", self.runs),
            ("emulatorpools", crd, "", self.pools),
        ]
        for space in self._scope.each:
            among = within(space) or (lambda _: True)
            for kind, group, selector, store in kinds:
                if not any(among(thing) for thing in store.all()):
                    continue
                try:
                    first, _ = await anext(
                        client.pages(path(kind, space, group=group), selector, size=1, deadline=10.0)
                    )
                except ApiError as error:
                    log.info("whether any %s are left could not be asked: %s", kind, error)
                    return
                if not first:
                    self._stale.set()
                    return

    async def _read(
        self,
        client: Client,
        kind: str,
        group: str,
        selector: str,
        saw: Saw,
        store: Store[Any],
        space: str,
    ) -> str:
        """Returns the version of the list."""
        uids, as_of = await self._pages(client, path(kind, space, group=group), selector, saw)
        store.replace(uids, as_of, within(space))
        return as_of

    async def _pages(self, client: Client, where: str, selector: str, saw: Saw) -> tuple[set[str], str]:
        for left in reversed(range(_TRIES)):
            try:
                return await read(client, where, selector, saw, self._telemetry.attention.heard)
            except ApiError as error:
                if error.status != 410 or not left:
                    raise
        raise AssertionError("unreachable")

    # --- watches ------------------------------------------------------------------------------------------------------

    def watch(self, registry: kopf.OperatorRegistry, settings: kopf.OperatorSettings) -> None:
        """Has kopf tell this world what happens, to everything but slots (`watches.py`)."""
        kinds: list[tuple[tuple[str, str, str], str, Callable[..., object]]] = [
            (("coordination.k8s.io", "v1", "leases"), f"{names.MANAGED_BY}={names.OPERATOR}", self.saw_lease),
            ((GROUP, VERSION, "emulatorpools"), "", self.saw_pool),
            ((GROUP, VERSION, "trainingruns"), "", self.saw_run),
        ]
        if self._scope.nodes:
            kinds.append((("", "v1", "nodes"), "", self.saw_node))
        for kind, selector, saw in kinds:
            if selector:
                settings.watching.label_selectors[kind] = selector
            kopf.on.event(*kind, registry=registry, id=kind[-1])(self._handler(kind[-1], saw))

    def _handler(self, kind: str, saw: Callable[..., object]) -> Callable[..., Any]:
        async def on_event(event: Mapping[str, Any], **_: object) -> None:
            self._telemetry.event(kind)
            if event["type"] is None and self.synced:
                self._stale.set()
            saw(event["object"], event["type"] == "DELETED")

        return on_event


def _concern(node: NodeObject | None) -> tuple[bool, bool]:
    return (node.cordoned, node.silent) if node is not None else (False, False)


def within(space: str) -> Callable[[Any], bool] | None:
    """What a list of one namespace speaks of."""
    return (lambda thing: thing.namespace == space) if space else None
