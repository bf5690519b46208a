"""What is asked of a run from outside while it is under way: to stop, and when it is to end by itself.

- The first order to stop counts. The loop obeys `stop`: it finishes its update and saves; whatever else is under way is
  given up (`Interrupted`).
- An order with a grace (seconds) is carried out within it: when the grace is over, the work is `abandoned`, that is
  cancelled where it stands. What is lost then is what was done since the last checkpoint. The shortest grace counts.
- `superseded` abandons at once: somebody else goes on with the run, and nothing may be written any more.
- Ctrl-C has no grace; a second one leaves at once. SIGTERM has one, however often it is sent: whoever stops a group of
  processes may reach the same one twice.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final, TypeVar

from tapforge_api.learning import Stop
from tapforge_api.progress import EXIT_STOPPED

#: seconds from a SIGTERM until the work is given up
GRACE: Final = 60.0
#: stopped by Ctrl-C: 128 + SIGINT, as shells have it
EXIT_INTERRUPTED: Final = 130
#: how long abandoned work may take to clean up behind itself, seconds
_CLEANUP: Final = 10.0

T = TypeVar("T")


class Interrupted(Exception):
    """The run was asked to stop. What was under way is given up; started again, it goes on from its last checkpoint."""


class Why(StrEnum):
    """Who asked for a stop."""

    INTERRUPT = "Ctrl-C"
    TERMINATE = "SIGTERM"
    SUSPEND = "suspend"
    DEADLINE = "deadline"
    SUPERSEDED = "superseded"


class Orders:
    """Belongs to one event loop. `grace`: of a SIGTERM, seconds."""

    def __init__(self, grace: float = GRACE) -> None:
        self.grace = grace
        #: set when the run shall end
        self.stop = asyncio.Event()
        #: set when it shall end now
        self.abandoned = asyncio.Event()
        self.why: Why | None = None
        #: spec.stop as it is now; None: as the run's file says
        self.limits: Stop | None = None
        self._until: float | None = None

    def obey(self, why: Why, grace: float | None = None) -> None:
        """`grace`: how long the stop may take from now on, seconds; None: as long as it takes."""
        if self.why is None or why is Why.SUPERSEDED:
            self.why = why
        self.stop.set()
        if why is Why.SUPERSEDED:
            self.abandoned.set()
        elif grace is not None:
            self._give_up_after(grace)

    def _give_up_after(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if self._until is None or until < self._until:
            self._until = until
            loop.call_at(until, self.abandoned.set)

    @property
    def code(self) -> int:
        """What a run that stopped exits with."""
        return EXIT_INTERRUPTED if self.why in (None, Why.INTERRUPT) else EXIT_STOPPED


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when `stop` is set first: then `Interrupted`."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Interrupted("stopped")
        return task.result()
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


async def under_orders(
    orders: Orders, work: Coroutine[Any, Any, int], abandoning: Callable[[], None] = lambda: None
) -> int:
    """The exit code of `work`; of work that was interrupted or abandoned, the orders'. `abandoning` is called before it
    is cancelled, for whoever wants to make sure that it ends."""
    task, given_up = asyncio.create_task(work), asyncio.create_task(orders.abandoned.wait())
    waits: set[asyncio.Task[Any]] = {task, given_up}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            abandoning()
            task.cancel()
            await asyncio.wait({task}, timeout=_CLEANUP)
            if not task.done() or task.cancelled() or task.exception() is not None:
                return orders.code  # what breaks while it is cut off is nobody's fault
        return task.result()
    except Interrupted:
        return orders.code
    finally:
        given_up.cancel()
        if not orders.abandoned.is_set():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextmanager
def listening(orders: Orders) -> Iterator[None]:
    """SIGINT and SIGTERM are orders until the block ends."""
    running = asyncio.get_running_loop()

    def interrupt() -> None:
        orders.obey(Why.INTERRUPT)
        running.remove_signal_handler(signal.SIGINT)  # the next one is left to Python

    def terminate() -> None:
        signal.alarm(0)  # Ray sets one while it starts, to abort the process soon
        orders.obey(Why.TERMINATE, orders.grace)

    running.add_signal_handler(signal.SIGINT, interrupt)
    running.add_signal_handler(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        for name in (signal.SIGINT, signal.SIGTERM):
            running.remove_signal_handler(name)
