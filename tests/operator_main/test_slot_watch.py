"""Slots as a server tells of them that cuts connections, forgets versions and fails: nothing is missed, nothing that
vanished stays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from aiohttp import web

from tapforge_operator import names, slot_watch
from tapforge_operator.kube.client import Client
from tapforge_operator.slot_watch import SlotWatch
from tapforge_operator.telemetry import Telemetry
from tapforge_operator.world import Scope, World

Object = dict[str, Any]


def pod(uid: str, version: int, namespace: str = "a") -> Object:
    owner = {"kind": "EmulatorPool", "name": "phones", "uid": "pool", "controller": True}
    labels = {names.POOL_UID: "pool", names.ORDINAL: "0"}
    metadata = {"name": uid, "namespace": namespace, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": labels, "ownerReferences": [owner]}, "spec": {}, "status": {}}


class Server:
    """Pods, and what happened to them; a watch gets everything after its version, then what happens."""

    def __init__(self) -> None:
        self.pods: dict[str, Object] = {}
        self.events: list[tuple[int, str, Object]] = []
        self.version = 0
        self.asked: list[str] = []
        #: versions before this one are forgotten
        self.oldest = 0
        #: answers that come before all others
        self.troubles: list[web.Response] = []
        #: watches that were not refused
        self.begun = 0
        self._news = asyncio.Condition()
        self._watches: set[web.StreamResponse] = set()

    async def change(self, kind: str, uid: str, namespace: str = "a") -> None:
        self.version += 1
        thing = pod(uid, self.version, namespace)
        if kind == "DELETED":
            self.pods.pop(uid)
        elif kind != "BOOKMARK":
            self.pods[uid] = thing
        async with self._news:
            self.events.append((self.version, kind, thing))
            self._news.notify_all()

    def cut(self) -> None:
        """Ends all watches, without a word."""
        for response in self._watches:
            if response._req is not None and response._req.transport is not None:  # else it has ended by itself
                response._req.transport.abort()

    async def listened_to(self, watches: int) -> None:
        """That many were begun, the last one of them is open."""
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(lambda: self.begun >= watches and self._watches), 60)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        since = request.query.get("resourceVersion")
        self.asked.append(f"watch {since}" if "watch" in request.query else "list")
        if self.troubles:
            return self.troubles.pop(0)
        if "watch" in request.query:
            return await self._watch(request, int(since or 0))
        items = [thing for thing in self.pods.values() if _within(request, thing)]
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def _watch(self, request: web.Request, since: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if since < self.oldest:
            gone = {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}
            await response.write(json.dumps(gone).encode() + b"\n")
            return response
        self._watches.add(response)
        try:
            async with self._news:
                self.begun += 1
                self._news.notify_all()
            while True:
                for version, kind, thing in [e for e in self.events if e[0] > since]:
                    if _within(request, thing):
                        await response.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")
                    since = version
                async with self._news:
                    if self.version <= since:
                        await self._news.wait()
        finally:
            self._watches.discard(response)


def _within(request: web.Request, thing: Object) -> bool:
    return "/namespaces/" not in request.path or f"/namespaces/{thing['metadata']['namespace']}/" in request.path


@asynccontextmanager
async def watched(server: Server, spaces: tuple[str, ...] = ("",)) -> AsyncIterator[Seen]:
    app = web.Application()
    app.router.add_route("GET", "/{rest:.*}", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    world = Seen()
    try:
        async with Client(kopf.ConnectionInfo(server=f"http://{host}:{port}"), deadline=300.0) as client:
            task = asyncio.create_task(SlotWatch(world, client, spaces, world.heard).run())
            try:
                yield world
                assert not task.done()
            finally:
                task.cancel()
                await asyncio.wait({task})
    finally:
        await runner.cleanup()


class Seen(World):
    """Tells when something changed."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        #: lists and events
        self.words = 0
        super().__init__(Scope(), Telemetry(), lambda uid: self.news.set())

    def heard(self) -> None:
        self.words += 1
        self.news.set()


