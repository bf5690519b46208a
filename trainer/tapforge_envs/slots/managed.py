"""Slots behind ZeroGUI's manager (OSWorld, AndroidLab): workers that are made, replaced and ended from here.

    http://10.0.0.7:10001?workers=4    a manager; four workers of it are four slots
    http://10.0.0.7:10010              a worker that was made elsewhere is one slot, and is never ended from here

Promises:
1. Every worker that was made is ended when the slots are closed, or named in a warning (`clients/manager.py`); also
   when they are closed in the middle of making one.
2. A worker is ready when it answers, not after a fixed sleep; then its machine is started. All of it has an end
   (`Patience`).
3. After an episode that broke, a worker of ours is replaced; of one made elsewhere the machine is stopped. So a step
   that still hangs in it can't act in the next episode.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import aiohttp

from tapforge_api.pool import Protocol

from ..clients.http import Deadlines, new_session
from ..clients.manager import Manager, Patience, Worker
from ..clients.phones import PhoneAddress, PhoneOptions
from ..clients.worker import Dialect, WorkerClient
from ..protocol import EnvironmentFault
from .source import HealthProbe, Lease, Verdict
from .table import Backoff
from .urls import Address, UrlSlots

log = logging.getLogger(__name__)


class ManagedSlots(UrlSlots):
    """A slot with a fragment (`http://10.0.0.7:10001#2`) is a worker of that manager, to be made."""

    def __init__(
        self,
        addresses: Sequence[Address],
        protocol: Protocol,
        dialect: Dialect,
        deadlines: Deadlines | None = None,
        backoff: Backoff | None = None,
        health: HealthProbe | None = None,
        options: PhoneOptions | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(addresses, deadlines, backoff, health, protocol, options)
        self._dialect = dialect
        self._patience = patience or Patience()
        self._session: aiohttp.ClientSession | None = None
        self._managers: dict[str, Manager] = {}
        self._workers: dict[str, Worker] = {}
        #: workers made elsewhere on which an episode broke
        self._dirty: set[str] = set()
        #: what makes a slot's worker, and goes on when no caller waits for it any more
        self._making: dict[str, asyncio.Task[None]] = {}

    def address(self, slot: str) -> PhoneAddress:
        worker = self._workers.get(slot)
        url = worker.url if worker else slot
        return PhoneAddress(slot, url, self._deadlines, protocol=self._protocol, options=self._options)

    async def probe(self, slot: str) -> str:
        """Makes or replaces the slot's worker where that is due. Raises EnvironmentFault."""
        if "#" in slot:
            if slot not in self._making:
                self._making[slot] = asyncio.create_task(self._make(slot), name=f"worker {slot}")
            making = self._making[slot]
            try:
                await asyncio.shield(making)
            finally:
                if making.done():
                    self._making.pop(slot, None)
        elif slot in self._dirty:
            await self._client(slot, slot).stop(self._patience.terminate)
            self._dirty.discard(slot)
        return await super().probe(slot)

    async def release(self, lease: Lease, verdict: Verdict, why: str = "", pace: float | None = None) -> None:
        if verdict is Verdict.DIRTY:
            if (worker := self._workers.get(lease.slot)) is not None:
                worker.dirty = True
            else:
                self._dirty.add(lease.slot)
        await super().release(lease, verdict, why, pace)

    async def close(self) -> None:
        await super().close()
        for manager in self._managers.values():
            manager.close()
        try:
            # Those that are not being made any more are asked to end at once: the time for closing may be short.
            ended = asyncio.gather(*(self._end(slot) for slot in list(self._workers) if slot not in self._making))
            await asyncio.gather(ended, self._end_making())
        finally:
            for slot, worker in self._workers.items():
                log.warning("worker %s of %s was not ended: end it on that host", worker.env_id, slot)
            for making in self._making.values():
                log.warning("%s was being made: look for it on that host", making.get_name())
            if self._session is not None:
                await self._session.close()
                self._session = None

    async def _end_making(self) -> None:
        """A worker that is killed while its machine starts leaves the machine behind: it is given time to finish."""
        if not self._making:
            return
        done, late = await asyncio.wait(self._making.values(), timeout=self._patience.terminate)
        for making in late:
            log.warning("%s: its machine may be left running: it did not start in time", making.get_name())
            making.cancel()
        await asyncio.gather(*done, *late, return_exceptions=True)
        slots = [slot for slot in self._making if slot in self._workers]
        self._making.clear()
        await asyncio.gather(*map(self._end, slots))

    async def _make(self, slot: str) -> None:
        worker = self._workers.get(slot)
        if worker is not None and not worker.dirty:
            return
        if worker is not None:
            await self._end(slot)
        worker = self._workers[slot] = await self._manager(slot).create()
        worker.dirty = True  # until its machine runs
        client = self._client(slot, worker.url)
        await self._until_it_answers(slot, client)
        await client.start(self._patience.start)
        worker.dirty = False

    async def _until_it_answers(self, slot: str, client: WorkerClient) -> None:
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._patience.ready
        while True:
            try:
                await client.health()
                return
            except EnvironmentFault as fault:
                if self._closed or loop.time() >= ends:
                    why = f"a new worker did not answer for {self._patience.ready:g} s"
                    raise EnvironmentFault(f"{slot}: {why}: {fault}") from fault
            await asyncio.sleep(self._patience.poll)

    async def _end(self, slot: str) -> None:
        await self._manager(slot).terminate(self._workers.pop(slot))

    def _manager(self, slot: str) -> Manager:
        url = slot.partition("#")[0]
        if url not in self._managers:
            self._managers[url] = Manager(url, self._http(), self._patience)
        return self._managers[url]

    def _client(self, slot: str, url: str) -> WorkerClient:
        return WorkerClient(url, self._http(), self._deadlines, slot, self._dialect, pause=0.0)

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = new_session()
        return self._session
