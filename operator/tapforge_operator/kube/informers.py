"""What of the cluster is followed, and how the cache learns of it.

Promises:
1. `sync` reads everything once, consistently; before it no decision may be made.
2. A `Reflector` follows each kind. None of them keeps anything on objects: no annotation, no label, no finalizer.
3. The kinds of ours may be missing: their definitions are installed later, or are deleted and come back. Then
   `missing` says so, and they are asked for every few seconds. The watch reports each object that a deleted definition
   takes with it. Those that it missed are forgotten when the API server has not known the kind for `_GONE_SECONDS`.
4. An observer that fails on an event of a watch has missed it. That is reported (`broken`), and the watch goes on.

Times are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tapforge_api.base import API_VERSION
from tapforge_operator import labels
from tapforge_operator.kube.cache import Cache, Heads, Index, WatchFreshness
from tapforge_operator.kube.client import ApiError, Client
from tapforge_operator.kube.objectmeta import Unavailable
from tapforge_operator.kube.reflector import Broken, Kind, Observe, Reflector, ignore, read

log = logging.getLogger(__name__)

RAY: Final = "ray.io/v1"
KUBERAY_MISSING: Final = "the cluster knows no RayJobs (rayjobs.ray.io): install KubeRay 1.5.1 or newer"
KUBERAY_TOO_OLD: Final = (
    "the cluster's RayJobs (rayjobs.ray.io) have no rayClusterSpec.authOptions, and without it any Pod could start "
    "code in the run's Ray cluster: upgrade KubeRay to 1.5.1 or newer, and its CRDs, which Helm leaves as they are"
)
_COORDINATION: Final = "coordination.k8s.io/v1"
_OURS: Final = f"{labels.MANAGED_BY}={labels.OPERATOR}"

#: the label is of no other object: Pods of slots, and Leases of external URLs
_SLOTS: Final = Kind("slots", "pods", labels.POOL_UID)
_LEASES: Final = Kind("Leases of external URLs", "leases", labels.POOL_UID, _COORDINATION)
_NODES: Final = Kind("nodes", "nodes")
_POOLS: Final = Kind("pools", "emulatorpools", group=API_VERSION)
_RUNS: Final = Kind("runs", "trainingruns", group=API_VERSION)
_LEADER: Final = Kind("the leader's Lease", "leases", _OURS, _COORDINATION)
_JOBS: Final = Kind("RayJobs", "rayjobs", _OURS, RAY)
_HEADS: Final = Kind("the Pods of Ray's heads", "pods", f"ray.io/node-type=head,{labels.RUN_UID}")

#: a watch that says nothing for so long, while a leader renews every few seconds, is dead
_LEADER_SILENCE: Final = 25.0
#: lists that were read while the API server was compacting begin again this often
_TRIES: Final = 3
#: for which the API server has to say that it doesn't know a kind of ours: one that has just started may say so too
_GONE_SECONDS: Final = 10.0
#: between two lists, however often watches are cut
_REST_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Scope:
    """What of the cluster is this operator's."""

    #: empty: every namespace
    namespaces: tuple[str, ...] = ()
    nodes: bool = True
    #: Leases of external devices
    devices: bool = True

    @property
    def each(self) -> tuple[str, ...]:
        """Namespaces to list by; "" is all of them."""
        return self.namespaces or ("",)


class Telemetry(Protocol):
    """Where each word of a watch or a list is reported."""

    freshness: WatchFreshness

    def event(self, kind: str) -> None: ...
    def event_age(self, kind: str = "") -> float: ...
    def passed_over(self, kind: str) -> None: ...


