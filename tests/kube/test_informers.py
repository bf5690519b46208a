"""Lists put right what no watch tells of: what vanished while nobody listened, also when its kind did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from aiohttp import web

from tapforge_operator import labels
from tapforge_operator.kube import informers, reflector
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
        #: lists and watches that were asked for
        self.lists: list[str] = []
        self.watched: list[str] = []
        self.client: Client
        self._cut = asyncio.Event()

    def put(self, kind: str, name: str, namespace: str = "a", **metadata: Any) -> None:
        self.version += 1
        fresh = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        self.kinds[kind][name] = {"metadata": {**fresh, **metadata}, "spec": {}}

    def cut(self) -> None:
        """Ends all watches, without a word."""
        self._cut.set()
        self._cut = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind = request.path.rpartition("/")[2]
        (self.watched if "watch" in request.query else self.lists).append(kind)
        if kind not in self.kinds:
            return web.json_response({"kind": "Status", "reason": "NotFound"}, status=404)
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            await self._cut.wait()
            return response
        within = [
            thing
            for thing in self.kinds[kind].values()
            if "/namespaces/" not in request.path or f"/{thing['metadata']['namespace']}/" in request.path
        ]
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": within})


@asynccontextmanager
async def resynced(
    server: Server, *spaces: str, every: float = 600.0, devices: bool = True
) -> AsyncIterator[tuple[Cache, Informers]]:
    app = web.Application()
    app.router.add_route("GET", "/{rest:.*}", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    telemetry = Telemetry()
    telemetry.event("list")
    seen = Cache(telemetry, lambda uid: None)
    following = Informers(seen, Scope(spaces, nodes=False, devices=devices), telemetry)
    try:
        info = kopf.ConnectionInfo(server=f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with Client(info, deadline=300.0) as client:
            server.client = client
            await following.sync(client)
            task = asyncio.create_task(following.resync(client, every, 600.0))
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


KINDS_OF_OURS = pytest.mark.parametrize("kind", ["emulatorpools", "trainingruns"])


@KINDS_OF_OURS
async def test_a_kind_whose_definition_is_deleted_is_waited_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a moment in which no watch tells of what goes with it. Lists that are made meanwhile end nothing either."""
    monkeypatch.setattr(reflector, "_MISSING_SECONDS", 0.05)
    monkeypatch.setattr(informers, "_GONE_SECONDS", 0.05)
    server = Server()
    for one in ("emulatorpools", "trainingruns"):
        server.put(one, f"one-{one}")
        server.put(one, f"two-{one}", namespace="b")
    async with resynced(server, "a", "b", every=0.05) as (seen, following):
        index, other = (seen.pools, seen.runs) if kind == "emulatorpools" else (seen.runs, seen.pools)
        watching = asyncio.create_task(following.watch(server.client, "own"))
        await until(lambda: len(server.watched) >= 2 * 2 + 2 * 2)
        assert len(index) == 2 and len(other) == 2 and not following.missing
        gone = server.kinds.pop(kind)
        server.cut()
        await until(lambda: not len(index))
        assert f"{kind}.tapforge.dev" in following.missing and len(other) == 2
        server.kinds[kind] = {}
        server.put(kind, "again")
        await until(lambda: len(index) == 1 and not following.missing)  # each namespace has a list of its own
        assert {thing.name for thing in index.all()} == {"again"} and gone
        assert not watching.done()
        watching.cancel()
        await asyncio.wait({watching})


@KINDS_OF_OURS
async def test_an_operator_may_be_there_before_its_kinds(kind: str) -> None:
    server = Server()
    there = server.kinds.pop(kind)
    async with resynced(server) as (seen, following):
        assert kind in following.missing
        server.kinds[kind] = there
        server.put(kind, "one")
        await following.sync(server.client)
        assert len(seen.pools if kind == "emulatorpools" else seen.runs) == 1 and not following.missing


@KINDS_OF_OURS
async def test_a_kind_that_is_not_known_for_a_moment_is_not_forgotten(kind: str) -> None:
    """An API server that has just started may say so."""
    server = Server()
    server.put(kind, "one")
    async with resynced(server) as (seen, following):
        index = seen.pools if kind == "emulatorpools" else seen.runs
        for asked in (1, 2):
            there = server.kinds.pop(kind)
            await following.sync(server.client)
            await following.sync(server.client)
            server.kinds[kind] = there
            assert len(index) == 1, asked
            await following.sync(server.client)


async def test_without_rights_on_leases_none_is_read() -> None:
    server = Server()
    async with resynced(server, devices=False):
        assert server.lists and "leases" not in server.lists


async def test_leases_are_told_whole_after_each_list() -> None:
    server = Server()
    owner = {"kind": "EmulatorPool", "name": "phones", "uid": "pool", "controller": True}
    server.put("leases", "device", labels={labels.POOL_UID: "pool"}, ownerReferences=[owner])
    async with resynced(server) as (seen, following):
        told: list[tuple[int, str, str]] = []
        seen.leases_listed.append(lambda space, version: told.append((len(list(seen.leases.all())), space, version)))
        server.kinds["leases"].clear()
        server.version += 1
        await following.sync(server.client)
        assert told == [(0, "", str(server.version))]
