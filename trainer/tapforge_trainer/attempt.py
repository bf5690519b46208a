"""What the driver asks for and what comes back: one attempt at a task, as plain records.

The driver decides (`groups.py`, `evaluation_queue.py` and `scheduler.py` of `rollout/`) and a `Player` plays
(`worker.py`, `episode.py`); these records are all that passes between them.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from tapforge_envs.protocol import Reason, Task
from tapforge_envs.slots.source import Lease, Verdict

from .frames.handles import FrameHandle
from .records import EpisodeRecord, EpisodeRewards, Sampling


@dataclass(frozen=True, slots=True)
class Attempt:
    """A place (`group`, `member`) to be filled by one episode."""

    group: str
    #: issue order; smaller ones are played first
    order: int
    member: int
    #: how often an invalid episode in this place was played again
    rerun: int
    #: how often this place was played at all: unlike `rerun` it also counts what we stopped ourselves
    issue: int
    task: Task
    seed: int
    #: slots on which this place broke before
    avoid: frozenset[str] = frozenset()
    #: whether it may try a phone that broke others: it is played again if it breaks, and is not a re-run that an update
    #: waits for
    spare: bool = False
    #: prefix of the groups that this session of the run began; groups of an earlier one have another
    session: str = ""
    #: that calls to the phone may take, until the group goes on without this member; None: no limit
    phone_seconds: float | None = None

    @property
    def episode(self) -> str:
        """Unique among all episodes of a run."""
        name = f"{self.group}.{self.member}.{self.issue}"
        return name if self.group.startswith(self.session) else f"{name}@{self.session}"


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Seconds, unless a field says otherwise."""

    #: malformed answers in a row that end an episode
    max_parse_failures: int = 3
    #: all calls to the phone in an episode together
    episode_seconds: float = 600.0
    #: screens are kept as the device drew them, too
    device_screens: bool = False
    #: frames with more pixels are resized in a thread, so that other episodes go on meanwhile
    thread_pixels: int = 256 * 256


@dataclass(frozen=True, slots=True)
class AttemptRequest:
    """All that playing an attempt needs, besides a phone and a player."""

    attempt: Attempt
    sampling: Sampling
    limits: EpisodeLimits = EpisodeLimits()
    #: the one that answers; "": the policy that learns
    policy: str = ""
    #: whether the environment says how the episode ended; else its rewards do, later
    verified: bool = True
    #: whether its rewards are asked for after its end
    rewarded: bool = False


@dataclass(frozen=True, slots=True)
class PhoneCall:
    """A call to the phone: reset, step or evaluate; `step` and `action` where there is one."""

    name: str
    step: int = 0
    action: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """An attempt that ended. `frames` (a handle) and `ui_trees` hold all that its steps name. `broke`: the call that
    failed. `phone_seconds`: what the calls to the phone took, at most what they were allowed to. `verdict`: in which
    state the phone is left, and `why`."""

    attempt: Attempt
    record: EpisodeRecord
    frames: FrameHandle
    broke: PhoneCall | None
    phone_seconds: float = 0.0
    ui_trees: dict[str, str] = field(default_factory=dict)
    #: of the frames' data
    frame_bytes: int = 0
    verdict: Verdict = Verdict.DIRTY
    why: str = "the episode was not ended on the phone"
    #: the phone is well, and has no such task
    unknown_task: bool = False


def unplayed(attempt: Attempt, slot: str, message: str, verdict: Verdict, reason: Reason) -> EpisodeResult:
    """What is left of an attempt whose steps are lost."""
    now = time.time()
    record = EpisodeRecord(
        id=attempt.episode,
        group=attempt.group,
        task=attempt.task,
        attempt=attempt.rerun,
        slot=slot,
        seed=attempt.seed,
        reason=reason,
        outcome=None,
        score=None,
        message=message,
        steps=(),
        started=now,
        ended=now,
    )
    return EpisodeResult(attempt, record, {}, None, verdict=verdict, why=message)


class Player(Protocol):
    """Plays attempts, in this process or another one."""

    async def play(self, request: AttemptRequest, lease: Lease) -> EpisodeResult:
        """Raises only what the run can't go on with."""
        ...

    def stop(self, episode: str, reason: Reason) -> None:
        """Ends the attempt as `cancelled` or `reclaimed`; `play` returns with the steps so far."""
        ...

    async def reward(self, record: EpisodeRecord, frames: FrameHandle) -> EpisodeRewards:
        """What is found out about an episode that awaits its rewards, after its phone is free. Ends within the run's
        `rewards.deadlineSeconds`. Raises only what the run can't go on with."""
        ...

    async def verdicts_written(self) -> None:
        """Returns when every verdict of judges that came so far would survive a power failure. Raises JournalError."""
        ...

    def metrics(self) -> dict[str, float]:
        """Of an update: what there is to say of the processes that play, since the last call."""
        ...


def issue_of(episode: str) -> int:
    """How often its place had been played before."""
    return int(episode.rsplit(".", 1)[1].partition("@")[0])


def member_of(episode: str) -> int:
    """The place that an episode of this name filled."""
    return int(episode.rsplit(".", 2)[1])


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits from whatever names the place: equal names, equal seed, on every machine."""
    digest = hashlib.sha256("/".join(str(p) for p in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
