"""How a run is, as conditions, and which changes are worth an Event.

| the run | Ready | Reconciling | Stalled | and |
|---|---|---|---|---|
| waits, starts, is moved, stops | False | True | False | |
| runs | True: Running | False | False | |
| is suspended, as its user wants | True: Suspended | False | False | Suspended |
| has spent what judges may use | True: JudgeBudgetSpent | False | False | Suspended |
| is held by a queue | False | True: Queued | False | Suspended |
| needs a person | False | False | True | |
| has come to its end | True: Complete | False | False | Complete |
| has failed for good | False | False | True | Failed |

SpecChanged is there, and True, while spec differs from what the run was started with.

Ready is always one of True and False, and its reason is the one word that `kubectl get` shows. Reconciling and Stalled
are never both True: tools read Reconciling first and would wait for ever. Complete and Failed are final. No message
speaks of the present time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from tapforge_api import reading
from tapforge_api.base import Condition
from tapforge_api.progress import JUDGE_BUDGET_SPENT
from tapforge_api.run_status import TrainingRunStatus
from tapforge_operator.kube.objectmeta import ConditionBuilder, readable_conditions, stored_conditions
from tapforge_operator.kube.types import Event

SUSPENDED: Final = "Suspended"
#: why an attempt is over of whose run nothing is there, as it should be
SUSPENSIONS: Final = (SUSPENDED, JUDGE_BUDGET_SPENT)
#: words for a run that is on its way
_ORDINARY = ("Queued", "Removing", "Restarting", "Starting", "Stopping", "WaitingForPhones")


@dataclass(frozen=True, slots=True)
class Situation:
    """How a run is."""

    kind: Literal["busy", "good", "stalled"]
    #: as one word
    reason: str
    #: as a sentence for people
    message: str
    suspended: bool = False
    complete: bool = False
    failed: bool = False


def read_status(written: Mapping[str, Any] | None) -> TrainingRunStatus:
    """A status as the API server gave it. Raises UnreadableStatus."""
    return reading.read_status(TrainingRunStatus, written)


def with_unknown(situation: Situation, fields: str) -> Situation:
    """With the fields of the spec that were left out. The run goes on without them, so its words stay the same."""
    return replace(situation, message="; ".join(filter(None, (situation.message, _left_out(fields)))))


def _left_out(fields: str) -> str:
    return f"{fields}. Another release of the operator may know more" if fields else ""


def conditions(
    situation: Situation, before: TrainingRunStatus, generation: int, now: float, edited: str = ""
) -> tuple[Condition, ...]:
    """`edited`: what differs in spec from what the run was started with."""
    condition = ConditionBuilder(before.conditions, generation, now)
    s = situation
    good, busy, stalled = (s.kind == kind for kind in ("good", "busy", "stalled"))
    return (
        condition("Ready", good, s.reason, s.message),
        condition("Reconciling", True, s.reason, s.message)
        if busy
        else condition("Reconciling", False, "Stalled" if stalled else "UpToDate"),
        condition("Stalled", True, s.reason, s.message) if stalled else condition("Stalled", False, "NotStalled"),
        condition("Suspended", True, s.reason, s.message)
        if s.suspended
        else condition("Suspended", False, "NotSuspended"),
        condition("Complete", True, s.reason, s.message)
        if s.complete
        else condition("Complete", False, "Failed" if s.failed else "NotComplete"),
        condition("Failed", True, s.reason, s.message) if s.failed else condition("Failed", False, "NotFailed"),
        *((condition("SpecChanged", True, "Ignored", edited),) if edited else ()),
    )


def is_true(status: TrainingRunStatus, kind: str) -> bool:
    return any(c.type == kind and c.status == "True" for c in status.conditions)


def ended(status: TrainingRunStatus) -> bool:
    """Complete or Failed: nothing about it changes any more."""
    return is_true(status, "Complete") or is_true(status, "Failed")


def has_ended(stored: Any) -> bool:
    """The same of a status that can't be read, by those of its conditions that can."""
    return ended(TrainingRunStatus(conditions=readable_conditions(stored_conditions(stored))))


def events(before: TrainingRunStatus, after: TrainingRunStatus, unknown: str = "") -> Iterator[Event]:
    """What happened between two statuses that were written one after the other. `unknown`: fields of the spec that
    were left out; reported when the spec is new."""
    if unknown and after.observed_generation != before.observed_generation:
        yield Event("Warning", "UnknownFields", _left_out(unknown))
    if after.ray_job and after.ray_job != before.ray_job and not ended(after):
        yield Event("Normal", "AttemptStarted", f"attempt {after.attempts} begins as RayJob {after.ray_job}")
    if after.lost_clusters > before.lost_clusters:
        yield Event("Warning", "ClusterLost", f"attempt {after.attempts}: {after.attempt.message}")
    if after.disruptions > before.disruptions:
        yield Event("Normal", "Disrupted", f"attempt {after.attempts}: {after.attempt.message}")
    if after.attempt.phase == "Stopping" != before.attempt.phase:
        yield Event("Normal", "Stopping", after.attempt.message)
    if after.attempts == before.attempts and after.progress.restarts > before.progress.restarts:
        yield Event(
            "Warning",
            "DriverRestarted",
            f"the driver was started again in place, {after.progress.restarts} times so far",
        )
    changed = _condition(after, "SpecChanged")
    if changed is not None and _condition(before, "SpecChanged") is None:
        yield Event("Warning", "SpecChanged", changed.message)
    now, was = _condition(after, "Ready"), _condition(before, "Ready")
    if now is not None and (was is None or was.reason != now.reason):
        # What is neither asked for nor part of the way there keeps the run from going on.
        warns = not is_true(after, "Ready") and now.reason not in _ORDINARY
        yield Event("Warning" if warns else "Normal", now.reason, now.message)


def _condition(status: TrainingRunStatus, kind: str) -> Condition | None:
    return next((c for c in status.conditions if c.type == kind), None)
