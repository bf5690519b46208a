"""How many slots of a pool are what: counted as they change, so that nobody ever has to look at all of them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, TypeVar

from .records import Claimant, State

K = TypeVar("K")


class Share(NamedTuple):
    """What one slot adds to the counts of its pool."""

    state: State
    #: whose claim it has
    claimant: Claimant | None
    #: the claim is asked back for somebody who waits
    yields: bool
    #: the claim is asked back by the pool: the slot serves nobody afterwards
    leaves: bool
    booting: bool
    #: it will be free as soon as its mark is off
    returning: bool


class Tally:
    __slots__ = ("booting", "held", "holders", "leaving", "returning", "states", "yielding")

    def __init__(self) -> None:
        self.states: Counter[State] = Counter()
        #: claims that are being granted or held, by claimant; and of these those that are asked back
        self.held: Counter[Claimant] = Counter()
        #: the same by holder
        self.holders: Counter[str] = Counter()
        self.yielding: Counter[Claimant] = Counter()
        self.leaving: Counter[Claimant] = Counter()
        self.booting = 0
        self.returning = 0

    def add(self, share: Share, sign: int) -> None:
        self.states[share.state] += sign
        self.booting += sign * share.booting
        self.returning += sign * share.returning
        if share.claimant is not None:
            _count(self.held, share.claimant, sign)
            _count(self.holders, share.claimant[0], sign)
            if share.yields:
                _count(self.yielding, share.claimant, sign)
            if share.leaves:
                _count(self.leaving, share.claimant, sign)


def _count(counter: Counter[K], key: K, sign: int) -> None:
    counter[key] += sign
    if not counter[key]:
        del counter[key]
