"""A plan in the making: which slots stand, which were given up, and why.

A slot *stands* while it holds its ordinal: its Pod is neither being deleted nor retained nor given up in this plan. It
is *protected* while somebody's claim of it has not expired. A Pod that is being deleted holds nothing, claimed or not:
no one can take a deletion back, and the phone that follows it needs its time to boot.
"""

from __future__ import annotations

from ..slots import Slot
from .health import Deadlines
from .history import History
from .records import Held, Pool, Reason, Removal, Seen
from .rollout import Limits, outdated
from .sizing import Size, size


class Draft:
    def __init__(self, pool: Pool, seen: Seen, history: History, now: float):
        self.pool, self.seen, self.history, self.now = pool, seen, history, now
        self.deadlines = Deadlines.of(pool.spec, seen.watching_since)
        slots = [slot for slot in seen.slots if slot.pool_uid == pool.uid]
        self.standing = {slot.uid: slot for slot in slots if not slot.deleting and not slot.retained}
        #: the slots that stood before this plan
        self.present = tuple(self.standing.values())
        self.ending = [slot for slot in slots if slot.deleting]
        self.retained = [slot for slot in slots if slot.retained and not slot.deleting]
        self.protected: dict[str, Held] = {
            uid: claim
            for uid, claim in seen.held.items()
            if not claim.expired and not claim.condemned and uid in self.standing
        }
        self.size: Size = size(pool, seen, len(self.protected), len(self.standing), history, now)
        self.limits = Limits.of(pool.spec.update_strategy, self.desired)
        #: slots that are to be exchanged, why by uid
        self.outdated: dict[str, Reason] = self._outdated()
        self.removals: dict[str, Removal] = {}
        self.recall: dict[str, str] = {}
        #: sick slots that the budget does not let go
        self.waiting: list[Slot] = []

    def _outdated(self) -> dict[str, Reason]:
        cordoned = {name for name, state in self.seen.nodes.items() if state == "cordoned"}
        found = {}
        for uid, slot in self.standing.items():
            played = self.protected[uid].episodes if uid in self.protected else 0
            reason = outdated(slot, self.pool, played, slot.node in cordoned, self.now)
            if reason is not None:
                found[uid] = reason
        return found

    @property
    def desired(self) -> int:
        return self.size.desired

    def allowed(self) -> int:
        """Slots that may stand: surge only while something is left to exchange."""
        left = sum(uid in self.standing for uid in self.outdated)
        return self.desired + min(self.limits.surge, left)

    def free(self) -> list[Slot]:
        """Standing slots that nobody holds."""
        return [slot for uid, slot in self.standing.items() if uid not in self.protected]

    def claimed(self) -> list[Slot]:
        """Standing slots that somebody holds."""
        return [self.standing[uid] for uid in self.protected if uid in self.standing]

    def give_up(self, slot: Slot, reason: Reason, *, sick: bool = False, force: bool = False) -> None:
        self.removals[slot.uid] = Removal(slot, reason, sick, force)
        self.standing.pop(slot.uid, None)

    def ask_back(self, slot: Slot, reason: Reason | str) -> None:
        """Once per claim: what was asked back already is left alone."""
        if not self.is_asked_back(slot):
            self.recall[slot.uid] = str(reason)

    def is_asked_back(self, slot: Slot) -> bool:
        return slot.uid in self.recall or bool(self.protected[slot.uid].recalled)

    def asked_back(self) -> int:
        """Standing slots that come back at the end of their episode."""
        return sum(map(self.is_asked_back, self.claimed()))

    def condemned(self, slot: Slot) -> bool:
        """Nobody gets it again."""
        claim = self.seen.held.get(slot.uid)
        return claim is not None and claim.condemned

    def withheld(self) -> frozenset[str]:
        """Who got one of these now would be asked to give it back at once, or would play on the old image."""
        why = (Reason.CORDONED, Reason.OLD_TEMPLATE)
        return frozenset(uid for uid, reason in self.outdated.items() if reason in why)

    def known(self, slot: Slot) -> bool:
        """Its removal was planned and counted before."""
        return slot.uid in self.history.condemned

    def newly_failed(self) -> list[Slot]:
        """Slots given up as sick, that were not before; newest first."""
        fresh = [r.slot for r in self.removals.values() if r.sick and not self.known(r.slot)]
        return sorted(fresh, key=lambda slot: (-slot.created, slot.uid))
