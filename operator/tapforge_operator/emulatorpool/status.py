"""What a pool's status says.

1. Counters are what was seen, before anything is done about it: pods = ready + booting + unschedulable + unhealthy, of
   the slots that hold an ordinal. `claimed` counts across them.
2. Ready is True when every desired slot was ready, and until more than `maxUnavailable` of them are missing: one phone
   that is exchanged makes no pool unready. False otherwise, never Unknown.
3. Reconciling is True while there is something to do or to wait for; Stalled when only a person can help. Never both:
   tools read Reconciling first and would wait for ever.
4. Degraded is True while something keeps the pool from what was asked, though it may pass.
5. Events report changes: what was not reported yet, at most one in `EVENT_SECONDS` for each reason of a pool, so that a
   storm is one Event with a number. What changes back meanwhile is not reported.
6. A condition's lastTransitionTime changes when its status changes and never else. No message speaks of the current
   time, so that a pool at rest is written once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from tapforge_api.pool import EmulatorPoolStatus, SickReplacements, SlotFailure
from tapforge_operator.broker.types import Device
from tapforge_operator.emulatorpool import backoff
from tapforge_operator.emulatorpool.health import (
    FORCE_AGAIN,
    UNSCHEDULABLE_GRACE,
    age,
    disrupted,
    next_turn,
    pulling,
    running_since,
    sickness,
    stuck,
)
from tapforge_operator.emulatorpool.state import (
    BootFailures,
    Deadlines,
    Draft,
    Plan,
    Pool,
    Reason,
    Refusal,
    Refused,
    Removal,
    Removed,
    Reported,
    Spent,
)
from tapforge_operator.kube.objectmeta import ConditionBuilder, timestamp
from tapforge_operator.kube.types import Event, Slot
from tapforge_operator.labels import POOL_UID

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


def status_of(pool: Pool, report: Report, before: EmulatorPoolStatus, now: float) -> EmulatorPoolStatus:
    counts = report.counts
    condition = ConditionBuilder(before.conditions, pool.generation, now)
    stalls = next((c for c in report.concerns if c.stalls), None)
    worst = next(iter(report.concerns), None)
    busy = next(iter(report.busy), None)
    ready = counts.ready >= counts.desired - (report.unavailable if condition.was_true("Ready") else 0)
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
            else condition("Reconciling", False, "Stalled" if stalls else "UpToDate"),
            condition("Stalled", True, stalls.reason, stalls.message)
            if stalls
            else condition("Stalled", False, "NotStalled"),
            condition("Degraded", True, worst.reason, "; ".join(c.message for c in report.concerns))
            if worst
            else condition("Degraded", False, "AsExpected"),
        ),
    )


def unreadable(before: EmulatorPoolStatus, generation: int, message: str, now: float) -> EmulatorPoolStatus:
    """The status of a pool whose spec can't be read: nothing is done about it, and a person has to correct it."""
    condition = ConditionBuilder(before.conditions, generation, now)
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


# --- what is done, and when time alone changes something --------------------------------------------------------------


#: two plans that only time parts, seconds
SOONEST = 0.05


def counts(draft: Draft) -> Counts:
    external = draft.pool.spec.external
    states = Counter(_state(slot, draft.deadlines, draft.now) for slot in draft.present)
    devices = Counter(_of_device(device) for device in draft.observed.devices)
    both = states + devices
    return Counts(
        desired=len(external.urls) if external else draft.desired,
        pods=len(draft.present),
        ready=both["ready"],
        claimed=len(draft.protected) + sum(device.claimed for device in draft.observed.devices),
        booting=both["booting"],
        updated=sum(slot.template == draft.pool.template for slot in draft.present),
        unschedulable=both["unschedulable"],
        unhealthy=both["unhealthy"],
    )


def _state(slot: Slot, deadlines: Deadlines, now: float) -> str:
    if slot.ready:
        return "ready"
    if slot.unschedulable and not slot.terminal:
        return "unschedulable"
    return "unhealthy" if slot.ever_ready or sickness(slot, deadlines, now) else "booting"


def _of_device(device: Device) -> str:
    return {"ready": "ready", "unknown": "booting"}.get(device.state, "unhealthy")


