"""Until when a slot may be used, and a phone that is used no longer than that.

Promises of a `LeasedPhone`:
1. No call begins after the end of its lease's life, and one under way is cut off there.
2. A result that arrives after the end is not handed on, even where nothing else noticed: the process may have been
   asleep. Both are an `EnvironmentFault` with reason lease_lost.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..protocol import Action, Environment, EnvironmentFault, Observation, Reason, Score, StepResult, Task

T = TypeVar("T")

Clock = Callable[[], float]


def wakeful() -> float:
    """Seconds that go on while the machine sleeps, where it can tell."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class LeaseLife:
    """Belongs to one event loop; times are seconds of `clock`, an end at infinity is none."""

    def __init__(self, slot: str, ends: float = math.inf, why: str = "its time is over", clock: Clock = wakeful):
        """`why` it is over once `ends` has passed."""
        self.slot = slot
        #: episodes that began in it
        self.episodes = 0
        self._ends = ends
        self._why = why
        self._clock = clock
        self._lost = ""
        self._calls: set[asyncio.Timeout] = set()
        self._observers: list[Callable[[], None]] = []

    @property
    def ends(self) -> float:
        return self._ends

    @property
    def lost(self) -> str:
        """Why it ended before its time; "" while it didn't."""
        return self._lost

    def extend(self, ends: float) -> None:
        self._ends = ends
        if not self._lost:
            self._cut_off_at(self._deadline())

    def lose(self, why: str) -> None:
        """Cuts off the call that is under way."""
        if not self._lost:
            self._lost = why
            for notify in list(self._observers):
                notify()
            self._cut_off_at(asyncio.get_running_loop().time())

    def subscribe(self, notify: Callable[[], None]) -> Callable[[], None]:
        """`notify` is called when it is lost, until the function returned is."""
        self._observers.append(notify)
        return lambda: self._observers.remove(notify)

    def over(self) -> str:
        """Why it is over; "" while it is not."""
        return self._lost or ("" if self._clock() < self._ends else self._why)

    async def within(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of `call`, if the life lasts until it is there."""
        if why := self.over():
            call.close()
            raise self._fault(why)
        cut: asyncio.Timeout | None = None
        try:
            async with asyncio.timeout_at(self._deadline()) as cut:
                self._calls.add(cut)
                result = await call
        except TimeoutError as error:
            if not cut or not cut.expired():
                raise
            raise self._fault(self._lost or self._why) from error
        finally:
            if cut:
                self._calls.discard(cut)
        if why := self.over():
            raise self._fault(why)
        return result

    def _cut_off_at(self, moment: float | None) -> None:
        """The calls that are under way, but for those that are being cut off."""
        for call in self._calls:
            if not call.expired():
                call.reschedule(moment)

    def _deadline(self) -> float | None:
        if self._ends == math.inf:
            return None
        return asyncio.get_running_loop().time() + max(0.0, self._ends - self._clock())

    def _fault(self, why: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self.slot}: the claim on it is lost: {why}", Reason.LEASE_LOST)


class LeasedPhone:
    """A phone as far as the life of its lease reaches."""

    def __init__(self, phone: Environment, life: LeaseLife):
        self._phone = phone
        self._life = life

    async def reset(self, task: Task) -> Observation:
        if not self._life.over():
            self._life.episodes += 1
        return await self._life.within(self._phone.reset(task))

    async def step(self, action: Action, index: int) -> StepResult:
        return await self._life.within(self._phone.step(action, index))

    async def evaluate(self) -> Score:
        return await self._life.within(self._phone.evaluate())

    async def close(self) -> None:
        await self._life.within(self._phone.close())
