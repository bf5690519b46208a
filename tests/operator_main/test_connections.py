"""Connections that say nothing cost nobody else the operator's ports."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from tapforge_operator import server
from tapforge_operator.broker import tls
from tapforge_operator.broker.material import NOTHING, completed
from tapforge_operator.server import SHRUNK, Connection, Connections, Stage, fitting, keep, listen, raise_file_limit

BAD, GOOD, WORSE, NEW = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"
LARGE = 64 << 20


class Port:
    def __init__(self, connections: Connections, context: ssl.SSLContext | None = None):
        self.connections = connections
        self._context = context
        #: requests of /wait
        self.waiting = 0
        self.go_on = asyncio.Event()

    async def open(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/", self._here), web.get("/large", self._large)])
        app.add_routes([web.get("/wait", self._wait), web.get("/passed", self._wait)])
        self.runner = web.AppRunner(app, access_log=None)
        await self.runner.setup()
        await listen(self.runner, "127.0.0.1", 0, self._context, connections=self.connections)
        self.port = self.runner.addresses[0][1]

    async def _here(self, _: web.Request) -> web.Response:
        return web.Response(text="here")

    async def _wait(self, request: web.Request) -> web.Response:
        with keep(request, Stage.PASSED_ON if request.path == "/passed" else Stage.KEPT):
            self.waiting += 1
            await self.go_on.wait()
        return web.Response(text="waited")

    async def _large(self, _: web.Request) -> web.Response:
        return web.Response(body=bytes(LARGE))

    async def connect(self, address: str, say: bytes = b"") -> asyncio.StreamReader:
        """Somebody at that address who says only this, and stays."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0), limit=4096)
        writer.write(say)
        self.writers.append(writer)
        return reader

    async def get(self, address: str, path: str = "/", trust: ssl.SSLContext | bool = True) -> str:
        connector = aiohttp.TCPConnector(local_addr=(address, 0), ssl=trust)
        url = f"http{'s' * (trust is not True)}://127.0.0.1:{self.port}{path}"
        async with aiohttp.ClientSession(connector=connector) as session, session.get(url) as answer:
            return await answer.text()

    writers: list[asyncio.StreamWriter]


@pytest.fixture
async def ports() -> AsyncIterator[Callable[..., Awaitable[Port]]]:
    opened: list[Port] = []

    async def make(*given: int, context: ssl.SSLContext | None = None) -> Port:
        port = Port(Connections(*given), context)
        port.writers = []
        await port.open()
        opened.append(port)
        return port

    yield make
    for port in opened:
        port.go_on.set()
        for writer in port.writers:
            writer.transport.abort()
        await port.runner.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def ended(reader: asyncio.StreamReader) -> bool:
    """Waits for it."""
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):
            return await reader.read() == b""
    return True


async def test_who_has_many_silent_connections_gives_them_up_for_others(ports) -> None:
    port = await ports(4, 4)
    readers = [await port.connect(BAD) for _ in range(4)]
    await until(lambda: len(port.connections) == 4)
    assert [await port.get(GOOD) for _ in range(3)] == ["here"] * 3
    assert await ended(readers[0]), "the oldest goes first"
    assert port.connections.of(BAD) == 3


async def test_one_address_has_no_more_than_its_limit(ports) -> None:
    port = await ports(100, 3)
    readers = [await port.connect(BAD) for _ in range(8)]
    assert [await ended(reader) for reader in readers[:5]] == [True] * 5
    assert port.connections.of(BAD) == 3
    assert await port.get(BAD) == "here", "also a new one of the same address"


async def test_who_waits_for_what_is_proved_keeps_its_place(ports) -> None:
    port = await ports(3, 3)
    calls = [asyncio.create_task(port.get(BAD, "/wait")) for _ in range(3)]
    await until(lambda: port.waiting == 3)
    refused = await port.connect(BAD)
    assert await ended(refused)
    with pytest.raises(aiohttp.ClientError):
        await port.get(BAD)
    port.go_on.set()
    assert await asyncio.gather(*calls) == ["waited"] * 3
    assert await port.get(GOOD) == "here"


@pytest.mark.parametrize("path", ["/wait", "/passed"], ids=["kept", "passed on"])
async def test_silent_connections_of_several_cost_nobody_who_waits_for_something(ports, path: str) -> None:
    port = await ports(7, 7)
    calls = [asyncio.create_task(port.get(GOOD, path)) for _ in range(3)]
    await until(lambda: port.waiting == 3)
    for address in (BAD, WORSE):
        for _ in range(2):
            await port.connect(address)
    await until(lambda: len(port.connections) == 7)
    assert await port.get(NEW) == "here"
    assert [port.connections.of(address) for address in (BAD, WORSE)] == [1, 2]
    port.go_on.set()
    assert await asyncio.gather(*calls) == ["waited"] * 3


async def test_who_has_most_that_were_passed_on_gives_them_up_last(ports) -> None:
    port = await ports(4, 4)
    calls = [asyncio.create_task(port.get(BAD, "/passed")) for _ in range(3)]
    await until(lambda: port.waiting == 3)
    silent = await port.connect(BAD)
    await until(lambda: len(port.connections) == 4)
    assert [await port.get(NEW) for _ in range(2)] == ["here"] * 2
    assert await ended(silent)
    kept = [await port.connect(address) for address in (NEW, GOOD)]
    done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(done.pop().exception(), aiohttp.ClientError)
    assert (len(waiting), len(kept)) == (2, port.connections.of(NEW) + port.connections.of(GOOD))
    port.go_on.set()
    assert await asyncio.gather(*waiting) == ["waited"] * 2