def busy(draft: Draft, counted: Counts, creates: int) -> Iterator[tuple[str, str]]:
    """What is done or waited for: (reason, message), the most telling first."""
    left = [uid for uid in draft.outdated if uid in draft.standing]
    if left:
        why = Counter(draft.outdated[uid] for uid in left)
        rolling = Reason.OLD_TEMPLATE in why
        text = ", ".join(f"{n} {reason}" for reason, n in sorted(why.items()))
        held = sum(uid in draft.protected for uid in left)
        claimed = f"; {held} of them are claimed and exchanged when they are given back" if held else ""
        yield "RollingOut" if rolling else "Exchanging", f"slots to exchange: {text}{claimed}"
    if creates or draft.removals or len(draft.standing) != draft.desired:
        beyond = f"; {draft.size.beyond} more are asked for than maxReplicas allows" if draft.size.beyond else ""
        yield "Scaling", f"{counted.pods} slots exist, {draft.desired} are desired{beyond}"
    if counted.ready < counted.desired:
        yield (
            "SlotsMissing",
            f"{counted.booting} slots boot, {counted.unschedulable} wait for a node, {counted.unhealthy} are sick",
        )


def requeue_after(draft: Draft, plan: Plan, boots: BootFailures, spent: Spent, event_due: float | None) -> float | None:
    """Seconds until time alone changes the plan."""
    if len(plan.creates) == backoff.PER_PASS:
        return 0.0
    times = [*_times(draft, plan, boots, spent), *([] if event_due is None else [event_due])]
    return max(SOONEST, min(times) - draft.now) if times else None


def _times(draft: Draft, plan: Plan, boots: BootFailures, spent: Spent) -> Iterator[float]:
    after = draft.pool.spec.recycle.after_seconds
    for uid, slot in draft.standing.items():
        if slot.ready:
            if after is not None and slot.started is not None and uid not in draft.outdated:
                yield running_since(slot, draft.deadlines) + after
        elif not slot.terminal and (turn := next_turn(slot, draft.deadlines)) is not None and turn >= draft.now:
            # A second more: the cluster's clocks write whole seconds, and "longer than" is meant.
            yield turn + 1.0
    if draft.waiting and (returns := backoff.budget_returns_at(spent)) is not None:
        yield returns
    if len(draft.standing) + len(plan.creates) < draft.allowed():
        refused = plan.history.refused
        waits = [backoff.boots_again_at(boots)] if boots.times else []
        waits += [backoff.refusal_ends_at(refused)] if refused else []
        # When all of them are over, slots that boot now are waited for: the end of a boot causes a pass.
        if not waits or max(waits) > draft.now:
            yield max([*waits, draft.now])
    if draft.size.shrinks_at is not None:
        yield draft.size.shrinks_at
    if any(slot.node and draft.observed.nodes.get(slot.node) == "lost" for slot in draft.ending):
        yield draft.now + FORCE_AGAIN
    if draft.observed.next_lost_node is not None:
        yield draft.now + draft.observed.next_lost_node


# --- what keeps the pool from what was asked, in words that say what to do; the worst first ---------------------------


def concerns(draft: Draft, spent: Spent, boots: BootFailures, refused: Refused | None) -> list[Concern]:
    return [
        *_refused(refused),
        *_over_budget(draft, spent),
        *_boots(boots),
        *_stuck(draft),
        *_pulls(draft),
        *_unschedulable(draft),
        *(_no_devices(draft.observed.no_devices) if draft.pool.spec.external is not None else ()),
        *_refused_devices(draft.pool, draft.observed.devices),
        *_devices(draft.observed.devices),
        *_disruption_budget(draft.observed.budget),
        *_unknown(draft.pool.unknown),
    ]


def _refused(refused: Refused | None) -> Iterator[Concern]:
    if refused is not None:
        reason, message = refused.refusal.reason, refused.refusal.message
        text = f"the API server refuses new slots: {message.rstrip('.')}. {backoff.REMEDY[reason]}; it is tried again"
        yield Concern(reason, text, stalls=reason in backoff.NEEDS_A_PERSON)


def _over_budget(draft: Draft, spent: Spent) -> Iterator[Concern]:
    waiting = [slot for slot in draft.waiting if slot.uid in draft.standing]
    if waiting:
        percent = draft.pool.spec.health.max_replacements_percent_per_hour
        yield Concern(
            "ReplacementBudgetSpent",
            f"{_some(waiting)} sick and not replaced: {sum(n for _, n in spent)} sick slots were replaced within the "
            f"hour, as many as health.maxReplacementsPercentPerHour ({percent}) allows. See lastFailures; correct the "
            "template or raise it",
            stalls=True,
        )


def _boots(boots: BootFailures) -> Iterator[Concern]:
    if boots.times >= backoff.WORTH_SAYING:
        yield Concern(
            "BootFailing",
            f"{boots.times} boots in a row failed. See lastFailures; new slots come slower, up to 5 minutes apart, "
            "until one becomes ready",
        )


