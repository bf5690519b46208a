"""Where phones come from, as the rollout sees it.

Promises of every `SlotSource`:
1. A slot has at most one lease at any moment. A lease is returned exactly once, with a verdict.
2. A slot returned as dirty is granted again only after it proved healthy; one that was in quarantine first for a trial
   episode.
3. `acquire` ends: with a lease, or with `NoSlot`, naming what is wrong with the slots, when for its deadline (seconds)
   there was neither a slot to grant nor one in use. As long as a slot is in use, it waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ..clients.phones import PhoneAddress
from .lease_life import LeaseLife

#: asks a phone for its health: the instance of its server, or an EnvironmentFault
HealthProbe = Callable[[PhoneAddress], Awaitable[str]]


class Verdict(StrEnum):
    """What the holder of a lease says about the phone. Dirty: it may be in a state that a reset can't repair. Unproven:
    it was left clean, by an episode that says nothing of it, because it was stopped or never began."""

    CLEAN = "clean"
    DIRTY = "dirty"
    UNPROVEN = "unproven"


class SlotError(Exception):
    """A source can't offer phones. The message names the slots and the remedy."""


class NoSlot(SlotError):
    """For the deadline there was no slot to grant and none in use."""


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """An episode's exclusive right to a slot. `fence` grows with every lease of the same slot."""

    slot: str
    fence: int
    phone: PhoneAddress
    life: LeaseLife


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """A snapshot for progress and status."""

    free: int
    leased: int
    sick: int
    quarantined: int
    #: how often a slot was put into quarantine since the start
    quarantines: int
    #: out of quarantine, and waiting for a trial episode
    probation: int = 0
    #: trial episodes since the start, and how many of them let their slot serve again
    trials: int = 0
    recoveries: int = 0


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot as an observer of the fleet sees it."""

    name: str
    state: str
    #: failures that brought it nearer to quarantine, and failures since it was put there
    strikes: int
    failures: int
    #: episodes that ended clean and dirty
    clean: int
    dirty: int
    #: seconds per call; None: not known
    pace: float | None
    #: what was wrong with it last
    why: str = ""
    #: unix seconds at which it is asked again how it is; None: it isn't waited for
    again: float | None = None


class SlotSource(Protocol):
    """`start` before the first `acquire`; `close` ends every background task and process of the source. Slots may come
    and go while it is open."""

    @property
    def size(self) -> int:
        """All slots that are there now, whatever their state."""
        ...

    @property
    def usable(self) -> int:
        """Slots that are not in quarantine."""
        ...

    def counts(self) -> SlotCounts: ...

    def views(self) -> list[SlotView]:
        """All slots that are there now."""
        ...

    def when_changed(self, tell: Callable[[], None]) -> Callable[[], None]:
        """From now on `tell` is called whenever a slot came, went, was put into quarantine or is healthy again; the
        function returned ends that."""
        ...

    async def start(self) -> None: ...

    async def acquire(self, deadline: float, avoid: frozenset[str] = frozenset(), trial: bool = False) -> Lease:
        """Waits while a slot is in use, and else at most `deadline` seconds. Slots in `avoid` are granted only when no
        other slot is left, or when none came free for so long. `trial`: the episode may be spent on a phone that was in
        quarantine; such phones come first then."""
        ...

    async def release(self, lease: Lease, verdict: Verdict, why: str = "", pace: float | None = None) -> None:
        """`why` is what the holder saw; it appears where the slot's state is explained. `pace`: seconds that a call to
        the phone took on average, where the episode had enough calls to tell."""
        ...

    async def close(self) -> None: ...