async def until(world: Seen, uids: set[str], words: int = 0) -> None:
    """Those slots are known; so many words were heard at least."""
    async with asyncio.timeout(60):
        while {slot.uid for slot in world.slots.all()} != uids or world.words < words:
            world.news.clear()
            await world.news.wait()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_watch, "_FIRST_PAUSE", 0.01)


async def test_what_is_there_and_what_happens():
    server = Server()
    await server.change("ADDED", "a")
    async with watched(server) as world:
        await until(world, {"a"})
        await server.change("ADDED", "b")
        await until(world, {"a", "b"})
        await server.change("DELETED", "a")
        await until(world, {"b"})
        assert server.asked == ["list", "watch 1"]


async def test_a_watch_that_is_cut_begins_again_where_it_was_without_a_list():
    server = Server()
    async with watched(server) as world:
        await server.listened_to(1)
        await server.change("ADDED", "a")
        await until(world, {"a"})
        server.cut()
        await server.change("ADDED", "b")
        await server.change("DELETED", "a")
        await until(world, {"b"})
        assert server.asked == ["list", "watch 0", "watch 1"]


async def test_a_version_that_was_forgotten_is_followed_by_a_list_that_takes_away_what_vanished():
    server = Server()
    await server.change("ADDED", "a")
    await server.change("ADDED", "b")
    async with watched(server) as world:
        await until(world, {"a", "b"})
        await server.listened_to(1)
        server.cut()
        await server.change("DELETED", "a")
        await server.change("ADDED", "c")
        server.events, server.oldest = [], server.version
        await until(world, {"b", "c"})
        await server.listened_to(2)
        assert server.asked == ["list", "watch 2", "watch 2", "list", "watch 4"]


@pytest.mark.parametrize("status", [403, 410, 429, 500, 504])
async def test_a_server_that_refuses_is_asked_again(status):
    server = Server()
    refusal = {"kind": "Status", "reason": "Because", "message": "no"}
    async with watched(server) as world:
        await server.change("ADDED", "a")
        await until(world, {"a"})
        await server.listened_to(1)
        server.troubles = [web.json_response(refusal, status=status) for _ in range(2)]
        server.cut()
        await server.change("ADDED", "b")
        await until(world, {"a", "b"})
        assert not server.troubles


async def test_bookmarks_move_the_place_to_begin_again():
    server = Server()
    async with watched(server) as world:
        await server.listened_to(1)
        await server.change("ADDED", "a")
        await server.change("BOOKMARK", "")
        await server.change("ADDED", "b")
        await server.change("BOOKMARK", "")
        await until(world, {"a", "b"}, words=5)
        server.cut()
        await server.listened_to(2)
        assert server.asked == ["list", "watch 0", "watch 4"]
        assert {slot.uid for slot in world.slots.all()} == {"a", "b"}


async def test_each_namespace_has_its_own_place():
    server = Server()
    async with watched(server, ("a", "b")) as world:
        await server.change("ADDED", "one", "a")
        await server.change("ADDED", "two", "b")
        await until(world, {"one", "two"})
        await server.listened_to(2)
        assert sorted(server.asked)[:2] == ["list", "list"]


async def test_what_loses_its_label_is_no_slot_any_more():
    server = Server()
    await server.change("ADDED", "a")
    async with watched(server) as world:
        await until(world, {"a"})
        # The API server says DELETED when an object leaves the selector.
        await server.change("DELETED", "a")
        await until(world, set())


async def test_a_server_that_forgets_everything_is_left_in_peace(monkeypatch: pytest.MonkeyPatch):
    """Once it is asked again at once, and then after a pause, which here has no end."""
    monkeypatch.setattr(slot_watch, "_FIRST_PAUSE", 3600.0)
    server = Server()
    gone = {"kind": "Status", "reason": "Expired", "message": "too old"}
    server.troubles = [web.json_response(gone, status=410) for _ in range(50)]
    async with watched(server):
        async with asyncio.timeout(60):
            while len(server.asked) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert server.asked == ["list", "list"]
