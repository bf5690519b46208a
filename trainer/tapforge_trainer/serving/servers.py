"""The driver's hold on the servers of `spec.models`: starts them, says where they answer, starts dead ones again.

- Their GPUs are a placement group of their own, held from the start of the session to its end, whatever becomes of
  learner and engines. They are asked for first; `tapforge_api.gpus` has counted that the others find room beside them.
- A server that dies is started again in its place. One death too many within an hour, and the model answers no question
  any more; each then gets the reason, so that the run ends by `rewards.maxMissingShare`.
- The policy's weights never come here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from ..engine.client import POLL, POLL_GRACE, EngineDied, EngineError, called
from ..engine.restart_budget import RestartBudget
from ..judges.endpoint import Served
from ..placement.placement import ANYWHERE, ActorPlacement, Bundle, Placement, place
from .actor import start_server
from .settings import ServerSettings

log = logging.getLogger(__name__)
_STAGE_SECONDS: Final = 2.0

Listener = Callable[[Mapping[str, Served]], None]


@dataclass(slots=True)
class _Server:
    settings: ServerSettings
    number: int
    place: ActorPlacement
    budget: RestartBudget
    actor: Any = None
    #: where it answers; "": not yet, or not any more
    url: str = ""
    failure: str = ""
    task: asyncio.Task[None] | None = None

    @property
    def shown(self) -> str:
        return f"a server of spec.models[{self.settings.name}]"


class ModelServers:
    """Belongs to one event loop."""

    def __init__(self, models: Sequence[ServerSettings]):
        self.models = tuple(models)
        self.restarts = 0
        self._servers: list[_Server] = []
        self._placement = Placement()
        self._listeners: list[Listener] = []

    async def place(self, report: Callable[[str], None]) -> None:
        """Returns when they have their GPUs. Ray has been started. Raises PlacementError."""
        wanted = [model for model in self.models for _ in range(model.replicas)]
        places: Sequence[ActorPlacement] = [ANYWHERE] * len(wanted)
        if wanted and wanted[0].device == "cuda":
            bundles = [Bundle(model.tensor_parallel, True, 0) for model in wanted]
            self._placement = await place(bundles, wanted[0].start_seconds, report)
            places = _by_size(wanted, self._placement)
        self._servers = [
            _Server(model, number, place_, RestartBudget(model.restarts_per_hour))
            for number, (model, place_) in enumerate(zip(wanted, places, strict=True))
        ]

    async def start(self) -> None:
        """Returns when all of them answer. Raises EngineError."""
        await asyncio.gather(*(self._begin(server) for server in self._servers))
        for server in self._servers:
            server.task = asyncio.create_task(self._keep(server), name=f"keep {server.shown}")

    async def waiting(self) -> list[str]:
        """What servers that don't answer yet do, in words."""
        return list(await asyncio.gather(*(_stage(server) for server in self._servers if not server.url)))

    @property
    def served(self) -> dict[str, Served]:
        """By name, as judges need it."""
        found = {}
        for model in self.models:
            own = [server for server in self._servers if server.settings is model]
            urls = tuple(server.url for server in own if server.url)
            dead = bool(own) and all(server.failure for server in own)
            found[model.name] = Served(urls, model.token, own[0].failure if dead else "")
        return found

    def follow(self, listener: Listener) -> None:
        """It is called now, and each time when other servers answer."""
        self._listeners.append(listener)
        listener(self.served)

    async def close(self) -> None:
        tasks = [server.task for server in self._servers if server.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            _kill(server)
        self._placement.close()

    async def _begin(self, server: _Server) -> None:
        server.actor = start_server(server.settings, server.place, server.number)
        server.url = await called(server.actor.ready.remote(), server.shown, "ready", server.settings.start_seconds)
        self._publish()

    async def _keep(self, server: _Server) -> None:
        why = ""
        while True:
            why = why or await _death(server)
            server.url = ""
            _kill(server)
            self._publish()
            if not server.budget.spend(time.monotonic()):
                allowed = server.settings.restarts_per_hour
                server.failure = f"{server.shown}: {why}; it was started again {allowed} times within an hour"
                log.error("%s (spec.models[%s].maxRestartsPerHour)", server.failure, server.settings.name)
                self._publish()
                return
            log.warning("%s: %s; it is started again", server.shown, why)
            self.restarts += 1
            try:
                await self._begin(server)
                why = ""
            except EngineError as error:
                why = str(error)

    def _publish(self) -> None:
        for listener in self._listeners:
            listener(self.served)


async def _death(server: _Server) -> str:
    """Why it is dead, once it is."""
    reached = time.monotonic()
    while True:
        try:
            if why := await called(server.actor.watch.remote(POLL), server.shown, "watch", POLL + POLL_GRACE):
                return str(why)
            reached = time.monotonic()
        except EngineDied as error:
            return str(error)
        except EngineError as error:
            if time.monotonic() - reached > POLL + POLL_GRACE:
                return str(error)
            await asyncio.sleep(1.0)


async def _stage(server: _Server) -> str:
    words = "its process"
    with suppress(Exception):
        async with asyncio.timeout(_STAGE_SECONDS):
            words = await server.actor.stage.remote()
    return f"model {server.settings.name} ({words})"


def _kill(server: _Server) -> None:
    import ray

    if server.actor is not None:
        ray.kill(server.actor)


def _by_size(wanted: Sequence[ServerSettings], placement: Placement) -> list[ActorPlacement]:
    """For each server a place with its number of GPUs."""
    free, found = list(placement.engines), []
    for model in wanted:
        fitting = next(one for one in free if one.options["num_gpus"] == model.tensor_parallel)
        free.remove(fitting)
        found.append(fitting)
    return found
