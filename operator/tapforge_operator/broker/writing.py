"""The broker's tasks, found by what they write: the slot's UID, and the id of the claim that a write ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

Task = asyncio.Task[None]


class Writing:
    def __init__(self, ended: Callable[[BaseException | None], None]):
        """`ended` is called when a task ends by itself, with what it raised."""
        self._told = ended
        self._keys: dict[Task, tuple[str, ...]] = {}
        self._tasks: dict[str, set[Task]] = {}

    def begin(self, work: Coroutine[Any, Any, None], *keys: str) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._keys[task] = keys
        for key in keys:
            self._tasks.setdefault(key, set()).add(task)
        task.add_done_callback(self._ended)

    def of(self, keys: Iterable[str]) -> set[Task]:
        """Those under way for any of these slots or claims."""
        return {task for key in keys for task in self._tasks.get(key, ())}

    async def wait(self, keys: set[str], seconds: float) -> bool:
        """Until nothing is under way for them, also nothing that was begun meanwhile. False: the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while tasks := self.of(keys):
                    await asyncio.wait(tasks)
        except TimeoutError:
            return False
        return True

    def cancel(self) -> None:
        for task in self._keys:
            task.cancel()

    async def ended(self) -> None:
        await asyncio.gather(*self._keys, return_exceptions=True)

    def _ended(self, task: Task) -> None:
        for key in self._keys.pop(task):
            self._tasks[key].discard(task)
            if not self._tasks[key]:
                del self._tasks[key]
        if not task.cancelled():
            self._told(task.exception())