def _stuck(draft: Draft) -> Iterator[Concern]:
    found = [slot for slot in draft.standing.values() if stuck(slot)]
    if found:
        why = ", ".join(sorted({slot.waiting for slot in found}))
        yield Concern(
            "ContainerNotStarting",
            f"{_some(found)} without a started container: {why}. Check the template's images and imagePullSecrets with "
            "`kubectl describe pod`; the node tries again by itself",
        )


def _pulls(draft: Draft) -> Iterator[Concern]:
    limit = draft.deadlines.pull
    slow = [s for s in draft.standing.values() if pulling(s) and age(draft.now, draft.deadlines.begin(s)) > limit]
    if slow:
        yield Concern(
            "ImagePullSlow",
            f"{_some(slow)} without a started container for over boot.pullDeadlineSeconds ({limit:g} s). Check the "
            "image's name and imagePullSecrets with `kubectl describe pod`",
        )


def _unschedulable(draft: Draft) -> Iterator[Concern]:
    long = [
        slot
        for slot in draft.standing.values()
        if slot.unschedulable and age(draft.now, draft.deadlines.begin(slot)) > UNSCHEDULABLE_GRACE
    ]
    if long:
        yield Concern(
            "Unschedulable",
            f"{_some(long)} without a node for over {UNSCHEDULABLE_GRACE:g} s. `kubectl describe pod` says what is "
            "missing; the Pods are kept for the autoscaler to see",
        )


def _no_devices(refused: Refusal | None) -> Iterator[Concern]:
    if refused is not None:
        text = f"no device can be claimed: {refused.message.rstrip('.')}. {backoff.REMEDY[refused.reason]}"
        yield Concern(refused.reason, text, stalls=refused.reason in backoff.NEEDS_A_PERSON)


def _refused_devices(pool: Pool, devices: Sequence[Device]) -> Iterator[Concern]:
    if refused := [device.url for device in devices if device.state == "refused"]:
        more = ", ..." if len(refused) > _NAMED else ""
        yield Concern(
            "DevicesRefused",
            f"namespace {pool.namespace} may not name {len(refused)} of {len(devices)} external devices "
            f"({', '.join(refused[:_NAMED])}{more}): they are granted to no run. Take them out of external.urls, or "
            "let the namespace name them by --external-device of the operator",
        )


def _devices(devices: Sequence[Device]) -> Iterator[Concern]:
    bad = [device for device in devices if device.state in ("unready", "quarantined")]
    if bad:
        first = bad[0]
        why = f": {first.reason}" if first.reason else ""
        yield Concern(
            "DevicesUnavailable",
            f"{len(bad)} of {len(devices)} external devices can't be used, first {first.url} ({first.state}{why}). "
            "Each is asked again from time to time",
        )


def _disruption_budget(trouble: str) -> Iterator[Concern]:
    if trouble:
        yield Concern(
            "DisruptionBudget",
            f"{trouble}. Drains don't wait for claimed slots meanwhile. Delete what is in the way, or let the operator "
            "make it; it looks again within 5 minutes",
        )


def _unknown(fields: str) -> Iterator[Concern]:
    if fields:
        yield Concern("UnknownFields", f"{fields}. Another release of the operator may know more")


def _some(slots: Sequence[Slot]) -> str:
    """`3 slots (a, b, ...) are`."""
    names = ", ".join(islice(sorted(slot.name for slot in slots), 2))
    more = ", ..." if len(slots) > 2 else ""
    return f"{len(slots)} slot{'s' * (len(slots) > 1)} ({names}{more}) {'are' if len(slots) > 1 else 'is'}"


# --- what Events report -----------------------------------------------------------------------------------------------

#: between two Events of a pool with the same reason
EVENT_SECONDS = 60.0
_NAMED = 3

#: removals that are worth an Event, and its reason
_REMOVALS: Mapping[Reason, str] = {
    Reason.FAILED: "SlotFailed",
    Reason.BOOT_DEADLINE: "SlotBootFailed",
    Reason.UNREADY: "SlotUnready",
    Reason.CLAIM_EXPIRED: "SlotClaimExpired",
    Reason.NODE_LOST: "SlotNodeLost",
    Reason.CORDONED: "SlotNodeCordoned",
}
#: type and words of these Events; "SlotDisrupted" is for slots that the cluster took away
_WORDS: Mapping[str, tuple[Literal["Normal", "Warning"], str]] = {
    "SlotFailed": ("Warning", "ended"),
    "SlotBootFailed": ("Warning", "did not boot within boot.deadlineSeconds"),
    "SlotUnready": ("Warning", "stayed unready for over health.unreadyGraceSeconds"),
    "SlotClaimExpired": ("Warning", "lost the holder, which released nothing"),
    "SlotNodeLost": ("Warning", "had a node that does not answer"),
    "SlotNodeCordoned": ("Normal", "had a cordoned node"),
    "SlotDisrupted": ("Normal", "ended because the cluster took the Pod away"),
}


