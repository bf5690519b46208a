"""Episodes of a fixed list of tasks, `repeats` of each: evaluation. Pure; the same re-run rule as in groups.

Every place ends with exactly one record: a valid one, or the last invalid one when all re-runs broke. So success can be
given over valid and over attempted episodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tapforge_envs.protocol import Reason, Task

from ..attempt import Attempt, seed_of
from ..records import EpisodeRecord
from .groups import MAX_ISSUES


class EvaluationQueue:
    def __init__(self, tasks: Sequence[Task], repeats: int, *, max_reruns: int, seed: int, prefix: str):
        if repeats < 1:
            raise ValueError(f"repeats is {repeats}: every task is played at least once")
        self._max_reruns = max_reruns
        self._seed = seed
        self._results: list[EpisodeRecord | None] = [None] * (len(tasks) * repeats)
        self.reruns = 0
        self._pending = deque(
            Attempt(
                group=f"{prefix}{number:06d}",
                order=number,
                member=repeat,
                rerun=0,
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

    def next_attempt(self) -> Attempt | None:
        return self._pending.popleft() if self._pending else None

    def withdraw(self, attempt: Attempt) -> None:
        """The attempt never got a slot: it is the next one again."""
        self._pending.appendleft(attempt)

    def played(self, attempt: Attempt, record: EpisodeRecord) -> bool:
        """It awaits its rewards."""
        return True

    def ended(self, attempt: Attempt, record: EpisodeRecord, phone_seconds: float = 0.0) -> None:
        invalid = record.outcome is not None and not record.valid
        rerun = attempt.rerun + invalid
        if (
            record.valid
            or record.reason is Reason.VERDICT_MISSING
            or rerun > self._max_reruns
            or attempt.issue + 1 >= MAX_ISSUES
        ):
            self._results[attempt.order * self._repeats + attempt.member] = record
            return
        self.reruns += invalid
        self._pending.append(
            Attempt(
                group=attempt.group,
                order=attempt.order,
                member=attempt.member,
                rerun=rerun,
                issue=attempt.issue + 1,
                task=attempt.task,
                seed=seed_of(self._seed, "fixed", attempt.task.key, attempt.member, rerun),
                avoid=attempt.avoid | {record.slot} if invalid else attempt.avoid,
            )
        )

    def results(self) -> list[EpisodeRecord]:
        """In the order of the tasks, the repeats of a task side by side."""
        return [r for r in self._results if r is not None]
