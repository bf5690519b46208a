"""A client of the engines: many concurrent `generate` calls, few Ray calls. Any process may have one; `pool.py` is
the driver's hold on the same engines.

Rules:
- Requests made within a millisecond leave in one call; results of one engine step come back in one.
- A request goes to the engine that its sampling names; where that one is dead or none is named, to the live engine
  with the fewest requests of this client.
- Requests of an engine that dies are asked again at another one. Without another one they wait until `use` names one.
- Every request has a deadline, which stands still while its engine does for new weights, or while there is none.
- What the engine saw as prompt is compared with the agent's own expansion, token for token.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapforge_trainer.engine.choice import choose_engine
from tapforge_trainer.records import FinishReason, Generation, Prompt, Sampling

from ..placement.actors import reason
from .pauses import Deadline, PauseReading
from .wire import DEAD, REPEAT, EngineConnection, Replica, Replicas

#: seconds during which requests are gathered into one call
GATHER = 0.001
#: seconds of one long poll, and what is granted beyond for the call itself
POLL, POLL_GRACE = 20.0, 60.0
#: for answers that are there already to be seen
_LATE_SECONDS = 1.0
#: seconds until an engine that could not be reached is asked again
AGAIN = 1.0
#: hashes remembered per engine before they are sent again
KNOWN_FRAMES = 65536
#: shortest sleep of a request whose engine stands still, seconds
_LEAST_SLEEP = 0.05


class EngineError(RuntimeError):
    """A generation, or a call of an engine, that failed."""


class EngineDied(EngineError):
    """The engine's process or its vLLM is gone."""


class EngineLate(EngineError):
    """A call of an engine had no answer in time."""


class PromptMismatch(EngineError):
    """The engine saw another prompt than the learner would."""


@dataclass(slots=True)
class _Waiting:
    prompt: Prompt
    sampling: Sampling
    expanded: bytes
    future: asyncio.Future[Generation]
    deadline: Deadline
    engine: _Engine | None = None
    resent: bool = False


@dataclass(slots=True)
class _Engine:
    replica: Replica
    waiting: dict[str, _Waiting] = field(default_factory=dict)
    outbox: list[str] = field(default_factory=list)
    known: dict[str, None] = field(default_factory=dict)
    pauses: PauseReading = field(default_factory=PauseReading)
    collector: asyncio.Task[None] | None = None
    #: why it could not be reached when it was last asked
    trouble: str = ""
    #: the engine is dead or was replaced
    gone: bool = False

    @property
    def index(self) -> int:
        return self.replica.index


