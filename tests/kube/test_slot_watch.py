"""Slots as a server tells of them that cuts connections, forgets versions and fails: nothing is missed, nothing that
vanished stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from watch_server import Server, connected

from tapforge_operator.kube import reflector
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.informers import slot_reflector
from tapforge_operator.observability.metrics import Telemetry


@asynccontextmanager
async def watched(server: Server, spaces: tuple[str, ...] = ("",)) -> AsyncIterator[Seen]:
    cache = Seen()
    async with connected(server) as client:
        task = asyncio.create_task(slot_reflector(cache, client, spaces, cache.on_event).run())
        try:
            yield cache
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait({task})


class Seen(Cache):
    """Tells when something changed."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        #: lists and events
        self.words = 0
        super().__init__(Telemetry(), lambda uid: self.news.set())

    def on_event(self) -> None:
        self.words += 1
        self.news.set()


async def until(cache: Seen, uids: set[str], words: int = 0) -> None:
    """Those slots are known; so many words were heard at least."""
    async with asyncio.timeout(60):
        while {slot.uid for slot in cache.slots.all()} != uids or cache.words < words:
            cache.news.clear()
            await cache.news.wait()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "_FIRST_PAUSE", 0.01)


async def test_what_is_there_and_what_happens():
    server = Server()
    await server.change("ADDED", "a")
    async with watched(server) as cache:
        await until(cache, {"a"})
        await server.change("ADDED", "b")
        await until(cache, {"a", "b"})
        await server.change("DELETED", "a")
        await until(cache, {"b"})
        assert server.asked == ["list", "watch 1"]


async def test_a_watch_that_is_cut_begins_again_where_it_was_without_a_list():
    server = Server()
    async with watched(server) as cache:
        await server.listened_to(1)
        await server.change("ADDED", "a")
        await until(cache, {"a"})
        server.cut()
        await server.change("ADDED", "b")
        await server.change("DELETED", "a")
        await until(cache, {"b"})
        assert server.asked == ["list", "watch 0", "watch 1"]


async def test_a_version_that_was_forgotten_is_followed_by_a_list_that_takes_away_what_vanished():
    server = Server()
    await server.change("ADDED", "a")
    await server.change("ADDED", "b")
    async with watched(server) as cache:
        await until(cache, {"a", "b"})
        await server.listened_to(1)
        server.cut()
        await server.change("DELETED", "a")
        await server.change("ADDED", "c")
        server.events, server.oldest = [], server.version
        await until(cache, {"b", "c"})
        await server.listened_to(2)
        assert server.asked == ["list", "watch 2", "watch 2", "list", "watch 4"]


@pytest.mark.parametrize("status", [403, 410, 429, 500, 504])
async def test_a_server_that_refuses_is_asked_again(status):
    server = Server()
    refusal = {"kind": "Status", "reason": "Because", "message": "no"}
    async with watched(server) as cache:
        await server.change("ADDED", "a")
        await until(cache, {"a"})
        await server.listened_to(1)
        server.troubles = [web.json_response(refusal, status=status) for _ in range(2)]
        server.cut()
        await server.change("ADDED", "b")
        await until(cache, {"a", "b"})
        assert not server.troubles


async def test_bookmarks_move_the_place_to_begin_again():
    server = Server()
    async with watched(server) as cache:
        await server.listened_to(1)
        await server.change("ADDED", "a")
        await server.change("BOOKMARK", "")
        await server.change("ADDED", "b")
        await server.change("BOOKMARK", "")
        await until(cache, {"a", "b"}, words=5)
        server.cut()
        await server.listened_to(2)
        assert server.asked == ["list", "watch 0", "watch 4"]
        assert {slot.uid for slot in cache.slots.all()} == {"a", "b"}


async def test_each_namespace_has_its_own_place():
    server = Server()
    async with watched(server, ("a", "b")) as cache:
        await server.change("ADDED", "one", "a")
        await server.change("ADDED", "two", "b")
        await until(cache, {"one", "two"})
        await server.listened_to(2)
        assert sorted(server.asked)[:2] == ["list", "list"]


async def test_what_loses_its_label_is_no_slot_any_more():
    server = Server()
    await server.change("ADDED", "a")
    async with watched(server) as cache:
        await until(cache, {"a"})
        # The API server says DELETED when an object leaves the selector.
        await server.change("DELETED", "a")
        await until(cache, set())


async def test_a_server_that_forgets_everything_is_left_in_peace(monkeypatch: pytest.MonkeyPatch):
    """Once it is asked again at once, and then after a pause, which here has no end."""
    monkeypatch.setattr(reflector, "_FIRST_PAUSE", 3600.0)
    server = Server()
    gone = {"kind": "Status", "reason": "Expired", "message": "too old"}
    server.troubles = [web.json_response(gone, status=410) for _ in range(50)]
    async with watched(server):
        async with asyncio.timeout(60):
            while len(server.asked) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert server.asked == ["list", "list"]
