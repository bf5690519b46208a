"""What to do about a pool now. A pure function; the rules, in order:

1.  A claimed slot is touched only when its Pod has ended or its claim expired. Everything below that wants it asks for
    it back, and gets it at the end of the holder's episode.
2.  Slots whose claim expired go. Unclaimed slots on a lost node go, by force, and block no replacement.
3.  Slots that ended, did not boot in time or were unready too long go, within the budget of sick slots per hour. The
    newest `retainFailed` that ended are kept aside instead; they are no slots any more.
4.  Of several slots with the same ordinal one stays: a claimed one, else the oldest.
5.  Slots on cordoned nodes, of an old template, or due by episodes or age are exchanged: old ones that were never ready
    at once, all others rolling, unclaimed first, with at most `maxUnavailable` missing. Not while creates are refused.
    Nobody gets a slot on a cordoned node or of an old template, until it is exchanged or the reason has passed.
6.  Slots that no node has room for are held: they are the autoscaler's signal. Only rules 5 (old template) and 7 end
    them.
7.  Too many: those without a node, booting, unready go first, then the newest on the emptiest node. Claimed ones are
    asked back. A slot that was given up once goes, also when the reason has passed: nobody would get it any more.
8.  Too few: new ones on the lowest free ordinals, all in parallel up to a bound; fewer while boots fail, one from time
    to time while the API server refuses them.
9.  Otherwise nothing. A pool that is being deleted is left to the garbage collector; its claims are asked back.

A node is lost when it was silent for a while in which this process watched and another node answered, and no age of
rule 3 is from before a gap in watching: what an outage of the API server hid is no slot's fault.

The clock (seconds since the epoch, as in the cluster's timestamps) may jump. Ready slots are not removed by time,
except for their age, which is rolling; what is removed because it took too long is bounded by the budget or, where it
never served, replaced at the pace of the back-off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from ..slots import Slot
from . import memory, pacing, progress, refusals
from .concerns import concerns
from .draft import Draft
from .health import FORCE_AGAIN, disrupted, sickness
from .history import BootFailures, History, Refused
from .placement import keeper, name_new, scale_in_order
from .records import NewSlot, Plan, Pool, Reason, Removal, Seen
from .rollout import Limits
from .status import MAX_FAILURES, Report, status_of


def plan(pool: Pool, seen: Seen, history: History, now: float) -> Plan:
    history = history.settled(now)
    history = replace(history, refused=refusals.remember(history, seen, pool.generation, now))
    draft = Draft(pool, seen, history, now)
    if pool.deleting:
        return _farewell(draft)
    last, replaced = memory.follow(draft)
    _drop_expired_and_lost(draft)
    spent = _replace_the_sick(draft)
    _drop_duplicates(draft)
    _exchange_the_outdated(draft)
    _scale_in(draft)
    _drop_the_condemned(draft)
    boots = _count_boots(draft)
    # A refusal of slots that nobody needs any more is of no interest.
    refused = history.refused if len(draft.standing) < draft.allowed() else None
    creates = _scale_out(draft, boots, refused, last)
    deletes, retain = _keep_for_a_look(draft)
    counted = progress.counts(draft)
    status = status_of(
        pool,
        Report(
            counts=counted,
            unavailable=Limits.of(pool.spec.update_strategy, counted.desired).unavailable,
            concerns=concerns(draft, spent, boots, refused),
            busy=tuple(progress.busy(draft, counted, len(creates))),
            replaced_total=history.status.replaced_total + replaced,
            failures=memory.failures(draft),
            sick_replacements=memory.replacements(draft, spent),
        ),
        history.status,
        now,
    )
    made = Plan(
        creates=creates,
        too_many=len(draft.present) > draft.allowed(),
        deletes=tuple(deletes),
        retain=tuple(retain),
        recall=draft.recall,
        withhold=draft.withheld(),
        status=status,
        history=History(
            status=status,
            spent=spent,
            condemned=memory.condemned(draft),
            last=memory.carry_on(last, draft, creates),
            needs=draft.size.needs,
            boots=boots,
            refused=refusals.tried(refused, creates, now),
            forced=memory.forced(draft),
        ),
    )
    return replace(made, look_again=progress.look_again(draft, made, boots, spent))


# --- rule 2 -----------------------------------------------------------------------------------------------------------


def _drop_expired_and_lost(draft: Draft) -> None:
    for uid, claim in draft.seen.held.items():
        if claim.expired and uid in draft.standing:
            draft.give_up(draft.standing[uid], Reason.CLAIM_EXPIRED)
    lost = {name for name, state in draft.seen.nodes.items() if state == "lost"}
    if not lost:
        return
    for slot in draft.free():
        if slot.node in lost:
            draft.give_up(slot, Reason.NODE_LOST, force=True)
    for slot in draft.claimed():
        if slot.node in lost and not slot.terminal:
            draft.ask_back(slot, Reason.NODE_LOST)
    for slot in draft.ending:
        held = draft.seen.held.get(slot.uid)
        holds = held is not None and not (held.expired or held.condemned)
        again = draft.now - draft.history.forced.get(slot.uid, -FORCE_AGAIN) >= FORCE_AGAIN
        if slot.node in lost and not holds and again:
            draft.give_up(slot, Reason.NODE_LOST, force=True)


# --- rule 3 -----------------------------------------------------------------------------------------------------------


def _replace_the_sick(draft: Draft) -> pacing.Spent:
    spent = pacing.within_the_hour(draft.history.spent, draft.now)
    left = pacing.budget(spent, draft.desired, draft.pool.spec.health.max_replacements_percent_per_hour)
    spare, paid = len(draft.standing) - draft.allowed(), 0
    proof = pacing.proof(draft.standing.values(), draft.pool.template)
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
    return pacing.spend(spent, paid, draft.now)


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
        stays = keeper(same, draft.protected)
        for slot in same:
            if slot is stays:
                continue
            if slot.uid in draft.protected:
                draft.ask_back(slot, Reason.DUPLICATE)
            else:
                draft.give_up(slot, Reason.DUPLICATE)


# --- rule 5 -----------------------------------------------------------------------------------------------------------


def _exchange_the_outdated(draft: Draft) -> None:
    due = _due(draft)
    for slot, reason in due:
        if reason is Reason.CORDONED and slot.uid in draft.protected:
            draft.ask_back(slot, reason)
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
    room -= draft.asked_back()
    claimed = [pair for pair in rolling if pair[0].uid in draft.protected and not draft.is_asked_back(pair[0])]
    for slot, reason in claimed[: max(0, room)]:
        draft.ask_back(slot, reason)


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
    free = sorted(free, key=lambda slot: not draft.condemned(slot))[:excess]
    claimed = [slot for slot in draft.claimed() if not draft.is_asked_back(slot)]
    asked = scale_in_order(claimed, draft.standing.values())
    for slot in free:
        draft.give_up(slot, Reason.SCALE_IN)
    for slot in asked[: max(0, excess - len(free) - draft.asked_back())]:
        draft.ask_back(slot, Reason.SCALE_IN)


def _drop_the_condemned(draft: Draft) -> None:
    """Those that are still to be exchanged go in their turn, by rule 5."""
    for slot in draft.free():
        if draft.condemned(slot) and slot.uid not in draft.outdated:
            draft.give_up(slot, Reason.GIVEN_UP)


# --- rule 8 -----------------------------------------------------------------------------------------------------------


def _count_boots(draft: Draft) -> BootFailures:
    failed = [slot for slot in draft.newly_failed() if not slot.ever_ready]
    proof = pacing.proof(draft.standing.values(), draft.pool.template)
    return pacing.count_boots(draft.history.boots, failed, proof, draft.pool.template, draft.now)


def _scale_out(
    draft: Draft, boots: BootFailures, refused: Refused | None, last: Mapping[int, str]
) -> tuple[NewSlot, ...]:
    missing = min(draft.allowed() - len(draft.standing), pacing.PER_PASS)
    if missing <= 0 or draft.pool.spec.template is None:
        return ()
    booting = sum(not slot.ever_ready and not slot.unschedulable for slot in draft.standing.values())
    wanted = pacing.allowed(boots, missing, booting, draft.now)
    wanted = refusals.allowed(refused, wanted, draft.now)
    others: defaultdict[int, list[Slot]] = defaultdict(list)
    for slot in (*draft.ending, *draft.retained, *(removal.slot for removal in draft.removals.values())):
        others[slot.ordinal].append(slot)
    taken = {slot.ordinal for slot in draft.standing.values()}
    return name_new(draft.pool, wanted, taken, others, last)


# --- rule 9 -----------------------------------------------------------------------------------------------------------


def _farewell(draft: Draft) -> Plan:
    for slot in draft.claimed():
        draft.ask_back(slot, "PoolDeleted")
    return Plan(recall=draft.recall, status=draft.history.status, history=draft.history)
