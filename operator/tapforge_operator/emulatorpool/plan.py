"""What to do about a pool now. A pure function; the rules, in order:

1.  A claimed slot is touched only when its Pod has ended or its claim expired. Everything below that wants it asks for
    it back, and gets it at the end of the holder's episode.
2.  Slots whose claim expired go. Unclaimed slots on a lost node go, by force, and block no replacement.
3.  Slots that ended, did not boot in time or were unready too long go, within the budget of sick slots per hour. The
    newest `retainFailed` that ended are kept aside instead; they are not slots any more.
4.  Of several slots with the same ordinal one stays: a claimed one, else the oldest.
5.  Slots on cordoned nodes, of an old template, or due by episodes or age are exchanged: old ones that were never ready
    at once, all others rolling, unclaimed first, with at most `maxUnavailable` missing. Not while creates are refused.
    A slot on a cordoned node or of an old template is not granted until it is exchanged or the reason has passed.
6.  Slots that no node has room for are held: they are the autoscaler's signal. Only rules 5 (old template) and 7 end
    them.
7.  Too many: those without a node, booting, unready go first, then the newest on the emptiest node. Claimed ones are
    asked back. A slot that was given up once goes, also when the reason has passed: it is never granted again.
8.  Too few: new ones on the lowest free ordinals, all in parallel up to a bound; fewer while boots fail, one from time
    to time while the API server refuses them.
9.  Otherwise nothing. A pool that is being deleted is left to the garbage collector; its claims are asked back.

A node is lost when it was silent for a while in which this process watched and another node answered. An age of rule 3
counts from when this process saw the change, and none is from before a gap in watching: neither what an outage of the
API server hid nor a node's wrong clock is a slot's fault.

The clock (seconds since the epoch, as in the cluster's timestamps) may jump. Ready slots are not removed by time,
except for their age, which is rolling; what is removed because it took too long is bounded by the budget or, where it
never served, replaced at the pace of the back-off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tapforge_api.pool import SickReplacements, SlotFailure
from tapforge_operator.emulatorpool import backoff
from tapforge_operator.emulatorpool.health import FORCE_AGAIN, disrupted, running_since, sickness
from tapforge_operator.emulatorpool.rollout import limits, outdated
from tapforge_operator.emulatorpool.scaling import name_new, scale_in_order, size, survivor
from tapforge_operator.emulatorpool.state import (
    BootFailures,
    Draft,
    History,
    NewSlot,
    Observed,
    Plan,
    Pool,
    Reason,
    Refused,
    Removal,
    Spent,
)
from tapforge_operator.emulatorpool.status import (
    MAX_FAILURES,
    Report,
    busy,
    concerns,
    counts,
    events_of,
    requeue_after,
    status_of,
    with_failure,
    with_tail,
)
from tapforge_operator.kube.objectmeta import timestamp
from tapforge_operator.kube.types import Slot


def plan(pool: Pool, observed: Observed, history: History, now: float) -> Plan:
    history = history.settled(now)
    history = replace(history, refused=backoff.remember_refusal(history, observed, pool.generation, now))
    draft = _begin(pool, observed, history, now)
    if pool.deleting:
        return _release_all(draft)
    last, replaced = _follow(draft)
    _drop_expired_and_lost(draft)
    spent = _replace_the_sick(draft)
    _drop_duplicates(draft)
    _exchange_the_outdated(draft)
    _scale_in(draft)
    _drop_the_draining(draft)
    boots = _count_boots(draft)
    # A refusal of slots that are no longer needed is dropped.
    refused = history.refused if len(draft.standing) < draft.allowed() else None
    creates = _scale_out(draft, boots, refused, last)
    deletes, retain = _keep_for_a_look(draft)
    counted, found = counts(draft), concerns(draft, spent, boots, refused)
    status = status_of(
        pool,
        Report(
            counts=counted,
            unavailable=limits(pool.spec.update_strategy, counted.desired).unavailable,
            concerns=found,
            busy=tuple(busy(draft, counted, len(creates))),
            replaced_total=history.status.replaced_total + replaced,
            failures=_failures(draft),
            sick_replacements=_replacements(draft, spent),
        ),
        history.status,
        now,
    )
    fresh = (r for r in draft.removals.values() if not (draft.known(r.slot) or r.slot.deleting))
    by_demand = pool.spec.scaling is not None
    events, reported, event_due = events_of(history.reported, status, found, fresh, by_demand, now)
    made = Plan(
        creates=creates,
        too_many=len(draft.present) > draft.allowed(),
        deletes=tuple(deletes),
        retain=tuple(retain),
        revoke=draft.revocations,
        withhold=draft.withheld(),
        status=status,
        events=events,
        history=History(
            status=status,
            spent=spent,
            draining=_draining(draft),
            last=_carry_on(last, draft, creates),
            needs=draft.size.needs,
            boots=boots,
            refused=backoff.refusal_tried(refused, creates, now),
            forced=_forced(draft),
            reported=reported,
        ),
    )
    return replace(made, requeue_after=requeue_after(draft, made, boots, spent, event_due))


def _begin(pool: Pool, observed: Observed, history: History, now: float) -> Draft:
    draft = Draft(pool, observed, history, now)
    draft.size = size(pool, observed, len(draft.protected), len(draft.standing), history, now)
    draft.limits = limits(pool.spec.update_strategy, draft.desired)
    cordoned = {name for name, state in observed.nodes.items() if state == "cordoned"}
    for uid, slot in draft.standing.items():
        played = draft.protected[uid].episodes if uid in draft.protected else 0
        age = now - running_since(slot, draft.deadlines)
        reason = outdated(slot, pool, played, slot.node in cordoned, age)
        if reason is not None:
            draft.outdated[uid] = reason
    return draft


# --- rule 2 -----------------------------------------------------------------------------------------------------------


def _drop_expired_and_lost(draft: Draft) -> None:
    for uid, claim in draft.observed.held.items():
        if claim.expired and uid in draft.standing:
            draft.give_up(draft.standing[uid], Reason.CLAIM_EXPIRED)
    lost = {name for name, state in draft.observed.nodes.items() if state == "lost"}
    if not lost:
        return
    for slot in draft.free():
        if slot.node in lost:
            draft.give_up(slot, Reason.NODE_LOST, force=True)
    for slot in draft.claimed():
        if slot.node in lost and not slot.terminal:
            draft.revoke(slot, Reason.NODE_LOST)
    for slot in draft.ending:
        held = draft.observed.held.get(slot.uid)
        holds = held is not None and not (held.expired or held.draining)
        again = draft.now - draft.history.forced.get(slot.uid, -FORCE_AGAIN) >= FORCE_AGAIN
        if slot.node in lost and not holds and again:
            draft.give_up(slot, Reason.NODE_LOST, force=True)


# --- rule 3 -----------------------------------------------------------------------------------------------------------


def _replace_the_sick(draft: Draft) -> Spent:
    spent = backoff.within_the_hour(draft.history.spent, draft.now)
    left = backoff.budget(spent, draft.desired, draft.pool.spec.health.max_replacements_percent_per_hour)
    spare, paid = len(draft.standing) - draft.allowed(), 0
    proof = backoff.proof(draft.standing.values(), draft.pool.template)
    for slot, reason in _sick(draft):
        # Not paid for: what was paid for before, what rule 7 would end anyway, what the cluster did, and boots: those
        # of an old template rule 5 would end anyway, those that fail in a row are paced by their back-off.
        free = draft.known(slot) or spare > 0 or disrupted(slot)
        if not slot.ever_ready:
            free = free or slot.template != draft.pool.template or slot.created > proof
        if not free and paid == left:
            draft.waiting.append(slot)
            continue
        draft.give_up(slot, reason, sick=not disrupted(slot))
        paid += not free
        spare -= 1
    return backoff.spend(spent, paid, draft.now)


def _sick(draft: Draft) -> list[tuple[Slot, Reason]]:
    """Those that ended first, then the oldest. Of the claimed ones only those that ended."""
    found = [
        (slot, reason)
        for uid, slot in draft.standing.items()
        if not slot.ready and (slot.terminal or uid not in draft.protected)
        if (reason := sickness(slot, draft.deadlines, draft.now)) is not None
    ]
    return sorted(found, key=lambda pair: (pair[1] is not Reason.FAILED, pair[0].created, pair[0].uid))


def _keep_for_a_look(draft: Draft) -> tuple[list[Removal], list[Removal]]:
    """(deletes, retains): the newest failed Pods change from the first list to the second."""
    room = draft.pool.spec.recycle.retain_failed
    failed = [r for r in draft.removals.values() if r.sick and r.slot.terminal]
    newest = sorted([*draft.retained, *(r.slot for r in failed)], key=lambda s: (-s.created, s.uid))[:room]
    kept = {slot.uid for slot in newest}
    for slot in draft.retained:
        if slot.uid not in kept:
            draft.removals[slot.uid] = Removal(slot, Reason.RETAINED)
    spoke = {slot.uid for slot in draft.newly_failed()[:MAX_FAILURES] if slot.started is not None}
    marked = [replace(r, tail=True) if uid in spoke else r for uid, r in draft.removals.items()]
    return [r for r in marked if r.slot.uid not in kept], [r for r in marked if r.slot.uid in kept]


# --- rule 4 -----------------------------------------------------------------------------------------------------------


def _drop_duplicates(draft: Draft) -> None:
    if len({slot.ordinal for slot in draft.standing.values()}) == len(draft.standing):
        return  # nearly always: thousands of lists that hold one slot each would wake the garbage collector
    by_ordinal: defaultdict[int, list[Slot]] = defaultdict(list)
    for slot in draft.standing.values():
        by_ordinal[slot.ordinal].append(slot)
    for same in by_ordinal.values():
        if len(same) == 1:
            continue
        stays = survivor(same, draft.protected)
        for slot in same:
            if slot is stays:
                continue
            if slot.uid in draft.protected:
                draft.revoke(slot, Reason.DUPLICATE)
            else:
                draft.give_up(slot, Reason.DUPLICATE)


# --- rule 5 -----------------------------------------------------------------------------------------------------------


def _exchange_the_outdated(draft: Draft) -> None:
    due = _due(draft)
    for slot, reason in due:
        if reason is Reason.CORDONED and slot.uid in draft.protected:
            draft.revoke(slot, reason)
    if not due or draft.history.refused is not None:
        return
    for slot, reason in due:
        if reason is Reason.OLD_TEMPLATE and not slot.ever_ready and slot.uid not in draft.protected:
            draft.give_up(slot, reason)
    serving = sum(slot.ready for slot in draft.standing.values())
    room = serving - max(0, draft.desired - draft.limits.unavailable)
    rolling = [(slot, reason) for slot, reason in due if slot.uid in draft.standing]
    for slot, reason in [pair for pair in rolling if pair[0].uid not in draft.protected][: max(0, room)]:
        draft.give_up(slot, reason)
        room -= 1
    room -= draft.revoked()
    claimed = [pair for pair in rolling if pair[0].uid in draft.protected and not draft.is_revoked(pair[0])]
    for slot, reason in claimed[: max(0, room)]:
        draft.revoke(slot, reason)


_ROLL_ORDER = (Reason.CORDONED, Reason.OLD_TEMPLATE, Reason.EPISODES, Reason.AGE)


def _due(draft: Draft) -> list[tuple[Slot, Reason]]:
    """Standing slots to exchange: those that don't serve first, then by reason, then the oldest."""
    due = [(draft.standing[uid], reason) for uid, reason in draft.outdated.items() if uid in draft.standing]
    return sorted(due, key=lambda pair: (pair[0].ready, _ROLL_ORDER.index(pair[1]), pair[0].created, pair[0].uid))


