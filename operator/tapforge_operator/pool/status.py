"""What a pool's status says.

1. Counters are what was seen, before anything is done about it: pods = ready + booting + unschedulable + unhealthy, of
   the slots that hold an ordinal. `claimed` counts across them.
2. Ready is True when every desired slot was ready, and until more than `maxUnavailable` of them are missing: one phone
   that is exchanged makes no pool unready. False otherwise, never Unknown.
3. Reconciling is True while there is something to do or to wait for; Stalled when only a person can help. Never both:
   tools read Reconciling first and would wait for ever.
4. Degraded is True while something keeps the pool from what was asked, though it may pass.
5. A condition's lastTransitionTime changes when its status changes and never else. No message speaks of the current
   time, so that a pool at rest is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from tapforge_api.base import Condition
from tapforge_api.pool import EmulatorPoolStatus, SickReplacements, SlotFailure

from ..names import POOL_UID
from .records import Pool

MAX_FAILURES = 5
_MAX_TAIL = 4096


@dataclass(frozen=True, slots=True)
class Counts:
    desired: int = 0
    pods: int = 0
    ready: int = 0
    claimed: int = 0
    booting: int = 0
    updated: int = 0
    unschedulable: int = 0
    unhealthy: int = 0


@dataclass(frozen=True, slots=True)
class Concern:
    """Something that keeps the pool from what was asked."""

    reason: str
    message: str
    #: it passes only when a person does something
    stalls: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    counts: Counts
    #: slots that may be missing before the pool is no longer Ready
    unavailable: int
    #: the worst first
    concerns: Sequence[Concern] = ()
    #: what is being done or waited for: (reason, message); the most telling first
    busy: Sequence[tuple[str, str]] = ()
    replaced_total: int = 0
    failures: Sequence[SlotFailure] = field(default_factory=tuple)
    sick_replacements: tuple[SickReplacements, ...] = ()


def timestamp(now: float) -> str:
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Conditions:
    """Makes conditions that remember when their status last changed."""

    def __init__(self, before: EmulatorPoolStatus, generation: int, now: float):
        self._old = {condition.type: condition for condition in before.conditions}
        self._generation, self._now = generation, timestamp(now)

    def was(self, kind: str) -> bool:
        return kind in self._old and self._old[kind].status == "True"

    def __call__(self, kind: str, status: bool, reason: str, message: str) -> Condition:
        word: Literal["True", "False"] = "True" if status else "False"
        old = self._old.get(kind)
        since = old.last_transition_time if old is not None and old.status == word else ""
        return Condition(
            type=kind,
            status=word,
            reason=reason,
            message=message[:4096],
            last_transition_time=since or self._now,
            observed_generation=self._generation,
        )


def status_of(pool: Pool, report: Report, before: EmulatorPoolStatus, now: float) -> EmulatorPoolStatus:
    counts = report.counts
    condition = _Conditions(before, pool.generation, now)
    stalls = next((c for c in report.concerns if c.stalls), None)
    worst = next(iter(report.concerns), None)
    busy = next(iter(report.busy), None)
    ready = counts.ready >= counts.desired - (report.unavailable if condition.was("Ready") else 0)
    ready = ready and (counts.ready > 0 or counts.desired == 0)
    tally = f"{counts.ready} of {counts.desired} slots are ready"
    return EmulatorPoolStatus(
        observed_generation=pool.generation,
        desired_replicas=counts.desired,
        pods=counts.pods,
        ready=counts.ready,
        claimed=counts.claimed,
        booting=counts.booting,
        updated=counts.updated,
        unschedulable=counts.unschedulable,
        unhealthy=counts.unhealthy,
        replaced_total=report.replaced_total,
        selector=f"{POOL_UID}={pool.uid}",
        last_failures=tuple(report.failures[:MAX_FAILURES]),
        sick_replacements=report.sick_replacements,
        conditions=(
            condition("Ready", ready, "SlotsReady" if ready else "SlotsMissing", tally),
            condition("Reconciling", True, busy[0], busy[1])
            if busy and not stalls
            else condition("Reconciling", False, "Stalled" if stalls else "UpToDate", ""),
            condition("Stalled", True, stalls.reason, stalls.message)
            if stalls
            else condition("Stalled", False, "NotStalled", ""),
            condition("Degraded", True, worst.reason, "; ".join(c.message for c in report.concerns))
            if worst
            else condition("Degraded", False, "AsExpected", ""),
        ),
    )


def unreadable(before: EmulatorPoolStatus, generation: int, message: str, now: float) -> EmulatorPoolStatus:
    """The status of a pool whose spec can't be read: nothing is done about it, and a person has to correct it."""
    condition = _Conditions(before, generation, now)
    return before.model_copy(
        update={
            "observed_generation": generation,
            "conditions": (
                condition("Ready", False, "InvalidSpec", message),
                condition("Reconciling", False, "Stalled", ""),
                condition("Stalled", True, "InvalidSpec", message),
                condition("Degraded", True, "InvalidSpec", message),
            ),
        }
    )


def with_failure(failures: Sequence[SlotFailure], pod: str, reason: str, now: float) -> tuple[SlotFailure, ...]:
    """Newest first, each Pod once."""
    fresh = SlotFailure(pod=pod, reason=reason[:128], time=timestamp(now))
    return (fresh, *(f for f in failures if f.pod != pod))[:MAX_FAILURES]


def with_tail(failure: SlotFailure, tail: str | None) -> SlotFailure:
    """With the end of its log, once. Characters that no status can hold are left out."""
    if not tail or failure.log_tail:
        return failure
    text = "".join(c for c in tail if c in "\n\t" or c.isprintable())
    return failure.model_copy(update={"log_tail": text[-_MAX_TAIL:]})
