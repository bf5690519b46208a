"""How fast sick slots are replaced, and when boots that fail and creates that are refused slow the pool down.

*Budget.* Within an hour `health.maxReplacementsPercentPerHour` of the desired slots are given up as sick, but five in
any case: a percentage of a few slots says nothing. The rest waits. A slot is counted once, however often its removal is
planned. Boots that fail in a row are not counted: the back-off is the tighter bound, and it ends when boots work again.
What was spent is in the status, a little coarser (`portions`), so that a restart does not begin a new hour.

*Back-off.* Counts only slots of the current template that never became ready, and only in a row: a slot that is ready
and was created no earlier than the one that failed is proof that boots work. Slots that were created before the last
failure was seen belong to the same failure, so a whole batch counts once. The n-th failure in a row holds creates for
1 s, 2 s, 4 s, ... up to 5 minutes and halves how many slots may boot at a time, down to one.

*Refusals.* A refusal holds all creates of the pool. It is tried again with one slot, after 5 s, then 10, 20, ... up to
5 minutes; at once when the pool's spec changed. It is over when that one slot exists. A namespace that isn't enabled is
tried again at least every 30 s: its label is not part of the pool, and the operator can't watch namespaces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tapforge_operator import labels
from tapforge_operator.emulatorpool.state import BootFailures, History, NewSlot, Observed, Refusal, Refused, Spent
from tapforge_operator.kube.types import Slot

HOUR = 3600.0
#: pauses after boots that failed and after creates that were refused, seconds
FIRST_BOOT, FIRST_REFUSED, LONGEST = 1.0, 5.0, 300.0
#: between two creates in a namespace that may be given its label at any moment
LONGEST_NOT_ENABLED = 30.0
#: creates in one plan: what the API server carries out in about a second
PER_PASS = 1000
#: slots that may boot at a time after a boot failed, halved with each one in a row
BOOTING = 500
#: sick slots that a pool of any size may replace within an hour
LEAST = 5
#: failures in a row before the pool says so
WORTH_SAYING = 2
#: what was spent is remembered in portions of so many seconds: an hour has at most twelve
PORTION = 300.0

#: these pass only when a person changes something
NEEDS_A_PERSON = frozenset(
    {"PodSecurity", "NamespaceNotEnabled", "Invalid", "Forbidden", "NameTaken", "DevicesNotEnabled"}
)
#: what a person can do about it, as the pool's condition says it
REMEDY = {
    "QuotaExceeded": "Raise the namespace's quota or make the pool smaller",
    "PodSecurity": "Change the template or kvm.mode, or the namespace's pod-security.kubernetes.io/enforce label",
    "NamespaceNotEnabled": "Only an administrator of the cluster may label a namespace",
    "Invalid": "Change spec.template",
    "Forbidden": "Let the operator create such Pods: its role, an admission policy or a LimitRange says no",
    "NameTaken": "Delete the Pod of that name, or rename the pool",
    "NamespaceTerminating": "The namespace is being deleted",
    "DevicesNotEnabled": "Its administrator may change that",
}
#: what the API server puts before the words of an admission policy
_DENIED = "denied request: "


def within_the_hour(spent: Spent, now: float) -> Spent:
    return tuple((t, n) for t, n in spent if now - t < HOUR)


def budget(spent: Spent, desired: int, percent: int) -> int:
    """Sick slots that may still be given up. `spent` is of this hour."""
    return max(0, max(LEAST, math.ceil(desired * percent / 100)) - sum(n for _, n in spent))


def spend(spent: Spent, slots: int, now: float) -> Spent:
    return (*spent, (now, slots)) if slots else spent


def budget_returns_at(spent: Spent) -> float | None:
    return spent[0][0] + HOUR if spent else None


def portions(spent: Spent) -> Spent:
    """The same in fewer entries; each is as late as the last replacement in it, so that none comes back too early."""
    coarse: list[tuple[float, int]] = []
    began = -math.inf
    for t, n in spent:
        if t - began < PORTION:
            coarse[-1] = (t, coarse[-1][1] + n)
        else:
            coarse.append((t, n))
            began = t
    return tuple(coarse)


def proof(slots: Iterable[Slot], template: str) -> float:
    """Creation of the newest slot of the template that serves: failed boots of earlier ones don't count."""
    return max((slot.created for slot in slots if slot.ready and slot.template == template), default=-math.inf)


def count_boots(before: BootFailures, failed: Sequence[Slot], proof: float, template: str, now: float) -> BootFailures:
    """The failures in a row, after `failed` were given up before they were ready."""
    if before.template != template:
        before = BootFailures(template=template)
    if before.times and proof >= before.created:
        before = BootFailures(template=template)
    newest = max((slot.created for slot in failed if slot.template == template), default=-math.inf)
    if newest <= proof:
        return before
    if before.times == 0 or newest >= math.floor(before.at):
        return BootFailures(before.times + 1, now, newest, template)
    return replace(before, created=max(before.created, newest))


def boots_again_at(boots: BootFailures) -> float:
    return boots.at + min(LONGEST, FIRST_BOOT * 2.0 ** min(boots.times - 1, 16))


def let_by_boots(boots: BootFailures, wanted: int, booting: int, now: float) -> int:
    """Creates that the back-off lets through. `booting`: slots that boot now."""
    if boots.times == 0:
        return wanted
    if now < boots_again_at(boots):
        return 0
    return max(0, min(wanted, max(1, BOOTING >> min(boots.times, 16)) - booting))


def refusal(status: int, reason: str, message: str) -> Refusal | None:
    """What the answer to a create means, or None when it says nothing about the Pod: busy, failed, gone, a conflict."""
    text = message[:1000]
    if status == 403:
        if labels.WORKLOADS in message:  # the confinement policy's own words name the label and the command
            return Refusal("NamespaceNotEnabled", text.rpartition(_DENIED)[2])
        if "exceeded quota" in message:
            return Refusal("QuotaExceeded", text)
        if "violates PodSecurity" in message:
            return Refusal("PodSecurity", text)
        if "being terminated" in message:
            return Refusal("NamespaceTerminating", text)
        return Refusal("Forbidden", text)
    if status in (400, 422) and reason != "Conflict":
        return Refusal("Invalid", text)
    return None


def refusal_ends_at(refused: Refused) -> float:
    longest = LONGEST_NOT_ENABLED if refused.refusal.reason == "NamespaceNotEnabled" else LONGEST
    return refused.at + min(longest, FIRST_REFUSED * 2.0 ** min(refused.times - 1, 16))


def remember_refusal(history: History, observed: Observed, generation: int, now: float) -> Refused | None:
    """What holds the creates after what was seen."""
    before = history.refused
    if before is not None and before.generation != generation:
        before = None
    if observed.refusals:
        # The worst one speaks: what needs a person is not hidden behind what may pass.
        worst = max(observed.refusals, key=lambda r: r.reason in NEEDS_A_PERSON)
        return Refused(worst, before.times + 1 if before else 1, now, generation)
    if before is not None and before.probe and any(slot.name == before.probe for slot in observed.slots):
        return None
    return before


def let_by_refusal(refused: Refused | None, wanted: int, now: float) -> int:
    """Creates that a refusal lets through."""
    if refused is None:
        return wanted
    return min(wanted, 1) if now >= refusal_ends_at(refused) else 0


def refusal_tried(refused: Refused | None, creates: tuple[NewSlot, ...], now: float) -> Refused | None:
    """The refusal after these creates are sent. Without an answer the next try is as far away as this one was."""
    if refused is None or not creates:
        return refused
    return replace(refused, probe=creates[0].name, at=now)
