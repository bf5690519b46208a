"""What keeps a pool from what was asked, in words that tell a person what to do. The worst comes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from ..slots import Slot
from . import pacing
from .draft import Draft
from .health import UNSCHEDULABLE_GRACE, age, pull_began, pulling, stuck
from .history import BootFailures, Refused
from .records import Device
from .refusals import NEEDS_A_PERSON
from .status import Concern

_REMEDY = {
    "QuotaExceeded": "Raise the namespace's quota or make the pool smaller",
    "PodSecurity": "Change the template or kvm.mode, or the namespace's pod-security.kubernetes.io/enforce label",
    "Invalid": "Change spec.template",
    "Forbidden": "Let the operator create such Pods: its role, an admission policy or a LimitRange says no",
    "NameTaken": "Delete the Pod of that name, or rename the pool",
    "NamespaceTerminating": "The namespace is being deleted",
}


def concerns(draft: Draft, spent: pacing.Spent, boots: BootFailures, refused: Refused | None) -> list[Concern]:
    return [
        *_refused(refused),
        *_over_budget(draft, spent),
        *_boots(boots),
        *_stuck(draft),
        *_pulls(draft),
        *_unschedulable(draft),
        *_devices(draft.seen.devices),
        *_budget(draft.seen.budget),
        *_unknown(draft.pool.unknown),
    ]


def _refused(refused: Refused | None) -> Iterator[Concern]:
    if refused is not None:
        reason, message = refused.refusal.reason, refused.refusal.message
        text = f"the API server refuses new slots: {message.rstrip('.')}. {_REMEDY[reason]}; it is tried again"
        yield Concern(reason, text, stalls=reason in NEEDS_A_PERSON)


def _over_budget(draft: Draft, spent: pacing.Spent) -> Iterator[Concern]:
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
    if boots.times >= pacing.WORTH_SAYING:
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
    slow = [slot for slot in draft.standing.values() if pulling(slot) and age(draft.now, pull_began(slot)) > limit]
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
        if slot.unschedulable and age(draft.now, slot.created) > UNSCHEDULABLE_GRACE
    ]
    if long:
        yield Concern(
            "Unschedulable",
            f"{_some(long)} without a node for over {UNSCHEDULABLE_GRACE:g} s. `kubectl describe pod` says what is "
            "missing; the Pods are kept for the autoscaler to see",
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


def _budget(trouble: str) -> Iterator[Concern]:
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
