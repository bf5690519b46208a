"""A group under way: a place for each member, and what a checkpoint keeps of it."""

from __future__ import annotations

from dataclasses import dataclass

from tapforge_envs.protocol import Task

from ..attempt import Attempt
from ..records import EpisodeRecord, GroupRecord


@dataclass(frozen=True, slots=True)
class Resumed:
    """A group that was under way when a run was interrupted: finished members are kept, the others are played again.
    `awaiting`: members that were played to their end, and whose rewards are asked for again; `unjudged`: whose verdict
    is missing for good, so that their group goes on without them."""

    order: int
    task: Task
    version: int
    episodes: tuple[EpisodeRecord, ...]
    awaiting: tuple[EpisodeRecord, ...] = ()
    unjudged: tuple[EpisodeRecord, ...] = ()

    @property
    def played(self) -> tuple[EpisodeRecord, ...]:
        return (*self.episodes, *self.awaiting, *self.unjudged)


@dataclass(slots=True)
class Place:
    reruns: int = 0
    issue: int = 0
    running: Attempt | None = None
    record: EpisodeRecord | None = None
    #: played to its end by `running`, and awaiting its rewards
    played: EpisodeRecord | None = None
    lost: bool = False
    #: why it is lost, where the phone did well and no verdict came
    unjudged: EpisodeRecord | None = None
    #: that calls to phones took, of attempts that we didn't stop ourselves
    phone_seconds: float = 0.0
    avoid: frozenset[str] = frozenset()

    @property
    def completed(self) -> bool:
        return self.record is not None or self.lost


@dataclass(slots=True)
class Group:
    id: str
    order: int
    task: Task
    version: int
    places: list[Place]
    accepted: bool = False

    def valid(self) -> tuple[EpisodeRecord, ...]:
        return tuple(p.record for p in self.places if p.record is not None)

    def awaiting(self) -> tuple[EpisodeRecord, ...]:
        return tuple(p.played for p in self.places if p.played is not None)

    def unjudged(self) -> tuple[EpisodeRecord, ...]:
        return tuple(p.unjudged for p in self.places if p.unjudged is not None)

    def as_record(self) -> GroupRecord:
        return GroupRecord(self.id, self.order, self.task, self.version, self.valid())
