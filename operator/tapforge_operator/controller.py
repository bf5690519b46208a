"""The work queue of both kinds: which object is reconciled when, and what happens when that fails.

Promises:
1. One task per object, so that no two passes of an object overlap. News during a pass cause one more pass, after it.
2. A pass that fails with an `ApiError` is repeated after 1 s, 2 s, 4 s, ... up to a minute, or when its object changes,
   but not within a second. One object's trouble delays no other object.
3. A controller that breaks in any other way, which is a bug, is dropped with all that it remembers. The object rests,
   whatever changes, and then gets a new one: after 10 s, 20 s, 40 s, ... up to five minutes, until a pass ends well.
4. Nothing runs before `start`, after `stop`, or while this process does not lead.
5. Calls that outlast a pass (`InFlight`) are known by their key, and end with their controller.

A controller observes, plans and applies; it has no loop, no pause and no restart of its own. Times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from tapforge_operator.kube.client import ApiError
from tapforge_operator.kube.leaderelection import NotLeading
from tapforge_operator.observability.logging import ref

log = logging.getLogger(__name__)

_FIRST_BACKOFF: Final = 1.0
_LONGEST_BACKOFF: Final = 60.0
#: between a pass and the next one, even when the first one asked for the second
_YIELD_SECONDS: Final = 0.01
#: for which an object rests whose controller broke: the first time, and at most
_RESTART_SECONDS: Final = 10.0
_LONGEST_REST: Final = 300.0
_STANDSTILL_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Requeue:
    """When an object is reconciled again."""

    #: if nothing changes until then
    after: float
    #: at the earliest, whatever changes: a storm of events costs a pass now and then, not one each
    pause: float = 0.1


class Controller(Protocol):
    """That of one object."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    async def reconcile(self) -> Requeue | None:
        """One pass. None: the object is gone. Raises ApiError for what should be tried again, and NotLeading."""

    async def close(self) -> None:
        """Nothing is written any more afterwards."""


#: called with every pass: the object as namespace/name, how long it took, and what it failed with
Measure = Callable[[str, float, str | None], None]


class WorkQueue:
    """The controllers of all objects of a kind."""

    def __init__(
        self,
        kind: str,
        begin: Callable[[str], Controller | None],
        leads: Callable[[], bool],
        measure: Measure | None = None,
        forget: Callable[[str], object] | None = None,
    ):
        """`begin` makes the controller of the object with that UID; None where there is none. `forget` is called with
        an object, as namespace/name, that went while it rested after a crash: no controller is left to close."""
        self._kind = kind
        self._begin = begin
        self._leads = leads
        self._measure = measure
        self._forget = forget
        self._loops: dict[str, _Loop] = {}
        #: controllers that broke in a row, and namespace/name, by object
        self._crashes: dict[str, tuple[int, str]] = {}
        #: ends of the rests after that
        self._resting: dict[str, asyncio.TimerHandle] = {}
        self._started = False

    def start(self) -> None:
        self._started = True

    async def stop(self) -> None:
        """May be called again."""
        self._started = False
        for timer in self._resting.values():
            timer.cancel()
        self._resting.clear()
        self._crashes.clear()
        tasks = [loop.task for loop in self._loops.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self, uid: str) -> None:
        """Something happened to the object."""
        if not (self._started and self._leads()) or uid in self._resting:
            return
        if uid not in self._loops:
            if (controller := self._begin(uid)) is None:
                if (crashed := self._crashes.pop(uid, None)) is not None and self._forget is not None:
                    self._forget(crashed[1])
                return
            done = lambda: self._crashes.pop(uid, None)  # noqa: E731
            self._loops[uid] = loop = _Loop(self._kind, uid, controller, self._leads, done, self._measure)
            loop.task.add_done_callback(lambda _: self._ended(uid, loop))
        self._loops[uid].news.set()

    def _ended(self, uid: str, loop: _Loop) -> None:
        del self._loops[uid]
        if loop.task.cancelled():
            return
        if (error := loop.task.exception()) is not None:
            self._rest(uid, loop, error)
        elif loop.news.is_set():  # the object was gone and is back
            self.wake(uid)

    def _rest(self, uid: str, loop: _Loop, error: BaseException) -> None:
        crashes = self._crashes.get(uid, (0, ""))[0] + 1
        self._crashes[uid] = crashes, loop.key
        rest = min(_LONGEST_REST, _RESTART_SECONDS * 2.0 ** min(crashes - 1, 10))
        text = "the controller of %s %s broke (%d in a row); another one begins in %g s"
        log.error(text, self._kind, loop.key, crashes, rest, exc_info=error, extra=loop.ref)
        if self._measure is not None:
            self._measure(loop.key, 0.0, "Crash")
        if self._started:
            self._resting[uid] = asyncio.get_running_loop().call_later(rest, self._rested, uid)

    def _rested(self, uid: str) -> None:
        del self._resting[uid]
        self.wake(uid)


