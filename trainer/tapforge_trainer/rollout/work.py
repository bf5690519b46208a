"""One attempt at a task that is to be played, and the seeds that make it repeatable."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tapforge_envs.protocol import Task


@dataclass(frozen=True, slots=True)
class Work:
    """A place (`group`, `member`) to be filled by one episode."""

    group: str
    #: issue order; smaller ones are played first
    order: int
    member: int
    #: how often an invalid episode in this place was played again
    attempt: int
    #: how often this place was played at all: unlike `attempt` it also counts what we stopped ourselves
    issue: int
    task: Task
    seed: int
    #: slots on which this place broke before
    avoid: frozenset[str] = frozenset()
    #: prefix of the groups that this session of the run began; groups taken up from an earlier one have another
    session: str = ""
    #: that calls to the phone may take, until the group goes on without this member; None: no limit
    phone_seconds: float | None = None

    @property
    def episode(self) -> str:
        """Unique among all episodes of a run."""
        name = f"{self.group}.{self.member}.{self.issue}"
        return name if self.group.startswith(self.session) else f"{name}@{self.session}"


def member_of(episode: str) -> int:
    """The place that an episode of this name filled."""
    return int(episode.rsplit(".", 2)[1])


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits from whatever names the place: equal names, equal seed, on every machine."""
    digest = hashlib.sha256("/".join(str(p) for p in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
