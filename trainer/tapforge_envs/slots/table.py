"""The holder of each slot, and how far its phone is trusted: a pure state machine without clock or I/O.

    free -> leased -> free                    returned clean
            leased -> sick                    returned dirty, or the phone died while it was leased
    free ------------> sick                   the phone died
                       sick -> free           a probe found it healthy
                       sick -> quarantined    too many strikes
            leased -> quarantined             returned clean, but much slower than the others
                               quarantined -> probation    a later probe found it healthy
    probation -> leased -> free               its trial episode ended clean
                 leased -> quarantined        it did not

1. A strike is a dirty return, a death or a failed probe; a clean return takes one back, an unproven one changes
   nothing: a phone on probation stays so. So a phone that lies about its health (each probe succeeds, each episode
   breaks) ends in quarantine too, and one that breaks every second episode doesn't.
2. Quarantine is a circuit breaker: it opens at the limit of strikes. Each failure of a probe or of a trial doubles its
   cooldown (`Backoff`); a trial episode that ends clean closes it.
3. A phone on probation is granted for one episode, to a request that can afford to lose it (`trial`), or when no
   other phone is left. Another one, after a phone that broke (`avoid`), gets none with strikes while there are others.
4. Of free phones, those without strikes come first, and of equal ones the longest idle: all phones get work, also where
   there are more than episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from .source import SlotCounts, SlotError, SlotView, Verdict

#: times the median pace of all phones, from which on one is too slow to be used
SLOW = 5.0
#: seconds per call that are never too slow: a model takes as long, and where phones are fast, noise is many times that
_SOON = 1.0
#: of all phones at most, that are not used for being slow: when all of them are, it isn't their fault
_SLOW_SHARE = 0.25
#: phones whose pace has to be known, before one is called slow
_PACES = 5
#: share of the newest episode in a phone's pace
_NEWEST = 0.5
#: doublings after which a cooldown grows no more, whatever its cap is
_OPENINGS = 32


class State(StrEnum):
    FREE = "free"
    LEASED = "leased"
    SICK = "sick"
    QUARANTINED = "quarantined"
    PROBATION = "probation"


@dataclass(slots=True)
class _Slot:
    name: str
    state: State = State.FREE
    fence: int = 0
    strikes: int = 0
    #: failures since its breaker opened, the opening included; 0: it is closed
    openings: int = 0
    #: died while leased: whatever the holder says at the end, it is dirty
    doomed: bool = False
    #: place in the queue of free slots
    idle_since: int = 0
    #: seconds per call, an average over its episodes; None: not known
    pace: float | None = None
    #: in quarantine for its pace
    slow: bool = False
    #: episodes that ended clean and dirty
    clean: int = 0
    dirty: int = 0


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds before the next probe of a sick slot: `first`, doubled with each strike up to `cap`."""

    first: float = 0.5
    cap: float = 30.0
    #: that lead to quarantine
    strikes: int = 4
    #: cooldown: seconds before the first probe of a slot in quarantine, doubled with each failure up to the cap
    quarantine: float = 15.0
    quarantine_cap: float = 300.0

    def delay(self, strikes: int, openings: int = 0) -> float:
        if openings:
            return min(self.quarantine_cap, self.quarantine * 2.0 ** min(openings - 1, _OPENINGS))
        return min(self.cap, self.first * 2.0 ** min(max(0, strikes - 1), _OPENINGS))


