"""What one slot's Pod says about its health: pure functions of the Pod and the clock.

A slot that was never ready is booting: it has until `boot.deadlineSeconds` after its container's start, and nothing
else counts against it. A slot that was ready may be unready for `health.unreadyGraceSeconds` from the moment it turned.
One without a node or without a started container is waited for.

Each of these times counts from the moment in which this operator saw the change: a node's clock may be wrong by more
than any of them. Ages are never negative and begin anew after a gap in watching, and with another leader: a phone that
is well again could not say so while the API server was away.
"""

from __future__ import annotations

from tapforge_operator.emulatorpool.state import Deadlines, Reason
from tapforge_operator.kube.disruption import DISRUPTIONS
from tapforge_operator.kube.types import Slot

#: why a container waits that no waiting will start
STUCK = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)

#: how long a Pod may find no node before the pool says so, seconds; autoscalers bring one within minutes
UNSCHEDULABLE_GRACE = 300.0

#: seconds until a Pod on a lost node that is still there is deleted by force again
FORCE_AGAIN = 60.0


def age(now: float, since: float) -> float:
    return max(0.0, now - since)


def sickness(slot: Slot, deadlines: Deadlines, now: float) -> Reason | None:
    if slot.ready:
        return None
    if slot.terminal:
        return Reason.FAILED
    if slot.ever_ready:
        return Reason.UNREADY if age(now, deadlines.begin(slot)) > deadlines.unready else None
    late = slot.started is not None and age(now, deadlines.begin(slot)) > deadlines.boot
    return Reason.BOOT_DEADLINE if late else None


def disrupted(slot: Slot) -> bool:
    return slot.terminal and slot.end in DISRUPTIONS


def pulling(slot: Slot) -> bool:
    """It has a node, and its container did not start yet."""
    return bool(slot.node) and slot.started is None and not slot.terminal


def stuck(slot: Slot) -> bool:
    """Its container can't start as the template says it."""
    return slot.started is None and slot.waiting in STUCK


def next_turn(slot: Slot, deadlines: Deadlines) -> float | None:
    """When time alone changes the health of a slot that is neither ready nor terminal."""
    begin = deadlines.begin(slot)
    if slot.ever_ready:
        return begin + deadlines.unready
    if slot.started is not None:
        return begin + deadlines.boot
    if slot.unschedulable:
        return begin + UNSCHEDULABLE_GRACE
    return begin + deadlines.pull if slot.node else None


def running_since(slot: Slot, deadlines: Deadlines) -> float:
    """When its container started, for ages of hours that outlast this process: by its node's clock, but not before the
    API server had the Pod, and not after this operator saw it start. So one clock that is wrong makes no Pod old."""
    seen = slot.since + deadlines.offset
    return min(seen, max(slot.created if slot.started is None else slot.started, slot.created))
