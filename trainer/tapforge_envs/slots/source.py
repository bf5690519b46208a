"""Where phones come from, as the rollout sees it.

Promises of every `SlotSource`:
1. A slot has at most one lease at any moment. A lease is returned exactly once, with a verdict.
2. A slot returned as dirty is granted again only after it proved healthy.
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
    """What the holder of a lease says about the phone. Dirty: it may be in a state that a reset can't repair."""

    CLEAN = "clean"
    DIRTY = "dirty"


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

    def when_changed(self, tell: Callable[[], None]) -> Callable[[], None]:
        """From now on `tell` is called whenever a slot came, went, was put into quarantine or is healthy again; the
        function returned ends that."""
        ...

    async def start(self) -> None: ...

    async def acquire(self, deadline: float, avoid: frozenset[str] = frozenset()) -> Lease:
        """Waits while a slot is in use, and else at most `deadline` seconds. Slots in `avoid` are granted only when no
        other slot is left, or when none came free for so long."""
        ...

    async def release(self, lease: Lease, verdict: Verdict, why: str = "") -> None:
        """`why` is what the holder saw; it appears where the slot's state is explained."""
        ...

    async def close(self) -> None: ...
