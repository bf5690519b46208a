"""Who stands by knows who leads and where its broker is, as the Lease says it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import kopf
import pytest
from aiohttp import web

from tapforge_operator import labels
from tapforge_operator.kube.client import Client
from tapforge_operator.kube.leaderelection import Election, Timing

TIMING = Timing(lease_seconds=15.0, renew_seconds=10.0, every_seconds=0.05)


class Server:
    """One Lease, merged as the API server does."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] = {}
        self.version = 0

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response(self.lease, status=200 if self.lease else 404)
        body = await request.json()
        if self.lease and body["metadata"].get("resourceVersion") != str(self.version):
            return web.json_response({"reason": "Conflict", "message": "modified"}, status=409)
        self.version += 1
        notes = self.lease.get("metadata", {}).get("annotations", {}) | body["metadata"].get("annotations", {})
        metadata = {"resourceVersion": str(self.version), "annotations": notes}
        self.lease = {"metadata": metadata, "spec": self.lease.get("spec", {}) | body["spec"]}
        return web.json_response(self.lease)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with Client(kopf.ConnectionInfo(server=f"http://127.0.0.1:{runner.addresses[0][1]}")) as client:
        yield client
    await runner.cleanup()


def election(client: Client, identity: str, address: str = "") -> Election:
    return Election(client, "system", "operator", identity, TIMING, address=address)


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_who_stands_by_knows_where_the_leader_is(client: Client) -> None:
    first, second = election(client, "a", "[fd00::1]:8443"), election(client, "b", "10.0.0.2:8443")
    assert (first.holder, first.leader) == ("", "")
    await first.win()
    assert (first.holder, first.leader) == ("", ""), "whoever leads sends nobody on"
    keep = asyncio.create_task(first.keep())
    waits = asyncio.create_task(second.win())
    await until(lambda: second.leader)
    assert (second.holder, second.leader) == ("a", "[fd00::1]:8443")
    await first.resign()
    await asyncio.wait_for(waits, 60)
    assert (second.holder, second.leader) == ("", "")
    lease = await client.get("/apis/coordination.k8s.io/v1/namespaces/system/leases/operator")
    assert lease["metadata"]["annotations"] == {labels.BROKER: "10.0.0.2:8443"}
    keep.cancel()


async def test_an_address_that_is_not_told_is_not_that_of_the_one_before(client: Client) -> None:
    first, silent, third = election(client, "a", "10.0.0.1:8443"), election(client, "b"), election(client, "c")
    await first.win()
    await first.resign()
    await silent.win()
    waits = asyncio.create_task(third.win())
    await until(lambda: third.holder)
    assert (third.holder, third.leader) == ("b", "")
    waits.cancel()
