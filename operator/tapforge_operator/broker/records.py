"""What the ledger is told, what it keeps of a claim, and what it asks its shell to do: plain records.

Times are seconds of a clock that only runs while the operator does (`clock.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from .mark import Mark

#: who competes for slots: (holder, priority)
Claimant = tuple[str, int]


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot as the API server had it at `version`: read off its Pod, or off the Lease of an external URL."""

    uid: str
    #: uid of its EmulatorPool
    pool: str
    namespace: str
    #: of the Pod or the Lease
    name: str
    #: resourceVersion; "" for a Lease that is not there
    version: str
    node: str = ""
    #: IP of the Pod, or the whole URL
    address: str = ""
    #: it can serve
    ready: bool = False
    #: why it never serves again; "" while it may
    ended: str = ""
    #: it has a node and was never ready, so it may soon be
    booting: bool = False
    #: an external URL: it outlives its claims
    lasting: bool = False
    fence: int = 0
    #: episodes played under claims that were given back
    episodes: int = 0
    #: fence of the claim that a later leader than its own told of, and wrote so
    confirmed: str = ""
    mark: Mark | None = None
    #: it carries a mark that was signed with a key that is not ours
    foreign: bool = False
    #: times that it was claimed (external URLs only)
    transitions: int = 0
    #: claims in a row that ended badly (external URLs only)
    strikes: int = 0
    #: seconds that it rests after its last claim (external URLs only)
    rest: float = 0.0

    @property
    def served(self) -> bool:
        """It was ready once, so somebody may have been given it."""
        return self.ready or (bool(self.node) and not self.booting)

    @property
    def is_confirmed(self) -> bool:
        """What the leader of its claim sent before it died is not carried out any more."""
        return self.mark is not None and self.confirmed == str(self.mark.fence)

    @property
    def order(self) -> int:
        """Versions of an object grow."""
        return int(self.version) if self.version.isdigit() else 0


@dataclass(slots=True, eq=False)
class Claim:
    """A claim that is being granted or held."""

    mark: Mark
    ticket: int = 0
    #: when its holder spoke last, or it began
    heard: float = math.inf
    #: episodes played under it so far
    episodes: int = 0
    #: why it was asked back; "" when it was not
    recalled: str = ""
    #: asked back for somebody who waits: the slot goes on serving. Otherwise nobody gets it afterwards
    yields: bool = False
    #: its holder heard of the recall
    told: bool = False
    #: filled in by the shell when it is first needed
    secret: str = ""
    id: str = field(init=False)
    claimant: Claimant = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.mark.id
        self.claimant = (self.mark.holder, self.mark.priority)

    @property
    def silent_from(self) -> float:
        return self.heard + self.mark.ttl

    @property
    def ends(self) -> float:
        return self.heard + max(self.mark.ttl, self.mark.hold)


class State(StrEnum):
    FREE = "free"
    GRANTING = "granting"
    HELD = "held"
    RELEASING = "releasing"
    RESTING = "resting"
    DOOMED = "doomed"


@dataclass(frozen=True, slots=True)
class Counts:
    """Slots of a pool by state; `free` are those that would be granted at once."""

    slots: int = 0
    free: int = 0
    held: int = 0
    booting: int = 0
    resting: int = 0
    doomed: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Want:
    """An acquire: `slots` at most. What is written on them is in `mark.Mark`."""

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
    """An acquire that is not answered, or whose answer nobody took yet."""

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
    #: nobody listens any more
    withdrawn: bool = False

    @property
    def claimant(self) -> Claimant:
        return (self.want.holder, self.want.priority)

    @property
    def open(self) -> bool:
        return not (self.answered or self.withdrawn)


# --- what the ledger asks its shell to do -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clear:
    """Take the mark off the slot and write these counts; then say `cleared`."""

    view: SlotView
    mark: Mark
    episodes: int
    strikes: int = 0
    #: seconds that the slot rests afterwards, should another leader read it
    rest: float = 0.0
    #: until `begin_clear` a grant may replace the mark, which spares this write
    replaceable: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """Write the mark on the slot; then say `granted` or `refused`."""

    view: SlotView
    mark: Mark
    #: the write that this one replaces: the mark that was given back is still on the slot
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
    """Tell who waits on the ticket what it got; possibly nothing."""

    ticket: int
    claims: tuple[Claim, ...]
    #: the request was answered before; claims that ended since are not in it
    repeated: bool = False


Work = Grant | Clear | Remove | Answer


def run_holder(namespace: str, name: str, uid: str) -> str:
    """As whom all Pods of a TrainingRun hold slots."""
    return f"run/{namespace}/{name}/{uid}"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who asks for slots: a run, as `run_holder` has it, or `user/<name>`."""

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
class Patience:
    """The shell's times, in seconds."""

    #: between two looks at the time
    tick: float = 0.25
    #: how long writes that were begun for a caller may go on after its own wait is over
    settle: float = 10.0
    #: how long the first slot of a call waits for the others that are being written
    siblings: float = 1.0
    #: how long a release is waited for; afterwards it goes on behind the answer
    release: float = 5.0
    #: how long a clean release waits for somebody who takes the slot over: one write instead of two
    handover: float = 0.02
    #: how long a slot is looked at whose claim is later than what is known
    look: float = 5.0
    #: between two looks at the Pods of silent holders
    holders: float = 5.0


@dataclass(frozen=True, slots=True)
class Pace:
    """The ledger's times, in seconds."""

    #: how long a wish stands before others are asked to give slots back for it
    patience: float = 10.0
    #: how long a wish is remembered that was answered in part or not at all; its caller will ask again
    linger: float = 1.0
    #: how long an answered request is known, should it be sent again
    remember: float = 120.0
    #: the longest call that a late holder of an external URL may still be in
    step_deadline: float = 60.0
    #: how long an external URL rests whose claim can't be proved any more: the longest life of a claim
    unproved: float = 3600.0
    #: pause of an external URL after its first bad claim, doubled with each one in a row
    first_pause: float = 10.0
    longest_pause: float = 600.0

    def pause(self, strikes: int) -> float:
        return min(self.longest_pause, self.first_pause * 2.0 ** min(strikes - 1, 30)) if strikes > 0 else 0.0