# --- rule 7 -----------------------------------------------------------------------------------------------------------


def _scale_in(draft: Draft) -> None:
    excess = len(draft.standing) - draft.allowed()
    if excess <= 0:
        return
    free = scale_in_order(draft.free(), draft.standing.values())
    free = sorted(free, key=lambda slot: not draft.draining(slot))[:excess]
    claimed = [slot for slot in draft.claimed() if not draft.is_revoked(slot)]
    asked = scale_in_order(claimed, draft.standing.values())
    for slot in free:
        draft.give_up(slot, Reason.SCALE_IN)
    for slot in asked[: max(0, excess - len(free) - draft.revoked())]:
        draft.revoke(slot, Reason.SCALE_IN)


def _drop_the_draining(draft: Draft) -> None:
    """Those that are still to be exchanged go in their turn, by rule 5."""
    for slot in draft.free():
        if draft.draining(slot) and slot.uid not in draft.outdated:
            draft.give_up(slot, Reason.GIVEN_UP)


# --- rule 8 -----------------------------------------------------------------------------------------------------------


def _count_boots(draft: Draft) -> BootFailures:
    failed = [slot for slot in draft.newly_failed() if not slot.ever_ready]
    proof = backoff.proof(draft.standing.values(), draft.pool.template)
    return backoff.count_boots(draft.history.boots, failed, proof, draft.pool.template, draft.now)


