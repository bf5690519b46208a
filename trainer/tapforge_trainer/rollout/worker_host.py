"""A rollout worker in another process than the driver: the messages between the two, and the worker's end of them.

The driver says once a second, and at once on changes, what it wants (`Wanted`), and is answered with what there is
(`WorkerReport`). Both are whole states, but for the engines, which are sent until a message with them is answered: one
that is lost, late or repeated does no harm.

Rules of leases:
1. A lease ends on the worker's clock. The driver computes its end from the worker's last answer: the worker's reading
   in it belongs to a moment before the driver had it, so delays make leases shorter and never longer.
2. Without an answered message a lease ends `LINK_SECONDS` after the last one, however long its claim lives. A driver
   that is started in place of another waits as long before it uses phones that no broker fences.
3. Shortly before, the worker stops its attempts as cancelled, so that they return their steps.

Rewards: a worker goes on asking for those of an episode as long as the driver says that it waits for them. Verdicts
that came meanwhile are in every report until the driver says that it has them.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tapforge_envs.clients.phones import PhoneAddress
from tapforge_envs.protocol import EnvironmentFault, Reason
from tapforge_envs.slots.lease_life import Clock, LeaseLife, wakeful
from tapforge_envs.slots.source import Lease

from ..attempt import AttemptRequest, EpisodeResult
from ..frames.handles import FrameHandle
from ..judges.journal import VerdictRelay, Written
from ..records import EpisodeRecord, EpisodeRewards
from ..rewards.rewarder import missing
from .stall import StallMonitor
from .worker import RolloutWorker

#: seconds without an answered message after which a worker uses no phone any more, and before which it stops attempts
LINK_SECONDS, STOP_SECONDS = 30.0, 20.0
_CHECK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """A lease, as another process has it. `ends`: seconds of the worker's clock."""

    slot: str
    fence: int
    phone: PhoneAddress
    ends: float

    @property
    def key(self) -> str:
        return f"{self.slot}#{self.fence}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """`number` grows with each; one that was overtaken is ignored."""

    number: int
    #: by `LeaseTerms.key`: when it ends; one that isn't named ends as it was said last
    leases: Mapping[str, float] = field(default_factory=dict)
    #: by the same: why it is lost
    lost: Mapping[str, str] = field(default_factory=dict)
    #: attempts to end, by the episode's name; one that isn't being played has ended
    stop: Mapping[str, Reason] = field(default_factory=dict)
    #: episodes whose rewards are waited for
    rewards: frozenset[str] = frozenset()
    #: verdicts of this worker that the driver has
    verdicts: int = 0
    #: how the engines are reached, for `use_engines`; None: as was said before
    engines: Any = None


@dataclass(frozen=True, slots=True)
class WorkerReport:
    #: the message that it answers
    number: int
    #: the worker's clock
    now: float
    #: model answers so far of every attempt that is being played
    steps: Mapping[str, int] = field(default_factory=dict)
    #: the longest time in seconds that the worker's loop stood still, since the last report
    stall: float = 0.0
    #: verdicts that it had reported before, and those after them
    verdicts_before: int = 0
    verdicts: tuple[Written, ...] = ()
    #: lines for people since the last report
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RewardTerms:
    """`number`: of the last message before the question; `known`: verdicts on the episode that the driver has."""

    number: int = 0
    known: tuple[Written, ...] = ()


@dataclass(frozen=True, slots=True)
class Health:
    """Of a phone: the instance of its server, or what is wrong with it."""

    instance: str = ""
    fault: str = ""
    reason: Reason = Reason.ENV_ERROR

    def raised(self) -> str:
        if self.fault:
            raise EnvironmentFault(self.fault, self.reason)
        return self.instance


class WorkerHost:
    """Belongs to one event loop. Its methods are what the driver may call."""

    def __init__(
        self,
        worker: RolloutWorker,
        use_engines: Callable[[Any], None],
        clock: Clock = wakeful,
        verdicts: VerdictRelay | None = None,
        notes: deque[str] | None = None,
    ):
        """`use_engines` takes what the driver says of them, each time that it changes. `verdicts`: that the worker's
        judges give. `notes`: lines for people, which leave it with the next report."""
        self._verdicts = verdicts or VerdictRelay()
        self._notes: deque[str] = deque() if notes is None else notes
        self._rewards: dict[str, tuple[int, asyncio.Task[EpisodeRewards]]] = {}
        self._wanted = Wanted(-1)
        self._worker = worker
        self._use_engines = use_engines
        self._clock = clock
        self._lives: dict[str, LeaseLife] = {}
        self._heard = clock()
        self._stalls: StallMonitor | None = None
        self._watch: asyncio.Task[None] | None = None

    async def play(self, request: AttemptRequest, terms: LeaseTerms) -> EpisodeResult:
        """Raises what the engine or our own code does wrong."""
        life = LeaseLife(terms.slot, terms.ends, "the driver is silent or its claim has ended", self._clock)
        self._lives[terms.key] = life
        try:
            return await self._worker.play(request, Lease(terms.slot, terms.fence, terms.phone, life))
        finally:
            del self._lives[terms.key]

    async def reward(
        self, record: EpisodeRecord, frames: FrameHandle, terms: RewardTerms = RewardTerms()
    ) -> EpisodeRewards:
        """Of one that the driver gives up they are missing."""
        given_up = missing(record, "its rewards are not waited for any more")
        if self._given_up(record.id, terms.number):
            return given_up
        self._verdicts.know(terms.known)
        task = asyncio.get_running_loop().create_task(self._worker.reward(record, frames), name=f"rewards {record.id}")
        self._rewards[record.id] = terms.number, task
        try:
            await asyncio.wait({task})
            return given_up if task.cancelled() else task.result()
        finally:
            task.cancel()
            if self._rewards.get(record.id) == (terms.number, task):
                del self._rewards[record.id]

    def exchange(self, wanted: Wanted) -> WorkerReport:
        """May be called again with the same message."""
        self._heard = self._clock()
        if self._watch is None or self._stalls is None:
            self._stalls = StallMonitor()
            self._watch = asyncio.get_running_loop().create_task(self._stop_when_silent(), name="silent driver")
        if wanted.number > self._wanted.number:
            self._wanted = wanted
            for episode, (number, task) in self._rewards.items():
                if self._given_up(episode, number):
                    task.cancel()
            if wanted.engines is not None:
                self._use_engines(wanted.engines)
            for key, ends in wanted.leases.items():
                if (life := self._lives.get(key)) is not None:
                    life.extend(ends)
            for key, why in wanted.lost.items():
                if (life := self._lives.get(key)) is not None:
                    life.lose(why)
            for episode, reason in wanted.stop.items():
                self._worker.stop(episode, reason)
        before, verdicts = self._verdicts.new(wanted.verdicts)
        stall = self._stalls.stalls().longest
        notes = tuple(self._notes)
        self._notes.clear()
        return WorkerReport(wanted.number, self._clock(), self._worker.steps, stall, before, verdicts, notes)

    async def health(self, phone: PhoneAddress) -> Health:
        try:
            return Health(await self._worker.health(phone))
        except EnvironmentFault as fault:
            return Health(fault=str(fault), reason=fault.reason)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._stalls is not None:
            self._stalls.close()
        await self._worker.close()

    def _given_up(self, episode: str, number: int) -> bool:
        """`number`: of the last message before the driver asked."""
        return self._wanted.number > number and episode not in self._wanted.rewards

    async def _stop_when_silent(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            if self._clock() - self._heard > STOP_SECONDS:
                for episode in self._worker.steps:
                    self._worker.stop(episode, Reason.CANCELLED)


def end_on_worker(ends: float, answered: float, worker_now: float) -> float:
    """When a lease that lives until `ends` is over on the worker's clock, if the worker's last answer said `worker_now`
    and came at `answered`: both `ends` and `answered` are of the driver's clock."""
    return worker_now + min(ends - answered, LINK_SECONDS) if ends < math.inf else worker_now + LINK_SECONDS
