"""What a run knows of how hard its tasks are: successes and attempts of each task and each template, and which tasks
pause because they taught nothing.

Promises:
- Only valid episodes count. What an update takes in is counted once, when the update is over, in issue order; so the
  memory is a function of the results alone and the order in which phones finished changes nothing.
- Results get old: each counts half after `half_life` updates. A task that was not played for long is as good as
  unknown, and is tried again.
- `state` is plain JSON from which a memory goes on; numbers that a later release adds are left out.

Pure, without a clock: updates are the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tapforge_envs.protocol import Outcome, Task

from ..records import GroupRecord

#: tasks that are remembered; of suites without an end the least recent ones are forgotten
MAX_TASKS = 10_000
#: attempts that the guess before any result counts as: two, as with Laplace's rule
_PRIOR = 2.0
#: valid episodes without which a group says nothing of whether a task always fails
_COMPARED = 2


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What a group came to. `order`: its issue order; `successes` of `valid` episodes."""

    order: int
    task: str
    template: str
    successes: int
    valid: int

    @staticmethod
    def of(group: GroupRecord) -> GroupResult:
        valid = [episode for episode in group.episodes if episode.valid]
        won = sum(episode.outcome is Outcome.SUCCESS for episode in valid)
        return GroupResult(group.order, group.task.key, group.task.template, won, len(valid))


@dataclass(frozen=True, slots=True)
class CooldownRule:
    """Groups in a row that all failed, or all succeeded, after which a task pauses for so many updates; None: never."""

    after_failed: int | None = None
    after_solved: int | None = None
    updates: int = 20

    def due(self, streak: int) -> bool:
        failed = self.after_failed is not None and streak <= -self.after_failed
        return failed or (self.after_solved is not None and streak >= self.after_solved)


@dataclass(slots=True)
class TaskRecord:
    """Of a task or of a template."""

    #: decayed up to `update`
    successes: float = 0.0
    attempts: float = 0.0
    #: of the last result
    update: int = 0
    #: all there ever were
    successes_total: int = 0
    attempts_total: int = 0
    #: last groups in a row in which all succeeded; negative: in which all failed
    streak: int = 0
    #: first update at which it is drawn again; 0: it does not pause
    pauses_until: int = 0

    def decay(self, update: int, half_life: float) -> None:
        """Brings both sums to a later update."""
        factor = 0.5 ** ((update - self.update) / half_life)
        self.successes, self.attempts, self.update = self.successes * factor, self.attempts * factor, update

    def count(self, successes: int, valid: int) -> None:
        self.successes += successes
        self.attempts += valid
        self.successes_total += successes
        self.attempts_total += valid

    def as_list(self) -> list[float]:
        return [getattr(self, name) for name in self.__slots__]


@dataclass(slots=True)
class DifficultyMemory:
    """Read by samplers; written by `take` alone."""

    half_life: float = 50.0
    cooldown: CooldownRule | None = None
    #: updates that are over
    update: int = 0
    tasks: dict[str, TaskRecord] = field(default_factory=dict)
    templates: dict[str, TaskRecord] = field(default_factory=dict)
    #: pauses that began, and tasks that were played again after one
    paused: int = 0
    retried: int = 0

    # --- what samplers ask ---

    def rate(self, task: Task) -> float:
        """Estimate of the task's success rate, strictly between 0 and 1: its decayed successes over attempts, drawn
        towards the template's rate as by two attempts, and this towards one half. A task that was never played has its
        template's rate; a template that was never played has one half."""
        template = self._shrunk(self.templates.get(task.template), 0.5)
        return self._shrunk(self.tasks.get(task.key), template)

    def attempts(self, task: Task) -> float:
        """Decayed attempts at this very task."""
        record = self.tasks.get(task.key)
        return 0.0 if record is None else record.attempts * self._left(record)

    def age(self, task: Task) -> int | None:
        """Updates since its last result; None: it has none."""
        record = self.tasks.get(task.key)
        return None if record is None else self.update - record.update

    def pauses(self, task: Task) -> bool:
        record = self.tasks.get(task.key)
        return record is not None and record.pauses_until > self.update

    @property
    def pausing(self) -> int:
        """Tasks that pause now."""
        return sum(record.pauses_until > self.update for record in self.tasks.values())

    def _shrunk(self, record: TaskRecord | None, prior: float) -> float:
        if record is None:
            return prior
        left = self._left(record)
        return (record.successes * left + _PRIOR * prior) / (record.attempts * left + _PRIOR)

    def _left(self, record: TaskRecord) -> float:
        return 0.5 ** ((self.update - record.update) / self.half_life)

    # --- results ---

    def take(self, update: int, results: Iterable[GroupResult]) -> None:
        """Counts what update number `update` took in."""
        self.update = update
        for result in sorted(results, key=lambda one: one.order):
            if not result.valid:
                continue
            # Taken out and put back: the least recent ones come first.
            record = self.tasks.pop(result.task, None) or TaskRecord()
            template = self.templates.setdefault(result.template, TaskRecord())
            self.tasks[result.task] = record
            for one in (record, template):
                one.decay(update, self.half_life)
                one.count(result.successes, result.valid)
            self._cool(record, result)
        while len(self.tasks) > MAX_TASKS:
            del self.tasks[next(iter(self.tasks))]

    def _cool(self, record: TaskRecord, result: GroupResult) -> None:
        if result.valid < _COMPARED:
            return
        if 0 < result.successes < result.valid:
            record.streak = 0
        elif result.successes:
            record.streak = max(record.streak, 0) + 1
        else:
            record.streak = min(record.streak, 0) - 1
        if 0 < record.pauses_until <= self.update:
            self.retried += 1
        before, record.pauses_until = record.pauses_until, 0
        if self.cooldown is not None and self.cooldown.due(record.streak):
            record.pauses_until = self.update + self.cooldown.updates
            # What was under way when the pause began only moves its end.
            self.paused += before <= self.update

    # --- checkpoints ---

    @property
    def state(self) -> dict[str, Any]:
        return {
            "update": self.update,
            "tasks": {key: record.as_list() for key, record in self.tasks.items()},
            "templates": {name: record.as_list() for name, record in self.templates.items()},
            "paused": self.paused,
            "retried": self.retried,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """From `state`; an empty one, as of a checkpoint of an earlier release, is a memory without results."""
        self.update = state.get("update", 0)
        self.tasks = _records(state.get("tasks", {}))
        self.templates = _records(state.get("templates", {}))
        self.paused, self.retried = state.get("paused", 0), state.get("retried", 0)


def _records(state: Mapping[str, list[Any]]) -> dict[str, TaskRecord]:
    known = len(TaskRecord.__slots__)
    return {name: TaskRecord(*numbers[:known]) for name, numbers in state.items()}
