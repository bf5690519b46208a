"""Lists put right what no watch tells of: what vanished while nobody listened, also when nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from aiohttp import web

from tapforge_operator import labels
from tapforge_operator.kube import informers
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.client import Client
from tapforge_operator.kube.informers import Informers, Scope
from tapforge_operator.observability.metrics import Telemetry

Object = dict[str, Any]
KINDS = ("leases", "pods", "trainingruns", "emulatorpools")


class Server:
    def __init__(self) -> None:
        self.kinds: dict[str, dict[str, Object]] = {kind: {} for kind in KINDS}
        self.version = 10
        #: lists that were asked for whole, and questions for one object only
        self.lists: list[str] = []
        self.questions: list[str] = []

    def put(self, kind: str, name: str, namespace: str = "a", **metadata: Any) -> None:
        self.version += 1
        fresh = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        self.kinds[kind][name] = {"metadata": {**fresh, **metadata}, "spec": {}}

    async def answer(self, request: web.Request) -> web.Response:
        kind = request.path.rpartition("/")[2]
        (self.questions if request.query["limit"] == "1" else self.lists).append(kind)
        within = [
            thing
            for thing in self.kinds[kind].values()
            if "/namespaces/" not in request.path or f"/{thing['metadata']['namespace']}/" in request.path
        ]
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": within})


@asynccontextmanager
async def resynced(server: Server, *spaces: str) -> AsyncIterator[tuple[Cache, Informers]]:
    app = web.Application()
    app.router.add_route("GET", "/{rest:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    telemetry = Telemetry()
    telemetry.event("list")
    seen = Cache(telemetry, lambda uid: None)
    following = Informers(seen, Scope(spaces, nodes=False), telemetry)
    try:
        info = kopf.ConnectionInfo(server=f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with Client(info, deadline=300.0) as client:
            await following.sync(client)
            task = asyncio.create_task(following.resync(client, 600.0, 600.0))
            try:
                yield seen, following
                assert not task.done()
            finally:
                task.cancel()
                await asyncio.wait({task})
    finally:
        await runner.cleanup()


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", ["emulatorpools", "trainingruns"])
async def test_a_kind_of_which_nothing_is_left(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informers, "_PROBE_SECONDS", 0.05)
    server = Server()
    server.put(kind, "one")
    server.put(kind, "two", namespace="b")
    async with resynced(server, "a", "b") as (seen, _):
        index = seen.pools if kind == "emulatorpools" else seen.runs
        await until(lambda: len(server.questions) > 4)
        assert set(server.questions) == {kind} and len(server.lists) == 2 * len(KINDS), "something is left of it"
        del server.kinds[kind]["one"]  # no watch tells of it
        await until(lambda: {thing.uid for thing in index.all()} == {"uid-two"})


async def test_leases_are_told_whole_after_each_list() -> None:
    server = Server()
    owner = {"kind": "EmulatorPool", "name": "phones", "uid": "pool", "controller": True}
    server.put("leases", "device", labels={labels.POOL_UID: "pool"}, ownerReferences=[owner])
    async with resynced(server) as (seen, following):
        told: list[tuple[int, str, str]] = []
        seen.leases_listed.append(lambda space, version: told.append((len(list(seen.leases.all())), space, version)))
        server.kinds["leases"].clear()
        server.version += 1
        following._stale.set()
        await until(lambda: told)
        assert told == [(0, "", str(server.version))]
