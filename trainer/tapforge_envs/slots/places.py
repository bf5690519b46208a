"""Places to play in where no phone is needed: as many leases as there are places, each good for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..clients.phones import PhoneAddress
from .lease_life import LeaseLife
from .source import Lease, SlotCounts, SlotView, Verdict


class Places:
    """A `SlotSource` of `size` places. Nothing in it can be sick."""

    def __init__(self, size: int):
        self.size = self.usable = size
        self._free = [f"place-{number}" for number in range(size, 0, -1)]
        self._waiting = asyncio.Semaphore(size)
        self._leases = 0

    def counts(self) -> SlotCounts:
        free = len(self._free)
        return SlotCounts(free=free, leased=self.size - free, sick=0, quarantined=0, quarantines=0)

    def views(self) -> list[SlotView]:
        return []

    def when_changed(self, tell: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    async def start(self) -> None: ...

    async def acquire(self, deadline: float, avoid: frozenset[str] = frozenset(), trial: bool = False) -> Lease:
        await self._waiting.acquire()
        slot = self._free.pop()
        self._leases += 1
        return Lease(slot, self._leases, PhoneAddress(slot, ""), LeaseLife(slot))

    async def release(self, lease: Lease, verdict: Verdict, why: str = "", pace: float | None = None) -> None:
        self._free.append(lease.slot)
        self._waiting.release()

    async def close(self) -> None: ...
