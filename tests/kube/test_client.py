"""Calls to an API server that is slow, refuses, or dies in the middle: what is sent again and what never is."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import kopf
import pytest
from aiohttp import web

from tapforge_operator.kube.client import ApiError, Client, NotSent, path

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def _server(answer: Answer, **settings: float) -> AsyncIterator[tuple[Client, list[web.Request]]]:
    asked: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        await request.read()
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        info = kopf.ConnectionInfo(server=f"http://{host}:{port}", token="t0ken")
        async with Client(info, **{"deadline": 300.0} | settings) as client:
            yield client, asked
    finally:
        await runner.cleanup()


def _status(code: int, **headers: str) -> web.Response:
    return web.json_response({"kind": "Status", "reason": "Because", "message": "no"}, status=code, headers=headers)


def _in_turn(*answers: web.Response) -> Answer:
    left = list(answers)

    async def answer(_: web.Request) -> web.StreamResponse:
        return left.pop(0) if len(left) > 1 else left[0]

    return answer


async def _cut(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_a_call_carries_the_token_and_brings_back_the_object():
    async with _server(_in_turn(web.json_response({"a": 1}))) as (client, asked):
        assert await client.get("/api/v1/x") == {"a": 1}
        assert asked[0].headers["Authorization"] == "Bearer t0ken"


@pytest.mark.parametrize("verb", ["get", "create", "patch", "delete"])
async def test_too_many_requests_is_sent_again_after_the_pause(verb):
    async with _server(_in_turn(_status(429, **{"Retry-After": "0"}), web.json_response({"a": 1}))) as (client, asked):
        call = getattr(client, verb)
        assert await (call("/x", {}) if verb in ("create", "patch") else call("/x")) == {"a": 1}
        assert len(asked) == 2


@pytest.mark.parametrize(("verb", "times"), [("get", 2), ("delete", 2), ("create", 1), ("patch", 1), ("replace", 1)])
async def test_what_may_have_been_carried_out_is_not_written_twice(verb, times):
    async with _server(_in_turn(_status(500), web.json_response({"a": 1}))) as (client, asked):
        call = getattr(client, verb)
        if times == 2:
            assert await call("/x") == {"a": 1}
        else:
            with pytest.raises(ApiError) as caught:
                await call("/x", {})
            assert caught.value.unclear and caught.value.status == 500
        assert len(asked) == times


async def test_a_lost_connection_leaves_a_write_unclear():
    async with _server(_cut) as (client, asked):
        with pytest.raises(ApiError) as caught:
            await client.patch("/x", {})
        assert caught.value.unclear and caught.value.status == 0 and len(asked) == 1


async def test_a_hung_answer_ends_at_the_deadline_and_is_unclear():
    released = asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        await released.wait()
        return web.Response()

    async with _server(hang) as (client, _):
        with pytest.raises(ApiError, match="no answer within") as caught:
            await client.create("/x", {}, deadline=0.2)
        assert caught.value.unclear
        released.set()


async def test_what_waited_in_the_queue_was_certainly_not_sent():
    arrived, released = asyncio.Event(), asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        arrived.set()
        await released.wait()
        return web.json_response({})

    async with _server(hang, in_flight=1) as (client, asked):
        first = asyncio.create_task(client.create("/first", {}))
        await arrived.wait()
        with pytest.raises(NotSent) as caught:
            await client.create("/second", {}, deadline=0.2)
        assert not caught.value.unclear and [r.path for r in asked] == ["/first"]
        released.set()
        await first


async def test_creates_in_bulk_hold_nobody_up_and_are_answered_with_metadata():
    released = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            await released.wait()
        return web.json_response({"asked": request.headers["Accept"]})

    async with _server(hang, in_flight=8) as (client, asked):
        creates = [asyncio.create_task(client.create("/pods", {}, bulk=True)) for _ in range(20)]
        assert await client.patch("/status", {}) == {"asked": "application/json"}
        released.set()
        answers = await asyncio.gather(*creates)
        assert {answer["asked"].split(";")[1] for answer in answers} == {"as=PartialObjectMetadata"}
        assert len(asked) == 21


async def test_a_create_in_bulk_that_waited_too_long_was_certainly_not_sent():
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    async with _server(hang, in_flight=1) as (client, _):
        first = asyncio.create_task(client.create("/pods", {}, bulk=True))
        await asyncio.sleep(0)
        with pytest.raises(NotSent):
            await client.create("/pods", {}, deadline=0.2, bulk=True)
        first.cancel()


async def test_nobody_there(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []

    def until_it_is_too_late(low: float, high: float) -> float:
        pauses.append(high)
        return 0.0 if len(pauses) < 4 else 1000.0

    monkeypatch.setattr(random, "uniform", until_it_is_too_late)
    tried: list[tuple[str, int]] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        server = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with Client(
            kopf.ConnectionInfo(server=server),
            deadline=300.0,
            watcher=lambda verb, status, _: tried.append((verb, status)),
        ) as client:
            with pytest.raises(ApiError, match=f"{server} can't be reached") as caught:
                await client.create("/x", {})
    assert not caught.value.unclear and caught.value.passing
    assert tried == [("create", 0)] * 4, "it was certainly not sent, so it is sent again while there is time"


async def test_a_refusal_says_what_the_server_said():
    async with _server(_in_turn(_status(403))) as (client, asked):
        with pytest.raises(ApiError, match="POST /x: 403 Because: no") as caught:
            await client.create("/x", {})
        assert not caught.value.unclear and not caught.value.passing and len(asked) == 1


async def test_a_list_comes_in_pages():
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.query["labelSelector"] == "a=b"
        number = int(request.query.get("continue", "0"))
        metadata = {"resourceVersion": "77"} | ({"continue": str(number + 1)} if number < 2 else {})
        return web.json_response({"items": [{"n": number}], "metadata": metadata})

    async with _server(answer) as (client, _):
        pages = [(items, version) async for items, version in client.pages("/x", "a=b")]
        assert pages == [([{"n": n}], "77") for n in range(3)]


@pytest.mark.parametrize("name", ["../../secrets/x", "a/b", "a?x=1", "a b", "%2e%2e"])
def test_no_name_reaches_another_object(name):
    made = path("pods", "default", name)
    assert made.startswith("/api/v1/namespaces/default/pods/") and made.count("/") == 6 and "?" not in made


@pytest.mark.parametrize("name", [".", ".."])
def test_dots_are_no_name(name):
    with pytest.raises(ApiError, match="no object can be called") as error:
        path("pods", name, "a")
    assert error.value.status == 404


def test_paths():
    assert path("pods", "ns", "a", "log") == "/api/v1/namespaces/ns/pods/a/log"
    assert path("leases", "ns", group="coordination.k8s.io/v1") == "/apis/coordination.k8s.io/v1/namespaces/ns/leases"
    assert path("nodes") == "/api/v1/nodes"
