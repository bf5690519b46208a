"""What votes decide. Pure.

A verdict is what it would be whatever the unreadable votes had said. Where they could change it, and in a tie, there is
none.
"""

from __future__ import annotations

from collections.abc import Sequence

from tapforge_api.judge import VotingRule


def decide(votes: Sequence[float | None], rule: VotingRule) -> float | None:
    """0, 1, or None: not decided. Each vote is 0, 1, or None where it can't be read."""
    yes, no = votes.count(1.0), votes.count(0.0)
    if rule == "unanimous":
        accepted, refused = yes == len(votes), no > 0
    elif rule == "any":
        accepted, refused = yes > 0, no == len(votes)
    else:
        accepted, refused = 2 * yes > len(votes), 2 * no > len(votes)
    if not votes or accepted == refused:
        return None
    return 1.0 if accepted else 0.0


def agree(votes: Sequence[float | None]) -> bool:
    """Whether all are readable and the same."""
    return bool(votes) and None not in votes and len(set(votes)) == 1


def counted(votes: Sequence[float | None]) -> str:
    """In words, for messages."""
    return f"{votes.count(1.0)} yes, {votes.count(0.0)} no, {votes.count(None)} unreadable"
