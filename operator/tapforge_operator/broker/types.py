"""What the ledger receives, what it keeps of a claim, and what it asks its shell to do: plain records.

Times are seconds of a clock that only runs while the operator does (`renewals.RunningClock`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from tapforge_operator.broker.claim_record import ClaimRecord, Clear, SlotView

#: "unknown": the device was not probed yet; "quarantined": it broke too often and is left alone for a while
#: "refused": the namespace may not name it
DeviceState = Literal["ready", "unready", "quarantined", "refused", "unknown"]
#: a competitor for slots: (holder, priority)
Claimant = tuple[str, int]


@dataclass(slots=True, eq=False)
class Claim:
    """A claim that is being granted or held."""

    record: ClaimRecord
    ticket: int = 0
    #: when its holder renewed it last, or it began
    renewed_at: float = math.inf
    #: episodes run under it so far
    episodes: int = 0
    #: why it was asked back; "" when it was not
    revoked: str = ""
    #: asked back for a claimant that waits: the slot goes on serving. Otherwise it is not granted afterwards
    yields: bool = False
    #: its holder knows that it was revoked
    told: bool = False
    #: its record is signed with one of our keys
    proved: bool = True
    #: when it is over, however often it is renewed
    until: float = math.inf
    #: filled in by the shell when it is first needed
    secret: str = ""
    id: str = field(init=False)
    claimant: Claimant = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.record.id
        self.claimant = (self.record.holder, self.record.priority)

    @property
    def silent_from(self) -> float:
        return self.renewed_at + self.record.ttl

    @property
    def believed(self) -> float:
        """Its holder believes that it has it, as long as it receives nothing else."""
        return self.renewed_at + max(self.record.ttl, self.record.hold)

    @property
    def ends(self) -> float:
        return min(self.until, self.believed)


@dataclass(frozen=True, slots=True)
class ClaimEvent:
    """A claim was granted, or (`why`) ended."""

    claim: Claim
    view: SlotView
    why: str = ""


class State(StrEnum):
    FREE = "free"
    GRANTING = "granting"
    HELD = "held"
    RELEASING = "releasing"
    COOLDOWN = "cooldown"
    TERMINATING = "terminating"


@dataclass(frozen=True, slots=True)
class Counts:
    """Slots of a pool by state; `free` are those that would be granted at once."""

    slots: int = 0
    free: int = 0
    held: int = 0
    booting: int = 0
    cooldown: int = 0
    terminating: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Want:
    """An acquire: `slots` at most. What is written on them is in `ClaimRecord`."""

    pool: str
    holder: str
    run: str
    request: str
    slots: int
    ttl: float
    priority: int = 0
    hold: float = 0.0
    pod: str = ""
    session: str = ""
    number: int = 0
    #: slots that the holder may have in all; 0: any number
    limit: int = 0


@dataclass(slots=True, eq=False)
class Waiter:
    """An acquire that is not answered, or whose answer was not taken yet."""

    ticket: int
    want: Want
    #: since when its claimant has wanted what it does not have
    since: float
    #: the smaller, the earlier its claimant began to ask
    rank: int
    #: slots that are being granted to it
    pending: set[str] = field(default_factory=set)
    got: list[Claim] = field(default_factory=list)
    answered: bool = False
    #: no caller waits for it any more
    withdrawn: bool = False

    @property
    def claimant(self) -> Claimant:
        return (self.want.holder, self.want.priority)

    @property
    def open(self) -> bool:
        return not (self.answered or self.withdrawn)


class PoolNotFound(Exception):
    """There is no such pool, or it is being deleted."""


# --- what the ledger asks its shell to do -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant:
    """Write the record on the slot; then say `granted` or `refused`."""

    view: SlotView
    record: ClaimRecord
    #: the write that this one replaces: the record that was given back is still on the slot
    replaces: Clear | None = None


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete the slot's Pod, or the Lease of a URL that left its pool, unless it carries a larger fence by then: a
    claim of the next leader."""

    view: SlotView
    reason: str
    fence: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell the callers that wait on the ticket what it got; possibly nothing."""

    ticket: int
    claims: tuple[Claim, ...]
    #: the request was answered before; claims that ended since are not in it
    repeated: bool = False


Work = Grant | Clear | Remove | Answer


_SERVICE_ACCOUNT: Final = "system:serviceaccount:"
_UNPROVED: Final = "unproved"
_PERSON: Final = "user/"


@dataclass(frozen=True, slots=True)
class ClaimQuotas:
    """Slots that may be held at once, over all pools: by the claimants of a namespace together, and by each person."""

    by_namespace: Mapping[str, int] = field(default_factory=dict)
    #: of every namespace that has none of its own; None: any number
    default: int | None = None
    #: of one person, claiming under their own name; None: any number
    person: int | None = None

    def __bool__(self) -> bool:
        return bool(self.by_namespace) or self.default is not None or self.person is not None

    def of(self, account: str) -> int | None:
        """Of a namespace, or of a holder that is in none (`account_of`). None: any number."""
        if "/" in account:
            return self.person if account.startswith(_PERSON) else None
        return self.by_namespace.get(account, self.default) if account else None


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """A namespace's quota, or a person's, and how much of it is used."""

    account: str
    quota: int
    held: int


def namespace_of(holder: str) -> str:
    """Of the run or the service account that holds slots; "" for a person."""
    kind, _, rest = holder.partition("/")
    if kind == "run":
        return rest.partition("/")[0]
    return rest[len(_SERVICE_ACCOUNT) :].partition(":")[0] if rest.startswith(_SERVICE_ACCOUNT) else ""


def account_of(holder: str) -> str:
    """What the holder's slots count for: its namespace, or the holder itself where it is in none."""
    kind, _, rest = holder.partition("/")
    return rest.partition("/")[0] if kind == _UNPROVED else namespace_of(holder) or holder


