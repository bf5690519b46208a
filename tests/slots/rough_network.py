"""A TCP proxy that treats HTTP exchanges badly, on demand: what networks do, and a server can't do to itself.

Each exchange takes the next entry of `plan` that is meant for its path:

    refuse       the connection is closed at once, the request reaches nobody
    drop_answer  the request is served, its answer is lost with the connection
    half_answer  the answer stops in the middle of its body
    hang         the request reaches nobody, and nothing ever comes back
    late         the request is served, and its answer never comes back
    garbage      the answer is no HTTP
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class RoughNetwork:
    upstream: int
    port: int = 0
    #: (path ends with, what happens); used up from the front
    plan: list[tuple[str, str]] = field(default_factory=list)
    #: paths of all exchanges that began
    seen: list[str] = field(default_factory=list)
    connections: int = 0
    #: exchanges that were left without an answer for ever
    hung: int = 0

    def url(self, slot: int = 0) -> str:
        return f"http://127.0.0.1:{self.port}/slot/{slot}"

    def next_fault(self, path: str) -> str:
        for entry in self.plan:
            if path.endswith(entry[0]):
                self.plan.remove(entry)
                return entry[1]
        return ""

    async def hang(self) -> None:
        self.hung += 1
        await asyncio.get_running_loop().create_future()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while request := await _message(reader):
                path = request.split(b" ", 2)[1].decode()
                self.seen.append(path)
                fault = self.next_fault(path)
                if fault == "refuse":
                    return
                if fault == "hang":
                    await self.hang()
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
                up_writer.write(request)
                answer = await _message(up_reader)
                up_writer.close()
                if fault == "drop_answer":
                    return
                if fault == "late":
                    await self.hang()
                if fault == "garbage":
                    answer = b"what?\r\n\r\n"
                if fault == "half_answer":
                    body = answer.index(b"\r\n\r\n") + 4
                    answer = answer[: body + (len(answer) - body) // 2]
                writer.write(answer)
                await writer.drain()
                if fault:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the client went away: its right
        finally:
            writer.close()


async def _message(reader: asyncio.StreamReader) -> bytes:
    """One HTTP request or answer with its body; empty at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return head + await reader.readexactly(length)


@asynccontextmanager
async def rough_network(upstream: int) -> AsyncIterator[RoughNetwork]:
    network = RoughNetwork(upstream)
    tasks: set[asyncio.Task] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        tasks.add(task)
        try:
            await network.serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    network.port = server.sockets[0].getsockname()[1]
    try:
        yield network
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
