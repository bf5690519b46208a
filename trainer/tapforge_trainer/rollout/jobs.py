"""Attempts under way, from the wait for a slot to the return of its lease: how many there may be, and which are stopped
or give their place in the queue up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tapforge_envs.protocol import Reason

from ..attempt import Attempt, AttemptRequest, Player
from .evaluation_queue import EvaluationQueue
from .groups import GroupBuffer


@dataclass(slots=True, eq=False)
class Job:
    """An attempt under way."""

    request: AttemptRequest
    source: GroupBuffer | EvaluationQueue
    #: the slot that is leased; "" while waiting for one
    slot: str = ""
    #: the engine that it asks
    engine: int | None = None
    task: asyncio.Task[None] | None = field(default=None)

    @property
    def attempt(self) -> Attempt:
        return self.request.attempt

    @property
    def picky(self) -> bool:
        """Whether it waits for another slot than one that it broke: then it leaves its place to others."""
        return bool(self.attempt.avoid) and not self.slot


class Jobs:
    """Those of a scheduler."""

    def __init__(self, player: Player, concurrency: int | None):
        """`concurrency`: None: one for each slot."""
        self._player, self._concurrency = player, concurrency
        self._jobs: set[Job] = set()

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def running(self) -> int:
        return sum(1 for job in self._jobs if job.slot)

    def add(self, job: Job) -> None:
        self._jobs.add(job)

    def ended(self, job: Job) -> None:
        self._jobs.discard(job)

    def room(self, usable: int) -> int:
        """How many more may begin; below 0: that many too many. Slots that left or are in quarantine are not `usable`,
        but one attempt always waits: it is the one that raises when no slot is left."""
        usable = max(1, usable)
        limit = min(self._concurrency or usable, usable) + sum(job.picky for job in self._jobs)
        return limit - len(self._jobs)

    def shrink(self, usable: int) -> None:
        """The last ones that wait give their places up, as far as there are too many."""
        waiting = [job for job in self._jobs if not job.slot and not job.attempt.avoid]
        waiting.sort(key=lambda job: (job.attempt.order, job.attempt.member), reverse=True)
        self._withdraw(waiting[: max(0, -self.room(usable))])

    def stop(self, which: Callable[[Job], bool], reason: Reason = Reason.CANCELLED) -> None:
        hit = [job for job in self._jobs if which(job)]
        self._withdraw([job for job in hit if not job.slot])
        for job in hit:
            if job.slot:
                self._player.stop(job.attempt.episode, reason)

    def _withdraw(self, waiting: Sequence[Job]) -> None:
        """Attempts without a slot go back to where they came from, as if they had never been issued."""
        for job in waiting:
            assert job.task is not None and not job.slot
            job.task.cancel()
            self._jobs.discard(job)
            job.source.withdraw(job.attempt)
