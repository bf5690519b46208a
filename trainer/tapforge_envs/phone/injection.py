"""What a phone server does about the faults of one phone: strikes, delays, and the two calls that show and set them.

Whatever protocol the phone speaks, a fault that prevents an answer strikes here; one that is about a frame is returned
to the protocol's server, which spoils its own answer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from aiohttp import web
from pydantic import ValidationError

from tapforge_envs.serving.claims import Refused
from tapforge_envs.serving.http import words

from . import faults
from .faults import FAULTS, Call, Fault, Kind


class Injector:
    """The faults of one phone. Setting `stopping` lets hung calls go."""

    def __init__(
        self,
        initial: list[Fault],
        stopping: asyncio.Event,
        crash: Callable[[], None] = lambda: os._exit(1),
        notice: Callable[[Call, str, int, Kind], None] = lambda call, episode, index, kind: None,
    ):
        """`crash`: what a fault of that kind does; if it returns, the call is not answered. `notice`: called with every
        fault that strikes, but for slowness."""
        self.faults = initial
        self.stopping = stopping
        self.hung = False
        self._crash = crash
        self._notice = notice
        #: (episode, call, index) -> loop time at which a slow answer is ready
        self._ready: dict[tuple[str, Call, int], float] = {}

    @property
    def lying(self) -> bool:
        return any(f.kind == "lying_health" for f in self.faults)

    async def strike(self, call: Call, episode: str, index: int) -> Fault | None:
        """The fault of this call that is about its answer; those that prevent one strike here."""
        if self.hung:
            self._notice(call, episode, index, "hung")
            await self.never()
        if not self.faults:
            return None
        fault = faults.striking(self.faults, call, episode, index)
        if fault is None:
            return None
        self._notice(call, episode, index, fault.kind)
        match fault.kind:
            case "hung":
                self.hung = True
                await self.never()
            case "crashed":
                self._crash()
                await self.never()
            case "error":
                raise Refused(500, f"fault on demand: error at {call} {index} of episode {episode!r}")
            case "lying_health":
                raise Refused(503, f"fault on demand: {call} is refused, whatever the health check says")
        return fault

    async def never(self) -> None:
        await self.stopping.wait()
        raise Refused(503, "the phone hangs (fault on demand) and the server is stopping")

    async def delay(self, call: Call, episode: str, index: int) -> None:
        """Waits until a slow phone would have answered; a re-sent call waits for the rest of the time only."""
        if not self.faults:
            return
        seconds = faults.latency(self.faults, call, episode, index)
        if seconds > 0:
            now = asyncio.get_running_loop().time()
            ready = self._ready.setdefault((episode, call, index), now + seconds)
            await asyncio.sleep(max(0.0, ready - now))

    def new_episode(self) -> None:
        self._ready.clear()

    async def show(self, request: web.Request) -> web.Response:
        return web.json_response([f.model_dump(by_alias=True, exclude_defaults=True) for f in self.faults])

    async def set(self, request: web.Request) -> web.Response:
        """Replaces the faults, and wakes a phone that hung."""
        try:
            self.faults = FAULTS.validate_json(await request.read())
        except ValidationError as error:
            raise Refused(400, f"the body is not a list of faults: {words(error)}") from error
        self.hung = False
        return await self.show(request)
