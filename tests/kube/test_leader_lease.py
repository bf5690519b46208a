"""Renewals of the leader's Lease are heard, also when the server ends, refuses or cuts the watch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import kopf
import pytest
from aiohttp import web

from tapforge_operator.kube import reflector
from tapforge_operator.kube.client import Client
from tapforge_operator.kube.informers import leader_reflector


class Server:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        #: how the next watches end, before anything was said; those after them go on
        self.troubles: list[str] = []
        self.renewals: asyncio.Queue[str] = asyncio.Queue()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, request.query["labelSelector"]))
        trouble = self.troubles.pop(0) if self.troubles else ""
        if trouble == "refused":
            return web.json_response({"reason": "Forbidden"}, status=403)
        response = web.StreamResponse()
        await response.prepare(request)
        while not trouble:
            event = {"type": await self.renewals.get(), "object": {"metadata": {"resourceVersion": "7"}}}
            await response.write(json.dumps(event).encode() + b"\n")
        if trouble == "cut":
            assert request.transport is not None
            request.transport.abort()
        return response


@asynccontextmanager
async def heard(server: Server) -> AsyncIterator[list[None]]:
    app = web.Application()
    app.router.add_route("GET", "/{rest:.*}", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    words: list[None] = []
    try:
        async with Client(kopf.ConnectionInfo(server=f"http://127.0.0.1:{runner.addresses[0][1]}")) as client:
            task = asyncio.create_task(leader_reflector(client, "tapforge-system", lambda: words.append(None)).run())
            try:
                yield words
                assert not task.done()
            finally:
                task.cancel()
                await asyncio.wait({task})
    finally:
        await runner.cleanup()


async def test_renewals_are_heard_whatever_happens_to_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(reflector, "_AGAIN", 0.01)
    server = Server()
    server.troubles = ["refused", "ended", "cut", "refused"]
    async with heard(server) as words:
        for kind in ("ADDED", "BOOKMARK", "MODIFIED", "MODIFIED"):
            server.renewals.put_nowait(kind)
        async with asyncio.timeout(60):
            while len(words) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(words) == 3, "a bookmark is no renewal"
        where = "/apis/coordination.k8s.io/v1/namespaces/tapforge-system/leases"
        assert server.asked == [(where, "app.kubernetes.io/managed-by=tapforge-operator")] * 5
