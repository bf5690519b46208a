"""Leases over slots that one process has for itself: the shell around `table.py` that waits, probes and times out.

`acquire` serves those who wait in their order; a slot that is returned clean goes to the first of them at once. Time in
which a slot is leased doesn't count against anybody's deadline: a fleet that is busy is no fleet that is gone. Sick
slots are nursed each by a task of its own: sleep, probe, until it is healthy or the source is closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..clients.phones import PhoneAddress, PhoneClients
from ..protocol import EnvironmentFault
from .lease_life import LeaseLife
from .source import HealthProbe, Lease, NoSlot, SlotCounts, SlotError, Verdict
from .table import Backoff, SlotTable, State

log = logging.getLogger(__name__)


class LeasedSlots(ABC):
    """A `SlotSource`. A subclass says where the phone of a slot is."""

    def __init__(self, names: Sequence[str], backoff: Backoff | None = None, health: HealthProbe | None = None):
        """`health`: asks from where phones are used; None: from here."""
        self._own_clients = PhoneClients()
        self._health = health or self._own_clients.health
        self._backoff = backoff or Backoff()
        self._table = SlotTable(names, self._backoff.strikes)
        self._waiting: dict[asyncio.Future[Lease], frozenset[str]] = {}
        self._nurses: dict[str, asyncio.Task[None]] = {}
        #: slot -> what was wrong with it last
        self._ailments: dict[str, str] = {}
        self._told: list[Callable[[], None]] = []
        self._closed = False
        #: when a slot was in use last, on the loop's clock
        self._last_used = -math.inf

    @abstractmethod
    def address(self, slot: str) -> PhoneAddress:
        """Where its phone is now."""

    def life(self, slot: str) -> LeaseLife:
        """Of a new lease."""
        return LeaseLife(slot)

    async def probe(self, slot: str) -> str:
        """The instance of the slot's server. Raises EnvironmentFault when it is sick, within a deadline."""
        return await self._health(self.address(slot))

    @property
    def size(self) -> int:
        return len(self._table.names)

    @property
    def usable(self) -> int:
        return self._table.usable

    def counts(self) -> SlotCounts:
        return self._table.counts()

    def when_changed(self, tell: Callable[[], None]) -> Callable[[], None]:
        self._told.append(tell)
        return lambda: self._told.remove(tell)

    async def acquire(self, deadline: float, avoid: frozenset[str] = frozenset()) -> Lease:
        if self._closed:
            raise SlotError("the slot source is closed")
        # A slot is free while others wait only when they avoid it: nobody is overtaken.
        if lease := self._take(avoid):
            return lease
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Lease] = loop.create_future()
        self._waiting[future] = avoid
        begun = loop.time()
        try:
            while not future.done():
                if self._table.in_use:
                    self._last_used = loop.time()
                left = max(begun, self._last_used) + deadline - loop.time()
                if left > 0:
                    await asyncio.wait([future], timeout=left)
                elif lease := self._take(frozenset()):  # better a slot that was to be avoided than none
                    return lease
                else:
                    raise NoSlot(f"for {deadline:g} s no slot was free or in use: {self.describe()}")
            return future.result()
        except asyncio.CancelledError:
            self._take_back(future)
            raise
        finally:
            self._waiting.pop(future, None)

    async def release(self, lease: Lease, verdict: Verdict, why: str = "") -> None:
        # No await in here: a holder that is being cancelled still returns its lease.
        self._last_used = asyncio.get_running_loop().time()
        self._put_back(lease, verdict, why)

    async def close(self) -> None:
        self._closed = True
        nurses = list(self._nurses.values())
        for task in nurses:
            task.cancel()
        await asyncio.gather(*nurses, return_exceptions=True)
        for future in self._waiting:
            if not future.done():
                future.set_exception(SlotError("the slot source was closed"))
        await self._own_clients.close()

    def describe(self) -> str:
        """The state of the slots in words, ailments first; for errors."""
        c = self.counts()
        text = f"{c.free} free, {c.leased} leased, {c.sick} sick, {c.quarantined} in quarantine"
        ill = [n for n in self._table.names if self._table.state(n) in (State.SICK, State.QUARANTINED)]
        return text + "".join(f"; {n}: {self._ailments.get(n, 'sick')}" for n in ill[:5]) + (" ..." if ill[5:] else "")

    def _mark_dead(self, slot: str, why: str) -> None:
        """For subclasses that notice a death themselves."""
        self._ailments[slot] = why
        if self._table.died(slot):
            self._nurse(slot)

    def _put_back(self, lease: Lease, verdict: Verdict, why: str) -> None:
        state = self._table.give(lease.slot, lease.fence, verdict)
        if state is not State.FREE:
            self._ailments[lease.slot] = why or self._ailments.get(lease.slot) or "an episode on it broke"
            self._nurse(lease.slot)
        self._serve()
        if state is State.QUARANTINED:
            self._tell()

    def _take(self, avoid: frozenset[str]) -> Lease | None:
        taken = self._table.take(avoid)
        return Lease(*taken, self.address(taken[0]), self.life(taken[0])) if taken else None

    def _serve(self) -> None:
        for future, avoid in self._waiting.items():
            if not future.done() and (lease := self._take(avoid)):
                future.set_result(lease)

    def _serve_changed(self) -> None:
        """There is one usable slot more than before, or one less."""
        self._serve()
        self._tell()

    def _tell(self) -> None:
        for tell in list(self._told):
            tell()

    def _take_back(self, future: asyncio.Future[Lease]) -> None:
        """The lease of a waiter that went away in the moment in which it was served."""
        if future.done() and not future.cancelled() and future.exception() is None:
            self._waiting.pop(future, None)
            self._put_back(future.result(), Verdict.CLEAN, "")

    def _nurse(self, slot: str) -> None:
        if not self._closed and slot not in self._nurses:
            task = asyncio.get_running_loop().create_task(self._nurse_until_healthy(slot), name=f"nurse {slot}")
            self._nurses[slot] = task

    async def _nurse_until_healthy(self, slot: str) -> None:
        try:
            while not self._closed:
                await asyncio.sleep(self._backoff.delay(self._table.strikes(slot)))
                try:
                    await self.probe(slot)
                except EnvironmentFault as fault:
                    self._ailments[slot] = str(fault)
                    before = self._table.state(slot)
                    if self._table.probed(slot, healthy=False) is State.QUARANTINED and before is State.SICK:
                        log.warning("slot %s is in quarantine: %s", slot, fault)
                        self._serve_changed()  # those who avoid every other slot may have no other choice now
                else:
                    self._table.probed(slot, healthy=True)
                    self._ailments.pop(slot, None)
                    return
        finally:
            del self._nurses[slot]
            if self._table.state(slot) is State.FREE:
                self._serve_changed()
