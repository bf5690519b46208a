"""Creates that the API server refuses: what kind of refusal it is, and when to try again.

A refusal holds all creates of the pool. It is tried again with one slot, after 5 s, then 10, 20, ... up to 5 minutes;
at once when the pool's spec changed. It is over when that one slot exists.
"""

from __future__ import annotations

from dataclasses import replace

from .history import History, Refusal, Refused
from .records import NewSlot, Seen

FIRST, CAP = 5.0, 300.0

#: these pass only when a person changes something
NEEDS_A_PERSON = frozenset({"PodSecurity", "Invalid", "Forbidden", "NameTaken"})


def refusal(status: int, reason: str, message: str) -> Refusal | None:
    """What the answer to a create means, or None when it says nothing about the Pod: busy, failed, gone, a conflict."""
    text = message[:1000]
    if status == 403:
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


def retry_at(refused: Refused) -> float:
    return refused.at + min(CAP, FIRST * 2.0 ** min(refused.times - 1, 16))


def remember(history: History, seen: Seen, generation: int, now: float) -> Refused | None:
    """What holds the creates after what was seen."""
    before = history.refused
    if before is not None and before.generation != generation:
        before = None
    if seen.refusals:
        # The worst one speaks: what needs a person is not hidden behind what may pass.
        worst = max(seen.refusals, key=lambda r: r.reason in NEEDS_A_PERSON)
        return Refused(worst, before.times + 1 if before else 1, now, generation)
    if before is not None and before.probe and any(slot.name == before.probe for slot in seen.slots):
        return None
    return before


def allowed(refused: Refused | None, wanted: int, now: float) -> int:
    """Creates that a refusal lets through."""
    if refused is None:
        return wanted
    return min(wanted, 1) if now >= retry_at(refused) else 0


def tried(refused: Refused | None, creates: tuple[NewSlot, ...], now: float) -> Refused | None:
    """The refusal after these creates are sent. Without an answer the next try is as far away as this one was."""
    if refused is None or not creates:
        return refused
    return replace(refused, probe=creates[0].name, at=now)
