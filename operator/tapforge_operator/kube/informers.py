"""What of the cluster is followed, and how the cache learns of it.

Promises:
1. `sync` reads everything once, consistently; before it nobody may decide anything.
2. kopf watches the two kinds of ours, a `Reflector` each other one. kopf has `on.event` handlers only and keeps nothing
   on objects: no annotation, no label, no finalizer.
3. A watch of kopf's that was cut and began again shows itself by events without a type; a list then puts right what
   vanished meanwhile. Where everything vanished there are no such events: whether anything is left of a kind is asked
   from time to time.
4. Slots are by far the most numerous objects and change the most often. On kopf's way an event costs five times as much
   and every object keeps a task: here a thousand Pods that change at once are digested in a tenth of a second, and
   claims are answered in between.

Times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast

import aiohttp
import kopf

from tapforge_api.base import API_VERSION
from tapforge_operator import labels
from tapforge_operator.kube.cache import Cache, Heads, Index, WatchFreshness
from tapforge_operator.kube.client import ApiError, Client
from tapforge_operator.kube.credentials import Access, Credentials, NoCluster
from tapforge_operator.kube.reflector import Kind, Observe, Reflector, read
from tapforge_operator.kube.types import Unavailable

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
#: until kopf may try again with credentials that were refused
_LOGIN_SECONDS: Final = 5.0
#: lists that were read while the API server was compacting begin again this often
_TRIES: Final = 3
#: between two lists, however often watches are cut
_REST_SECONDS: Final = 5.0
#: between two questions whether anything is left of a kind that kopf watches
_PROBE_SECONDS: Final = 60.0


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


class Telemetry(Protocol):
    """Where each word of a watch or a list is reported."""

    freshness: WatchFreshness

    def event(self, kind: str) -> None: ...
    def event_age(self, kind: str = "") -> float: ...


class Informers:
    def __init__(self, cache: Cache, scope: Scope, telemetry: Telemetry):
        self._cache = cache
        self._scope = scope
        self._telemetry = telemetry
        self._synced = False
        #: a watch of kopf's was cut
        self._stale = asyncio.Event()

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
                # Rights go with their namespace. The other namespaces' pools must not wait for somebody to notice.
                log.error("namespace %s can't be read, what is in it is left as it is: %s", space, error)
        self._synced = True

    async def _read_space(self, client: Client, space: str) -> None:
        """Pools last: nobody decides about one whose slots may not be seen."""
        cache = self._cache
        as_of = await self._read(client, _LEASES, space, cache.observe_lease, cache.leases)
        for listener in cache.leases_listed:
            listener(space, as_of)
        await self._read(client, _SLOTS, space, cache.observe_pod, cache.slots)
        await self._read(client, _RUNS, space, cache.observe_run, cache.runs)
        await self._read(client, _POOLS, space, cache.observe_pool, cache.pools)

    async def _read(self, client: Client, kind: Kind, space: str, observe: Observe, index: Index[Any]) -> str:
        """Returns the version of the list."""
        for left in reversed(range(_TRIES)):
            try:
                uids, as_of = await read(
                    client, kind.path(space), kind.selector, observe, self._telemetry.freshness.refresh
                )
            except ApiError as error:
                if error.status != 410 or not left:
                    raise
            else:
                index.replace(uids, as_of, _within(space))
                return as_of
        raise AssertionError("unreachable")

    async def resync(self, client: Client, every: float, silence: float) -> None:
        """Lists again `every` so many seconds, soon after a watch was cut, and after a `silence` of all watches: one of
        them hears each renewal of the leader's Lease, so nobody is left to tell anything. Until cancelled."""
        listed = probed = time.monotonic()
        while True:
            due = min(
                min(listed + every, probed + _PROBE_SECONDS) - time.monotonic(), silence - self._telemetry.event_age()
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due)):
                    await self._stale.wait()
                    await asyncio.sleep(1.0)  # a cut watch begins again with an event for each object
            now = time.monotonic()
            if now >= probed + _PROBE_SECONDS and not self._stale.is_set():
                await self._probe(client)
                probed = time.monotonic()
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

    async def _probe(self, client: Client) -> None:
        """A list is due where something is known of a kind that kopf watches, and the server has nothing of it."""
        kinds: tuple[tuple[Kind, Index[Any]], ...] = ((_RUNS, self._cache.runs), (_POOLS, self._cache.pools))
        for space in self._scope.each:
            among = _within(space) or (lambda _: True)
            for kind, index in kinds:
                if not any(among(thing) for thing in index.all()):
                    continue
                try:
                    first, _ = await anext(client.pages(kind.path(space), kind.selector, size=1, deadline=10.0))
                except ApiError as error:
                    log.info("whether any %s are left could not be asked: %s", kind.name, error)
                    return
                if not first:
                    self._stale.set()
                    return

    # --- watches ------------------------------------------------------------------------------------------------------

    async def watch(
        self, client: Client, credentials: Credentials, own_namespace: str, begun: asyncio.Event, end: asyncio.Event
    ) -> None:
        """Follows everything that a process needs which leads or stands by; sets `begun`, and returns when `end` is
        set."""
        cache, event = self._cache, self._telemetry.event
        reflectors = [
            slot_reflector(cache, client, self._scope.each, lambda: event("pods")),
            lease_reflector(cache, client, self._scope.each, lambda: event("leases")),
            leader_reflector(client, own_namespace, lambda: event("leader")),
        ]
        if self._scope.nodes:
            reflectors.append(node_reflector(cache, client, lambda: event("nodes")))
        # Begun before kopf, which ends every task that it finds afterwards; with the tasks that these begin.
        tasks = {asyncio.create_task(one.run(), name="a reflector") for one in reflectors}
        await asyncio.sleep(0)
        for task in tasks:
            task.add_done_callback(lambda _: end.set())
        try:
            await self._watch_ours(credentials, begun, end)
        finally:
            for task in tasks:
                task.cancel()
            done, _ = await asyncio.wait(tasks)
        for task in done:
            if not task.cancelled():
                task.result()

    async def _watch_ours(self, credentials: Credentials, begun: asyncio.Event, end: asyncio.Event) -> None:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        # Nowhere to keep or look for kopf's own marks, and no finalizer: it removes the one of this name from whatever
        # has it, and its default is that of every other kopf operator.
        settings.persistence.diffbase_storage = kopf.MultiDiffBaseStorage([])
        settings.persistence.progress_storage = kopf.MultiProgressStorage([])
        settings.persistence.finalizer = "tapforge.dev/never-set"
        # Each object that was seen has a task, which keeps it whole in memory until it has been quiet for so long.
        settings.queueing.idle_timeout = 0.5
        settings.scanning.disabled = True  # needs no right to list namespaces and definitions
        # Below the API server's own limit, so that both sides agree that a watch is over.
        settings.watching.server_timeout = 270
        settings.watching.client_timeout = 300
        settings.watching.connect_timeout = 5
        settings.watching.chunk_size = 500
        settings.networking.request_timeout = 30
        settings.networking.error_backoffs = _Backoff()
        registry = kopf.OperatorRegistry()

        kopf.on.login(registry=registry)(_Login(credentials).login)
        for kind, observe in ((_POOLS, self._cache.observe_pool), (_RUNS, self._cache.observe_run)):
            handler = self._handler(kind.plural, observe)
            kopf.on.event(API_VERSION, kind.plural, registry=registry, id=kind.plural)(handler)
        await kopf.operator(
            registry=registry,
            settings=settings,
            # Nobody sees it, but without one kopf asks for the name of its user, and a container's may have none.
            identity=cast(Any, "tapforge-operator"),
            standalone=True,
            clusterwide=not self._scope.namespaces,
            namespaces=self._scope.namespaces,
            ready_flag=begun,
            stop_flag=end,
        )

    def _handler(self, kind: str, observe: Observe) -> Callable[..., Any]:
        async def on_event(event: Mapping[str, Any], **_: object) -> None:
            self._telemetry.event(kind)
            if event["type"] is None and self._synced:
                self._stale.set()
            observe(event["object"], event["type"] == "DELETED")

        return on_event


