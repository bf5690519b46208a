"""The driver's hold on the engines: starts them, gives them new weights, starts dead ones again.

- An engine may be asked (`replicas`) once it has started and has the proven weights that the others have. Before the
  first weights came, those of the model's folder count as such.
- A dead engine is noticed at once, by a call that every engine has open. It is started again in the background, with
  the next incarnation, and joins the next round of weights; when no other one lives, `starved` says that it needs
  weights now.
- Restarts are bounded: one death too many within an hour is the end (`replicas.failure`), and says why.
- Where they share GPUs with the learner, all of them `sleep` while it works, and wake in the next round of weights. One
  that dies meanwhile is started again when that round begins: until then its GPU has no room. One that is starting when
  the others are to sleep is waited for.
- A round of weights is: `renew`, or `pause`, `wake` and `proceed`; then `probe`; then `release` or `discard`. It is
  about the engines that were up when it began; those that die on the way, or don't answer in time, are left out and
  started again, but for a death while ranks and engines hand over weights between GPUs (`sync/sync.py`): then all of
  them `stop`, and `start` again with the ranks. Clients live on: their waits for answers go on with the new ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..learner.frame_store import PixelFormat
from ..placement.placement import ANYWHERE, ActorPlacement
from ..placement.settings import EngineSettings, PauseMode, SleepPart
from .actor import kill_engine, start_engine
from .client import POLL, POLL_GRACE, EngineDied, EngineError, EngineLate, called
from .restart_budget import RestartBudget
from .wire import CacheCounts, EngineConnection, Replica, Replicas

log = logging.getLogger(__name__)

#: for an engine's word on what it does
_STAGE_SECONDS = 2.0


@dataclass(slots=True)
class _Engine:
    index: int
    actor: Any
    budget: RestartBudget
    incarnation: int = 0
    #: it has started
    up: bool = False
    #: what it did until then, as far as it said
    stage: str = "its process"
    #: and has the weights that the others have
    current: bool = True
    #: what its caches did up to the last sync
    counts: CacheCounts = field(default_factory=CacheCounts)
    watch: asyncio.Task[None] | None = None
    restart: asyncio.Task[None] | None = None
    #: being started again; done when it is up or has failed
    starting: asyncio.Future[None] | None = None

    @property
    def live(self) -> bool:
        return self.up and self.current


class Engines:
    """Belongs to one event loop."""

    def __init__(
        self,
        settings: EngineSettings,
        form: PixelFormat,
        image_id: int,
        *,
        replicas: int = 1,
        places: Sequence[ActorPlacement] = (),
    ):
        """`places`: of the engines, in their order; without any, Ray's choice."""
        self.settings = settings
        #: policy version of the last proven weights
        self.version = 0
        #: since the start of the run
        self.restarts = 0
        #: set while engines are up and none has weights to answer with, or none is to sleep any longer
        self.starved = asyncio.Event()
        #: no memory is theirs, up to the end of the next round of weights
        self.asleep = False
        #: what the last round of weights took
        self.round_metrics: dict[str, float] = {}
        self._form, self._image = form, image_id
        #: weights have come since the start: an engine that starts again has older ones
        self._renewed = False
        self._failure = ""
        self._serial = 0
        self._listeners: list[Callable[[Replicas], None]] = []
        self._changed = asyncio.Event()
        self._counts = CacheCounts()
        #: they are to wake, though nothing was learned
        self._called = False
        #: GPUs have room for engines that start
        self._room = asyncio.Event()
        self._room.set()
        #: (index, incarnation) of the engines that the round of weights is about
        self._round: list[tuple[int, int]] = []
        self._places = places or [ANYWHERE] * replicas
        self._engines = [
            _Engine(index, self._start(index), RestartBudget(settings.restarts_per_hour)) for index in range(replicas)
        ]

    async def ready(self) -> None:
        """Until all have started. Raises `EngineError`."""
        await asyncio.gather(*(self._started(engine) for engine in self._engines))

    async def waiting(self) -> list[str]:
        """What engines that are not up do, in words."""
        late = [engine for engine in self._engines if not engine.up]
        return list(await asyncio.gather(*(_stage(engine) for engine in late)))

    # --- which may be asked -------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> Replicas:
        live = [Replica(e.index, e.incarnation, e.actor) for e in self._engines if e.live]
        return Replicas(self._serial, tuple(live) if not self._failure else (), self._failure)

    async def died(self, members: Sequence[tuple[int, int]], seconds: float) -> bool:
        """Whether one of these is dead, as far as is known within this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while set(members) <= set(self._up()):
                    self._changed.clear()
                    await self._changed.wait()
        return not set(members) <= set(self._up())

    @property
    def connection(self) -> EngineConnection:
        """For an `EngineClient`, in this process or in another one; `follow` tells what changes."""
        settings = self.settings
        return EngineConnection(self._form, self._image, settings.answer_seconds, settings.pause_seconds, self.replicas)

    def follow(self, listener: Callable[[Replicas], None]) -> None:
        """It is called each time when other engines may be asked."""
        self._listeners.append(listener)

    @property
    def members(self) -> list[tuple[int, int]]:
        """Index and incarnation of the engines that the round of weights is about."""
        return [(engine.index, engine.incarnation) for engine in self._members()]

    @property
    def actors(self) -> list[Any]:
        """Of the round of weights under way; else of all engines that are up."""
        return [engine.actor for engine in self._members() or [e for e in self._engines if e.up]]

    # --- weights: called by sync --------------------------------------------------------------------------------------

    async def renew(self, payload: Any, version: int, mode: PauseMode, deadline: float) -> int:
        """Returns the number of bytes that each engine got."""
        self._begin_round()
        return max(size for _, size in await self._all("renew", payload, version, mode, deadline=deadline))

    async def sleep(self, mode: PauseMode, deadline: float) -> None:
        """`deadline` is for falling asleep, after those that are starting have started."""
        self._room.clear()
        if starting := [engine.starting for engine in self._engines if engine.starting is not None]:
            await asyncio.wait(starting)
        self.asleep = True
        self._round = self._up()
        try:
            if self._members():
                await self._all("sleep", mode, deadline=deadline)
        except EngineDied:
            log.warning("all engines died while they fell asleep")
        finally:
            self._round = []

    async def wake(self, part: SleepPart, deadline: float) -> None:
        """Within a round of weights. Nothing where they are awake."""
        if self.asleep:
            await self._all("wake", part, deadline=deadline)

    def call(self) -> None:
        """Sets `starved`: its waiter gives weights, and so wakes the engines, though nothing was learned."""
        self._called = self.asleep
        self._publish()

    async def pause(self, mode: PauseMode, deadline: float) -> None:
        self._begin_round()
        await self._all("pause", mode, deadline=deadline)

    async def proceed(self, version: int, deadline: float) -> None:
        await self._all("proceed", version, deadline=deadline)

    async def arrivals(self, deadline: float) -> list[tuple[int, list[Any]]]:
        """Of each engine by index what its workers say of the weights that they got."""
        return [(engine.index, workers) for engine, workers in await self._all("arrivals", deadline=deadline)]

    async def kept(self, deadline: float) -> dict[int, dict[str, int]]:
        """Of each engine by index what its caches had of the time before this round: `Sampler.kept`."""
        return {engine.index: caches for engine, caches in await self._all("kept", deadline=deadline)}

    async def probe(self, requests: Sequence[tuple], frames: dict[str, bytes], deadline: float) -> list[list[tuple]]:
        answers = await self._all("probe", requests, frames, deadline, deadline=deadline + POLL_GRACE)
        return [rows for _, rows in answers]

    async def release(self, version: int, deadline: float) -> None:
        released = await self._all("release", deadline=deadline)
        self.version, self._renewed, self._counts = version, True, CacheCounts()
        self.asleep = self._called = False
        for engine in self._engines:
            engine.current = False
        for engine, counts in released:
            engine.current = True
            self._counts = self._counts.plus(counts.since(engine.counts))
            engine.counts = counts
        self._round = []
        self._publish()

    async def discard(self, why: str, deadline: float, *, again: bool = False) -> None:
        """`again`: another round follows, and requests wait for it instead of failing."""
        if self._members():
            await self._all("discard", why, again, deadline=deadline)
        self._round = []

    @property
    def metrics(self) -> dict[str, float]:
        """Of all engines, between the last two rounds of weights, and of the last one; restarts since the start."""
        return self._counts.rates() | self.round_metrics | {"engine_restarts": float(self.restarts)}

    # --- life ---------------------------------------------------------------------------------------------------------

    async def any_up(self) -> None:
        """Until an engine is up, with or without the newest weights. Raises `EngineDied` if none will be."""
        while self._failure or not any(engine.up for engine in self._engines):
            if self._failure:
                raise EngineDied(self._failure)
            self._changed.clear()
            await self._changed.wait()

    def fail(self, why: str) -> None:
        """No engine answers any more: callers that wait for one get the reason."""
        self._failure = self._failure or why
        self._publish()

    async def close(self) -> None:
        self.fail("the engines were closed")
        await self._end()

    async def stop(self) -> None:
        """Until `start` no engine takes requests; those that wait for an answer go on waiting."""
        await self._end()
        for engine in self._engines:
            engine.up = False
            engine.incarnation += 1
        self._round, self._failure = [], ""
        self.asleep = self._called = self._renewed = False
        self._room.set()
        self._publish()

    def start(self, places: Sequence[ActorPlacement] = ()) -> None:
        """After `stop`: all anew, with the weights of the model's folder. `ready` returns when they have started."""
        self._places = places or [ANYWHERE] * len(self._engines)
        for engine in self._engines:
            engine.actor, engine.counts, engine.current = self._start(engine.index), CacheCounts(), True

    async def _end(self) -> None:
        tasks = [task for engine in self._engines for task in (engine.watch, engine.restart) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in self._engines:
            kill_engine(engine.actor)

    def _start(self, index: int) -> Any:
        return start_engine(self.settings, self._places[index], index)

    async def _started(self, engine: _Engine) -> None:
        await self._call(engine, "ready", deadline=self.settings.start_seconds)
        engine.up, engine.current = True, not self._renewed
        engine.watch = asyncio.create_task(self._watch(engine, engine.incarnation), name=f"watch-{engine.index}")
        self._publish()

    async def _watch(self, engine: _Engine, incarnation: int) -> None:
        reached = time.monotonic()
        why = ""
        while not why:
            try:
                why = await self._call(engine, "watch", POLL, deadline=POLL + POLL_GRACE)
                reached = time.monotonic()
            except EngineDied as error:
                why = str(error)
            except EngineError as error:
                if time.monotonic() - reached > POLL + POLL_GRACE:
                    why = str(error)
                else:
                    await asyncio.sleep(1.0)
        self._lose(engine, incarnation, why)

    def _lose(self, engine: _Engine, incarnation: int, why: str) -> None:
        """The engine of this incarnation is dead. Of several reports the first counts."""
        if engine.incarnation != incarnation or self._failure:
            return
        engine.up = False
        engine.incarnation += 1
        if engine.watch is not None and engine.watch is not asyncio.current_task():
            engine.watch.cancel()
        kill_engine(engine.actor)  # its process may live on without an engine
        if engine.budget.spend(time.monotonic()):
            log.warning("%s; it is started again", why)
            self.restarts += 1
            engine.restart = asyncio.create_task(self._restart(engine), name=f"restart-{engine.index}")
        else:
            allowed = self.settings.restarts_per_hour
            self.fail(f"{why}; it was started again {allowed} times within an hour (engine.maxRestartsPerHour)")
        self._publish()

    async def _restart(self, engine: _Engine) -> None:
        await self._room.wait()
        incarnation = engine.incarnation
        starting = engine.starting = asyncio.get_running_loop().create_future()
        engine.actor, engine.counts = self._start(engine.index), CacheCounts()
        try:
            await self._started(engine)
        except EngineError as error:
            self._lose(engine, incarnation, str(error))
        finally:
            starting.set_result(None)
            if engine.starting is starting:
                engine.starting = None

    def _publish(self) -> None:
        self._serial += 1
        up, live = any(e.up for e in self._engines), any(e.live for e in self._engines)
        if up and (not live or self._called) and not self._failure:
            self.starved.set()
        else:
            self.starved.clear()
        self._changed.set()
        for listener in self._listeners:
            listener(self.replicas)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self._room.set()
        self._round = self._up()

    def _up(self) -> list[tuple[int, int]]:
        return [(engine.index, engine.incarnation) for engine in self._engines if engine.up]

    def _members(self) -> list[_Engine]:
        """Engines of the round under way that live on."""
        found = [(self._engines[index], incarnation) for index, incarnation in self._round]
        return [engine for engine, incarnation in found if engine.incarnation == incarnation]

    async def _all(self, method: str, *args: Any, deadline: float) -> list[tuple[_Engine, Any]]:
        """What the engines of the round answer, without those that die meanwhile, unless all do."""
        members = [(engine, engine.incarnation) for engine in self._members()]
        if self._failure or not members:
            raise EngineDied(self._failure or "no engine is up")
        calls = [self._call(engine, method, *args, deadline=deadline) for engine, _ in members]
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers: list[tuple[_Engine, Any]] = []
        deaths: list[str] = []
        for (engine, incarnation), result in zip(members, results, strict=True):
            if isinstance(result, EngineDied | EngineLate):
                self._lose(engine, incarnation, str(result))
                deaths.append(str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                answers.append((engine, result))
        if not answers:
            raise EngineDied(deaths[0])
        return answers

    async def _call(self, engine: _Engine, method: str, *args: Any, deadline: float) -> Any:
        reference = getattr(engine.actor, method).remote(*args)
        return await called(reference, f"engine {engine.index}", method, deadline)


async def _stage(engine: _Engine) -> str:
    """Its last report, where it gives none now: it may be busy, or dying, which its caller finds out."""
    with suppress(Exception):
        async with asyncio.timeout(_STAGE_SECONDS):
            engine.stage = await engine.actor.stage.remote()
    return f"an engine ({engine.stage})"
