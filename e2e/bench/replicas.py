"""Replicas of the operator behind a Service, with what a cluster does for them: probes, endpoints, and the way of a Pod
that is deleted. Numbers are those of manifests/base/operator.yaml.

- The Service is a TCP round-robin over the replicas that are ready, by connection, as kube-proxy's; one that refuses a
  connection costs its caller that connection.
- A replica is ready when its probe says so, and no more after as many probes as the manifest allows.
- One that is deleted leaves the Service at once, and gets SIGTERM `PRE_STOP` seconds later.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import aiohttp

from e2e.cluster.processes import free_ports

from .testbed import Testbed

PRE_STOP: Final = 5.0
_PROBE_EVERY: Final = 5.0
_FAILURES: Final = 2
_START_SECONDS: Final = 90.0
_POLL: Final = 0.1


class Service:
    """`async with Service() as service`: `port` leads to one of `endpoints` in turn."""

    def __init__(self) -> None:
        self.endpoints: list[int] = []
        self._turn = itertools.count()
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if not self.endpoints:
                return
            port = self.endpoints[next(self._turn) % len(self.endpoints)]
            with suppress(OSError):  # of either end: the other one is closed too
                there, back = await asyncio.open_connection("127.0.0.1", port)
                try:
                    await asyncio.gather(_pass(reader, back), _pass(there, writer))
                finally:
                    back.close()
        finally:
            writer.close()
            self._open.discard(task)


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while chunk := await source.read(65536):
        sink.write(chunk)
        await sink.drain()
    sink.close()


@dataclass(eq=False)
class Replica:
    name: str
    broker: int
    health: int
    #: probes in a row that failed
    failures: int = 0
    deleted: bool = False
    starts: int = 0

    @property
    def process(self) -> str:
        return f"{self.name}-{self.starts}"


class Replicas:
    """`async with Replicas(bed, service) as replicas`."""

    def __init__(self, bed: Testbed, service: Service):
        self._bed = bed
        self._service = service
        self._all: list[Replica] = []
        self._names = itertools.count()

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0))
        self._probes = asyncio.create_task(self._probe())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._probes.cancel()
        for replica in self._all:
            await asyncio.to_thread(self._bed.cluster.stop_component, replica.process, signal.SIGKILL)
        await self._http.close()

    @property
    def present(self) -> list[Replica]:
        """Those that were not deleted."""
        return [replica for replica in self._all if not replica.deleted]

    async def add(self) -> Replica:
        """A new one, as soon as it is ready."""
        broker, health = free_ports(2)
        replica = Replica(f"replica-{next(self._names)}", broker, health)
        self._all.append(replica)
        await self.restart(replica)
        return replica

    async def restart(self, replica: Replica) -> None:
        """Its container, in place: name and address stay. Returns when it is ready."""
        replica.starts += 1
        self._bed.launch_replica(replica.process, replica.name, replica.broker, replica.health)
        end = time.monotonic() + _START_SECONDS
        while await self._says(replica) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"{replica.name} is not ready after {_START_SECONDS:g} s")
            await asyncio.sleep(_POLL)
        if replica.broker not in self._service.endpoints:
            self._service.endpoints.append(replica.broker)

    async def delete(self, replica: Replica) -> None:
        """Returns when it ended."""
        self.forget(replica)
        await asyncio.sleep(PRE_STOP)
        await asyncio.to_thread(self._bed.cluster.stop_component, replica.process)

    async def kill(self, replica: Replica) -> None:
        """It dies of SIGKILL. Its probes find out."""
        await asyncio.to_thread(self._bed.cluster.stop_component, replica.process, signal.SIGKILL)

    def forget(self, replica: Replica) -> None:
        """Its node is found to be lost: it counts no more."""
        replica.deleted = True
        if replica.broker in self._service.endpoints:
            self._service.endpoints.remove(replica.broker)

    async def leader(self) -> Replica:
        """Waits for one."""
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            for replica in self.present:
                if (await self._says(replica) or "").startswith("leads"):
                    return replica
            await asyncio.sleep(_POLL)
        raise TimeoutError(f"no replica leads after {_START_SECONDS:g} s")

    async def _says(self, replica: Replica) -> str | None:
        """What it is ready for; None when it is not."""
        try:
            async with self._http.get(f"http://127.0.0.1:{replica.health}/readyz") as answer:
                return (await answer.text()).strip() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def _probe(self) -> None:
        """A replica that fails too often leaves the Service until it is ready again."""
        while True:
            await asyncio.sleep(_PROBE_EVERY)
            for replica in self.present:
                well, there = await self._says(replica) is not None, replica.broker in self._service.endpoints
                replica.failures = 0 if well else replica.failures + 1
                if there and replica.failures >= _FAILURES:
                    self._service.endpoints.remove(replica.broker)
                elif well and not there and not replica.deleted:
                    self._service.endpoints.append(replica.broker)
