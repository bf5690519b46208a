"""One leadership from its beginning to its end: what is rebuilt, started and stopped, in which order.

Promises:
1. Nothing is granted and nothing is planned before everything was read once after the leadership was won.
2. When the leadership ends, the broker stops granting at once and no pool is touched any more.
3. A broker that broke ends the leadership: another one begins with what is written.
4. The broker answers also while this process does not lead (503): a caller knows that it should try again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from .broker import tls
from .broker.auth import Auth
from .broker.mark import Keys
from .broker.progress import add_progress
from .broker.server import application, runner
from .broker.service import Claims
from .kube.client import Client
from .kube.election import Election
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


class Leadership:
    def __init__(self, settings: Settings, client: Client, election: Election, telemetry: Telemetry):
        self._settings = settings
        self._client = client
        self._election = election
        self._telemetry = telemetry
        self._claims: Claims | None = None
        self._keepers: dict[str, tuple[PoolKeeper, asyncio.Task[None]]] = {}
        self._closed = False
        self._keep: asyncio.Task[None] | None = None
        self.world = World(settings.scope, telemetry, self._woken)
        self._runs = RunKeepers(settings, self.world, client, telemetry, lambda: election.leads)
        self.world.slot_listeners.append(self._slot_changed)
        self.world.pool_listeners.append(self._pool_changed)
        self.world.lease_listeners.append(self._lease_changed)
        self.world.leases_listed.append(self._leases_listed)

    def unready(self) -> str:
        """Why nobody should be sent here; "" when they should."""
        if self._claims is None:
            return "the broker does not listen yet"
        if self._election.leads and not self.world.synced:
            return "the cluster is still being read"
        return ""

    async def run(self) -> None:
        """Waits to lead, leads, and returns when the leadership was lost."""
        async with AsyncExitStack() as stack:
            await self._listen(stack)
            term = await self._election.win()
            keep = asyncio.create_task(self._election.keep(), name="renewing the leader Lease")
            self._keep = keep  # it goes on until everything has stopped that needs the leadership
            jobs = await self._begin(term)
            resync = asyncio.create_task(
                self.world.keep_right(self._client, self._settings.resync_seconds, self._settings.silence_seconds / 2),
                name="lists",
            )
            stack.callback(resync.cancel)
            claims = asyncio.create_task(self._broker_fails(), name="the broker")
            stack.callback(claims.cancel)
            done, _ = await asyncio.wait({keep, resync, claims, jobs}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def close(self) -> None:
        """Stops acting, then lets the next one lead."""
        await self._stop_acting()
        await self._election.resign()
        if self._keep is not None:
            self._keep.cancel()
        self._telemetry.leading(0)

    async def _stop_acting(self) -> None:
        """Claims end last: a pool that is planned without them has none. May be called again."""
        self._closed = True
        await self._runs.end()
        for _, task in self._keepers.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in self._keepers.values()), return_exceptions=True)
        if self._claims is not None:
            await self._claims.end()

    async def _listen(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        service = f"tapforge-broker.{settings.namespace}.svc"
        names = (service, f"{service}.cluster.local", "localhost", "127.0.0.1", *settings.names)
        material = await tls.ensure(self._client, settings.namespace, names)
        self._claims = Claims(
            self._client,
            Keys(material.key),
            lambda: self._election.leads,
            on_change=self._woken,
            saw_pod=self.world.saw_pod,
            telemetry=self._telemetry,
        )
        auth = Auth(self._client, self._claims.find_pool)
        app = application(self._claims, auth)
        add_progress(app, self._runs.reports, auth)
        served = runner(app)
        await served.setup()
        stack.push_async_callback(served.cleanup)
        # Before that: the server waits up to a minute for answers, and callers wait for slots that come no more.
        stack.push_async_callback(self._stop_acting)
        context = tls.context(material)
        await web.TCPSite(served, settings.host, settings.broker_port, ssl_context=context).start()
        keep = asyncio.create_task(tls.keep(self._client, settings.namespace, names, context, material))
        stack.callback(keep.cancel)
        log.info("claims on port %d", served.addresses[0][1])

    async def _begin(self, term: int) -> asyncio.Task[None]:
        assert self._claims is not None
        await self.world.sync(self._client)
        self._telemetry.leading(term)
        leases = [lease.body for lease in self.world.leases.all()]
        self._claims.begin(term, self.world.pools.all(), self.world.slots.all(), leases)
        for pool in list(self.world.pools.all()):
            self._woken(pool.uid)
        return await self._runs.begin()

    async def _broker_fails(self) -> None:
        """Ends the leadership of a broker that stopped by itself: without claims nothing here is safe to go on."""
        assert self._claims is not None
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            # In this order: a leadership that ends in between is not the broker's fault.
            if not self._claims.leading and self._election.leads:
                raise RuntimeError("the broker stopped in the middle of its leadership")

    # --- what the world says ------------------------------------------------------------------------------------------

    def _woken(self, uid: str) -> None:
        if self._claims is None or not self._claims.leading or self._closed:
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
