"""The end of a leadership is final, also when the API server comes back at the last moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
from aiohttp import web

from tapforge_operator.kube.client import Client
from tapforge_operator.kube.election import Election, Timing, since_boot

TIMING = Timing(lease_seconds=1.5, renew_seconds=0.5, every_seconds=0.2)


class LeaseServer:
    def __init__(self, refusals: int = 0) -> None:
        self.lease: dict[str, Any] = {}
        self.refusals = refusals

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response(self.lease, status=200 if self.lease else 404)
        body = await request.json()
        if request.method == "PATCH" and self.refusals:
            self.refusals -= 1
            return web.json_response({"message": "busy"}, status=503)
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
    async with answering(LeaseServer(refusals=2)) as client:
        election = Election(client, "system", "operator", "me", TIMING)
        assert await election.win() == 1
        await asyncio.wait_for(election.keep(), 10)
        assert election.lost.is_set()
        assert not election.leads


async def test_a_machine_that_slept_leads_no_longer() -> None:
    slept = 0.0
    async with answering(LeaseServer()) as client:
        election = Election(client, "system", "operator", "me", TIMING, clock=lambda: since_boot() + slept)
        await election.win()
        keep = asyncio.create_task(election.keep())
        assert election.leads
        slept = 3600.0
        assert not election.leads, "at once, before anything else is done"
        await asyncio.wait_for(keep, 10)
        assert election.lost.is_set()
        assert not election.leads
