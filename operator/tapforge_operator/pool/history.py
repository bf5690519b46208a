"""What the planner remembers from one plan to the next. It lives in memory and may be lost at any moment: then
back-offs start anew, budgets are counted from what the status still tells, and nothing else changes.

Every record bounds itself. Times are seconds since the epoch and may lie in the future after the clock was set back:
`settled` pulls them to now, so that no wait becomes longer than it was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from tapforge_api.pool import EmulatorPoolStatus

#: what an API server refuses a Pod for. QuotaExceeded may pass by itself; the others need a person
RefusalReason = Literal["QuotaExceeded", "PodSecurity", "Invalid", "Forbidden", "NameTaken", "NamespaceTerminating"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A create that the API server refused for good."""

    reason: RefusalReason
    message: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal that holds the pool's creates."""

    refusal: Refusal
    #: how often in a row
    times: int
    at: float
    #: the pool's generation: another one is tried at once
    generation: int
    #: name of the one slot that was tried again; when it exists, the refusal is over
    probe: str = ""


@dataclass(frozen=True, slots=True)
class BootFailures:
    """Boots of the current template that failed in a row."""

    times: int = 0
    at: float = 0.0
    #: creation of the newest slot that failed
    created: float = 0.0
    template: str = ""


@dataclass(frozen=True, slots=True)
class History:
    #: what was last reported; conditions keep the time of their last transition from it
    status: EmulatorPoolStatus = field(default_factory=EmulatorPoolStatus)
    #: replacements of sick slots within the hour: (when, how many), oldest first
    spent: tuple[tuple[float, int], ...] = ()
    #: slots whose removal was planned last time, and counted: why, by uid
    condemned: Mapping[str, str] = field(default_factory=dict)
    #: uid of the Pod that last had the ordinal
    last: Mapping[int, str] = field(default_factory=dict)
    #: sizes that were needed: (until when, how many), sizes falling; None: nothing known
    needs: tuple[tuple[float, int], ...] | None = None
    boots: BootFailures = BootFailures()
    refused: Refused | None = None
    #: when a Pod on a lost node was last deleted by force, by uid
    forced: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, status: EmulatorPoolStatus) -> History:
        """What can be known after a restart."""
        said = [(t, r.slots) for r in status.sick_replacements if (t := _epoch(r.time)) is not None]
        failures = [(t, 1) for f in status.last_failures if (t := _epoch(f.time)) is not None]
        return cls(status=status, spent=tuple(sorted(said or failures)))

    def settled(self, now: float) -> History:
        """The same, with no time later than now."""
        if not self._ahead(now):
            return self
        return replace(
            self,
            spent=tuple((min(t, now), n) for t, n in self.spent),
            needs=None if self.needs is None else tuple((min(t, now), n) for t, n in self.needs),
            boots=replace(self.boots, at=min(self.boots.at, now)),
            refused=self.refused and replace(self.refused, at=min(self.refused.at, now)),
            forced={uid: min(t, now) for uid, t in self.forced.items()},
        )

    def _ahead(self, now: float) -> bool:
        return (
            any(t > now for t, _ in self.spent)
            or any(t > now for t, _ in self.needs or ())
            or self.boots.at > now
            or (self.refused is not None and self.refused.at > now)
            or any(t > now for t in self.forced.values())
        )


def _epoch(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        # A status may have been written by hand; what is no time is no memory.
        return None