class Informers:
    def __init__(self, cache: Cache, scope: Scope, telemetry: Telemetry, broken: Broken | None = None):
        """`broken` is called with what an observer raised on an event of a watch: it has missed that event."""
        self._cache = cache
        self._scope = scope
        self._telemetry = telemetry
        self._broken = broken
        #: kinds of ours that the API server doesn't know, by namespace ("": all of them): why, for people; since when
        self._missing: dict[tuple[str, str], tuple[str, float]] = {}

    @property
    def missing(self) -> str:
        """Which kinds of ours the API server doesn't know, or doesn't let be read; "" when there are none."""
        return "; ".join(sorted({text for text, _ in self._missing.values()}))

    # --- lists --------------------------------------------------------------------------------------------------------

    async def sync(self, client: Client) -> None:
        """Reads everything. Raises ApiError."""
        cache = self._cache
        if self._scope.nodes:
            await self._read(client, _NODES, "", cache.observe_node, cache.nodes)
        for space in self._scope.each:
            try:
                await self._read_space(client, space)
            except ApiError as error:
                if error.status != 403 or not space:
                    raise
                # Rights go with their namespace. The other namespaces' pools must not wait until a person notices.
                log.error("namespace %s can't be read, what is in it is left as it is: %s", space, error)

    async def _read_space(self, client: Client, space: str) -> None:
        """Pools last: no pool is decided about while its slots may not be seen."""
        cache = self._cache
        if self._scope.devices:
            as_of = await self._read(client, _LEASES, space, cache.observe_lease, cache.leases)
            for listener in cache.leases_listed:
                listener(space, as_of)
        await self._read(client, _SLOTS, space, cache.observe_pod, cache.slots)
        await self._read_ours(client, _RUNS, space, cache.observe_run, cache.runs)
        await self._read_ours(client, _POOLS, space, cache.observe_pool, cache.pools)

    async def _read_ours(self, client: Client, kind: Kind, space: str, observe: Observe, index: Index[Any]) -> None:
        try:
            await self._read(client, kind, space, observe, index)
        except ApiError as error:
            if error.status != 404:
                raise
            self._lacks(kind, index, space, error)
        else:
            self._has(kind, space)

    async def _read(self, client: Client, kind: Kind, space: str, observe: Observe, index: Index[Any]) -> str:
        """Returns the version of the list."""
        for left in reversed(range(_TRIES)):
            try:
                uids, as_of = await read(
                    client,
                    kind.path(space),
                    kind.selector,
                    observe,
                    self._telemetry.freshness.refresh,
                    lambda: self._telemetry.passed_over(kind.plural),
                )
            except ApiError as error:
                if error.status != 410 or not left:
                    raise
            else:
                index.replace(uids, as_of, _within(space))
                return as_of
        raise AssertionError("unreachable")

    async def resync(self, client: Client, every: float, silence: float) -> None:
        """Lists again `every` so many seconds, and after a `silence` of all watches: one of them receives each renewal
        of the leader's Lease, so no watch works then. Until cancelled."""
        listed = time.monotonic()
        while True:
            age = self._telemetry.event_age()
            if (left := min(listed + every - time.monotonic(), silence - age)) > 0:
                await asyncio.sleep(left)
                continue
            began = time.monotonic()
            try:
                await self.sync(client)
                listed = began
                self._telemetry.event("list")
                await asyncio.sleep(_REST_SECONDS)
            except ApiError as error:
                if not error.passing:
                    raise
                log.warning("what the cluster holds could not be listed: %s", error)
                await asyncio.sleep(1.0)

    # --- watches ------------------------------------------------------------------------------------------------------

    async def watch(self, client: Client, own_namespace: str) -> None:
        """Follows everything that a process needs which leads or stands by. Until cancelled."""
        cache, event, spaces, broken = self._cache, self._telemetry.event, self._scope.each, self._broken
        passed_over = self._telemetry.passed_over
        reflectors = [
            self._follow(_POOLS, cache.observe_pool, cache.pools, client),
            self._follow(_RUNS, cache.observe_run, cache.runs, client),
            slot_reflector(cache, client, spaces, lambda: event("pods"), broken, lambda: passed_over("pods")),
            leader_reflector(client, own_namespace, lambda: event("leader")),
        ]
        if self._scope.devices:
            reflectors.append(
                lease_reflector(cache, client, spaces, lambda: event("leases"), broken, lambda: passed_over("leases"))
            )
        if self._scope.nodes:
            reflectors.append(
                node_reflector(cache, client, lambda: event("nodes"), broken, lambda: passed_over("nodes"))
            )
        async with asyncio.TaskGroup() as group:
            for reflector in reflectors:
                group.create_task(reflector.run(), name="a reflector")

    def _follow(self, kind: Kind, observe: Observe, index: Index[Any], client: Client) -> Reflector:
        """A kind of ours."""

        def listed(space: str, uids: set[str], as_of: str) -> None:
            index.replace(uids, as_of, _within(space))
            self._has(kind, space)

        return Reflector(
            client,
            kind,
            self._scope.each,
            observe,
            listed,
            on_event=lambda: self._telemetry.event(kind.plural),
            missing=lambda space, error: self._lacks(kind, index, space, error),
            absent=(404,),  # an API server that has just started refuses every caller for a moment
            broken=self._broken,
            passed_over=lambda: self._telemetry.passed_over(kind.plural),
        )

    def _has(self, kind: Kind, space: str) -> None:
        if self._missing.pop((kind.plural, space), None):
            log.info("%s can be read%s", kind.name, _of_namespace(space))

    def _lacks(self, kind: Kind, index: Index[Any], space: str, error: ApiError) -> None:
        known, since = self._missing.get((kind.plural, space), ("", 0.0))
        match error.status:
            case 404:
                text = f"the API server knows no {kind.plural}.{kind.group.partition('/')[0]}: apply the definitions"
                if known == text and time.monotonic() - since >= _GONE_SECONDS:
                    index.forget(_within(space))
            case 403:
                text = f"the operator may not read {kind.name}{_of_namespace(space)}: {error.message}"
            case _:
                log.warning("%s can't be listed%s: %s", kind.name, _of_namespace(space), error)
                return
        if known != text:
            self._missing[kind.plural, space] = text, time.monotonic()
            log.log(logging.ERROR if error.status == 404 else logging.WARNING, "%s", text)


