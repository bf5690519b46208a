"""The driver's side of the engines: many concurrent `generate` calls, few Ray calls.

Rules:
- Requests made within a millisecond leave in one call; results of one engine step come back in one.
- A request goes to the live engine with the fewest requests in flight.
- Every request has a deadline. A dead engine fails its requests at once with `EngineDied`; `restart` brings it back
  with the weights it was last given.
- What the engine saw as prompt is compared with the agent's own expansion, token for token.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapforge_trainer.records import FinishReason, Generation, Prompt, Sampling

from .engine import start_engine
from .frames import PixelFormat
from .remote import reason
from .settings import EngineSettings, PauseMode

#: seconds during which requests are gathered into one call
GATHER = 0.001
#: seconds of one long poll, and what is granted beyond for the call itself
POLL, POLL_GRACE = 20.0, 60.0
#: hashes remembered per engine before they are sent again
KNOWN_FRAMES = 65536


class EngineError(RuntimeError):
    """A generation that failed."""


class EngineDied(EngineError):
    """The engine's process or its vLLM is gone; `restart` it."""


class PromptMismatch(EngineError):
    """The engine saw another prompt than the learner would."""


@dataclass(slots=True)
class _Waiting:
    prompt: Prompt
    sampling: Sampling
    expanded: bytes
    future: asyncio.Future[Generation]
    resent: bool = False


@dataclass(slots=True)
class _Engine:
    index: int
    actor: Any
    waiting: dict[str, _Waiting] = field(default_factory=dict)
    outbox: list[str] = field(default_factory=list)
    known: dict[str, None] = field(default_factory=dict)
    collector: asyncio.Task[None] | None = None
    dead: str = ""