def unproved_holder(namespace: str, said: str) -> str:
    """Of a claim that can't be proved, on a slot of that namespace: its record says `said`."""
    return f"{_UNPROVED}/{namespace}/{said}"


def run_holder(namespace: str, name: str, uid: str) -> str:
    """The holder as which all Pods of a TrainingRun hold slots."""
    return f"run/{namespace}/{name}/{uid}"


@dataclass(frozen=True, slots=True)
class Holder:
    """A claimant of slots: a run, as `run_holder` has it, or `user/<name>`."""

    name: str
    #: name of the TrainingRun, "" for a user
    run: str = ""
    #: the Pod that asks, as namespace/name/uid; "" for none that can be read
    pod: str = ""
    #: phones that the run's spec gives it in all; 0: any number
    slots: int = 0
    #: what its spec says; None: any
    priority: int | None = None

    def bounded(self, priority: int) -> int:
        """A larger priority than that of the run's spec is lowered to it."""
        return priority if self.priority is None else min(priority, self.priority)


@dataclass(frozen=True, slots=True)
class ServiceTimeouts:
    """The shell's times, in seconds."""

    #: between two looks at the time
    tick: float = 0.25
    #: how long writes that were begun for a caller may go on after its own wait is over
    settle: float = 10.0
    #: how long the slots of a call wait for the others that are being written, since the last one that was
    siblings: float = 1.0
    #: how long a release is waited for; afterwards it goes on after the answer
    release: float = 5.0
    #: how long a clean release waits for a claimant that takes the slot over: one write instead of two
    handover: float = 0.02
    #: how long a slot is read whose claim is later than what is known
    refresh: float = 5.0
    #: between two looks at the Pods of silent holders
    holders: float = 5.0
    #: between two looks at what namespaces use of their quotas: claims come and go by the hundred
    quotas: float = 1.0


@dataclass(frozen=True, slots=True)
class LedgerTimeouts:
    """The ledger's times, in seconds."""

    #: how long a demand stands before others are asked to give slots back for it
    revoke_after: float = 10.0
    #: how long a demand is remembered that was answered in part or not at all; its caller will ask again
    linger: float = 1.0
    #: how long an answered request is known, should it be sent again
    remember: float = 120.0
    #: the longest call that a late holder of an external URL may still be in
    step_deadline: float = 60.0
    #: that a claim which can't be proved may say of itself, and that it has an external URL at most
    longest_claim: float = 3600.0
    #: pause of an external URL after its first bad claim, doubled with each one in a row
    first_pause: float = 10.0
    longest_pause: float = 600.0

    def pause(self, failures: int) -> float:
        return min(self.longest_pause, self.first_pause * 2.0 ** min(failures - 1, 30)) if failures > 0 else 0.0


# --- what a pool's controller receives --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """A claim of a slot, as the ledger knows it."""

    holder: str
    #: its time ran out: the slot has no holder and is not granted again
    expired: bool = False
    #: it has no holder and is not granted again: the pool gave it up, or had asked it back
    draining: bool = False
    #: why it was asked back; "" when it was not
    revoked: str = ""
    #: episodes run under this claim so far
    episodes: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """An external URL, as the broker knows it."""

    url: str
    state: DeviceState = "unknown"
    claimed: bool = False
    reason: str = ""