class SlotTable:
    def __init__(self, names: Sequence[str], strikes: int):
        if len(set(names)) != len(names):
            raise SlotError(f"slot names must differ: {sorted(n for n in set(names) if list(names).count(n) > 1)}")
        self._slots: dict[str, _Slot] = {}
        self._limit = strikes
        self._ticks = 0
        #: of all slots together: a slot that leaves and comes again never repeats one
        self._fences = 0
        self._quarantines = self._trials = self._recoveries = 0
        for name in names:
            self.add(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._slots)

    def __contains__(self, name: str) -> bool:
        return name in self._slots

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

    def delay(self, name: str, backoff: Backoff) -> float:
        """Seconds before the next probe of a sick or quarantined slot."""
        return backoff.delay(self._slots[name].strikes, self._slots[name].openings)

    def views(self) -> list[SlotView]:
        return [
            SlotView(s.name, s.state, s.strikes, s.openings, s.clean, s.dirty, s.pace) for s in self._slots.values()
        ]

    def counts(self) -> SlotCounts:
        by_state = {s: sum(slot.state is s for slot in self._slots.values()) for s in State}
        return SlotCounts(
            free=by_state[State.FREE],
            leased=by_state[State.LEASED],
            sick=by_state[State.SICK],
            quarantined=by_state[State.QUARANTINED],
            quarantines=self._quarantines,
            probation=by_state[State.PROBATION],
            trials=self._trials,
            recoveries=self._recoveries,
        )

    @property
    def usable(self) -> int:
        return sum(slot.state is not State.QUARANTINED for slot in self._slots.values())

    def take(self, avoid: frozenset[str] = frozenset(), trial: bool = False) -> tuple[str, int] | None:
        """Leases a slot: (name, fence). Slots to avoid only when every other one is quarantined. `trial`: the episode
        may be lost."""
        slots = [s for s in self._slots.values() if s.state is not State.QUARANTINED]
        if avoid and any(s.name not in avoid for s in slots):
            slots = [s for s in slots if s.name not in avoid]
        known = [] if trial else [s for s in slots if s.state is not State.PROBATION]
        if known and avoid:
            known = [s for s in known if not s.strikes] or known
        found = [s for s in known or slots if s.state in (State.FREE, State.PROBATION)]
        if not found:
            return None
        slot = min(found, key=lambda s: (s.state is not State.PROBATION, s.strikes, s.idle_since))
        self._trials += slot.state is State.PROBATION
        slot.state = State.LEASED
        self._fences += 1
        slot.fence = self._fences
        return slot.name, slot.fence

    def give(self, name: str, fence: int, verdict: Verdict, pace: float | None = None) -> State:
        """Ends a lease and returns the slot's new state. `pace`: seconds that a call to the phone took on average."""
        slot = self._slots.get(name)
        if slot is None or slot.state is not State.LEASED or slot.fence != fence:
            now = slot.state if slot else "gone"
            raise SlotError(f"lease {fence} of slot {name} was returned before; the slot is {now}")
        if verdict is Verdict.DIRTY or slot.doomed:
            slot.doomed = False
            slot.dirty += 1
            self._strike(slot)
            return slot.state
        if verdict is Verdict.UNPROVEN:
            self._free(slot, State.PROBATION if slot.openings else State.FREE)
            return slot.state
        slot.clean += 1
        if pace is not None:
            slow = self._too_slow(slot, pace)
            slot.pace = pace if slot.pace is None else (1 - _NEWEST) * slot.pace + _NEWEST * pace
            if slow:
                slot.slow = True
                self._open(slot)
                return slot.state
        if slot.openings:
            slot.openings = slot.strikes = 0
            slot.slow = False
            self._recoveries += 1
        slot.strikes = max(0, slot.strikes - 1)
        self._free(slot)
        return slot.state

    def died(self, name: str) -> bool:
        """The phone is gone. True when the slot is sick from now on; a leased one becomes so at its return."""
        slot = self._slots[name]
        if slot.state is State.LEASED:
            slot.doomed = True
            return False
        if slot.state in (State.FREE, State.PROBATION):
            self._strike(slot)
            return True
        return False

    def probed(self, name: str, healthy: bool) -> State:
        """The result of a probe of a sick or quarantined slot."""
        slot = self._slots[name]
        if slot.state not in (State.SICK, State.QUARANTINED):
            raise SlotError(f"slot {name} is {slot.state}: only sick slots are probed")
        if not healthy:
            self._strike(slot)
        elif slot.state is State.QUARANTINED:
            self._free(slot, State.PROBATION)
        else:
            self._free(slot)
        return slot.state

    def _free(self, slot: _Slot, state: State = State.FREE) -> None:
        slot.state = state
        slot.idle_since = self._ticks
        self._ticks += 1

    def _strike(self, slot: _Slot) -> None:
        slot.strikes = min(slot.strikes + 1, self._limit)
        if slot.openings or slot.strikes >= self._limit:
            self._open(slot)
        else:
            slot.state = State.SICK

    def _open(self, slot: _Slot) -> None:
        self._quarantines += slot.state is not State.QUARANTINED
        slot.state = State.QUARANTINED
        slot.openings = min(slot.openings + 1, _OPENINGS)

    def _too_slow(self, slot: _Slot, pace: float) -> bool:
        others = [other for other in self._slots.values() if other is not slot]
        paces = [other.pace for other in others if other.pace is not None]
        spared = sum(other.slow for other in others) + 1 > _SLOW_SHARE * len(self._slots)
        return not spared and len(paces) >= _PACES and pace > max(_SOON, SLOW * median(paces))