class _Login:
    """Gives kopf the credentials that all clients have. kopf asks when its own have expired, and after a 401."""

    def __init__(self, credentials: Credentials):
        self._credentials = credentials
        self._given: Access | None = None
        self._again = 0

    async def login(self, **_: object) -> kopf.ConnectionInfo | kopf.AiohttpSession:
        access = await self._current()
        if access is self._given and await self._credentials.renewed(access):
            access = await self._current()
        if access is self._given:
            # Refused, and there are no others: an API server may be wrong about that for a while. kopf takes none that
            # equal those that were refused, and would give up.
            await asyncio.sleep(_LOGIN_SECONDS)
            self._again += 1
        self._given = access
        if access.server_name is not None:
            return _session_by_name(access, access.server_name)
        return replace(access.info, priority=self._again)

    async def _current(self) -> Access:
        while True:
            try:
                return await self._credentials.current()
            except NoCluster as error:
                log.error("nothing can be watched: %s", error)
                await asyncio.sleep(_LOGIN_SECONDS)


def _session_by_name(access: Access, name: str) -> kopf.AiohttpSession:
    """kopf has no field for the name that the server's certificate is checked for. It closes the session."""

    async def named(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        request.server_hostname = name
        return await send(request)

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=access.ssl),
        headers=access.headers,
        proxy=access.info.proxy_url,
        middlewares=(named,),
    )
    return kopf.AiohttpSession(server=access.info.server, expiration=access.info.expiration, aiohttp_session=session)


