"""The end of a leadership is final, also when the API server comes back at the last moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
from aiohttp import web

from tapforge_operator.kube.client import Client
from tapforge_operator.kube.election import Election, Timing

TIMING = Timing(lease_seconds=15.0, renew_seconds=10.0, every_seconds=0.05)


class Clock:
    """The machine's, in our hands."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class LeaseServer:
    def __init__(self, clock: Clock, refusals: int = 0, slow: float = 0.0) -> None:
        """The first `refusals` renewals are refused. Any other one takes `slow` seconds."""
        self.clock = clock
        self.lease: dict[str, Any] = {}
        self.refusals = refusals
        self.slow = slow
        self.renewals = 0

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response(self.lease, status=200 if self.lease else 404)
        body = await request.json()
        if request.method == "PATCH" and self.refusals:
            self.refusals -= 1
            return web.json_response({"message": "busy"}, status=503)
        if request.method == "PATCH":
            self.renewals += 1
            self.clock.now += self.slow
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(len(str(self.lease)))}}
        return web.json_response(self.lease)


@asynccontextmanager
async def answering(server: LeaseServer) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with Client(kopf.ConnectionInfo(server=f"http://127.0.0.1:{runner.addresses[0][1]}")) as client:
            yield client
    finally:
        await runner.cleanup()


async def test_a_renewal_that_comes_too_late_revives_nothing() -> None:
    server = LeaseServer(clock := Clock(), refusals=2, slow=TIMING.renew_seconds)
    async with answering(server) as client:
        election = Election(client, "system", "operator", "me", TIMING, clock=clock)
        assert await election.win() == 1
        assert election.leads
        await asyncio.wait_for(election.keep(), 60)
        assert (server.refusals, server.renewals) == (0, 1), "the Lease was renewed, when it was over"
        assert election.lost.is_set()
        assert not election.leads


async def test_renewals_that_come_in_time_go_on() -> None:
    server = LeaseServer(clock := Clock(), refusals=2, slow=TIMING.renew_seconds * 0.4)
    async with answering(server) as client:
        election = Election(client, "system", "operator", "me", TIMING, clock=clock)
        await election.win()
        keep = asyncio.create_task(election.keep())
        async with asyncio.timeout(60):
            while server.renewals < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert election.leads
        keep.cancel()
        await asyncio.wait({keep})
        assert election.lost.is_set(), "whoever keeps it no longer doesn't lead"


async def test_a_machine_that_slept_leads_no_longer() -> None:
    server = LeaseServer(clock := Clock())
    async with answering(server) as client:
        election = Election(client, "system", "operator", "me", TIMING, clock=clock)
        await election.win()
        keep = asyncio.create_task(election.keep())
        assert election.leads
        clock.now += 3600.0
        assert not election.leads, "at once, before anything else is done"
        await asyncio.wait_for(keep, 60)
        assert election.lost.is_set()
        assert not election.leads
