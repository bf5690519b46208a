"""The order in which tasks are practised: seeded, endless, resumable.

Each number has a task, which depends on the seed and the number alone. A source goes through the numbers; each task is
taken or passed over when its turn comes: quarantined and pausing ones are passed over, and of the others a sampler says
how likely they are taken. The order of those that are taken stays as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from random import Random
from typing import Any, Protocol

from tapforge_api.reading import read_record
from tapforge_envs.protocol import Task

from ..records import GroupRecord
from .memory import DifficultyMemory, GroupResult
from .samplers.sampler import Sampler

#: quarantined tasks in a row after which a source says that nothing is left
_PATIENCE = 10_000
#: tasks that are passed over in a row, after which the one with the largest weight is taken: some milliseconds
_TURNS = 1000


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
    """Hands out tasks one by one, and remembers what they came to.

    `state` and `practice` are what a checkpoint keeps. With the sampler `uniform` and without a cool-down, `state`
    alone decides what comes next. Else results do as well. So that the pace of phones doesn't matter, tasks are then
    drawn ahead: as many as may be under way at the beginning, and after each update as many as it took, with the memory
    of that moment. Only in the place of groups that were dropped are tasks drawn when they are needed.

    Results count when the update that learned from them is over. What came in after the last checkpoint is not in it:
    a run that is resumed plays these groups on, or again, and counts them when its next updates take them.
    """

    def __init__(
        self,
        tasks: TaskSet,
        seed: int,
        state: int = 0,
        *,
        sampler: Sampler | None = None,
        memory: DifficultyMemory | None = None,
        ahead: int = 0,
        practice: Mapping[str, Any] | None = None,
    ):
        """`sampler`: None is uniform. `ahead`: tasks that are drawn before the first result, unless `practice` has
        those of an earlier session."""
        self._tasks = tasks
        self._seed = seed
        self._next = state
        self.memory = memory or DifficultyMemory()
        self._sampler = sampler
        self._steered = sampler is not None or self.memory.cooldown is not None
        #: task key -> why it is not practised any more
        self.quarantined: dict[str, str] = {}
        #: of groups that were dropped, and that no update is past yet
        self._dropped: list[GroupResult] = []
        self._drawn: deque[Task] = deque()
        if practice:
            self.memory.restore(practice.get("memory", {}))
            self._dropped = [GroupResult(*values) for values in practice.get("dropped", ())]
            self._drawn.extend(read_record(Task, task) for task in practice.get("drawn", ()))
        else:
            self._draw_ahead(ahead)

    @property
    def state(self) -> int:
        return self._next

    @property
    def practice(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "memory": self.memory.state,
            "dropped": [list(astuple(result)) for result in self._dropped],
            "drawn": [task.model_dump() for task in self._drawn],
        }

    def next(self) -> Task:
        while self._drawn:
            task = self._drawn.popleft()
            if task.key not in self.quarantined:
                return task
        return self._draw()

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks: for evaluation."""
        return [self.next() for _ in range(count)]

    def quarantine(self, key: str, why: str) -> None:
        self.quarantined.setdefault(key, why)

    # --- results ---

    def dropped(self, group: GroupRecord) -> None:
        """A group that no update will learn from: it counts with the next update that takes a later one."""
        self._dropped.append(GroupResult.of(group))

    def learned(self, update: int, groups: Sequence[GroupRecord]) -> dict[str, tuple[int, int]]:
        """The update is over. Call it before there is room for further groups. Returns template -> (successes, valid
        episodes) of what it took in, groups included that it did not learn from."""
        last = max((group.order for group in groups), default=-1)
        passed = [result for result in self._dropped if result.order <= last]
        self._dropped = [result for result in self._dropped if result.order > last]
        results = [*map(GroupResult.of, groups), *passed]
        self.memory.take(update, results)
        self._draw_ahead(len(groups))
        templates: dict[str, tuple[int, int]] = {}
        for result in sorted(results, key=lambda one: one.template):
            won, played = templates.get(result.template, (0, 0))
            templates[result.template] = (won + result.successes, played + result.valid)
        return templates

    # --- drawing ---

    def _draw_ahead(self, count: int) -> None:
        if self._steered:
            self._drawn.extend(self._draw() for _ in range(count))

    def _draw(self) -> Task:
        best: tuple[float, Task] | None = None
        turns = 0
        for _ in range(_PATIENCE):
            place, task = self._next, self._tasks.sample(self._seed, self._next)
            self._next += 1
            if task.key in self.quarantined:
                continue
            weight = self._weight(task)
            if weight >= 1 or Random(f"take/{self._seed}/{place}").random() < weight:
                return task
            if best is None or weight > best[0]:
                best = weight, task
            turns += 1
            if turns == _TURNS:
                break
        if best is not None:
            return best[1]
        some = "; ".join(f"{key}: {why}" for key, why in list(self.quarantined.items())[:3])
        raise TaskError(f"no task is left: the last {_PATIENCE} drawn are all in quarantine, such as {some}")

    def _weight(self, task: Task) -> float:
        if not self._steered:
            return 1.0
        if self.memory.pauses(task):
            return 0.0
        return 1.0 if self._sampler is None else weight_of(self._sampler, task, self.memory)


def weight_of(sampler: Sampler, task: Task, memory: DifficultyMemory) -> float:
    """Raises TaskError for a sampler of another package that fails, or whose answer is not a probability."""
    name = type(sampler).__name__
    try:
        weight = float(sampler(task, memory))
    except Exception as error:
        raise TaskError(f"the sampler {name} failed at {task.key}: {error or type(error).__name__}") from error
    if not 0 <= weight <= 1:
        raise TaskError(f"the sampler {name} gave {task.key} {weight:g}; it has to be a probability from 0 to 1")
    return weight
