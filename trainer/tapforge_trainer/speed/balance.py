"""Which split of a run's GPUs, and how many phones, would make its updates faster. Pure.

A split is named where it is faster by `_WORTH` at both ends of the range of shares; phones where rollout is what is
waited for and more of them help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from .cards import CardSpeed
from .estimate import Assumed, Speed, Work, speed

#: of an update's time
_WORTH: Final = 0.05


@dataclass(frozen=True, slots=True)
class Better:
    """A change, as `--set` takes it, and what it makes of an update: at the low share and at the high one."""

    overrides: tuple[str, ...]
    low: Speed
    high: Speed


def both(work: Work, assumed: Assumed, card: CardSpeed) -> tuple[Speed, Speed]:
    low, high = assumed.shares
    return speed(work, assumed, card, low), speed(work, assumed, card, high)


def better_split(
    work: Work, assumed: Assumed, card: CardSpeed, *, colocated: bool, fits: Callable[[Work], bool]
) -> Better | None:
    """Of the same GPUs. `fits`: whether a split has room for the model."""
    if colocated:
        return None
    now = both(work, assumed, card)
    found = [(other, both(other, assumed, card)) for other in _splits(work)]
    found.sort(key=lambda one: one[1][0].update + one[1][1].update)
    for other, (low, high) in found:
        if low.update > (1 - _WORTH) * now[0].update or high.update > (1 - _WORTH) * now[1].update:
            return None
        if fits(other):
            changed = (f"spec.learner.ranks={other.ranks}", f"spec.engine.replicas={other.engines}")
            return Better(changed, low, high)
    return None


def _splits(work: Work) -> Iterator[Work]:
    for engines in range(1, work.gpus // work.tensor_parallel + 1):
        ranks = work.gpus - engines * work.tensor_parallel
        if ranks > 0 and engines != work.engines:
            yield replace(work, ranks=ranks, engines=engines)


def enough_players(work: Work, assumed: Assumed, card: CardSpeed, most: int) -> int | None:
    """Episodes at once from which on the learner is what is waited for, at the middle of the range; None: it is
    already, or `most` of them would not do."""
    middle = sum(assumed.shares) / 2
    if work.in_turns or speed(work, assumed, card, middle).bound == "learner":
        return None
    for players in range(work.players + 1, most + 1):
        if speed(replace(work, players=players), assumed, card, middle).bound == "learner":
            return players
    return None
