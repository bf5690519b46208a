"""What a logger is: three calls, made one after another on one thread of a process of its own.

Another package offers one by an entry point of the group `tapforge.loggers`, a function of the options of
`spec.logging.plugins` (text by name) that returns a `Logger`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

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
