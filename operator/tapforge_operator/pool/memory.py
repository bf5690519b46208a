"""What a plan adds to the history: who had which ordinal, which removals were counted, what failed last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapforge_api.pool import SickReplacements, SlotFailure

from ..slots import Slot
from . import pacing
from .draft import Draft
from .records import NewSlot, Reason
from .status import MAX_FAILURES, timestamp, with_failure, with_tail

#: slots that go without a successor
_NOT_FOLLOWED = frozenset({Reason.SCALE_IN, Reason.DUPLICATE})


def follow(draft: Draft) -> tuple[dict[int, str], int]:
    """(the Pod that last had each ordinal, slots that took the place of another one since the last plan)."""
    last, replaced = dict(draft.history.last), 0
    for slot in draft.present:
        was = last.get(slot.ordinal)
        if was == slot.uid or was in draft.standing:
            continue
        last[slot.ordinal] = slot.uid
        replaced += was is not None
    bound = draft.desired + draft.limits.surge + len(draft.present)
    return ({o: uid for o, uid in last.items() if o < bound} if len(last) > bound else last), replaced


def carry_on(last: dict[int, str], draft: Draft, creates: Sequence[NewSlot]) -> Mapping[int, str]:
    """The same after this plan. A create that is planned again before its Pod was seen has to find its predecessor."""
    for removal in draft.removals.values():
        slot = removal.slot
        if removal.reason in _NOT_FOLLOWED and last.get(slot.ordinal) == slot.uid:
            del last[slot.ordinal]
    last.update((new.ordinal, new.predecessor) for new in creates if new.predecessor)
    return last


def condemned(draft: Draft) -> Mapping[str, str]:
    return {uid: str(removal.reason) for uid, removal in draft.removals.items()}


def forced(draft: Draft) -> Mapping[str, float]:
    before, fresh = draft.history.forced, {uid: draft.now for uid, r in draft.removals.items() if r.force}
    if not before:
        return fresh
    there = {slot.uid for slot in draft.seen.slots}
    return {**{uid: t for uid, t in before.items() if uid in there}, **fresh}


def failures(draft: Draft) -> tuple[SlotFailure, ...]:
    """The latest failures, newest first."""
    latest: tuple[SlotFailure, ...] = draft.history.status.last_failures
    for slot in reversed(draft.newly_failed()[:MAX_FAILURES]):
        latest = with_failure(latest, slot.name, _end(slot, draft), draft.now)
    return tuple(with_tail(failure, draft.seen.tails.get(failure.pod)) for failure in latest)


def replacements(draft: Draft, spent: pacing.Spent) -> tuple[SickReplacements, ...]:
    """What the budget has to know after a restart. Said anew only with a new one: time alone writes no status."""
    if not spent or spent[-1][0] < draft.now:
        return draft.history.status.sick_replacements
    return tuple(SickReplacements(time=timestamp(t), slots=n) for t, n in pacing.portions(spent))


def _end(slot: Slot, draft: Draft) -> str:
    return slot.end or str(draft.removals[slot.uid].reason)