def _scale_out(
    draft: Draft, boots: BootFailures, refused: Refused | None, last: Mapping[int, str]
) -> tuple[NewSlot, ...]:
    missing = min(draft.allowed() - len(draft.standing), backoff.PER_PASS)
    if missing <= 0 or draft.pool.spec.template is None:
        return ()
    booting = sum(not slot.ever_ready and not slot.unschedulable for slot in draft.standing.values())
    wanted = backoff.let_by_boots(boots, missing, booting, draft.now)
    wanted = backoff.let_by_refusal(refused, wanted, draft.now)
    others: defaultdict[int, list[Slot]] = defaultdict(list)
    for slot in (*draft.ending, *draft.retained, *(removal.slot for removal in draft.removals.values())):
        others[slot.ordinal].append(slot)
    taken = {slot.ordinal for slot in draft.standing.values()}
    return name_new(draft.pool, wanted, taken, others, last)


# --- rule 9 -----------------------------------------------------------------------------------------------------------


def _release_all(draft: Draft) -> Plan:
    for slot in draft.claimed():
        draft.revoke(slot, "PoolDeleted")
    return Plan(revoke=draft.revocations, status=draft.history.status, history=draft.history)


# --- what the next plan remembers: slots by ordinal, which removals were counted, what failed last --------------------


