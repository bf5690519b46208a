"""The terms of this process, one after the other: what is rebuilt, started and stopped, in which order.

Promises:
1. Nothing is granted and nothing is planned before everything was read once after the term was won.
2. When a term ends, the broker stops answering for claims at once and no pool is touched any more. Nothing of a term is
   left when the next one begins.
3. A lost term, a broker that broke, an API server that is away or refuses, a change that an observer in this process
   failed on and missed: none of them ends the process. It stands by, and its next term begins with what is written.
   Kinds that the API server doesn't know (any more) end no term either.
4. No term begins before its keys for claims are those that the Secret holds, and the Secret holds them.
5. The broker answers also while this process does not lead: it passes callers on to the leader, or says 503, and a
   caller knows that it should try again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, ParamSpec

from tapforge_operator.broker import tls
from tapforge_operator.broker.auth import Auth
from tapforge_operator.broker.claim_record import Keys
from tapforge_operator.broker.http import Forward, application, runner
from tapforge_operator.broker.material import Material
from tapforge_operator.broker.service import Claims
from tapforge_operator.broker.waiting import WaitingRoom, limits_of
from tapforge_operator.config import Settings
from tapforge_operator.controller import WorkQueue
from tapforge_operator.emulatorpool.controller import PoolController
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.client import ApiError, Client
from tapforge_operator.kube.informers import Informers
from tapforge_operator.kube.leaderelection import Election
from tapforge_operator.kube.types import PoolObject, Slot
from tapforge_operator.observability.metrics import Telemetry
from tapforge_operator.server import Connections, listen
from tapforge_operator.trainingrun.controller import RunQueue
from tapforge_operator.trainingrun.progress import add_progress

log = logging.getLogger(__name__)

#: between two checks whether the broker still leads
_CHECK_SECONDS = 1.0
#: beside the life of its Lease: that a leader has to write back a Secret which was deleted
_WRITTEN_BACK_SECONDS = 10.0
#: after a term that lasted so long the next one is not expected to break at once
_CALM_SECONDS = 60.0


P = ParamSpec("P")


class Leadership:
    def __init__(
        self,
        settings: Settings,
        client: Client,
        claims_client: Client,
        reviews_client: Client,
        election: Election,
        telemetry: Telemetry,
    ):
        """`claims_client` writes claims, `reviews_client` has the callers' tokens reviewed."""
        self._settings = settings
        self._client = client
        self._claims_client = claims_client
        self._reviews_client = reviews_client
        self._election = election
        self._telemetry = telemetry
        self._claims: Claims | None = None
        self._pools = WorkQueue(
            "EmulatorPool", self._pool_controller, lambda: election.leads, telemetry.reconciled, self._forget_pool
        )
        #: what was given up now is not to be won again
        self._closing = False
        #: what the broker serves and signs with
        self._served: tls.Own | tls.Mounted | None = None
        #: why it does not lead though it could, for people
        self._why = ""
        self.cache = Cache(telemetry, self._requeue)
        #: of the present term: the failure of an observer that has to receive every change
        self._missed: asyncio.Future[None] | None = None
        self.informers = Informers(self.cache, settings.scope, telemetry, self._miss)
        self._runs = RunQueue(settings, self.cache, client, telemetry, lambda: election.leads, lambda: self._claims)
        self.cache.slot_listeners.append(self._reliably(self._slot_changed))
        self.cache.pool_listeners.append(self._reliably(self._pool_changed))
        self.cache.lease_listeners.append(self._reliably(self._lease_changed))
        self.cache.leases_listed.append(self._reliably(self._leases_listed))

    def unready(self) -> str:
        """Why callers should not be sent here; "" when they should."""
        if self._claims is None:
            return self._why or "the broker does not listen yet"
        if self._election.leads and not self._claims.leading:
            return self._why or "the cluster is still being read"
        return self._served.problem if self._served is not None and not self._served.usable else ""

    def role(self) -> str:
        """What it is ready for."""
        problem = f"; not taken over: {self._served.problem}" if self._served and self._served.problem else ""
        if self._election.leads:
            lacks = f"; {self.informers.missing}" if self.informers.missing else ""
            return f"leads in term {self._election.term}{problem}{lacks}"
        return f"standing by; {self._election.holder or 'no replica'} leads{problem}"

    async def run(self) -> None:
        """Leads whenever it can, until cancelled."""
        async with AsyncExitStack() as stack:
            await self._listen(stack)
            pauses = _pauses()
            while not self._closing:
                term = await self._election.win()
                if self._closing:  # `close` waits for what was just won, and gives it up
                    break
                began = time.monotonic()
                await self._lead(term)
                await self._stop_acting()
                self._telemetry.leading(0)
                # What broke, if it was no outage, may break again at once.
                if time.monotonic() - began > _CALM_SECONDS:
                    pauses = _pauses()
                await asyncio.sleep(next(pauses))

    async def close(self) -> None:
        """Stops acting, then lets the next one lead."""
        self._closing = True
        await self._stop_acting()
        await self._election.resign()
        self._telemetry.leading(0)

    async def _lead(self, term: int) -> None:
        """One term, to its end: it was lost, or given up because something broke."""
        keep = asyncio.create_task(self._election.keep(), name="renewing the leader Lease")
        acting = asyncio.create_task(self._act(term), name="leading")
        try:
            await asyncio.wait({keep, acting}, return_when=asyncio.FIRST_COMPLETED)
            if self._closing:  # `close` stops what acts, and gives the Lease up itself
                await asyncio.wait({keep})
            elif acting.done():
                error = None if acting.cancelled() else acting.exception()
                self._why = _reason(error)
                log.error("term %d is given up: %s", term, self._why, exc_info=error)
                await self._stop_acting()
                await self._election.resign()
        finally:
            # Everything stops that needs the leadership, and then the renewals do.
            for task in (acting, keep):
                task.cancel()
                await asyncio.wait({task})

    async def _act(self, term: int) -> None:
        """Raises when this process can't lead any further."""
        self._why = ""
        missed = self._missed = asyncio.get_running_loop().create_future()
        jobs = await self._begin(term)
        every, silence = self._settings.resync_seconds, self._settings.silence_seconds / 2
        lists = asyncio.create_task(self.informers.resync(self._client, every, silence), name="lists")
        broker = asyncio.create_task(self._broker_fails(), name="the broker")
        try:
            done, _ = await asyncio.wait({lists, broker, jobs, missed}, return_when=asyncio.FIRST_COMPLETED)
            raise ExceptionGroup("what a leader needs has ended", [_end_of(task) for task in done])
        finally:
            missed.cancel()
            for task in (lists, broker):
                task.cancel()
            await asyncio.wait({lists, broker})

    async def _stop_acting(self) -> None:
        """Claims end last: a pool that is planned without them has none. May be called again."""
        await asyncio.gather(self._runs.stop(), self._pools.stop())
        if self._claims is not None:
            await self._claims.end()

    async def _listen(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        service = settings.service
        folder, names = settings.tls_dir, settings.called
        if folder is None:
            names = tuple(dict.fromkeys((service, f"{service}.cluster.local", "localhost", "127.0.0.1", "::1", *names)))
        material = await self._material(names)
        keys = Keys(*material.keys)
        claims = Claims(
            self._claims_client,
            keys,
            lambda: self._election.leads,
            on_change=self._requeue,
            on_quota=self._quota_used,
            idle=self._idle,
            lost=lambda node: self.cache.bad_nodes().get(node) == "lost",
            elsewhere=None if settings.scope.nodes else self.cache.ready_elsewhere,
            observe_pod=self.cache.observe_pod,
            telemetry=self._telemetry,
            quotas=settings.quotas,
            devices=settings.devices,
        )
        self._telemetry.watch_quotas(claims.quota_use)
        self._telemetry.watch_unproved(claims.unproved)
        auth = Auth(self._reviews_client, claims.find_pool)
        trust = ssl.create_default_context(cadata=material.ca.decode())
        forward = Forward(
            lambda: self._election.leader, settings.identity, settings.service, trust, self._telemetry.passed_on
        )
        stack.push_async_callback(forward.close)
        room = WaitingRoom(limits_of(settings.connections))
        # A claim that can't be proved because its key was lost is not a stranger's.
        app = application(
            claims, auth, lambda i, secret: keys.proved(i, secret) or claims.is_unproved(i), room, forward
        )
        add_progress(app, self._runs.reports, auth)
        served = runner(app)
        await served.setup()
        stack.push_async_callback(served.cleanup)
        # Before that: the server waits up to a minute for answers, and callers wait for slots that come no more.
        stack.push_async_callback(self._stop_acting)
        context = tls.context(material)
        connections = Connections(settings.connections, settings.address_connections)
        await listen(served, settings.host, settings.broker_port, context, connections=connections)
        self._claims = claims

        def other_keys(found: tuple[bytes, ...]) -> None:
            keys.replace(found)
            claims.reread(self.cache.slots.all())

        if folder is None:
            self._served = tls.Own(names, context, trust, material, self._telemetry, other_keys)
        else:
            self._served = tls.Mounted(folder, names, context, trust, material, self._telemetry, other_keys)
        keep = asyncio.create_task(
            tls.keep(self._served, self._client, settings.namespace, leads=lambda: self._election.leads)
        )
        stack.callback(keep.cancel)
        log.info("claims on port %d", served.addresses[0][1])

    async def _material(self, names: tuple[str, ...]) -> Material:
        """The certificate and the keys, as soon as the API server gives them: one that is away, or that has just
        started and refuses every caller for a moment, is waited for; so is a mounted certificate that can be served,
        and a leader that has the keys which the Secret has lost."""
        pauses, create, deadline = _pauses(), False, 0.0
        while True:
            try:
                material = await tls.ensure(
                    self._client, self._settings.namespace, names, folder=self._settings.tls_dir, create=create
                )
                if not create:  # the process that made the keys has led
                    self._election.led_before = True
                return material
            except (ApiError, RuntimeError, tls.Unusable) as error:
                self._why = f"the broker's certificate can't be had: {error}"
                if isinstance(error, tls.Unusable):
                    self._telemetry.certificate(None, refused=True)
                passing = isinstance(error, ApiError) and error.passing
                log.log(logging.WARNING if passing else logging.ERROR, "%s", self._why)
            except tls.KeysMissing as error:
                deadline = deadline or time.monotonic() + self._election.timing.lease_seconds + _WRITTEN_BACK_SECONDS
                try:
                    leader = await self._election.find_leader()
                except ApiError as unknown:
                    leader = f"unknown: {unknown}"
                create = not leader or time.monotonic() > deadline
                if create:
                    log.info("%s: new keys are made", error)
                    continue
                self._why = f"{error}; the leader ({leader}) may write it back"
                log.warning("%s", self._why)
            await asyncio.sleep(next(pauses))

    async def _begin(self, term: int) -> asyncio.Task[None]:
        assert self._claims is not None
        await self._refresh_keys()
        await self._read_everything()
        self._telemetry.leading(term)
        leases = [lease.body for lease in self.cache.leases.all()]
        self._claims.begin(term, self.cache.pools.all(), self.cache.slots.all(), leases)
        self._pools.start()
        for pool in list(self.cache.pools.all()):
            self._requeue(pool.uid)
        return await self._runs.start()

    async def _refresh_keys(self) -> None:
        """The leader before this one may have signed claims with keys that it wrote a moment ago."""
        assert self._served is not None
        pauses = _pauses()
        while True:
            try:
                await self._served.refresh(self._client, self._settings.namespace, write=True)
                return
            except (ApiError, RuntimeError) as error:
                self._why = f"the broker's keys can't be read or written: {error}"
                passing = isinstance(error, ApiError) and error.passing
                log.log(logging.WARNING if passing else logging.ERROR, "%s", self._why)
            await asyncio.sleep(next(pauses))

    async def _read_everything(self) -> None:
        pauses = _pauses()
        while True:
            try:
                await self.informers.sync(self._client)
                return
            except ApiError as error:
                self._why = f"the cluster can't be read: {error}"
                log.log(logging.WARNING if error.passing else logging.ERROR, "%s", self._why)
            await asyncio.sleep(next(pauses))

    async def _broker_fails(self) -> None:
        """Ends the leadership of a broker that stopped by itself: without claims nothing here is safe to go on."""
        assert self._claims is not None
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            # In this order: a leadership that ends in between is not the broker's fault.
            if not self._claims.leading and self._election.leads:
                raise RuntimeError("the broker stopped in the middle of its leadership")

    def _idle(self, holder: str) -> bool:
        """The holder is a run that is deleted, finished or suspended."""
        kind, _, rest = holder.partition("/")
        run = self.cache.runs.get(rest.rpartition("/")[2])
        return kind == "run" and (run is None or run.ended or run.suspended)

    # --- what the cache says ------------------------------------------------------------------------------------------

    def _miss(self, error: Exception) -> None:
        """An observer failed on what happened: the claims, for example, would go on without it. So the term ends, and
        the next one begins with what is written."""
        if self._missed is not None and not self._missed.done():
            self._missed.set_exception(error)

    def _reliably(self, listener: Callable[P, None]) -> Callable[P, None]:
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                listener(*args, **kwargs)
            except Exception as error:
                log.exception("an observer failed on an event of a watch and missed it")
                self._miss(error)

        return call

    def _requeue(self, uid: str) -> None:
        # Without claims every slot would look free.
        if self._claims is not None and self._claims.leading:
            self._pools.wake(uid)

    def _quota_used(self, namespace: str) -> None:
        """Phones boot, and runs start, by the room that the others of their namespace leave."""
        for pool in [pool for pool in self.cache.pools.all() if pool.namespace == namespace]:
            self._requeue(pool.uid)
        self._runs.wake_waiting(namespace)

    def _pool_controller(self, uid: str) -> PoolController | None:
        pool = self.cache.pools.get(uid)
        if pool is None or self._claims is None:
            return None
        return PoolController(
            pool,
            self.cache,
            self._client,
            self._claims,
            self._telemetry,
            lambda: self._election.leads,
            lambda: self._requeue(uid),
            devices=self._settings.scope.devices,
        )

    def _forget_pool(self, key: str) -> None:
        if not self.cache.pools.of(key):  # another one of the name may be there
            self._telemetry.forget(key)

    def _slot_changed(self, before: Slot | None, after: Slot | None) -> None:
        if self._claims is None:
            return
        if after is not None:
            self._claims.observe(after)
        elif before is not None:
            self._claims.forget(before)

    def _lease_changed(self, lease: Mapping[str, Any], deleted: bool) -> None:
        if self._claims is not None:
            self._claims.observe_lease(lease, deleted)

    def _leases_listed(self, namespace: str, version: str) -> None:
        if self._claims is not None:
            self._claims.keep_leases((lease.body for lease in self.cache.leases.all()), namespace, version)

    def _pool_changed(self, before: PoolObject | None, after: PoolObject | None) -> None:
        if self._claims is None:
            return
        if after is not None:
            self._claims.observe_pool(after)
        elif before is not None:
            self._claims.forget_pool(before.uid)


def _end_of(ended: asyncio.Future[Any]) -> Exception:
    error = None if ended.cancelled() else ended.exception()
    if isinstance(error, Exception):
        return error
    name = ended.get_name() if isinstance(ended, asyncio.Task) else "it"
    return RuntimeError(f"{name} ended{'' if error is None else f' with {error!r}'}")


def _reason(error: BaseException | None) -> str:
    """Type and text of everything that was raised, for people."""
    if error is None:
        return "it was cancelled"
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_reason(part) for part in error.exceptions)
    cause = f" (because of {_reason(error.__cause__)})" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {error}{cause}" if str(error) else f"{type(error).__name__}{cause}"


def _pauses() -> Iterator[float]:
    """Seconds between attempts."""
    return itertools.chain((0.2, 0.5, 1.0, 2.0, 5.0), itertools.repeat(10.0))
