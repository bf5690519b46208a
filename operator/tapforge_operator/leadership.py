"""The terms of this process, one after the other: what is rebuilt, started and stopped, in which order.

Promises:
1. Nothing is granted and nothing is planned before everything was read once after the term was won.
2. When a term ends, the broker stops answering for claims at once and no pool is touched any more. Nothing of a term is
   left when the next one begins.
3. A lost term, a broker that broke, an API server that is away or refuses: none of them ends the process. It stands by,
   and its next term begins with what is written.
4. The broker answers also while this process does not lead: it passes callers on to the leader, or says 503, and a
   caller knows that it should try again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from .broker import tls
from .broker.auth import Auth
from .broker.forward import Forward
from .broker.mark import Keys
from .broker.progress import add_progress
from .broker.server import application, runner
from .broker.service import Claims
from .kube.client import ApiError, Client
from .kube.election import Election
from .listening import listen
from .objects import PoolObject
from .reconcile import PoolKeeper
from .run_keepers import RunKeepers
from .settings import Settings
from .slots import Slot
from .telemetry import Telemetry
from .world import World

log = logging.getLogger(__name__)

#: a keeper that broke (which is a bug) is started again after this many seconds
_MEND_SECONDS = 10.0
#: between two looks whether the broker still leads
_LOOK_SECONDS = 1.0
#: a term that lasted so long is no sign that the next one breaks at once
_CALM_SECONDS = 60.0


class Leadership:
    def __init__(
        self, settings: Settings, client: Client, claims_client: Client, election: Election, telemetry: Telemetry
    ):
        """`claims_client`: for what somebody who asks for claims waits for."""
        self._settings = settings
        self._client = client
        self._claims_client = claims_client
        self._election = election
        self._telemetry = telemetry
        self._claims: Claims | None = None
        self._keepers: dict[str, tuple[PoolKeeper, asyncio.Task[None]]] = {}
        #: pools and runs are being kept
        self._acting = False
        #: what was given up now is not to be won again
        self._closing = False
        #: why it does not lead though it could, for people
        self._why = ""
        self.world = World(settings.scope, telemetry, self._woken)
        self._runs = RunKeepers(settings, self.world, client, telemetry, lambda: election.leads, lambda: self._claims)
        self.world.slot_listeners.append(self._slot_changed)
        self.world.pool_listeners.append(self._pool_changed)
        self.world.lease_listeners.append(self._lease_changed)
        self.world.leases_listed.append(self._leases_listed)

    def unready(self) -> str:
        """Why nobody should be sent here; "" when they should."""
        if self._claims is None:
            return self._why or "the broker does not listen yet"
        if self._election.leads and not self._claims.leading:
            return self._why or "the cluster is still being read"
        return ""

    def role(self) -> str:
        """What it is ready for."""
        if self._election.leads:
            return f"leads in term {self._election.term}"
        return f"standing by; {self._election.holder or 'nobody'} leads"

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
                log.error("term %d is given up: %s", term, self._why, exc_info=error)
                await self._stop_acting()
                await self._election.resign()
        finally:
            # Everything stops that needs the leadership, and then the renewals do.
            for task in (acting, keep):
                task.cancel()
                await asyncio.wait({task})

    async def _act(self, term: int) -> None:
        """Returns, or raises, when this process can't lead any further."""
        self._why = ""
        jobs = await self._begin(term)
        every, silence = self._settings.resync_seconds, self._settings.silence_seconds / 2
        lists = asyncio.create_task(self.world.keep_right(self._client, every, silence), name="lists")
        broker = asyncio.create_task(self._broker_fails(), name="the broker")
        try:
            done, _ = await asyncio.wait({lists, broker, jobs}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (lists, broker):
                task.cancel()
            await asyncio.wait({lists, broker})

    async def _stop_acting(self) -> None:
        """Claims end last: a pool that is planned without them has none. May be called again."""
        self._acting = False
        await self._runs.end()
        for _, task in self._keepers.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in self._keepers.values()), return_exceptions=True)
        if self._claims is not None:
            await self._claims.end()

    async def _listen(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        service = settings.service
        names = (service, f"{service}.cluster.local", "localhost", "127.0.0.1", "::1", *settings.names)
        material = await self._material(names)
        keys = Keys(material.key)
        claims = Claims(
            self._claims_client,
            keys,
            lambda: self._election.leads,
            on_change=self._woken,
            idle=self._idle,
            lost=lambda node: self.world.bad_nodes().get(node) == "lost",
            saw_pod=self.world.saw_pod,
            telemetry=self._telemetry,
        )
        auth = Auth(self._claims_client, claims.find_pool)
        trust = ssl.create_default_context(cadata=material.ca.decode())
        forward = Forward(
            lambda: self._election.leader, settings.identity, settings.service, trust, self._telemetry.passed_on
        )
        stack.push_async_callback(forward.close)
        app = application(claims, auth, keys.proved, forward)
        add_progress(app, self._runs.reports, auth)
        served = runner(app)
        await served.setup()
        stack.push_async_callback(served.cleanup)
        # Before that: the server waits up to a minute for answers, and callers wait for slots that come no more.
        stack.push_async_callback(self._stop_acting)
        context = tls.context(material)
        await listen(served, settings.host, settings.broker_port, context)
        self._claims = claims
        keep = asyncio.create_task(tls.keep(self._client, settings.namespace, names, context, material, trust=trust))
        stack.callback(keep.cancel)
        log.info("claims on port %d", served.addresses[0][1])

    async def _material(self, names: tuple[str, ...]) -> tls.Material:
        """The certificate and the key, as soon as the API server gives them: one that is away, or that has just started
        and refuses everybody for a moment, is waited for."""
        pauses = _pauses()
        while True:
            try:
                return await tls.ensure(self._client, self._settings.namespace, names)
            except (ApiError, RuntimeError) as error:
                self._why = f"the broker's certificate can't be had: {error}"
                passing = isinstance(error, ApiError) and error.passing
                log.log(logging.WARNING if passing else logging.ERROR, "%s", self._why)
            await asyncio.sleep(next(pauses))

    async def _begin(self, term: int) -> asyncio.Task[None]:
        assert self._claims is not None
        await self._read_everything()
        self._telemetry.leading(term)
        leases = [lease.body for lease in self.world.leases.all()]
        self._claims.begin(term, self.world.pools.all(), self.world.slots.all(), leases)
        self._acting = True
        for pool in list(self.world.pools.all()):
            self._woken(pool.uid)
        return await self._runs.begin()

    async def _read_everything(self) -> None:
        pauses = _pauses()
        while True:
            try:
                await self.world.sync(self._client)
                return
            except ApiError as error:
                self._why = f"the cluster can't be read: {error}"
                log.log(logging.WARNING if error.passing else logging.ERROR, "%s", self._why)
            await asyncio.sleep(next(pauses))

    async def _broker_fails(self) -> None:
        """Ends the leadership of a broker that stopped by itself: without claims nothing here is safe to go on."""
        assert self._claims is not None
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            # In this order: a leadership that ends in between is not the broker's fault.
            if not self._claims.leading and self._election.leads:
                self._why = "the broker stopped in the middle of its leadership"
                raise RuntimeError(self._why)

    def _idle(self, holder: str) -> bool:
        """The holder is a run that is deleted, finished or suspended."""
        kind, _, rest = holder.partition("/")
        run = self.world.runs.get(rest.rpartition("/")[2])
        return kind == "run" and (run is None or run.ended or run.suspended)

    # --- what the world says ------------------------------------------------------------------------------------------

    def _woken(self, uid: str) -> None:
        if self._claims is None or not self._claims.leading or not self._acting:
            return
        if uid not in self._keepers and (pool := self.world.pools.get(uid)) is not None:
            keeper = PoolKeeper(
                pool, self.world, self._client, self._claims, self._telemetry, lambda: self._election.leads
            )
            task = asyncio.create_task(keeper.run(), name=f"pool {keeper.key}")
            task.add_done_callback(lambda task: self._ended(uid, task))
            self._keepers[uid] = keeper, task
        if uid in self._keepers:
            self._keepers[uid][0].wake()

    def _ended(self, uid: str, task: asyncio.Task[None]) -> None:
        keeper, _ = self._keepers.pop(uid)
        if task.cancelled() or task.exception() is None:
            return
        self._telemetry.reconciled(keeper.key, 0.0, "Crash")
        log.error("the keeper of pool %s broke; it begins anew", keeper.key, exc_info=task.exception())
        asyncio.get_running_loop().call_later(_MEND_SECONDS, self._woken, uid)

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
            self._claims.keep_leases((lease.body for lease in self.world.leases.all()), namespace, version)

    def _pool_changed(self, before: PoolObject | None, after: PoolObject | None) -> None:
        if self._claims is None:
            return
        if after is not None:
            self._claims.observe_pool(after)
        elif before is not None:
            self._claims.forget_pool(before.uid)


def _pauses() -> Iterator[float]:
    """Seconds between attempts."""
    return itertools.chain((0.2, 0.5, 1.0, 2.0, 5.0), itertools.repeat(10.0))
