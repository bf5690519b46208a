"""A leader that leaves says so, also when a renewal of its own or somebody else came first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import kopf
import pytest
from aiohttp import web

from tapforge_operator.kube.client import Client
from tapforge_operator.kube.leaderelection import Election

Object = dict[str, Any]


class Leases:
    """A server with one Lease, which takes a change of its newest version only."""

    def __init__(self) -> None:
        self.spec: Object = {}
        self.version = 0
        #: what time it is
        self.now = 1000.0

    def write(self, **spec: Any) -> None:
        self.spec |= spec
        self.version += 1

    def _lease(self) -> Object:
        return {"metadata": {"resourceVersion": str(self.version)}, "spec": self.spec}

    async def answer(self, request: web.Request) -> web.Response:
        if request.method != "GET":
            body = await request.json()
            if self.version and body["metadata"].get("resourceVersion") != str(self.version):
                return web.json_response({"reason": "Conflict", "message": "modified"}, status=409)
            self.write(**body["spec"])
        return web.json_response(self._lease() if self.version else {}, status=200 if self.version else 404)


@pytest.fixture
def server() -> Leases:
    return Leases()


@pytest.fixture
async def leader(server: Leases) -> AsyncIterator[Election]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        info = kopf.ConnectionInfo(server=f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with Client(info) as client:
            election = Election(client, "system", "operator", "me", clock=lambda: server.now)
            await election.win()
            yield election
    finally:
        await runner.cleanup()


async def test_a_renewal_that_comes_first_keeps_nobody_waiting(server: Leases, leader: Election) -> None:
    server.write(renewTime="later")
    await leader.resign()
    assert server.spec["holderIdentity"] == "" and not leader.leads


async def test_what_is_somebody_elses_by_now_is_not_given_up(server: Leases, leader: Election) -> None:
    server.write(holderIdentity="other", leaseTransitions=2)
    await leader.resign()
    assert server.spec["holderIdentity"] == "other" and not leader.leads
