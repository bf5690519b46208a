"""What a pool is doing: its counters, what is under way, and when time alone changes something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..slots import Slot
from . import pacing
from .draft import Draft
from .health import FORCE_AGAIN, Deadlines, next_turn, sickness
from .history import BootFailures
from .records import Device, Plan, Reason
from .refusals import retry_at
from .status import Counts

#: two plans that only time parts, seconds
SOONEST = 0.05


def counts(draft: Draft) -> Counts:
    external = draft.pool.spec.external
    states = Counter(_state(slot, draft.deadlines, draft.now) for slot in draft.present)
    devices = Counter(_of_device(device) for device in draft.seen.devices)
    both = states + devices
    return Counts(
        desired=len(external.urls) if external else draft.desired,
        pods=len(draft.present),
        ready=both["ready"],
        claimed=len(draft.protected) + sum(device.claimed for device in draft.seen.devices),
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


def look_again(draft: Draft, plan: Plan, boots: BootFailures, spent: pacing.Spent) -> float | None:
    """Seconds until time alone changes the plan."""
    if len(plan.creates) == pacing.PER_PASS:
        return 0.0
    times = list(_times(draft, plan, boots, spent))
    return max(SOONEST, min(times) - draft.now) if times else None


def _times(draft: Draft, plan: Plan, boots: BootFailures, spent: pacing.Spent) -> Iterator[float]:
    after = draft.pool.spec.recycle.after_seconds
    for uid, slot in draft.standing.items():
        if slot.ready:
            if after is not None and slot.started is not None and uid not in draft.outdated:
                yield slot.started + after
        elif not slot.terminal and (turn := next_turn(slot, draft.deadlines)) is not None and turn >= draft.now:
            # A second more: the cluster's clocks write whole seconds, and "longer than" is meant.
            yield turn + 1.0
    if draft.waiting and (returns := pacing.budget_returns_at(spent)) is not None:
        yield returns
    if len(draft.standing) + len(plan.creates) < draft.allowed():
        refused = plan.history.refused
        waits = [pacing.boots_again_at(boots)] if boots.times else []
        waits += [retry_at(refused)] if refused else []
        # When all of them are over, slots that boot now are waited for: the end of a boot is news.
        if not waits or max(waits) > draft.now:
            yield max([*waits, draft.now])
    if draft.size.shrinks_at is not None:
        yield draft.size.shrinks_at
    if any(slot.node and draft.seen.nodes.get(slot.node) == "lost" for slot in draft.ending):
        yield draft.now + FORCE_AGAIN
    if draft.seen.next_lost_node is not None:
        yield draft.now + draft.seen.next_lost_node
