"""An API server of Pods over HTTP, for who follows them: it cuts connections, forgets versions and fails when it is
told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
from aiohttp import web

from tapforge_operator import labels as wellknown
from tapforge_operator.kube.client import Client

Object = dict[str, Any]


def pod(uid: str, version: int, namespace: str = "a") -> Object:
    owner = {"kind": "EmulatorPool", "name": "phones", "uid": "pool", "controller": True}
    labels = {wellknown.POOL_UID: "pool", wellknown.ORDINAL: "0"}
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
async def connected(server: Server) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_route("GET", "/{rest:.*}", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        async with Client(kopf.ConnectionInfo(server=f"http://{host}:{port}"), deadline=300.0) as client:
            yield client
    finally:
        await runner.cleanup()