class _Backoff:
    """Pauses between attempts, seconds. They have no end: a namespace that may not be read (any more), or an API server
    that fails for an hour, is no reason for all other watches to end."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1, 1, 2, 3, 5, 8), itertools.repeat(15))


# --- reflectors: `spaces` are namespaces, "" is all of them; `on_event` is called with each page and event ------------


def slot_reflector(cache: Cache, client: Client, spaces: tuple[str, ...], on_event: Callable[[], None]) -> Reflector:
    def listed(space: str, uids: set[str], as_of: str) -> None:
        cache.slots.replace(uids, as_of, _within(space))

    return Reflector(client, _SLOTS, spaces, cache.observe_pod, listed, on_event=on_event)


def lease_reflector(cache: Cache, client: Client, spaces: tuple[str, ...], on_event: Callable[[], None]) -> Reflector:
    def listed(space: str, uids: set[str], as_of: str) -> None:
        cache.leases.replace(uids, as_of, _within(space))
        for listener in cache.leases_listed:
            listener(space, as_of)

    return Reflector(client, _LEASES, spaces, cache.observe_lease, listed, on_event=on_event)


def node_reflector(cache: Cache, client: Client, on_event: Callable[[], None]) -> Reflector:
    def listed(_: str, uids: set[str], as_of: str) -> None:
        cache.nodes.replace(uids, as_of)

    return Reflector(client, _NODES, ("",), cache.observe_node, listed, on_event=on_event)


def leader_reflector(client: Client, namespace: str, renewed: Callable[[], None]) -> Reflector:
    """`renewed` is called whenever the leader renewed its Lease, which it does every few seconds. That shows that
    watches live, also while the pools are so quiet that nothing else happens; otherwise a list of everything would have
    to answer their silence, every half a minute."""
    return Reflector(client, _LEADER, (namespace,), lambda _, __: renewed(), silence=_LEADER_SILENCE)


def job_reflector(cache: Cache, client: Client, spaces: tuple[str, ...], changed: Callable[[], None]) -> Reflector:
    """RayJobs with labels of ours. KubeRay may not be installed, or be installed later: then the API server knows no
    RayJobs, the cache says so, and it is asked again every few seconds. The same where the operator may not read them,
    and where the API server fails at it. `changed` is told when they can be read and when they can't any more."""

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
