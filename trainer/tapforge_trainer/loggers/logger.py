"""What a logger is: three calls, made one after another on one thread of a process of its own. One that shows episodes
has a fourth.

Another package offers one by an entry point of the group `tapforge.loggers`, a function of the options of
`spec.logging.plugins` (text by name) that returns a `Logger`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

#: how the session ended: the run is complete; it was stopped and may be resumed; it failed
Status = Literal["complete", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run that is logged."""

    name: str
    #: the run's; a logger may keep files in it, in a folder of its own name
    folder: Path
    #: plain data, without credentials
    config: Mapping[str, Any]
    #: what `start` returned in an earlier session of the run; "": there was none
    resume: str = ""


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """An episode of an update, as trackers show it."""

    episode: str
    group: str
    task: str
    template: str
    goal: str
    outcome: str
    reason: str
    #: of the environment, summed over the steps
    reward: float
    #: of judges and other rewards that were asked, summed over the steps, by stream; "" without any
    streams: str
    steps: int
    #: of the policy, one after another, each with its step's number
    answers: str
    #: a JPEG: the screens with the gestures; None where none is recorded
    picture: bytes | None

    @property
    def caption(self) -> str:
        return f"{self.template}: {self.outcome} after {self.steps} steps, reward {self.reward:g}: {self.goal}"


class Logger(Protocol):
    """Whatever is raised is reported once, and the run goes on without it."""

    def start(self, run: RunInfo) -> str:
        """Returns the id under which the tracker knows the run."""
        ...

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of the time after update `step`; names as docs/loggers.md has them. Steps never decrease within a
        session."""
        ...

    def finish(self, status: Status) -> None: ...


@runtime_checkable
class EpisodeLogger(Logger, Protocol):
    """A logger that shows episodes, for runs with `spec.logging.episodes`."""

    def log_episodes(self, step: int, episodes: Sequence[EpisodeRow]) -> None:
        """Of update `step`: at least one. Comes at most once for an update, before or after its figures."""
        ...
