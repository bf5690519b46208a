"""Who holds which slot: a pure state machine without clock or I/O.

    free -> leased -> free                    returned clean
            leased -> sick                    returned dirty, or the phone died while it was leased
    free ------------> sick                   the phone died
                       sick -> free           a probe found it healthy
                       sick -> quarantined    too many strikes in a row
                               quarantined -> free    a later probe found it healthy; the next strike sends it back

A strike is a dirty return, a death or a failed probe; a clean return clears them. So a phone that lies about its health
(each probe succeeds, each episode breaks) ends in quarantine too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .source import SlotCounts, SlotError, Verdict


class State(StrEnum):
    FREE = "free"
    LEASED = "leased"
    SICK = "sick"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class _Slot:
    name: str
    state: State = State.FREE
    fence: int = 0
    strikes: int = 0
    #: died while leased: whatever the holder says at the end, it is dirty
    doomed: bool = False
    #: place in the queue of free slots; the longest idle is granted first, so that all phones get work
    idle_since: int = 0


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds before the next probe of a sick slot: `first`, doubled with each strike up to `cap`."""

    first: float = 0.5
    cap: float = 30.0
    #: strikes in a row that lead to quarantine
    strikes: int = 8
    #: seconds between probes of a slot in quarantine
    quarantine: float = 300.0

    def delay(self, strikes: int) -> float:
        if strikes >= self.strikes:
            return self.quarantine
        return min(self.cap, self.first * 2 ** max(0, strikes - 1))


class SlotTable:
    def __init__(self, names: Sequence[str], strikes: int):
        if len(set(names)) != len(names):
            raise SlotError(f"slot names must differ: {sorted(n for n in set(names) if list(names).count(n) > 1)}")
        self._slots: dict[str, _Slot] = {}
        self._limit = strikes
        self._ticks = 0
        #: of all slots together: a slot that leaves and comes again never repeats one
        self._fences = 0
        self._quarantines = 0
        for name in names:
            self.add(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def add(self, name: str) -> None:
        """A new slot, free."""
        if name in self._slots:
            raise SlotError(f"slot {name} is there already")
        self._slots[name] = slot = _Slot(name)
        self._free(slot)

    def remove(self, name: str) -> None:
        """The slot is gone, whatever its state; a lease on it can't be given back any more."""
        del self._slots[name]

    def state(self, name: str) -> State:
        return self._slots[name].state

    def leased(self, name: str) -> bool:
        return self._slots[name].state is State.LEASED

    @property
    def in_use(self) -> bool:
        """Whether any slot is leased."""
        return any(slot.state is State.LEASED for slot in self._slots.values())

    def strikes(self, name: str) -> int:
        return self._slots[name].strikes

    def counts(self) -> SlotCounts:
        by_state = {s: sum(slot.state is s for slot in self._slots.values()) for s in State}
        return SlotCounts(
            free=by_state[State.FREE],
            leased=by_state[State.LEASED],
            sick=by_state[State.SICK],
            quarantined=by_state[State.QUARANTINED],
            quarantines=self._quarantines,
        )

    @property
    def usable(self) -> int:
        return sum(slot.state is not State.QUARANTINED for slot in self._slots.values())

    def take(self, avoid: frozenset[str] = frozenset()) -> tuple[str, int] | None:
        """Leases the longest idle free slot: (name, fence). Slots to avoid only when every other one is quarantined."""
        free = [s for s in self._slots.values() if s.state is State.FREE]
        if avoid:
            others = any(s.state is not State.QUARANTINED and s.name not in avoid for s in self._slots.values())
            if others:
                free = [s for s in free if s.name not in avoid]
        if not free:
            return None
        slot = min(free, key=lambda s: s.idle_since)
        slot.state = State.LEASED
        self._fences += 1
        slot.fence = self._fences
        return slot.name, slot.fence

    def give(self, name: str, fence: int, verdict: Verdict) -> State:
        """Ends a lease and returns the slot's new state."""
        slot = self._slots.get(name)
        if slot is None or slot.state is not State.LEASED or slot.fence != fence:
            now = slot.state if slot else "gone"
            raise SlotError(f"lease {fence} of slot {name} was returned before; the slot is {now}")
        if verdict is Verdict.DIRTY or slot.doomed:
            slot.doomed = False
            self._strike(slot)
        else:
            slot.strikes = 0
            self._free(slot)
        return slot.state

    def died(self, name: str) -> bool:
        """The phone is gone. True when the slot is sick from now on; a leased one becomes so at its return."""
        slot = self._slots[name]
        if slot.state is State.LEASED:
            slot.doomed = True
            return False
        if slot.state is State.FREE:
            self._strike(slot)
            return True
        return False

    def probed(self, name: str, healthy: bool) -> State:
        """The result of a probe of a sick or quarantined slot."""
        slot = self._slots[name]
        if slot.state not in (State.SICK, State.QUARANTINED):
            raise SlotError(f"slot {name} is {slot.state}: only sick slots are probed")
        if healthy:
            self._free(slot)
        else:
            self._strike(slot)
        return slot.state

    def _free(self, slot: _Slot) -> None:
        slot.state = State.FREE
        slot.idle_since = self._ticks
        self._ticks += 1

    def _strike(self, slot: _Slot) -> None:
        # Strikes stop at the limit: out of quarantine, one more sends the slot back.
        slot.strikes = min(slot.strikes + 1, self._limit)
        before, slot.state = slot.state, State.QUARANTINED if slot.strikes >= self._limit else State.SICK
        if slot.state is State.QUARANTINED and before is not State.QUARANTINED:
            self._quarantines += 1
