"""Engines without a model or a process, as their clients and the driver reach them: each moment is chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from tapforge_trainer.engine.client import EngineClient
from tapforge_trainer.engine.mailboxes import Mailboxes
from tapforge_trainer.engine.wire import (
    REPEAT,
    CacheCounts,
    EngineConnection,
    GenerateResult,
    Replica,
    Replicas,
    engine_key,
)
from tapforge_trainer.learner.frame_store import PixelFormat
from tapforge_trainer.placement.settings import EngineSettings
from tapforge_trainer.records import Generation, Prompt, Sampling

FORM = PixelFormat(16, 2, (0.5,) * 3, (0.5,) * 3)
SETTINGS = EngineSettings("nowhere", (1, 2), (2,), restarts_per_hour=2)
PROMPT = Prompt((5, 6, 7), (), 3)
#: seconds after which something that must happen is taken for something that never will
END = 30.0


class Remote:
    """A method as Ray's handles have it."""

    def __init__(self, actor: Actor, method: Callable[..., Awaitable[Any]]):
        self._actor, self._method = actor, method

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._actor.until_killed(self._method, *arguments))


class Actor:
    """An engine without a model. Answers when `answer` is called, with the version that it has."""

    def __init__(self) -> None:
        self.boxes = Mailboxes(60.0)
        self.asked: dict[str, int] = {}
        self.aborted: list[str] = []
        self.version = 0
        self.rounds: list[str] = []
        #: what a call of this name raises
        self.failing: dict[str, Exception] = {}
        self.started = asyncio.Event()
        #: polls come to nothing
        self.deaf = False
        self._killed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __getattr__(self, name: str) -> Remote:
        return Remote(self, getattr(type(self), f"on_{name}").__get__(self))

    def kill(self) -> None:
        if not self._killed.done():
            self._killed.set_result(None)

    @property
    def killed(self) -> bool:
        return self._killed.done()

    def answer(self) -> None:
        """All that was asked."""
        ids = np.asarray([1, 2], np.int32).tobytes()
        prompt, said = np.asarray(PROMPT.ids, np.int32).tobytes(), np.zeros(2, np.float32).tobytes()
        keys, self.asked = self.asked, {}
        self.boxes.deliver([GenerateResult(key, prompt, ids, said, ((self.version, 0, 2),), "stop") for key in keys])

    async def until_killed(self, method: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        from ray.exceptions import ActorDiedError

        task = asyncio.ensure_future(method(*arguments))
        await asyncio.wait({task, self._killed}, return_when=asyncio.FIRST_COMPLETED)
        if self._killed.done():
            task.cancel()
            raise ActorDiedError()
        return await task

    async def on_ready(self) -> None:
        await self.started.wait()

    async def on_stage(self) -> str:
        if self.deaf:
            await asyncio.Event().wait()
        return "loading weights"

    async def on_submit(self, client: str, requests: Sequence[tuple], frames: dict[str, bytes]) -> None:
        for key in self.boxes.expect(client, [request[0] for request in requests]):
            self.asked[engine_key(client, key)] = 1

    async def on_collect(self, client: str, seconds: float) -> Any:
        if self.deaf:
            await asyncio.sleep(0.001)
            return [], False, 0.0
        return await self.boxes.collect(client, seconds)

    async def on_abort(self, client: str, keys: Sequence[str]) -> None:
        for key in self.boxes.withdraw(client, keys):
            self.aborted.append(key)
            del self.asked[key]

    async def on_watch(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return ""

    async def on_renew(self, payload: Any, version: int, mode: str) -> int:
        self.rounds.append("renew")
        self.boxes.pause()
        self.version = version
        return len(payload)

    async def on_pause(self, mode: str) -> None:
        self.noted("pause")
        self.boxes.pause()

    async def on_sleep(self, mode: str) -> None:
        self.noted("sleep")
        self.boxes.pause()

    async def on_wake(self, part: str) -> None:
        self.noted(f"wake {part}")

    async def on_proceed(self, version: int) -> None:
        self.noted("proceed")
        self.version = version

    async def on_discard(self, why: str, again: bool = False) -> None:
        self.noted("discard")
        error = f"{REPEAT}: {why}" if again else why
        keys, self.asked = self.asked, {}
        self.boxes.deliver([GenerateResult(key, error=error) for key in keys])
        if not again:
            self.boxes.proceed()

    def noted(self, call: str) -> None:
        self.rounds.append(call)
        if call in self.failing:
            raise self.failing[call]

    async def on_release(self) -> CacheCounts:
        self.rounds.append("release")
        self.boxes.proceed()
        return CacheCounts(10, 4, 4, 2, encoded=1, dropped=48)


def connected(*actors: Actor, answer_seconds: float = END, pause_seconds: float = END) -> EngineConnection:
    live = tuple(Replica(index, 0, actor) for index, actor in enumerate(actors))
    return EngineConnection(FORM, 99, answer_seconds, pause_seconds, Replicas(1, live))


def asking(client: EngineClient, count: int = 1, engine: int | None = None) -> list[asyncio.Task[Generation]]:
    return [asyncio.create_task(client.generate(PROMPT, Sampling(4, engine=engine))) for _ in range(count)]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(END):
        while not condition():  # noqa: ASYNC110 - other tasks of this loop
            await asyncio.sleep(0.001)
