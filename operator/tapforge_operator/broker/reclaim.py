"""Which claims of a pool are asked back so that others get their share: `fairness.py` applied to the table.

A claim that yields goes back to whoever waits. One that the pool itself recalled (its node is drained, its template is
old) serves nobody afterwards, so it counts neither as held nor as coming.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from . import fairness
from .records import Claimant
from .table import Pool, Slot, Table


def balance(table: Table, key: str, wishes_since: float) -> bool:
    """Asks for what is missing for wishes that are at least as old as `wishes_since`; takes back what is asked for
    beyond need and was not told yet. True when anything changed. All slots are looked at only when something does."""
    pool = table.find_pool(key)
    if pool is None:
        return False
    wishes, tally = pool.queue.wishes(wishes_since, pool.tally.holders), pool.tally
    if not wishes and not pool.asked:
        return False
    claimants = dict.fromkeys([*tally.held, *wishes])
    demands = [fairness.Demand(p, tally.held[p] - tally.leaving[p], wishes.get(p, 0)) for p in claimants]
    due = fairness.recalls(demands, table.packing.free(key) + tally.booting + tally.returning)
    pool.asked = bool(due)
    missing = {p: count for p in claimants if (count := due.get(p, 0) - tally.yielding[p])}
    changed = False
    for claimant, slots in _claimed(pool, missing).items():
        reason = f"others wait for slots, and {claimant[0]} has more than its share" if missing[claimant] > 0 else ""
        for slot in _choose(table, slots, missing[claimant]):
            table.recall(slot, reason, yields=True)
            changed = True
    return changed


def _claimed(pool: Pool, claimants: dict[Claimant, int]) -> dict[Claimant, list[Slot]]:
    """Slots that the claimants have and that serve on afterwards."""
    result: dict[Claimant, list[Slot]] = defaultdict(list)
    for slot in pool.slots.values() if claimants else ():
        claim = slot.claim
        if claim is not None and claim.claimant in claimants and (claim.yields or not claim.recalled):
            result[claim.claimant].append(slot)
    return result


def _choose(table: Table, slots: list[Slot], missing: int) -> list[Slot]:
    """Slots to ask back (or, for a negative number, no longer), those on the emptiest nodes first."""
    if missing > 0:
        able = [slot for slot in slots if slot.claim and not slot.claim.yields]
        return heapq.nsmallest(missing, able, key=lambda slot: (table.packing.fill(slot.view.node), -slot.fence))
    return [slot for slot in slots if slot.claim and slot.claim.yields and not slot.claim.told][:-missing]
