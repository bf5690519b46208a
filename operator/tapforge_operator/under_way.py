"""Calls that may take longer than the pass that began them.

Promises:
1. What is under way is known by its key; nobody begins it a second time.
2. A pass waits as long as calls of its own end, until no more of them are under way than may go on into the next one.
   Calls of which none ends for `_STANDSTILL_SECONDS` go on too; the end of what went on is reported (`ended`), and
   what it raised comes out of the next `end_pass`.
3. After `end` nothing is under way any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterator
from typing import Any, Final, Generic, TypeVar

_STANDSTILL_SECONDS: Final = 1.0

K = TypeVar("K", bound=Hashable)


class UnderWay(Generic[K]):
    def __init__(self, ended: Callable[[], None]):
        """`ended` is called when a call ends after its pass."""
        self._told = ended
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

    def begin(self, key: K, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[key] = task
        self._fresh.add(task)
        task.add_done_callback(lambda task: self._end_of(key, task))
        return task

    async def end_pass(self, pending: int = 0) -> None:
        """Waits until at most `pending` calls of the pass are under way, or none of them ends any more. Raises what any
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
        for error in raised:
            raise error

    async def end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end_of(self, key: K, task: asyncio.Task[Any]) -> None:
        del self._tasks[key]
        self._moved.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._raised.append(error)
        if task in self._fresh:
            self._fresh.remove(task)
        elif not task.cancelled():
            self._told()
