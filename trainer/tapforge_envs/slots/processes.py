"""Phones as processes on this machine: `count` slots spread over `processes` phone servers.

A server prints one line of JSON on stdout when it is ready, {"port": N}, and serves the phones /slot/0, /slot/1, ...;
each is a base URL of the protocol. Promises: a server that died is replaced (with growing pauses, its slots are sick
meanwhile); all servers end with `close()`, and with this process, however it dies. Slots keep their names over a
replacement: `local-0`, `local-1`, ...

Recycling costs no phone a moment: a server that is due gets a successor beside it, one server at a time. Slots that
no episode uses move there at once, the others at the end of their episodes; then the old server ends.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from ..clients.http import Deadlines
from ..clients.phones import PhoneAddress
from ..protocol import EnvironmentFault
from .leasing import LeasedSlots
from .source import HealthProbe, Lease, SlotError, Verdict
from .table import Backoff

log = logging.getLogger(__name__)

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a phone server is started. --host, --port and --slots are added."""

    module: str = "tapforge_envs.phone.server"
    arguments: tuple[str, ...] = ()
    #: 0: any free port; else the first server takes this one, the next one the next
    port: int = 0
    #: seconds from the start of the process to its line of JSON
    start_seconds: float = 60.0
    #: seconds between the request to stop and the kill
    stop_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class Recycle:
    """When a healthy server is replaced by a fresh one. None: never for that."""

    #: on each of its phones, on average
    after_episodes: int | None = None
    after_seconds: float | None = None

    def due(self, phones: int, episodes: int, age: float) -> bool:
        """`episodes`: on all its phones together. `age`: seconds."""
        used = self.after_episodes is not None and episodes >= self.after_episodes * phones
        return used or (self.after_seconds is not None and age >= self.after_seconds)


def spread(count: int, processes: int) -> list[int]:
    """Slots per process: as even as possible, the larger ones first."""
    if count < 1 or processes < 1:
        raise SlotError(f"{count} local phones in {processes} processes: both must be at least 1")
    processes = min(processes, count)
    return [count // processes + (i < count % processes) for i in range(processes)]


@dataclass(slots=True, eq=False)
class _Server:
    index: int
    slots: list[str]
    process: asyncio.subprocess.Process | None = None
    port: int = 0
    started: float = 0.0
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    readers: list[asyncio.Task[None]] = field(default_factory=list)
    #: that ended since it was started
    episodes: int = 0
    #: where its slots move to
    successor: _Server | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)


