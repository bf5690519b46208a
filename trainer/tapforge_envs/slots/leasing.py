"""Leases over slots that one process has for itself: the shell around `table.py` that waits, probes and times out.

`acquire` serves callers in their order; a slot that is returned clean goes to the first of them at once. Time in
which a slot is leased doesn't count against any caller's deadline: a fleet that is busy is not lost. Sick
slots are nursed each by a task of its own: sleep, probe, until it is healthy or the source is closed. Where all are in
quarantine and a caller waits, no cooldown outlasts its deadline: they are probed several times before that.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ..clients.phones import PhoneAddress, PhoneClients
from ..protocol import EnvironmentFault
from .lease_life import LeaseLife
from .source import HealthProbe, Lease, NoSlot, SlotCounts, SlotError, SlotView, Verdict
from .table import SLOW, Backoff, SlotTable, State

log = logging.getLogger(__name__)

#: probes of phones whose cooldown isn't over, within the deadline of a waiting caller, when all are in quarantine
_HURRIES = 4
#: and not more often than this, seconds
_HURRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Request:
    """What a caller that waits for a slot would take."""

    avoid: frozenset[str]
    trial: bool


class LeasedSlots(ABC):
    """A `SlotSource`. A subclass says where the phone of a slot is."""

    def __init__(self, names: Sequence[str], backoff: Backoff | None = None, health: HealthProbe | None = None):
        """`health`: asks from where phones are used; None: from here."""
        self._own_clients = PhoneClients()
        self._health = health or self._own_clients.health
        self._backoff = backoff or Backoff()
        self._table = SlotTable(names, self._backoff.strikes)
        #: wakes those that wait for the end of a cooldown, while a caller waits for a phone and all are in quarantine
        self._hurry = asyncio.Event()
        self._waiting: dict[asyncio.Future[Lease], _Request] = {}
        self._nurses: dict[str, asyncio.Task[None]] = {}
        #: slot -> what was wrong with it last
        self._ailments: dict[str, str] = {}
        #: slot -> when its nurse asks it again, unix seconds
        self._again: dict[str, float] = {}
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

    def views(self) -> list[SlotView]:
        return [
            replace(view, why=self._ailments.get(view.name, ""), again=self._again.get(view.name))
            for view in self._table.views()
        ]

    def when_changed(self, tell: Callable[[], None]) -> Callable[[], None]:
        self._told.append(tell)
        return lambda: self._told.remove(tell)

    async def acquire(self, deadline: float, avoid: frozenset[str] = frozenset(), trial: bool = False) -> Lease:
        if self._closed:
            raise SlotError("the slot source is closed")
        request = _Request(avoid, trial)
        # A slot is free while others wait only when they don't want it: no caller is overtaken.
        if lease := self._take(request):
            return lease
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Lease] = loop.create_future()
        self._waiting[future] = request
        begun = loop.time()
        try:
            while not future.done():
                if self._table.in_use:
                    self._last_used = loop.time()
                left = max(begun, self._last_used) + deadline - loop.time()
                if left > 0:
                    await asyncio.wait([future], timeout=min(left, max(_HURRY_SECONDS, deadline / _HURRIES)))
                    if not future.done() and not self._table.usable:
                        self._hurry.set()
                        self._hurry.clear()
                elif lease := self._take(_Request(frozenset(), True)):  # better one that wasn't wanted than none
                    return lease
                else:
                    raise NoSlot(f"for {deadline:g} s no slot was free or in use: {self.describe()}")
            return future.result()
        except asyncio.CancelledError:
            self._take_back(future)
            raise
        finally:
            self._waiting.pop(future, None)

    async def release(self, lease: Lease, verdict: Verdict, why: str = "", pace: float | None = None) -> None:
        # No await in here: a holder that is being cancelled still returns its lease.
        self._last_used = asyncio.get_running_loop().time()
        self._put_back(lease, verdict, why, pace)

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
        text += f", {c.probation} on probation" if c.probation else ""
        ill = [n for n in self._table.names if self._table.state(n) in (State.SICK, State.QUARANTINED)]
        return text + "".join(f"; {n}: {self._ailments.get(n, 'sick')}" for n in ill[:5]) + (" ..." if ill[5:] else "")

    def _mark_dead(self, slot: str, why: str) -> None:
        """For subclasses that notice a death themselves."""
        self._ailments[slot] = why
        if self._table.died(slot):
            self._nurse(slot)
            if self._table.state(slot) is State.QUARANTINED:
                log.warning("slot %s is in quarantine: %s", slot, why)
                self._serve_changed()

    def _put_back(self, lease: Lease, verdict: Verdict, why: str, pace: float | None = None) -> None:
        state = self._table.give(lease.slot, lease.fence, verdict, pace)
        if state is State.FREE:
            self._ailments.pop(lease.slot, None)
        elif state is not State.PROBATION:
            if verdict is Verdict.CLEAN and state is State.QUARANTINED and pace is not None:
                why = f"its calls took {pace:.1f} s on average, more than {SLOW:g} times those of the others"
            self._ailments[lease.slot] = why or self._ailments.get(lease.slot) or "an episode on it broke"
            self._nurse(lease.slot)
        self._serve()
        if state is State.QUARANTINED:
            log.warning("slot %s is in quarantine: %s", lease.slot, self._ailments[lease.slot])
            self._tell()

    def _take(self, request: _Request) -> Lease | None:
        taken = self._table.take(request.avoid, request.trial)
        return Lease(*taken, self.address(taken[0]), self.life(taken[0])) if taken else None

    def _serve(self) -> None:
        for future, request in self._waiting.items():
            if not future.done() and (lease := self._take(request)):
                future.set_result(lease)

    def _forget(self, slot: str) -> None:
        """The slot is gone, whatever its state."""
        self._table.remove(slot)
        self._ailments.pop(slot, None)
        if (nurse := self._nurses.pop(slot, None)) is not None:
            nurse.cancel()

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
            self._put_back(future.result(), Verdict.UNPROVEN, "")

    def _nurse(self, slot: str) -> None:
        if not self._closed and slot not in self._nurses:
            task = asyncio.get_running_loop().create_task(self._nurse_until_healthy(slot), name=f"nurse {slot}")
            self._nurses[slot] = task

    async def _probed(self, slot: str) -> None:
        """Raises EnvironmentFault for whatever goes wrong: a phone without a nurse would be lost for good."""
        try:
            await self.probe(slot)
        except EnvironmentFault:
            raise
        except Exception as error:
            log.exception("slot %s: its health can't be asked", slot)
            raise EnvironmentFault(f"{slot}: health: {error!r:.200}") from error

    async def _nurse_until_healthy(self, slot: str) -> None:
        try:
            while not self._closed:
                delay = self._table.delay(slot, self._backoff)
                self._again[slot] = time.time() + delay
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._hurry.wait()
                try:
                    await self._probed(slot)
                except EnvironmentFault as fault:
                    self._ailments[slot] = str(fault)
                    before = self._table.state(slot)
                    if self._table.probed(slot, healthy=False) is State.QUARANTINED and before is State.SICK:
                        log.warning("slot %s is in quarantine: %s", slot, fault)
                        self._serve_changed()  # callers that avoid every other slot may have no other choice now
                else:
                    if self._table.probed(slot, healthy=True) is State.PROBATION:
                        log.info("slot %s is on probation", slot)
                    return
        finally:
            self._again.pop(slot, None)
            if self._nurses.get(slot) is asyncio.current_task():
                del self._nurses[slot]
                if self._table.state(slot) in (State.FREE, State.PROBATION):
                    self._serve_changed()
