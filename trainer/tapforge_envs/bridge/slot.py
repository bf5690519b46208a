"""One phone behind the bridge: its episode, the one call that it is executing, and every answer that was given.

Rules, in order of weight:
1. The phone executes one call at a time. A call that began is never executed a second time, and goes on when its
   caller's connection breaks: a client that sends it again waits for the same execution and gets the same bytes.
2. A reset of a new episode ends the one before: from then on its calls are refused (409), also those that are being
   executed; the phone is reset when the call in flight has ended and the environment of the old episode is closed.
3. A fault of the phone ends its episode. Every later call of it, but for closing, is refused with that fault until
   there is a new reset: what happened after an unanswered call is unknown.
4. An action that the phone doesn't have gets 422 with reason `unsupported_action` and consumes no index.
5. The instance is that of the bridge and of the server behind it: it is another one when either was replaced. A server
   that was replaced in the middle of an episode has ended it.
6. Each call of the phone has a deadline here too, above the client's own: a client that hangs holds nothing for ever.

Seconds everywhere; no HTTP here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from ..clients.http import Deadlines
from ..protocol import (
    Action,
    Environment,
    EnvironmentFault,
    Observation,
    Reason,
    Score,
    StepResult,
    Task,
    UnknownTask,
    UnsupportedAction,
)
from ..serving.claims import Claims, Refused
from ..wire import UNSUPPORTED_ACTION, encode_step

log = logging.getLogger(__name__)

#: bytes of answers that are kept of an episode for calls that are sent again; the newest is kept whatever its size
MAX_STORED = 64 * 1024 * 1024
#: episodes that are known to be over: a late reset of one of them starts nothing
_MAX_PAST = 256
#: seconds above twice a client's deadline (it may send a call again, and wait up to a minute because an action says so)
#: after which the bridge gives up on the client
_MARGIN = 65.0

_STATUS = {Reason.DEADLINE: 504, Reason.LEASE_LOST: 503}

T = TypeVar("T")


@dataclass(eq=False)
class _Episode:
    id: str
    task: Task
    environment: Environment | None = None
    #: by which its observations are named
    instance: str = ""
    opening: asyncio.Task[bytes] | None = None
    #: by index: the answer or its execution; None for one that is not stored any more
    steps: list[asyncio.Task[bytes] | None] = field(default_factory=list)
    verdict: asyncio.Task[Score] | None = None
    #: number of steps at which it was judged
    judged_at: int = -1
    #: what ended it, if the phone did
    fault: EnvironmentFault | None = None

    def executing(self) -> str:
        """The call that the phone is executing for it; "" for none."""
        if self.opening is not None and not self.opening.done():
            return "reset"
        if self.verdict is not None and not self.verdict.done():
            return "evaluate"
        last = self.steps[-1] if self.steps else None
        return f"step {len(self.steps) - 1}" if last is not None and not last.done() else ""


class BridgeSlot:
    def __init__(
        self,
        name: str,
        connect: Callable[[], Environment],
        probe: Callable[[], Awaitable[str]],
        deadlines: Deadlines,
        uid: str = "",
    ):
        """`name`: of the phone, for errors. `connect`: a client of it for one episode. `probe`: what its health
        check answers, the identity of its server; raises EnvironmentFault when it is sick. `uid`: of the slot that it
        is; "" where it is not known."""
        self.name = name
        self.claims = Claims(uid)
        self._connect = connect
        self._probe = probe
        self._deadlines = deadlines
        self._own = uuid4().hex
        self._behind = ""
        self._episode: _Episode | None = None
        #: the one whose environment is open: `_episode`, or one before it that is being ended
        self._holding: _Episode | None = None
        #: ids of episodes that are over, the oldest first
        self._past: dict[str, None] = {}
        self._closing: tuple[str, asyncio.Task[None]] | None = None
        self._probing: asyncio.Task[str] | None = None
        self._phone = asyncio.Lock()
        self._executions: set[asyncio.Task[Any]] = set()
        self._stopping = False

    @property
    def instance(self) -> str:
        return hashlib.sha256(f"{self._own} {self._behind}".encode()).hexdigest()[:32]

    @property
    def episode(self) -> str | None:
        return self._episode.id if self._episode else None

    async def health(self) -> str:
        """The instance. Raises Refused when the phone is sick. A phone that executes a call is not asked: some servers
        answer nothing else meanwhile, and the call has its own deadline."""
        if self._stopping:
            raise Refused(503, "the bridge is stopping")
        if self._phone.locked():
            return self.instance
        if self._probing is None or self._probing.done():
            self._probing = self._execution(self._asked())
        try:
            return await asyncio.shield(self._probing)
        except EnvironmentFault as fault:
            raise Refused(503, str(fault), fault.reason) from fault

    async def reset(self, episode: str, task: Task) -> bytes:
        running = self._episode
        if running is not None and running.id == episode:
            if running.task != task:
                raise Refused(
                    409,
                    f"episode {episode!r} runs task {running.task.key!r} already; a new task needs a new episode id",
                )
        elif self._stopping:
            raise Refused(503, "the bridge is stopping")
        elif episode in self._past:
            raise Refused(409, f"episode {episode!r} is over; a new one needs a new id")
        else:
            before, running = running, _Episode(episode, task)
            self._retire(before)
            self._episode = running
            running.opening = self._execution(self._open(running, before))
        assert running.opening is not None
        return await self._answer(running, running.opening)

    async def step(self, episode: str, index: int, action: Action) -> bytes:
        running, following = self._running(episode), len(self._running(episode).steps)
        if index < following:
            stored = running.steps[index]
            if stored is None:
                raise Refused(
                    409, f"the answer of step {index} is not stored any more; the bridge keeps {MAX_STORED} bytes"
                )
            return await self._answer(running, stored)
        self._ready(running, f"step {index}")
        if index > following:
            raise Refused(409, f"step {index} of episode {episode!r} is from the future; the next one is {following}")
        execution = self._execution(self._step(running, index, action))
        running.steps.append(execution)
        return await self._answer(running, execution)

    async def evaluate(self, episode: str) -> Score:
        """Judged once between two steps: a call that is sent again gets the same verdict."""
        running = self._running(episode)
        if running.verdict is None or running.judged_at != len(running.steps):
            self._ready(running, "evaluate")
            running.judged_at = len(running.steps)
            running.verdict = self._execution(self._evaluate(running))
        return await self._answer(running, running.verdict)

    async def close(self, episode: str) -> None:
        if self._closing is None or self._closing[0] != episode:
            running = self._running(episode)
            self._retire(running)
            self._episode = None
            self._closing = episode, self._execution(self._close(running))
        try:
            await asyncio.shield(self._closing[1])
        except EnvironmentFault as fault:
            raise _refusal(fault) from fault

    async def stop(self, grace: float) -> None:
        """Ends the episode and lets the phone go. A call in flight gets `grace` seconds, then it is given up; letting
        go gets as many."""
        self._stopping = True
        self._episode = None
        for cancel in (False, True):
            executions = list(self._executions)
            for execution in executions:
                if cancel:
                    execution.cancel()
            if executions:
                await asyncio.wait(executions, timeout=grace)
        if self._holding is not None:
            try:
                async with asyncio.timeout(grace):
                    await self._end_quietly(self._holding)
            except TimeoutError:
                log.warning("%s was not let go within %g s", self.name, grace)

    # --- what the phone executes, one call after another ---

    async def _open(self, new: _Episode, before: _Episode | None) -> bytes:
        async with self._phone:
            if before is not None:
                await self._end_quietly(before)
            self._current(new)
            new.instance = await self._on_phone(new, "health", self._deadlines.health, self._asked())
            observation = await self._on_phone(new, "reset", self._deadlines.reset, self._connected(new))
            return self._encoded(new, "reset", StepResult(observation))

    async def _connected(self, new: _Episode) -> Observation:
        new.environment = self._connect()
        self._holding = new
        return await new.environment.reset(new.task)

    async def _step(self, running: _Episode, index: int, action: Action) -> bytes:
        async with self._phone:
            environment = self._environment(running)
            step = environment.step(action, index)
            try:
                result = await self._on_phone(running, f"step {index}", self._deadlines.step, step)
            except UnsupportedAction:
                running.steps.pop()
                raise
            body = self._encoded(running, f"step {index}", result)
            _forget_oldest(running.steps, len(body))
            return body

    def _encoded(self, running: _Episode, call: str, result: StepResult) -> bytes:
        """What can't be written (half of a pair of surrogates in a text of the phone's) ends the episode as a fault."""
        try:
            return encode_step(result, running.instance)
        except ValueError as error:  # pydantic's is one
            running.fault = EnvironmentFault(f"{self.name}: {call}: its answer can't be written: {error!s:.200}")
            raise running.fault from error

    async def _evaluate(self, running: _Episode) -> Score:
        async with self._phone:
            environment = self._environment(running)
            return await self._on_phone(running, "evaluate", self._deadlines.evaluate, environment.evaluate())

    async def _close(self, running: _Episode) -> None:
        async with self._phone:
            await self._end(running)

    async def _end(self, running: _Episode) -> None:
        environment, running.environment = running.environment, None
        if environment is not None:
            self._holding = None
            await self._within("close", self._deadlines.reset, environment.close())

    async def _end_quietly(self, running: _Episode) -> None:
        """Whether the phone is well shows at its next reset."""
        try:
            await self._end(running)
        except EnvironmentFault as fault:
            log.warning("the end of episode %s: %s", running.id, fault)

    async def _asked(self) -> str:
        """The instance, after the server behind it was asked for its identity."""
        behind = await self._within("health", self._deadlines.health, self._probe())
        if behind != self._behind:
            before, self._behind = self._behind, behind
            running = self._episode
            if running is not None and running.instance and running.fault is None:
                what = f"the server behind the bridge is {behind!r} now, was {before!r}: the episode is lost"
                running.fault = EnvironmentFault(f"{self.name}: {what}")
        return self.instance

    async def _on_phone(self, running: _Episode, call: str, seconds: float, work: Awaitable[T]) -> T:
        """A call of an episode: what goes wrong with it ends the episode."""
        fault: EnvironmentFault | None = EnvironmentFault(f"{self.name}: {call}: broken off; the bridge's log says why")
        try:
            answer = await self._within(call, seconds, work)
            fault = None
            return answer
        except UnsupportedAction:
            fault = None
            raise
        except EnvironmentFault as error:
            fault = error
            raise
        finally:
            running.fault = running.fault or fault

    async def _within(self, call: str, seconds: float, work: Awaitable[T]) -> T:
        limit = 2 * seconds + _MARGIN
        try:
            async with asyncio.timeout(limit):
                return await work
        except TimeoutError as error:
            raise EnvironmentFault(f"{self.name}: {call}: no answer within {limit:g} s", Reason.DEADLINE) from error

    # --- whose call it is ---

    def _running(self, episode: str) -> _Episode:
        if self._stopping:
            raise Refused(503, "the bridge is stopping")
        if self._episode is None:
            raise Refused(409, f"no episode is running here, so {episode!r} isn't; start one with /reset")
        if self._episode.id != episode:
            raise Refused(
                409, f"episode {episode!r} doesn't hold this phone, {self._episode.id!r} does; start one with /reset"
            )
        return self._episode

    def _ready(self, running: _Episode, call: str) -> None:
        """Refuses a new call of an episode that is over, or whose last call is being executed."""
        if executing := running.executing():
            raise Refused(409, f"{call} of episode {running.id!r} comes too early: {executing} is being executed")
        if running.fault is not None:
            raise Refused(
                503, f"episode {running.id!r} is over, start another with /reset: {running.fault}", running.fault.reason
            )

    def _current(self, running: _Episode) -> None:
        """Asked again when it is its turn: another client may have started an episode meanwhile."""
        if self._episode is not running:
            raise Refused(409, f"episode {running.id!r} is over: the phone was reset or closed meanwhile")

    def _environment(self, running: _Episode) -> Environment:
        self._current(running)
        assert running.environment is not None
        return running.environment

    def _retire(self, running: _Episode | None) -> None:
        if running is not None:
            self._past[running.id] = None
            if len(self._past) > _MAX_PAST:
                del self._past[next(iter(self._past))]

    def _execution(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Goes on when no caller waits for it any more."""
        execution = asyncio.get_running_loop().create_task(work)
        self._executions.add(execution)
        execution.add_done_callback(self._executed)
        return execution

    def _executed(self, execution: asyncio.Task[Any]) -> None:
        self._executions.discard(execution)
        error = None if execution.cancelled() else execution.exception()
        if error is not None and not isinstance(error, EnvironmentFault | UnsupportedAction | Refused):
            log.error("%s: a failure of our own", self.name, exc_info=error)

    async def _answer(self, running: _Episode, execution: asyncio.Task[T]) -> T:
        """What the execution gives, to a caller that still holds the phone by then."""
        try:
            answer = await asyncio.shield(execution)
        except EnvironmentFault as fault:
            self._current(running)
            raise _refusal(fault) from fault
        except UnsupportedAction as error:
            raise Refused(422, f"{self.name}: {error}", UNSUPPORTED_ACTION) from error
        except asyncio.CancelledError:
            if execution.cancelled():
                raise Refused(503, "the bridge is stopping") from None
            raise
        self._current(running)
        return answer


def _forget_oldest(steps: list[asyncio.Task[bytes] | None], size: int) -> None:
    """Keeps the newest answers within `MAX_STORED` bytes, of which the one that is about to be given takes `size`."""
    for index in range(len(steps) - 2, -1, -1):
        stored = steps[index]
        if stored is None:
            return
        size += len(stored.result())
        if size > MAX_STORED:
            steps[: index + 1] = [None] * (index + 1)
            return


def _refusal(fault: EnvironmentFault) -> Refused:
    status = 404 if isinstance(fault, UnknownTask) else _STATUS.get(fault.reason, 502)
    return Refused(status, str(fault), fault.reason)