class ProcessSlots(LeasedSlots):
    #: between two looks at which server is due
    _look_seconds = 1.0

    def __init__(
        self,
        count: int,
        processes: int = 1,
        command: ServerCommand | None = None,
        deadlines: Deadlines | None = None,
        backoff: Backoff | None = None,
        health: HealthProbe | None = None,
        recycle: Recycle | None = None,
    ) -> None:
        names = [f"local-{i}" for i in range(count)]
        super().__init__(names, backoff, health)
        self._command = command or ServerCommand()
        self._deadlines = deadlines or Deadlines()
        self._servers: list[_Server] = []
        self._place: dict[str, tuple[_Server, int]] = {}
        first = 0
        for index, share in enumerate(spread(count, processes)):
            server = _Server(index, names[first : first + share])
            self._servers.append(server)
            self._place.update({name: (server, k) for k, name in enumerate(server.slots)})
            first += share
        self._keepers: dict[_Server, asyncio.Task[None]] = {}
        self._recycle = recycle
        self._recycler: asyncio.Task[None] | None = None
        #: how often a server that died was replaced, and one that was due
        self.replaced = self.recycled = 0
        if recycle is not None and self._command.port:
            raise SlotError("phone servers on fixed ports can't be recycled: a successor runs beside the old one")

    @property
    def urls(self) -> list[str]:
        """Where the phones are now."""
        return [self._url(name) for name in self._place]

    @property
    def pids(self) -> list[int]:
        return [s.process.pid for s in self._servers if s.process]

    def address(self, slot: str) -> PhoneAddress:
        return PhoneAddress(slot, self._url(slot), self._deadlines)

    async def probe(self, slot: str) -> str:
        server, _ = self._place[slot]
        if server.process is None or server.process.returncode is not None:
            raise EnvironmentFault(f"{slot}: its server is not running; last words: {_tail(server)}")
        return await super().probe(slot)

    async def start(self) -> None:
        """All servers at once. Raises SlotError with the server's last words when one doesn't come up."""
        results = await asyncio.gather(*(self._launch(s) for s in self._servers), return_exceptions=True)
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            await self.close()
            raise errors[0]
        for server in self._servers:
            self._watch(server)
        if self._recycle is not None:
            self._recycler = asyncio.get_running_loop().create_task(self._recycle_servers(self._recycle))

    async def close(self) -> None:
        tasks = [*self._keepers.values(), *([self._recycler] if self._recycler else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()
        successors = [s.successor for s in self._servers if s.successor is not None]
        await asyncio.gather(*(self._stop(s) for s in [*self._servers, *successors]))

    # --- recycling ---

    async def _recycle_servers(self, recycle: Recycle) -> None:
        """One at a time, until cancelled."""
        while True:
            await asyncio.sleep(self._look_seconds)
            now = time.monotonic()
            for server in list(self._servers):
                if recycle.due(len(server.slots), server.episodes, now - server.started):
                    await self._succeed(server)

    async def _succeed(self, server: _Server) -> None:
        """Another process takes the place of a server that runs. While none can be started, it goes on."""
        successor = _Server(server.index, server.slots)
        try:
            await self._launch(successor)
        except SlotError as error:
            log.warning("phone server %d is due, but has no successor: %s", server.index, error)
            await asyncio.sleep(self._backoff.cap)
            return
        server.successor = successor
        self._watch(successor)
        for slot in server.slots:
            if not self._table.leased(slot):
                self._move(slot)
        await server.moved.wait()
        keeper = self._keepers.pop(server)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        self._servers[server.index] = successor
        self.recycled += 1
        await self._stop(server)

    def _move(self, slot: str) -> None:
        """To its server's successor, if there is one."""
        server, number = self._place[slot]
        if server.successor is not None:
            self._place[slot] = (server.successor, number)
            if all(self._place[other][0] is server.successor for other in server.slots):
                server.moved.set()

    def _put_back(self, lease: Lease, verdict: Verdict, why: str, pace: float | None = None) -> None:
        self._place[lease.slot][0].episodes += 1
        self._move(lease.slot)  # before another caller gets it
        super()._put_back(lease, verdict, why, pace)

    # --- servers ---

    def _watch(self, server: _Server) -> None:
        loop = asyncio.get_running_loop()
        self._keepers[server] = loop.create_task(self._keep(server), name=f"keep phone server {server.index}")

    async def _launch(self, server: _Server) -> None:
        command, port = self._command, self._command.port and self._command.port + server.index
        arguments = ["--host", HOST, "--port", str(port), "--slots", str(len(server.slots)), *command.arguments]
        server.stderr.clear()
        # A session of its own: Ctrl-C in a terminal reaches the trainer, which then ends its phones in order.
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tapforge_envs.slots.child", str(os.getpid()), command.module, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise SlotError(f"phone server {server.index} can't be started: {error}") from error
        server.process, server.started = process, time.monotonic()
        assert process.stdout is not None and process.stderr is not None
        loop = asyncio.get_running_loop()
        server.readers = [loop.create_task(_collect(process.stderr, server.stderr))]
        try:
            async with asyncio.timeout(command.start_seconds):
                line = await process.stdout.readline()
        except (TimeoutError, ValueError) as error:  # ValueError: a line longer than the stream's limit
            await self._stop(server)
            raise SlotError(f"phone server {server.index} was not ready within {command.start_seconds:g} s") from error
        except asyncio.CancelledError:
            await self._stop(server)
            raise
        try:
            server.port = int(json.loads(line)["port"])
        except (ValueError, KeyError, TypeError) as error:
            await self._stop(server)
            raise SlotError(_why_not_ready(server, line, port)) from error
        server.readers.append(loop.create_task(_collect(process.stdout, server.stderr)))

    async def _keep(self, server: _Server) -> None:
        """Replaces the server whenever it dies, until cancelled."""
        deaths = 0
        while server.process is not None:
            code = await server.process.wait()
            # A server that ran for a while starts over with short pauses.
            deaths = 1 if time.monotonic() - server.started > 4 * self._backoff.cap else deaths + 1
            why = f"its server ended with {code}; last words: {_tail(server)}"
            log.warning("phone server %d (%s): %s; it is replaced", server.index, ", ".join(server.slots), why)
            for slot in server.slots:
                if self._place[slot][0] is server:
                    self._mark_dead(slot, why)
            if server.successor is not None:
                return
            await asyncio.sleep(min(self._backoff.cap, self._backoff.first * 2 ** min(deaths - 1, 16)))
            try:
                await self._launch(server)
                self.replaced += 1
                server.episodes = 0
            except SlotError as error:
                log.warning("phone server %d could not be replaced: %s", server.index, error)

    async def _stop(self, server: _Server) -> None:
        process = server.process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(self._command.stop_seconds):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
            finally:  # also when no caller waits for its end any more
                if process.returncode is None:
                    process.kill()
        # The readers end by themselves at end-of-file; a grandchild that holds the pipe open must not hold us.
        if server.readers:
            await asyncio.wait(server.readers, timeout=1.0)
        for task in server.readers:
            task.cancel()
        server.readers = []

    def _url(self, slot: str) -> str:
        server, number = self._place[slot]
        return f"http://{HOST}:{server.port}/slot/{number}"


async def _collect(stream: asyncio.StreamReader, into: deque[str]) -> None:
    """Reads a pipe to its end (a full pipe would block the server) and keeps the last lines."""
    while chunk := await stream.read(65536):
        into.extend(chunk.decode("utf-8", "replace").splitlines()[-20:])


def _tail(server: _Server) -> str:
    return " | ".join(list(server.stderr)[-5:]) or "none"


def _why_not_ready(server: _Server, line: bytes, port: int) -> str:
    if port and _in_use(port):
        return f"port {port} on {HOST} is in use: choose another, or 0 for any free one"
    said = line.decode("utf-8", "replace").strip()
    said = f"said {said!r} instead of its port" if said else "ended before it was ready"
    return f"phone server {server.index} {said}; last words: {_tail(server)}"


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