class Engines:
    """A `Generator` over several replicas. Belongs to one event loop."""

    def __init__(self, settings: EngineSettings, form: PixelFormat, image_id: int, *, replicas: int = 1):
        self.settings = settings
        #: policy version of the last proven weights
        self.version = 0
        self._form, self._image = form, image_id
        self._deadline = settings.answer_seconds
        self._keys = itertools.count()
        self._payload: Any = None
        self._calls = 0
        self._engines = [_Engine(index, start_engine(settings)) for index in range(replicas)]

    async def ready(self) -> None:
        await self._all("ready", deadline=self.settings.start_seconds)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        expanded = self._expand(prompt)
        alive = [engine for engine in self._engines if not engine.dead]
        if not alive:
            raise EngineDied("; ".join(engine.dead for engine in self._engines))
        engine = min(alive, key=lambda e: len(e.waiting))
        key = f"{next(self._keys)}"
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        engine.waiting[key] = _Waiting(prompt, sampling, expanded, future)
        self._post(engine, key)
        try:
            async with asyncio.timeout(self._deadline):
                return await future
        except TimeoutError as error:
            raise EngineError(
                f"engine {engine.index} did not answer within {self._deadline:.0f} s; {len(engine.waiting)} requests "
                "are in flight there: fewer slots or more replicas would help"
            ) from error
        finally:
            if engine.waiting.pop(key, None) is not None and not engine.dead:  # nobody waits any more
                engine.actor.abort.remote([key])

    # --- weights: called by sync -------------------------------------------------------------------------------------

    async def renew(self, payload: Any, version: int, mode: PauseMode, deadline: float) -> None:
        await self._all("renew", payload, version, mode, deadline=deadline)
        self._payload = (payload, version)

    async def pause(self, mode: PauseMode, deadline: float) -> None:
        await self._all("pause", mode, deadline=deadline)

    async def proceed(self, version: int, deadline: float) -> None:
        await self._all("proceed", version, deadline=deadline)

    @property
    def actors(self) -> list[Any]:
        return [engine.actor for engine in self._engines]

    async def probe(self, requests: Sequence[tuple], frames: dict[str, bytes], deadline: float) -> list[list[tuple]]:
        return await self._all("probe", requests, frames, deadline, deadline=deadline + POLL_GRACE)

    async def release(self, version: int, deadline: float) -> None:
        await self._all("release", deadline=deadline)
        self.version = version

    async def discard(self, why: str, deadline: float) -> None:
        await self._all("discard", why, deadline=deadline)

    # --- life ---------------------------------------------------------------------------------------------------------

    @property
    def dead(self) -> list[str]:
        """What happened to the engines that are gone."""
        return [engine.dead for engine in self._engines if engine.dead]

    async def restart(self) -> None:
        """Starts dead engines again, with the weights that they had."""
        deadline = self.settings.start_seconds
        if self.dead and self._payload is None and self.version:
            raise EngineDied(
                f"{'; '.join(self.dead)}. Its weights came over the GPUs' own wire and are not at hand: resume"
            )
        for engine in [engine for engine in self._engines if engine.dead]:
            fresh = _Engine(engine.index, start_engine(self.settings))
            await self._call(fresh, "ready", deadline=deadline)
            if self._payload is not None:
                payload, version = self._payload
                await self._call(fresh, "renew", payload, version, "keep", deadline=deadline)
                await self._call(fresh, "release", deadline=deadline)
            self._engines[engine.index] = fresh

    async def close(self) -> None:
        import ray

        for engine in self._engines:
            if engine.collector is not None:
                engine.collector.cancel()
            ray.kill(engine.actor)
            self._lose(engine, f"engine {engine.index} was closed")

    # --- wire ---------------------------------------------------------------------------------------------------------

    def _expand(self, prompt: Prompt) -> bytes:
        """The ids that the engine has to report, as int32 bytes."""
        ids = np.asarray(prompt.ids, np.int32)
        counts = np.ones(len(ids), np.int64)
        places = np.flatnonzero(ids == self._image)
        if len(places) != len(prompt.frames):
            raise ValueError(f"{len(places)} image placeholders for {len(prompt.frames)} frames")
        for place, frame in zip(places, prompt.frames, strict=True):
            rows, columns = self._form.grid(frame.width, frame.height)
            counts[place] = rows * columns
        return np.repeat(ids, counts).tobytes()

    def _post(self, engine: _Engine, key: str) -> None:
        loop = asyncio.get_running_loop()
        if not engine.outbox:
            loop.call_later(GATHER, self._flush, engine)
        engine.outbox.append(key)
        if engine.collector is None or engine.collector.done():
            engine.collector = loop.create_task(self._collect(engine), name=f"collect-{engine.index}")

    def _flush(self, engine: _Engine) -> None:
        keys, engine.outbox = engine.outbox, []
        rows: list[tuple] = []
        frames: dict[str, bytes] = {}
        if len(engine.known) > KNOWN_FRAMES:
            engine.known.clear()
        for key in keys:
            waiting = engine.waiting.get(key)
            if waiting is None:
                continue
            prompt, sampling = waiting.prompt, waiting.sampling
            for frame in prompt.frames:
                if frame.name not in engine.known:
                    frames[frame.name] = frame.data
                    engine.known[frame.name] = None
            names = tuple(frame.name for frame in prompt.frames)
            rows.append((key, prompt.ids, names, sampling.max_tokens, sampling.temperature, sampling.seed))
        if rows and not engine.dead:
            engine.actor.submit.remote(rows, frames)
            self._calls += 1

    async def _collect(self, engine: _Engine) -> None:
        while engine.waiting:
            try:
                rows = await self._call(engine, "collect", POLL, deadline=POLL + POLL_GRACE)
            except EngineError as error:
                self._lose(engine, str(error))
                return
            for row in rows:
                self._answer(engine, row)

    def _answer(self, engine: _Engine, row: tuple) -> None:
        key, prompt_ids, ids, logprobs, versions, finish_reason, error, missing = row
        waiting = engine.waiting.get(key)
        if waiting is None or waiting.future.done():
            return
        if missing and not waiting.resent:
            waiting.resent = True
            for name in missing:
                engine.known.pop(name, None)
            self._post(engine, key)
        elif missing:
            waiting.future.set_exception(EngineError(f"engine {engine.index} does not keep the prompt's frames"))
        elif error:
            kind = EngineDied if error.startswith("the engine died") else EngineError
            waiting.future.set_exception(kind(f"engine {engine.index}: {error}"))
            if kind is EngineDied:
                self._lose(engine, f"engine {engine.index}: {error}")
        elif prompt_ids != waiting.expanded:
            waiting.future.set_exception(PromptMismatch(_difference(engine.index, waiting, prompt_ids)))
        else:
            waiting.future.set_result(_generation(waiting.prompt, ids, logprobs, versions, finish_reason))

    def _lose(self, engine: _Engine, why: str) -> None:
        engine.dead = why
        for waiting in engine.waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(EngineDied(why))

    async def _call(self, engine: _Engine, method: str, *args: Any, deadline: float) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        self._calls += 1
        reference = getattr(engine.actor, method).remote(*args)
        try:
            async with asyncio.timeout(deadline):
                return await reference
        except TimeoutError as error:
            raise EngineError(f"engine {engine.index}: {method} took longer than {deadline:.0f} s") from error
        except RayActorError as error:
            why = f"engine {engine.index} died during {method}: {reason(error)}"
            self._lose(engine, why)
            raise EngineDied(why) from error
        except RayTaskError as error:
            raise EngineError(f"engine {engine.index}: {method} failed: {reason(error)}") from error

    async def _all(self, method: str, *args: Any, deadline: float) -> list[Any]:
        alive = [engine for engine in self._engines if not engine.dead]
        if not alive:
            raise EngineDied("; ".join(self.dead))
        calls = [self._call(engine, method, *args, deadline=deadline) for engine in alive]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def _generation(
    prompt: Prompt, ids: bytes, logprobs: bytes, versions: tuple[tuple[int, int, int], ...], reason: FinishReason
) -> Generation:
    sampled = array("i", ids)
    per_token = [version for version, start, end in versions for _ in range(start, end)]
    if len(per_token) != len(sampled):
        raise EngineError(f"the engine named the policy version of {len(per_token)} of {len(sampled)} sampled tokens")
    return Generation(
        prompt_ids=prompt.ids,
        ids=sampled,
        logprobs=array("f", logprobs),
        versions=per_token,
        finish_reason=reason,
        prompt_length=prompt.expanded_length,
    )


def _difference(index: int, waiting: _Waiting, seen: bytes) -> str:
    mine, theirs = np.frombuffer(waiting.expanded, np.int32), np.frombuffer(seen, np.int32)
    shared = min(len(mine), len(theirs))
    at = next(iter(np.flatnonzero(mine[:shared] != theirs[:shared]).tolist()), shared)
    sizes = ", ".join(f"{frame.name[:12]} {frame.width}x{frame.height}" for frame in waiting.prompt.frames)
    return (
        f"engine {index} saw a prompt of {len(theirs)} tokens, expected were {len(mine)}; they differ from token {at} "
        f"on. Frames: {sizes or 'none'}. Are the announced sizes those of their bytes?"
    )