# --- reflectors: `spaces` are namespaces, "" is all of them; `on_event` is called with each page and event ------------


def slot_reflector(
    cache: Cache,
    client: Client,
    spaces: tuple[str, ...],
    on_event: Callable[[], None],
    broken: Broken | None = None,
    passed_over: Callable[[], None] = ignore,
) -> Reflector:
    def listed(space: str, uids: set[str], as_of: str) -> None:
        cache.slots.replace(uids, as_of, _within(space))

    return Reflector(
        client, _SLOTS, spaces, cache.observe_pod, listed, on_event=on_event, broken=broken, passed_over=passed_over
    )


def lease_reflector(
    cache: Cache,
    client: Client,
    spaces: tuple[str, ...],
    on_event: Callable[[], None],
    broken: Broken | None = None,
    passed_over: Callable[[], None] = ignore,
) -> Reflector:
    def listed(space: str, uids: set[str], as_of: str) -> None:
        cache.leases.replace(uids, as_of, _within(space))
        for listener in cache.leases_listed:
            listener(space, as_of)

    return Reflector(
        client, _LEASES, spaces, cache.observe_lease, listed, on_event=on_event, broken=broken, passed_over=passed_over
    )


def node_reflector(
    cache: Cache,
    client: Client,
    on_event: Callable[[], None],
    broken: Broken | None = None,
    passed_over: Callable[[], None] = ignore,
) -> Reflector:
    def listed(_: str, uids: set[str], as_of: str) -> None:
        cache.nodes.replace(uids, as_of)

    return Reflector(
        client, _NODES, ("",), cache.observe_node, listed, on_event=on_event, broken=broken, passed_over=passed_over
    )


def leader_reflector(client: Client, namespace: str, renewed: Callable[[], None]) -> Reflector:
    """`renewed` is called whenever the leader renewed its Lease, which it does every few seconds. That shows that
    watches live, also while the pools are so quiet that nothing else happens; otherwise a list of everything would have
    to answer their silence, every half a minute."""
    return Reflector(client, _LEADER, (namespace,), lambda _, __: renewed(), silence=_LEADER_SILENCE)


def job_reflector(cache: Cache, client: Client, spaces: tuple[str, ...], changed: Callable[[], None]) -> Reflector:
    """RayJobs with labels of ours. KubeRay may not be installed, or be installed later: then the API server knows no
    RayJobs, the cache says so, and it is asked again every few seconds. The same where the operator may not read them,
    and where the API server fails at it. `changed` is called when they can be read and when they can't any more."""

    def listed(space: str, uids: set[str], as_of: str) -> None:
        cache.ray_jobs.replace(uids, as_of, _within(space))
        if cache.no_ray_jobs.pop(space, None) is not None:
            log.info("runs: RayJobs can be made%s", _of_namespace(space))
            changed()

    def missing(space: str, error: ApiError) -> None:
        before, now = cache.no_ray_jobs.get(space), ray_jobs_unavailable(error)
        cache.no_ray_jobs[space] = now
        if before is None or before.reason != now.reason:
            log.log(logging.INFO if now.stalls else logging.WARNING, "runs: %s%s", now.message, _of_namespace(space))
            changed()

    return Reflector(client, _JOBS, spaces, cache.observe_ray_job, listed, missing=missing)


def head_reflector(heads: Heads, client: Client, spaces: tuple[str, ...]) -> Reflector:
    def listed(space: str, uids: set[str], as_of: str) -> None:
        heads.replace(uids, as_of, space)

    def missing(space: str, error: ApiError) -> None:
        if heads.known(space):
            log.warning("runs: the Pods of Ray's heads can't be read%s: %s", _of_namespace(space), error)
        heads.unread(space)

    return Reflector(client, _HEADS, spaces, heads.observe, listed, missing=missing)


def ray_jobs_unavailable(error: ApiError) -> Unavailable:
    """Why RayJobs can't be read or made, by what the API server answered instead."""
    match error.status:
        case 404:
            return Unavailable("KubeRayMissing", KUBERAY_MISSING, stalls=True)
        case 403:
            return Unavailable(
                "RayJobsForbidden", f"the operator may not look at RayJobs: {error.message}", stalls=True
            )
    text = "the API server can't answer for RayJobs (rayjobs.ray.io); the run goes on when it can"
    return Unavailable("RayJobsUnavailable", f"{text}: {error.status or 'no answer'} {error.reason}: {error.message}")


def _of_namespace(space: str) -> str:
    return f" (in namespace {space})" if space else ""


def _within(space: str) -> Callable[[Any], bool] | None:
    """What a list of one namespace speaks of."""
    return (lambda thing: thing.namespace == space) if space else None