async def test_a_busy_address_gives_up_what_is_silent_before_what_was_served(ports) -> None:
    port = await ports(3, 3)
    served = await port.connect(BAD, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    await served.readuntil(b"here")
    silent = [await port.connect(BAD) for _ in range(2)]
    await until(lambda: len(port.connections) == 3)
    assert await port.get(GOOD) == "here"
    assert await ended(silent[0])
    port.writers[0].write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert await served.readuntil(b"here")


@pytest.mark.parametrize("say", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n"], ids=["nothing", "half of its headers"])
async def test_headers_that_do_not_come_end_the_connection(ports, monkeypatch, say: bytes) -> None:
    monkeypatch.setattr(server, "HEADERS", 0.1)
    port = await ports(4)
    assert await ended(await port.connect(BAD, say))
    await until(lambda: len(port.connections) == 0)


async def test_a_handshake_that_is_not_finished_ends_the_connection(ports, monkeypatch) -> None:
    material = completed(NOTHING, ["127.0.0.1"], datetime.now(UTC))
    port = await ports(4, context=tls.context(material))
    trust = ssl.create_default_context(cadata=material.ca.decode())
    assert await port.get(GOOD, trust=trust) == "here"
    monkeypatch.setattr(server, "HEADERS", 0.1)
    assert await ended(await port.connect(BAD))
    assert await ended(await port.connect(BAD, b"\x16\x03\x01\x02\x00"))
    assert b"HTTP" not in await (await port.connect(BAD, b"GET / HTTP/1.1\r\n\r\n")).read()
    await until(lambda: len(port.connections) == 0)


async def test_headers_in_many_pieces_are_headers(ports, monkeypatch) -> None:
    port = await ports(4)
    reader = await port.connect(BAD)
    for piece in b"GET / HTTP/1.1\r\nHost: a\r\n\r\n":
        port.writers[0].write(bytes([piece]))
        await port.writers[0].drain()
        await asyncio.sleep(0)
    assert await reader.readuntil(b"here")


async def test_who_does_not_read_its_answer_is_sent_no_more(ports, monkeypatch) -> None:
    monkeypatch.setattr(server, "UNREAD", 0.1)
    port = await ports(4)
    await port.connect(BAD, b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
    await until(lambda: len(port.connections) == 1)
    await until(lambda: len(port.connections) == 0)


async def test_silent_connections_do_not_keep_the_port_open(ports) -> None:
    port = await ports(4)
    reader = await port.connect(BAD)
    await until(lambda: len(port.connections) == 1)
    await port.runner.cleanup()
    assert await ended(reader)
    assert len(port.connections) == 0


@pytest.mark.parametrize(
    ("wanted", "files", "most"), [(4096, 65_536, 4096), (4096, 1024, 128), (100, 1024, 100), (4096, 64, 1)]
)
def test_connections_leave_descriptors_for_everything_else(wanted: int, files: int, most: int) -> None:
    assert fitting(wanted, files) == most


def test_a_machine_without_descriptors_for_a_while_leaves_a_port_its_places() -> None:
    now = [0.0]
    connections = Connections(4096, clock=lambda: now[0])

    class Idle:
        """Of each address one: none has more than another."""

        def __init__(self, number: int):
            self.peer, self.stage = f"10.0.0.{number}", Stage.SILENT

        def abort(self) -> None:
            connections.drop(cast("Connection", self))

    def add(number: int) -> bool:
        return connections.add(cast("Connection", Idle(number)))

    assert all(add(number) for number in range(100))
    for _ in range(6):
        connections.shrink()
    assert (connections.places, len(connections)) == (32, 32)
    now[0] += SHRUNK + 1
    assert all(add(number) for number in range(100, 200))
    assert (connections.places, len(connections)) == (4096, 132)


#: a port in a process of its own, whose descriptors can be used up
_SCARCE = f"""
import asyncio, resource, sys
sys.path[:0] = {sys.path!r}
from test_connections import Port
from tapforge_operator.server import Connections

async def main():
    broker, health = Port(Connections(4096)), Port(Connections(8))
    await broker.open()
    await health.open()
    taken = len(__import__("os").listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 48, taken + 48))
    print(broker.port, health.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_health_answers_while_descriptors_are_used_up() -> None:
    """In a process of its own: the limit is the process'."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _SCARCE, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        broker, health = map(int, (await process.stdout.readline()).split())
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(socket.create_connection(("127.0.0.1", broker), source_address=(BAD, 0)))
            for port in (health, broker):
                async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/") as answer:
                    assert await answer.text() == "here"
    finally:
        process.kill()
        await process.wait()


def test_the_soft_limit_of_open_files_is_raised() -> None:
    script = (
        "import resource; from tapforge_operator.server import raise_file_limit\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "print(raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256)"
    )
    assert raise_file_limit() > 256
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True\n"
