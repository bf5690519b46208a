"""Episodes of a fixed list of tasks, `repeats` of each: evaluation. Pure; the same re-run rule as in groups.

Every place ends with exactly one record: a valid one, or the last invalid one when all re-runs broke. So success can be
given over valid and over attempted episodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tapforge_envs.protocol import Task

from ..records import EpisodeRecord
from .groups import MAX_ISSUES
from .work import Work, seed_of


class FixedBook:
    def __init__(self, tasks: Sequence[Task], repeats: int, *, max_reruns: int, seed: int, prefix: str):
        if repeats < 1:
            raise ValueError(f"repeats is {repeats}: every task is played at least once")
        self._max_reruns = max_reruns
        self._seed = seed
        self._results: list[EpisodeRecord | None] = [None] * (len(tasks) * repeats)
        self.reruns = 0
        self._pending = deque(
            Work(
                group=f"{prefix}{number:06d}",
                order=number,
                member=repeat,
                attempt=0,
                issue=0,
                task=task,
                seed=seed_of(seed, "fixed", task.key, repeat, 0),
            )
            for number, task in enumerate(tasks)
            for repeat in range(repeats)
        )
        self._repeats = repeats

    @property
    def done(self) -> bool:
        return all(r is not None for r in self._results)

    def next_work(self) -> Work | None:
        return self._pending.popleft() if self._pending else None

    def withdraw(self, work: Work) -> None:
        """The attempt never got a slot: it is the next one again."""
        self._pending.appendleft(work)

    def played(self, work: Work, record: EpisodeRecord, phone_seconds: float = 0.0) -> None:
        invalid = record.outcome is not None and not record.valid
        attempt = work.attempt + invalid
        if record.valid or attempt > self._max_reruns or work.issue + 1 >= MAX_ISSUES:
            self._results[work.order * self._repeats + work.member] = record
            return
        self.reruns += invalid
        self._pending.append(
            Work(
                group=work.group,
                order=work.order,
                member=work.member,
                attempt=attempt,
                issue=work.issue + 1,
                task=work.task,
                seed=seed_of(self._seed, "fixed", work.task.key, work.member, attempt),
                avoid=work.avoid | {record.slot} if invalid else work.avoid,
            )
        )

    def results(self) -> list[EpisodeRecord]:
        """In the order of the tasks, the repeats of a task side by side."""
        return [r for r in self._results if r is not None]