def events_of(
    reported: Reported,
    status: EmulatorPoolStatus,
    found: Sequence[Concern],
    removals: Iterable[Removal],
    by_demand: bool,
    now: float,
) -> tuple[tuple[Event, ...], Reported, float | None]:
    """What `kubectl describe` should show from now on, what will have been reported by then, and when an Event is
    due that comes too early now. `removals`: those that were not planned before; `by_demand`: the operator decides how
    many slots there are."""
    removed = _with_removals(reported.removed, removals)
    changes = [*_removed(removed), *_changes(reported, status, found, by_demand)]
    due = tuple(event for event in changes if _may_report(reported, event.reason, now))
    reasons, there = {event.reason for event in due}, {concern.reason for concern in found}
    known = reported.concerns & there if there else reported.concerns  # what is over is reported when nothing is left
    after = Reported(
        ready=_ready(status) if reported.ready is None or reasons & {"SlotsReady", "SlotsMissing"} else reported.ready,
        desired=status.desired_replicas
        if reported.desired is None or "Scaled" in reasons or not by_demand
        else reported.desired,
        rolling_out=reported.rolling_out ^ bool(reasons & {"RollOutStarted", "RollOutFinished"}),
        concerns=frozenset() if "Recovered" in reasons else known | (there & reasons),
        removed={reason: of for reason, of in removed.items() if reason not in reasons},
        at={**reported.at, **dict.fromkeys(reasons, now)} if due else reported.at,
    )
    early = [reported.at[event.reason] + EVENT_SECONDS for event in changes if event.reason not in reasons]
    return due, after, min(early, default=None)


def _may_report(reported: Reported, reason: str, now: float) -> bool:
    last = reported.at.get(reason)
    return last is None or not 0.0 <= now - last < EVENT_SECONDS  # the clock may have been set back


def _with_removals(before: Mapping[str, Removed], removals: Iterable[Removal]) -> Mapping[str, Removed]:
    found = dict(before)
    for removal in removals:
        slot, reason = removal.slot, _REMOVALS.get(removal.reason)
        if reason is None:
            continue
        if removal.reason is Reason.FAILED and disrupted(slot):
            reason = "SlotDisrupted"
        of, name = found.get(reason, Removed()), f"{slot.name} ({slot.end})" if slot.end else slot.name
        found[reason] = Removed(of.slots + 1, (*of.names, name)[:_NAMED])
    return found


def _removed(removed: Mapping[str, Removed]) -> Iterator[Event]:
    for reason, of in removed.items():
        kind, what = _WORDS[reason]
        names = ", ".join(of.names) + (", ..." if of.slots > len(of.names) else "")
        yield Event(kind, reason, f"{of.slots} slot{'s' * (of.slots > 1)} {what}: {names}")


def _changes(
    reported: Reported, status: EmulatorPoolStatus, found: Sequence[Concern], by_demand: bool
) -> Iterator[Event]:
    for concern in found:
        if concern.reason not in reported.concerns:
            yield Event("Warning", concern.reason, concern.message)
    if reported.concerns and not found:
        yield Event("Normal", "Recovered", f"no longer the case: {', '.join(sorted(reported.concerns))}")
    if by_demand and reported.desired is not None and status.desired_replicas != reported.desired:
        text = f"from {reported.desired} to {status.desired_replicas} slots by demand; {status.claimed} are claimed"
        yield Event("Normal", "Scaled", text)
    if (rolling_out := status.updated < status.pods) and not reported.rolling_out:
        text = f"{status.pods - status.updated} of {status.pods} slots are of an old template"
        yield Event("Normal", "RollOutStarted", text)
    elif reported.rolling_out and not rolling_out:
        yield Event("Normal", "RollOutFinished", f"all {status.pods} slots are of the present template")
    ready = _ready(status)
    if reported.ready is not None and ready != reported.ready:
        tally = f"{status.ready} of {status.desired_replicas} slots are ready"
        yield Event("Normal", "SlotsReady", tally) if ready else Event("Warning", "SlotsMissing", tally)


def _ready(status: EmulatorPoolStatus) -> bool:
    return any(c.type == "Ready" and c.status == "True" for c in status.conditions)
