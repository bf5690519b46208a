"""Rollout workers in other processes, as the driver sees them: which plays on which slot, and their end of the link.

- A slot stays with its worker, so that connections last; a new slot goes to the worker with the fewest.
- A worker that dies makes its attempts `cancelled` and their slots dirty, and is started again, each at most
  `RESTARTS` times in `RESTART_SECONDS`; then the run can't go on. A worker that can't be reached may still use its
  phones: their slots are given back when its leases have ended.
- That a worker is away says nothing about phones: attempts and probes wait until it was started again.
- What is sent to a worker is sent again with the next message, until its attempt is over (`worker_host`), or, which
  engines there are, it has answered.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tapforge_envs.clients.phones import PhoneAddress
from tapforge_envs.protocol import EnvironmentFault, Reason
from tapforge_envs.slots.lease_life import Clock, wakeful
from tapforge_envs.slots.source import Lease, Verdict

from ..attempt import AttemptRequest, EpisodeResult, unplayed
from ..frames.handles import FrameHandle
from ..judges.journal import VerdictJournal
from ..records import EpisodeRecord, EpisodeRewards
from .worker_host import LINK_SECONDS, Health, LeaseTerms, RewardTerms, Wanted, WorkerReport, end_on_worker

log = logging.getLogger(__name__)

#: between two messages, and for the answer to one, seconds
EXCHANGE_SECONDS, ANSWER_SECONDS = 1.0, 10.0
#: for a phone's answer to a probe, beyond the probe's own deadline
_PROBE_GRACE = 10.0
RESTARTS, RESTART_SECONDS = 5, 600.0
#: without use after which a slot has no worker any more
HOME_SECONDS = 600.0
#: times that a phone is asked for its health, while workers are lost over it
_PROBES = 3


class WorkerLost(Exception):
    """The worker's process is gone, or can't be reached. `dead`: it is known to be gone."""

    def __init__(self, why: str, *, dead: bool):
        super().__init__(why)
        self.dead = dead


class WorkerError(RuntimeError):
    """Workers can't be started, or die again and again: the run can't go on."""


class Carrier(Protocol):
    """The way to one worker. Its calls raise WorkerLost when the worker is gone or can't be reached."""

    async def exchange(self, wanted: Wanted, seconds: float) -> WorkerReport: ...
    async def play(self, request: AttemptRequest, terms: LeaseTerms) -> EpisodeResult: ...
    async def health(self, phone: PhoneAddress, seconds: float) -> Health: ...
    async def reward(self, record: EpisodeRecord, frames: FrameHandle, terms: RewardTerms) -> EpisodeRewards: ...
    async def close(self) -> None: ...


@dataclass(eq=False)
class _Attempt:
    request: AttemptRequest
    lease: Lease
    stop: Reason | None = None
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def lost(self, why: str, verdict: Verdict, reason: Reason) -> EpisodeResult:
        return unplayed(self.request.attempt, self.lease.slot, why, verdict, reason)


@dataclass(frozen=True, slots=True)
class _Abandoned:
    """An attempt that no caller awaits, and that its worker may still play. `until`: when its lease is over there."""

    episode: str
    why: str
    until: float


@dataclass(eq=False)
class _Worker:
    index: int
    carrier: Carrier | None = None
    number: int = 0
    #: the worker's clock in its last answer, and when that came
    worker_now: float = 0.0
    answered: float = -math.inf
    attempts: dict[str, _Attempt] = field(default_factory=dict)
    #: by the key of its lease
    abandoned: dict[str, _Abandoned] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    #: when it was started again
    restarts: deque[float] = field(default_factory=deque)
    #: what it knows of the engines
    engines: Any = None
    #: episodes whose rewards it asks for
    rewarding: set[str] = field(default_factory=set)
    #: verdicts that came from it
    verdicts: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ready: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False, slots=True)
class _Home:
    """Of a slot."""

    worker: _Worker
    used: float = -math.inf