class EngineClient:
    """A `Generator`. Belongs to one event loop."""

    def __init__(self, connection: EngineConnection):
        #: of this object: no other client ever has it
        self.incarnation = uuid.uuid4().hex
        #: Ray calls so far
        self.calls = 0
        self._connection = connection
        self._keys = itertools.count()
        self._engines: dict[int, _Engine] = {}
        #: requests that no engine has
        self._unplaced: dict[str, _Waiting] = {}
        #: incarnation of the engine that was lost last, and why, by index
        self._lost: dict[int, tuple[int, str]] = {}
        self._replicas = connection.replicas
        self._take(connection.replicas)

    def use(self, replicas: Replicas) -> None:
        """The engines that may be asked from here on, as the driver says. Earlier news than the last is ignored."""
        if replicas.serial > self._replicas.serial:
            self._take(replicas)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        """Raises `EngineError`: `PromptMismatch`, `EngineDied` when no engine will ever answer, or a late answer."""
        expanded = self._expand(prompt)
        if self._replicas.failure:
            raise EngineDied(self._replicas.failure)
        loop, settings = asyncio.get_running_loop(), self._connection
        key = f"{next(self._keys)}"
        deadline = Deadline(settings.answer_seconds, settings.pause_seconds, loop.time())
        waiting = _Waiting(prompt, sampling, expanded, loop.create_future(), deadline)
        self._place(key, waiting)
        try:
            while (left := deadline.left(loop.time())) > 0:
                done, _ = await asyncio.wait({waiting.future}, timeout=max(left, _LEAST_SLEEP))
                if done:
                    return waiting.future.result()
            raise EngineError(self._late(waiting))
        finally:
            self._forget(key, waiting)

    async def close(self) -> None:
        """Requests that still wait fail; the engines live on."""
        self._take(Replicas(self._replicas.serial + 1, (), "the client was closed"))

    # --- which engine -------------------------------------------------------------------------------------------------

    def _take(self, replicas: Replicas) -> None:
        self._replicas = replicas
        now = {replica.index: replica for replica in replicas.live}
        for engine in list(self._engines.values()):
            replica = now.get(engine.index)
            if replica is None or replica.incarnation != engine.replica.incarnation:
                self._lose(engine, f"engine {engine.index} is dead", place=False)
        for index, replica in now.items():
            lost, _ = self._lost.get(index, (-1, ""))
            if index not in self._engines and replica.incarnation > lost:
                self._engines[index] = _Engine(replica)
        for key, waiting in list(self._unplaced.items()):
            if replicas.failure:
                self._fail(waiting, EngineDied(replicas.failure))
            elif self._engines:
                del self._unplaced[key]
                self._place(key, waiting)

    def _place(self, key: str, waiting: _Waiting) -> None:
        load = {index: len(engine.waiting) for index, engine in self._engines.items()}
        chosen = choose_engine(waiting.sampling.engine, load)
        now = asyncio.get_running_loop().time()
        if chosen is None:
            waiting.engine = None
            waiting.deadline.move(None, now)
            self._unplaced[key] = waiting
            return
        engine = waiting.engine = self._engines[chosen]
        waiting.resent = False
        engine.waiting[key] = waiting
        self._post(engine, key)
        waiting.deadline.move(engine.pauses, now)

    def _lose(self, engine: _Engine, why: str, *, place: bool = True) -> None:
        """Its requests go elsewhere; `place`: at once."""
        if engine.gone:
            return
        engine.gone = True
        self._lost[engine.index] = (engine.replica.incarnation, why)
        if self._engines.get(engine.index) is engine:
            del self._engines[engine.index]
        if engine.collector is not None and engine.collector is not asyncio.current_task():
            engine.collector.cancel()
        moving, engine.waiting = engine.waiting, {}
        for key, waiting in moving.items():
            if waiting.future.done():
                continue
            waiting.engine = None
            if place:
                self._place(key, waiting)
            else:
                waiting.deadline.move(None, asyncio.get_running_loop().time())
                self._unplaced[key] = waiting

    def _forget(self, key: str, waiting: _Waiting) -> None:
        """Withdraws a request that no caller waits for any more."""
        self._unplaced.pop(key, None)
        engine = waiting.engine
        if engine is not None and engine.waiting.pop(key, None) is not None and not engine.gone:
            engine.replica.actor.abort.remote(self.incarnation, [key])
        if not waiting.future.cancel() and not waiting.future.cancelled():
            waiting.future.exception()  # has been seen

    def _late(self, waiting: _Waiting) -> str:
        seconds = self._connection.answer_seconds
        if waiting.engine is None:
            died = "; ".join(why for _, why in self._lost.values()) or "none has started"
            return f"no engine answered within {seconds:.0f} s: {died}"
        engine = waiting.engine
        trouble = f" ({engine.trouble})" if engine.trouble else ""
        return (
            f"engine {engine.index} did not answer within {seconds:.0f} s{trouble}; {len(engine.waiting)} requests of "
            "this client are in flight there: fewer slots or more replicas would help"
        )

    # --- wire ---------------------------------------------------------------------------------------------------------

    def _expand(self, prompt: Prompt) -> bytes:
        """The ids that the engine has to report, as int32 bytes."""
        ids = np.asarray(prompt.ids, np.int32)
        counts = np.ones(len(ids), np.int64)
        places = np.flatnonzero(ids == self._connection.image_id)
        if len(places) != len(prompt.frames):
            raise ValueError(f"{len(places)} image placeholders for {len(prompt.frames)} frames")
        for place, frame in zip(places, prompt.frames, strict=True):
            rows, columns = self._connection.form.grid(frame.width, frame.height)
            counts[place] = rows * columns
        return np.repeat(ids, counts).tobytes()

    def _post(self, engine: _Engine, key: str) -> None:
        loop = asyncio.get_running_loop()
        if not engine.outbox:
            loop.call_later(GATHER, self._flush, engine)
        engine.outbox.append(key)
        if engine.collector is None or engine.collector.done():
            engine.pauses = PauseReading()  # what it was while no client listened is unknown
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
        if rows and not engine.gone:
            engine.replica.actor.submit.remote(self.incarnation, rows, frames)
            self.calls += 1

    async def _collect(self, engine: _Engine) -> None:
        """Until nothing waits there any more."""
        try:
            while engine.waiting and not engine.gone:
                await self._poll(engine)
        except Exception as error:  # noqa: BLE001 - a fault of ours: each caller that waits gets it
            for waiting in engine.waiting.values():
                if not waiting.future.done():
                    waiting.future.set_exception(error)

    async def _poll(self, engine: _Engine) -> None:
        self.calls += 1
        poll = engine.replica.actor.collect.remote(self.incarnation, POLL)
        try:
            answer = await called(poll, f"engine {engine.index}", "collect", POLL + POLL_GRACE)
        except EngineDied as error:
            self._lose(engine, str(error))
            return
        except EngineError as error:  # not reached for now; only the driver decides that it is dead
            engine.trouble = str(error)
            await asyncio.sleep(AGAIN)
            answer = None
        if answer is None:  # what it knew of this client may be lost
            engine.known.clear()
            for key in list(engine.waiting):
                self._post(engine, key)
            return
        rows, paused, seconds = answer
        engine.pauses.read(paused, seconds, asyncio.get_running_loop().time())
        for row in rows:
            self._answer(engine, row)

    def _answer(self, engine: _Engine, row: tuple) -> None:
        key, prompt_ids, ids, logprobs, versions, finish_reason, error, missing = row
        waiting = engine.waiting.get(key)
        if waiting is None or waiting.future.done():
            return
        where = f"engine {engine.index}"
        if error.startswith(DEAD):
            self._lose(engine, f"{where}: {error}")
            return
        if error.startswith(REPEAT):
            waiting.resent = False
            waiting.deadline.renew(asyncio.get_running_loop().time())
            self._post(engine, key)
            return
        if missing and not waiting.resent:
            waiting.resent = True
            for frame in waiting.prompt.frames:  # all: by then the others may be dropped as well
                engine.known.pop(frame.name, None)
            self._post(engine, key)
            return
        del engine.waiting[key]
        try:
            if missing:
                raise EngineError(f"{where} does not keep the prompt's frames")
            if error:
                raise EngineError(f"{where}: {error}")
            if prompt_ids != waiting.expanded:
                raise PromptMismatch(_difference(engine.index, waiting, prompt_ids))
            waiting.future.set_result(_generation(waiting.prompt, ids, logprobs, versions, finish_reason))
        except EngineError as wrong:
            self._fail(waiting, wrong)

    def _fail(self, waiting: _Waiting, error: EngineError) -> None:
        if not waiting.future.done():
            waiting.future.set_exception(error)


async def called(reference: Any, where: str, method: str, seconds: float) -> Any:
    """What a Ray call of an engine returns. Raises `EngineLate` after `seconds`, and `EngineDied`. An answer that came
    in time counts, however late this process's event loop gets to see it."""
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

    call = asyncio.ensure_future(reference)
    try:
        # A loop that stood still finds its timers due before the answers that came meanwhile.
        for wait in (seconds, _LATE_SECONDS):
            await asyncio.wait({call}, timeout=wait)
        if not call.done():
            raise EngineLate(f"{where}: {method} took longer than {seconds:.0f} s")
        return call.result()
    except ActorUnavailableError as error:
        raise EngineError(f"{where} could not be reached for {method}: {reason(error)}") from error
    except RayError as error:
        # A call whose argument was to come from another actor fails with that one's death, and is an actor's error too.
        if isinstance(error, RayActorError) and not isinstance(error, RayTaskError):
            raise EngineDied(f"{where} died during {method}: {reason(error)}") from error
        died = EngineDied if DEAD in str(error) else EngineError
        raise died(f"{where}: {method} failed: {reason(error)}") from error
    finally:
        call.cancel()


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