class _Loop:
    """The passes of one object, one after the other."""

    def __init__(
        self,
        kind: str,
        uid: str,
        controller: Controller,
        leads: Callable[[], bool],
        done: Callable[[], object],
        measure: Measure | None,
    ):
        """`done` is called after each pass that ended well."""
        self.key = f"{controller.namespace}/{controller.name}"
        self.ref = ref(kind, controller.namespace, controller.name, uid)
        self.news = asyncio.Event()
        self._kind = kind
        self._controller = controller
        self._leads = leads
        self._done = done
        self._measure = measure
        self.task = asyncio.create_task(self._run(), name=f"{kind} {self.key}")

    async def _run(self) -> None:
        try:
            await self._repeat()
        finally:
            await self._controller.close()

    async def _repeat(self) -> None:
        failures = 0
        while self._leads():
            self.news.clear()
            began, error = time.monotonic(), None
            try:
                again = await self._controller.reconcile()
                failures = 0
                self._done()
            except NotLeading:
                return
            except ApiError as trouble:
                wait = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2.0 ** min(failures, 10))
                failures += 1
                error, again = trouble.reason or str(trouble.status), Requeue(wait, pause=_FIRST_BACKOFF)
                text = "%s %s: %s; it is tried again in %.1f s"
                log.warning(text, self._kind, self.key, trouble, wait, extra=self.ref)
            if again is None:
                return
            if self._measure is not None:
                self._measure(self.key, time.monotonic() - began, error)
            await self._wait(again)

    async def _wait(self, again: Requeue) -> None:
        rest = max(_YIELD_SECONDS, min(again.after, again.pause))
        await asyncio.sleep(rest)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(again.after - rest):
                await self.news.wait()


def _all_of(errors: list[BaseException]) -> BaseException:
    """The one that decides how to go on: a bug before the end of the leadership, that before what is tried again."""
    if len(errors) == 1:
        return errors[0]
    if not all(isinstance(error, ApiError | NotLeading) for error in errors):
        return BaseExceptionGroup(f"{len(errors)} calls of one pass", errors)
    first = next((error for error in errors if isinstance(error, NotLeading)), errors[0])
    others = Counter(f"{e.status} {e.reason}" for e in errors if isinstance(e, ApiError) and e is not first)
    if others:
        log.warning("more calls of this pass failed: %s", ", ".join(f"{n} of {what}" for what, n in others.items()))
    return first


K = TypeVar("K", bound=Hashable)


class InFlight(Generic[K]):
    """Calls that may take longer than the pass that began them. None is begun twice while it is in flight.

    A pass waits as long as calls of its own end, until no more of them are in flight than may go on into the next one.
    Calls of which none ends for `_STANDSTILL_SECONDS` go on too; the end of what went on is reported (`ended`), and
    what it raised comes out of the next `end_pass`. No pass waits for one in the background, and its end is not
    reported. No error is lost behind another one: of several the rest is logged, or is raised with it."""

    def __init__(self, ended: Callable[[], None]):
        """`ended` is called when a call ends after its pass."""
        self._report = ended
        self._tasks: dict[K, asyncio.Task[Any]] = {}
        #: those of the present pass
        self._fresh: set[asyncio.Task[Any]] = set()
        #: something ended
        self._moved = asyncio.Event()
        self._raised: list[BaseException] = []
        #: number of the present pass
        self.turn = 0

    def __contains__(self, key: K) -> bool:
        return key in self._tasks

    def __iter__(self) -> Iterator[K]:
        return iter(self._tasks)

    def get(self, key: K) -> asyncio.Task[Any] | None:
        return self._tasks.get(key)

    def begin(self, key: K, work: Coroutine[Any, Any, Any], *, background: bool = False) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[key] = task
        if not background:
            self._fresh.add(task)
        task.add_done_callback(lambda task: self._end_of(key, task, background))
        return task

    async def end_pass(self, pending: int = 0) -> None:
        """Waits until at most `pending` calls of the pass are in flight, or none of them ends any more. Raises what any
        call raised, once, after that."""
        while len(self._fresh) > pending:
            self._moved.clear()
            try:
                async with asyncio.timeout(_STANDSTILL_SECONDS):
                    await self._moved.wait()
            except TimeoutError:
                break
        self._fresh.clear()
        self.turn += 1
        raised, self._raised = self._raised, []
        if raised:
            raise _all_of(raised)

    async def end(self) -> None:
        """Nothing is in flight any more afterwards."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end_of(self, key: K, task: asyncio.Task[Any], background: bool) -> None:
        del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._raised.append(error)
        if background:
            return
        self._moved.set()
        if task in self._fresh:
            self._fresh.remove(task)
        elif not task.cancelled():
            self._report()