class RemotePlayers:
    """A `Player`. Belongs to one event loop."""

    def __init__(
        self,
        start: Callable[[int], Awaitable[Carrier]],
        workers: int,
        clock: Clock = wakeful,
        journal: VerdictJournal | None = None,
        say: Callable[[str], None] = log.info,
    ):
        """`start` begins a worker, given its number, and returns when it can play; it has a deadline of its own.
        `journal`: takes the verdicts that workers get; `say`: their lines for people."""
        self._start, self._clock, self._journal, self._say = start, clock, journal, say
        self._workers = [_Worker(index) for index in range(workers)]
        self._home: dict[str, _Home] = {}
        self._links: list[asyncio.Task[None]] = []
        self._failure: WorkerError | None = None
        self._restarted, self._stall, self._engines = 0, 0.0, None

    async def start(self) -> None:
        """All workers at once. Raises WorkerError, and what else the start of one raises."""
        try:
            await asyncio.gather(*(self._begin(worker) for worker in self._workers))
        except WorkerLost as lost:
            raise WorkerError(f"a rollout worker could not be started: {lost}") from lost
        loop = asyncio.get_running_loop()
        self._links = [loop.create_task(self._link(w), name=f"rollout worker {w.index}") for w in self._workers]

    def metrics(self) -> dict[str, float]:
        """`attempts` and their model answers so far, `steps`: as workers reported last; `longest_stall_seconds`: of any
        worker's loop, since the last call; `restarts`: since the start."""
        stall, self._stall = self._stall, 0.0
        return {
            "workers": len(self._workers),
            "attempts": sum(len(worker.steps) for worker in self._workers),
            "steps": sum(sum(worker.steps.values()) for worker in self._workers),
            "longest_stall_seconds": stall,
            "restarts": self._restarted,
        }

    def use_engines(self, connection: Any) -> None:
        """Workers ask these engines from here on."""
        self._engines = connection
        for worker in self._workers:
            worker.wake.set()

    async def play(self, request: AttemptRequest, lease: Lease) -> EpisodeResult:
        worker = self._worker_of(lease.slot)
        attempt = _Attempt(request, lease)
        name = request.attempt.episode
        worker.attempts[name] = attempt
        unsubscribe = lease.life.subscribe(worker.wake.set)
        lease.life.episodes += 1
        try:
            return await self._played(worker, attempt)
        finally:
            unsubscribe()
            del worker.attempts[name]

    def stop(self, episode: str, reason: Reason) -> None:
        for worker in self._workers:
            if (attempt := worker.attempts.get(episode)) is not None:
                attempt.stop = reason
                attempt.stopped.set()
                worker.wake.set()

    async def reward(self, record: EpisodeRecord, frames: FrameHandle) -> EpisodeRewards:
        """By the worker that has the fewest. Frames from the recording are read here: it may be on another node."""
        if isinstance(frames, Mapping) and not isinstance(frames, dict):
            frames = await asyncio.to_thread(dict, frames)
        while True:  # ends: a worker that is lost again and again is a failure
            worker = min(self._workers, key=lambda worker: (len(worker.rewarding), worker.index))
            worker.rewarding.add(record.id)
            try:
                if (carrier := await self._carrier(worker)) is None:
                    raise self._failure or WorkerError("no rollout worker is left")
                known = self._journal.of(record.id) if self._journal is not None else ()
                return await carrier.reward(record, frames, RewardTerms(worker.number, known))
            except WorkerLost:
                self._doubt(worker, carrier)
            finally:
                worker.rewarding.discard(record.id)
                worker.wake.set()  # one that is given up is asked about no longer

    async def verdicts_written(self) -> None:
        if self._journal is not None:
            await asyncio.to_thread(self._journal.flush)

    async def health(self, phone: PhoneAddress) -> str:
        worker = self._worker_of(phone.slot)
        for _ in range(_PROBES):
            carrier = await self._carrier(worker)
            if carrier is None:
                raise EnvironmentFault(f"{phone.slot}: no rollout worker can probe it: {self._failure}")
            try:
                found = await carrier.health(phone, phone.deadlines.health + _PROBE_GRACE)
            except WorkerLost as lost:
                self._doubt(worker, carrier)
                why = str(lost)
            else:
                return found.raised()
        raise EnvironmentFault(f"{phone.slot}: no rollout worker could probe it: {why}")

    async def close(self) -> None:
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        await asyncio.gather(*(worker.carrier.close() for worker in self._workers if worker.carrier is not None))

    # --- inside ---

    async def _played(self, worker: _Worker, attempt: _Attempt) -> EpisodeResult:
        carrier = await self._informed(worker, attempt)
        if attempt.stop is not None:
            return attempt.lost("stopped before it began", Verdict.UNPROVEN, attempt.stop)
        if carrier is None:
            assert self._failure is not None
            raise self._failure
        try:
            return await carrier.play(attempt.request, self._terms(worker, attempt.lease))
        except WorkerLost as lost:
            # No other attempt is sent there before the link has found out how it is.
            self._doubt(worker, carrier)
            if not lost.dead:
                left = self._abandon(worker, attempt, str(lost)) - self._clock()
                await asyncio.sleep(max(0.0, left))
            return attempt.lost(str(lost), Verdict.DIRTY, Reason.CANCELLED)
        except asyncio.CancelledError:
            self._abandon(worker, attempt, "the driver gave the attempt up")
            raise

    async def _informed(self, worker: _Worker, attempt: _Attempt) -> Carrier | None:
        """The way to the worker, once it is there and knows the engines. Returns early when the attempt is stopped."""
        while attempt.stop is None:
            carrier = await self._carrier(worker, attempt.stopped)
            if carrier is None or worker.engines is self._engines:
                return carrier
            try:
                await self._exchange(worker)
            except WorkerLost:
                self._doubt(worker, carrier)
        return None

    async def _carrier(self, worker: _Worker, or_else: asyncio.Event | None = None) -> Carrier | None:
        """Once it can be asked; None: it never will, or `or_else` came first."""
        while not worker.ready.is_set():  # ends: a worker that can't be started is a failure, which sets it
            if or_else is not None and or_else.is_set():
                return None
            waits = [asyncio.create_task(event.wait()) for event in (worker.ready, or_else) if event is not None]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return None if self._failure else worker.carrier

    def _doubt(self, worker: _Worker, carrier: Carrier | None) -> None:
        """The link is to find out how the worker is, if it has not been replaced already."""
        if worker.carrier is carrier and self._failure is None:
            worker.ready.clear()
            worker.wake.set()

    def _abandon(self, worker: _Worker, attempt: _Attempt, why: str) -> float:
        """From here on its lease is not made longer. Returns when it is over on the worker's clock at the latest, on
        this one."""
        until = worker.answered + LINK_SECONDS
        key = self._terms(worker, attempt.lease).key
        worker.abandoned[key] = _Abandoned(attempt.request.attempt.episode, why, until)
        worker.wake.set()
        return until

    def _terms(self, worker: _Worker, lease: Lease) -> LeaseTerms:
        terms = LeaseTerms(lease.slot, lease.fence, lease.phone, 0.0)
        ends = -math.inf if lease.life.lost else lease.life.ends
        return replace(terms, ends=end_on_worker(ends, worker.answered, worker.worker_now))

    def _worker_of(self, slot: str) -> _Worker:
        now = self._clock()
        if (home := self._home.get(slot)) is None:
            # A pool's phone that was replaced has another name: the old one must not count.
            used = {attempt.lease.slot for worker in self._workers for attempt in worker.attempts.values()}
            self._home = {s: h for s, h in self._home.items() if s in used or h.used > now - HOME_SECONDS}
            homes = Counter(home.worker.index for home in self._home.values())
            worker = min(self._workers, key=lambda worker: (homes[worker.index], worker.index))
            home = self._home[slot] = _Home(worker)
        home.used = now
        return home.worker

    async def _begin(self, worker: _Worker) -> None:
        worker.carrier, worker.engines, worker.verdicts = await self._start(worker.index), None, 0
        await self._exchange(worker)

    async def _link(self, worker: _Worker) -> None:
        """Until cancelled, or until its worker can't be started again."""
        try:
            while worker.carrier is not None:
                try:
                    async with asyncio.timeout(EXCHANGE_SECONDS):
                        await worker.wake.wait()
                except TimeoutError:
                    pass
                worker.wake.clear()
                try:
                    await self._exchange(worker)
                except WorkerLost as lost:
                    if lost.dead or self._clock() > worker.answered + LINK_SECONDS:
                        await self._again(worker, str(lost))
        except Exception as error:  # all attempts raise it
            log.exception("the link to rollout worker %d failed", worker.index)
            self._fail(f"rollout worker {worker.index} can't be led any more: {error!r}", error)

    async def _exchange(self, worker: _Worker) -> None:
        carrier = worker.carrier
        assert carrier is not None
        worker.number += 1
        engines = self._engines
        report = await carrier.exchange(self._wanted(worker), ANSWER_SECONDS)
        if worker.carrier is not carrier:
            raise WorkerLost("another process is in its place", dead=True)
        worker.worker_now, worker.answered = report.now, self._clock()
        worker.steps, worker.engines, self._stall = report.steps, engines, max(self._stall, report.stall)
        if self._journal is not None:
            for line in report.verdicts[worker.verdicts - report.verdicts_before :]:
                self._journal.put(line)
        worker.verdicts = max(worker.verdicts, report.verdicts_before + len(report.verdicts))
        for text in report.notes:
            self._say(text)
        worker.ready.set()

    def _wanted(self, worker: _Worker) -> Wanted:
        now = self._clock()
        abandoned = worker.abandoned = {key: gone for key, gone in worker.abandoned.items() if gone.until > now}
        leased = [(self._terms(worker, attempt.lease), attempt) for attempt in worker.attempts.values()]
        playing = [(terms, attempt) for terms, attempt in leased if terms.key not in abandoned]
        stop = {gone.episode: Reason.CANCELLED for gone in abandoned.values()}
        for _, attempt in playing:
            stop.pop(attempt.request.attempt.episode, None)  # another one of this name
            if attempt.stop is not None:
                stop[attempt.request.attempt.episode] = attempt.stop
        return Wanted(
            worker.number,
            {terms.key: terms.ends for terms, _ in playing},
            {terms.key: why for terms, attempt in playing if (why := attempt.lease.life.lost)}
            | {key: gone.why for key, gone in abandoned.items()},
            stop,
            frozenset(worker.rewarding),
            worker.verdicts,
            None if worker.engines is self._engines else self._engines,
        )

    async def _again(self, worker: _Worker, why: str) -> None:
        """Another process in its place. Starts that fail count as deaths, however long they take."""
        worker.ready.clear()
        now, restarts = self._clock(), worker.restarts
        while restarts and restarts[0] < now - RESTART_SECONDS:
            restarts.popleft()
        while True:
            gone, worker.carrier = worker.carrier, None
            if gone is not None:
                await gone.close()
            if self._failure:
                return
            if len(restarts) >= RESTARTS:
                self._fail(f"rollout worker {worker.index} died {RESTARTS + 1} times, the last time: {why}")
                return
            restarts.append(self._clock())
            self._restarted += 1
            log.warning("rollout worker %d: %s; it is started again", worker.index, why)
            try:
                await self._begin(worker)
                return
            except WorkerLost as lost:
                why = str(lost)

    def _fail(self, why: str, error: Exception | None = None) -> None:
        if self._failure is None:
            self._failure = WorkerError(why)
            self._failure.__cause__ = error
        for worker in self._workers:
            worker.ready.set()
