"""A claim as its holder knows it, and the phone under it.

A broker that is silent, or that says "not here", ends nothing: an outage of the operator or of the API server costs no
phone. A claim is lost when a leader says so, or when the phone refuses its fence. Only a claim with a `hold` ends by
itself, so many seconds after the last question that the broker answered was asked, on the holder's own clock: of a
holder that the broker can't look at, or of an external device, which somebody else gets then.

Promises of a `ClaimedPhone`:
1. No call begins after the claim was lost, and one under way is cut off.
2. A result that arrived after the end of the claim's life is not handed on, even where nothing else noticed: the
   process may have been asleep. Both are an `EnvironmentFault` with reason lease_lost.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tapforge_api.claims import Claim, Given, Held, Verdict

from ..protocol import Action, Environment, EnvironmentFault, Observation, Reason, Score, StepResult, Task
from ..wire import Fence

T = TypeVar("T")

Clock = Callable[[], float]


def wakeful() -> float:
    """Seconds that go on while the machine sleeps, where it can tell: the broker's do."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


@dataclass(slots=True, eq=False)
class HeldClaim:
    """A claim that the broker gave and that was not given back. Changed by the source alone."""

    id: str
    secret: str = field(repr=False)
    slot: str
    #: UID of the slot
    uid: str
    url: str
    fence: int
    #: seconds within which the broker wants to hear of it
    ttl: float
    #: seconds of the broker's silence after which it is over; infinity: never
    hold: float
    #: on the holder's clock: when the last question was asked that the broker answered
    heard: float
    #: episodes that were begun under it
    episodes: int = 0
    #: what would be said of the phone if it were given back now
    verdict: Verdict = "clean"
    #: why the broker wants it back at the end of its episode; "" while it doesn't
    recalled: str = ""
    #: why it is not the holder's any more; "" while it is
    lost: str = ""
    _calls: set[asyncio.Timeout] = field(default_factory=set, repr=False)

    @staticmethod
    def of(claim: Claim, asked: float) -> HeldClaim:
        """`asked`: when the request that was answered with it was first sent. A broker of an earlier release says
        nothing of holds, and throws the phone away after `ttl`."""
        hold = claim.hold_seconds if "hold_seconds" in claim.model_fields_set else claim.ttl_seconds
        return HeldClaim(
            claim.id,
            claim.secret,
            claim.slot,
            claim.slot_uid,
            claim.url,
            claim.fence,
            claim.ttl_seconds,
            math.inf if hold is None else hold,
            asked,
        )

    def renewed(self, asked: float) -> None:
        self.heard = max(self.heard, asked)

    @property
    def alive_until(self) -> float:
        return self.heard + self.hold

    def lose(self, why: str) -> None:
        """Cuts off the call that is under way."""
        if not self.lost:
            self.lost = why
            now = asyncio.get_running_loop().time()
            for call in self._calls:
                call.reschedule(now)

    def over(self, now: float) -> str:
        """Why it is not the holder's any more; "" while it is."""
        if self.lost or now < self.alive_until:
            return self.lost
        return f"the broker was not heard of for {self.hold:g} s"

    @property
    def shown(self) -> Fence:
        """What the phone is told with every request."""
        return Fence(self.uid, self.fence)

    def held(self) -> Held:
        return Held(id=self.id, secret=self.secret, episodes=self.episodes)

    def given(self) -> Given:
        return Given(id=self.id, secret=self.secret, episodes=self.episodes, verdict=self.verdict)

    async def within(self, call: Coroutine[Any, Any, T], clock: Clock) -> T:
        """The result of `call`, if the claim lives until it is there."""
        if why := self.over(clock()):
            call.close()
            raise self._fault(why)
        cut: asyncio.Timeout | None = None
        try:
            async with asyncio.timeout(None) as cut:
                self._calls.add(cut)
                result = await call
        except TimeoutError as error:
            if not cut or not cut.expired():
                raise
            raise self._fault(self.lost) from error
        finally:
            if cut:
                self._calls.discard(cut)
        if why := self.over(clock()):
            raise self._fault(why)
        return result

    def _fault(self, why: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self.slot}: the claim on it is lost: {why}", Reason.LEASE_LOST)


class ClaimedPhone:
    """A phone for one lease: `phone` as far as the claim reaches."""

    def __init__(self, phone: Environment, claim: HeldClaim, clock: Clock):
        self.claim = claim
        self._phone = phone
        self._clock = clock

    async def reset(self, task: Task) -> Observation:
        if not self.claim.lost:
            self.claim.episodes += 1
        return await self.claim.within(self._phone.reset(task), self._clock)

    async def step(self, action: Action, index: int) -> StepResult:
        return await self.claim.within(self._phone.step(action, index), self._clock)

    async def evaluate(self) -> Score:
        return await self.claim.within(self._phone.evaluate(), self._clock)

    async def close(self) -> None:
        await self.claim.within(self._phone.close(), self._clock)
