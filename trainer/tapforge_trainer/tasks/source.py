"""The order in which tasks are practised: seeded, endless, resumable.

The n-th task depends on the seed and on n alone, so the state of a source is one number. A quarantined task is skipped:
the source goes on to the next number, and the order of all other tasks stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Protocol

from tapforge_envs.protocol import Task

#: quarantined tasks in a row after which a source says that nothing is left
_PATIENCE = 10_000


class TaskError(ValueError):
    """Tasks can't be had as asked. The message names the file and line, or the suite, and the remedy."""


class TaskSet(Protocol):
    """Tasks without an end: the same (seed, index) gives the same task."""

    def sample(self, seed: int, index: int) -> Task: ...


@dataclass(frozen=True, slots=True)
class FixedTasks:
    """A finite list as a `TaskSet`: each pass goes through all of it in a new seeded order."""

    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise TaskError("a list of tasks needs at least one")

    def sample(self, seed: int, index: int) -> Task:
        around, place = divmod(index, len(self.tasks))
        return self.tasks[_order(len(self.tasks), seed, around)[place]]


@lru_cache(maxsize=4)
def _order(count: int, seed: int, around: int) -> tuple[int, ...]:
    order = list(range(count))
    Random(f"{seed}/{around}").shuffle(order)
    return tuple(order)


@dataclass(frozen=True, slots=True)
class Shortened:
    """The same tasks, with at most `most` steps each."""

    tasks: TaskSet
    most: int

    def sample(self, seed: int, index: int) -> Task:
        return _shortened(self.tasks.sample(seed, index), self.most)


def shortened(tasks: TaskSet, most: int | None) -> TaskSet:
    """`most`: None bounds nothing."""
    if most is None:
        return tasks
    if isinstance(tasks, FixedTasks):
        return FixedTasks(tuple(_shortened(task, most) for task in tasks.tasks))
    return Shortened(tasks, most)


def _shortened(task: Task, most: int) -> Task:
    return task if task.max_steps <= most else task.model_copy(update={"max_steps": most})


def at_most(tasks: TaskSet, seed: int, count: int) -> FixedTasks:
    """The first `count` different tasks of a set, for `maxTasks`. Fewer when the set has no more, or seems to."""
    found: dict[str, Task] = {}
    every = len(tasks.tasks) if isinstance(tasks, FixedTasks) else None  # one pass has all of them
    for index in range(max(1000, 50 * count) if every is None else every):
        task = tasks.sample(seed, index)
        found.setdefault(task.key, task)
        if len(found) == count:
            break
    return FixedTasks(tuple(found.values()))


class TaskSource:
    """Hands out tasks one by one. `state` is what a checkpoint keeps."""

    def __init__(self, tasks: TaskSet, seed: int, state: int = 0):
        self._tasks = tasks
        self._seed = seed
        self._next = state
        #: task key -> why it is not practised any more
        self.quarantined: dict[str, str] = {}

    @property
    def state(self) -> int:
        return self._next

    def next(self) -> Task:
        for _ in range(_PATIENCE):
            task = self._tasks.sample(self._seed, self._next)
            self._next += 1
            if task.key not in self.quarantined:
                return task
        some = "; ".join(f"{key}: {why}" for key, why in list(self.quarantined.items())[:3])
        raise TaskError(f"no task is left: the last {_PATIENCE} drawn are all in quarantine, such as {some}")

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks: for evaluation."""
        return [self.next() for _ in range(count)]

    def quarantine(self, key: str, why: str) -> None:
        self.quarantined.setdefault(key, why)
