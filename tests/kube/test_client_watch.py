"""A watch as the API server may deliver it: in pieces, with bookmarks, with errors inside, or not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from aiohttp import web

from tapforge_operator.kube.client import ApiError, Client

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
EVENTS = [
    {"type": "ADDED", "object": {"metadata": {"name": "a", "resourceVersion": "5"}, "note": "ä\n" * 3000}},
    {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}},
    {"type": "DELETED", "object": {"metadata": {"name": "a", "resourceVersion": "9"}, "note": "x" * 200_000}},
]
GONE = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}


@asynccontextmanager
async def _client(answer: Answer) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_get("/jobs", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        async with Client(kopf.ConnectionInfo(server=f"http://{host}:{port}", token="t0ken")) as client:
            yield client
    finally:
        await runner.cleanup()


def _sends(*events: Any, size: int = 0, cut: bool = False, hang: bool = False) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.query["watch"] == "1" and request.query["resourceVersion"] == "3"
        assert request.query["labelSelector"] == "a=b" and request.headers["Authorization"] == "Bearer t0ken"
        response = web.StreamResponse()
        await response.prepare(request)
        data = b"".join(json.dumps(event, ensure_ascii=False).encode() + b"\n" for event in events)
        for begin in range(0, len(data), size or len(data)):
            await response.write(data[begin : begin + (size or len(data))])
        if hang:
            await _silent(request)
        if cut and request.transport is not None:
            request.transport.abort()
        return response

    return answer


async def _silent(request: web.Request) -> None:
    while request.transport is not None and not request.transport.is_closing():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


async def _hear(client: Client, **more: Any) -> list[Any]:
    return [event async for event in client.watch("/jobs", "a=b", since="3", **more)]


@pytest.mark.parametrize("size", [0, 1000, 65_537])
async def test_events_arrive_whole_however_they_are_cut(size: int) -> None:
    async with _client(_sends(*EVENTS, size=size)) as client:
        assert await _hear(client) == EVENTS


async def test_an_error_among_the_events_is_raised() -> None:
    heard = []
    async with _client(_sends(EVENTS[1], GONE)) as client:
        with pytest.raises(ApiError) as caught:
            async for event in client.watch("/jobs", "a=b", since="3"):
                heard.append(event)  # noqa: PERF401 - what came before the error counts
    assert heard == [EVENTS[1]] and (caught.value.status, caught.value.reason) == (410, "Expired")


@pytest.mark.parametrize(("status", "reason"), [(404, "NotFound"), (403, "Forbidden"), (410, "Expired")])
async def test_a_refusal_is_raised(status: int, reason: str) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"kind": "Status", "reason": reason, "message": "no"}, status=status)

    async with _client(refuse) as client:
        with pytest.raises(ApiError) as caught:
            await _hear(client)
    assert (caught.value.status, caught.value.reason) == (status, reason)


async def test_silence_and_a_cut_end_the_watch() -> None:
    async with _client(_sends(EVENTS[1], hang=True)) as client:
        with pytest.raises(ApiError, match="ConnectionLost"):
            await _hear(client, silence=0.05)
    async with _client(_sends(EVENTS[1], cut=True)) as client:
        with pytest.raises(ApiError, match="ConnectionLost"):
            await _hear(client)