#: slots that go without a successor
_NOT_FOLLOWED = frozenset({Reason.SCALE_IN, Reason.DUPLICATE})


def _follow(draft: Draft) -> tuple[dict[int, str], int]:
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


def _carry_on(last: dict[int, str], draft: Draft, creates: Sequence[NewSlot]) -> Mapping[int, str]:
    """The same after this plan. A create that is planned again before its Pod was seen has to find its predecessor."""
    for removal in draft.removals.values():
        slot = removal.slot
        if removal.reason in _NOT_FOLLOWED and last.get(slot.ordinal) == slot.uid:
            del last[slot.ordinal]
    last.update((new.ordinal, new.predecessor) for new in creates if new.predecessor)
    return last


def _draining(draft: Draft) -> Mapping[str, str]:
    return {uid: str(removal.reason) for uid, removal in draft.removals.items()}


def _forced(draft: Draft) -> Mapping[str, float]:
    before, fresh = draft.history.forced, {uid: draft.now for uid, r in draft.removals.items() if r.force}
    if not before:
        return fresh
    there = {slot.uid for slot in draft.observed.slots}
    return {**{uid: t for uid, t in before.items() if uid in there}, **fresh}


def _failures(draft: Draft) -> tuple[SlotFailure, ...]:
    """The latest failures, newest first."""
    latest: tuple[SlotFailure, ...] = draft.history.status.last_failures
    for slot in reversed(draft.newly_failed()[:MAX_FAILURES]):
        latest = with_failure(latest, slot.name, _end(slot, draft), draft.now)
    return tuple(with_tail(failure, draft.observed.tails.get(failure.pod)) for failure in latest)


def _replacements(draft: Draft, spent: Spent) -> tuple[SickReplacements, ...]:
    """What the budget has to know after a restart. Said anew only with a new one: time alone writes no status."""
    if not spent or spent[-1][0] < draft.now:
        return draft.history.status.sick_replacements
    return tuple(SickReplacements(time=timestamp(t), slots=n) for t, n in backoff.portions(spent))


def _end(slot: Slot, draft: Draft) -> str:
    return slot.end or str(draft.removals[slot.uid].reason)
