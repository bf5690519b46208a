"""What the pool's planner observes, what it remembers and what it answers, and a plan in the making: plain records.

*History* lives in memory and may be lost at any moment: then back-offs start anew, budgets are counted from what the
status still holds, and nothing else changes. Every record of it bounds itself. Its times may lie in the future after
the clock was set back: `settled` pulls them to now, so that no wait becomes longer than it was meant.

*Draft.* A slot *stands* while it holds its ordinal: its Pod is neither being deleted nor retained nor given up in this
plan. It is *protected* while a claim of it has not expired. A Pod that is being deleted holds nothing, claimed or not:
a deletion can't be taken back, and the phone that follows it needs its time to boot.

*Template.* What the user says about a pool's Pods, as one hash: slots with another one are of an old template. Hashed
are the template as it was written, and those fields beside it that end up in the Pod and may change (kvm,
readinessPath) where they differ from their defaults. Nothing that the operator adds is hashed, so another release of
the operator rolls no fleet.

Times are seconds since the epoch. `uid` is always metadata.uid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from tapforge_api import reading
from tapforge_api.pool import EmulatorPoolSpec, EmulatorPoolStatus
from tapforge_operator.broker.types import Device, Held
from tapforge_operator.kube.types import Event, Slot
from tapforge_operator.labels import digest

NodeState = Literal["cordoned", "lost"]
#: what an API server refuses a Pod for. QuotaExceeded may pass by itself; the others need a person
RefusalReason = Literal[
    "QuotaExceeded",
    "PodSecurity",
    "NamespaceNotEnabled",
    "Invalid",
    "Forbidden",
    "NameTaken",
    "NamespaceTerminating",
    "DevicesNotEnabled",
]
#: replacements of sick slots: (when, how many), oldest first
Spent = tuple[tuple[float, int], ...]


class Reason(StrEnum):
    """Why a slot goes: a closed list, for metrics."""

    FAILED = "Failed"
    BOOT_DEADLINE = "BootDeadline"
    UNREADY = "Unready"
    CLAIM_EXPIRED = "ClaimExpired"
    NODE_LOST = "NodeLost"
    DUPLICATE = "Duplicate"
    CORDONED = "Cordoned"
    OLD_TEMPLATE = "OldTemplate"
    EPISODES = "Episodes"
    AGE = "Age"
    SCALE_IN = "ScaleIn"
    #: was kept so that its log can be read, and newer failures need the place
    RETAINED = "Retained"
    #: was given up for a reason that has passed since
    GIVEN_UP = "GivenUp"


# --- the pool ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pool:
    """An EmulatorPool as its user wrote it, and the status that was last written to it."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: EmulatorPoolSpec
    #: hash of what the user says about the Pods; "" with external devices
    template: str = ""
    deleting: bool = False
    #: fields of the spec that this release doesn't know and leaves out, in words; "" for none
    unknown: str = ""
    status: EmulatorPoolStatus = field(default_factory=EmulatorPoolStatus)

    @classmethod
    def of(cls, body: Mapping[str, Any], spec: EmulatorPoolSpec, unknown: str = "") -> Pool:
        """An object of the API server, whose spec was read already."""
        metadata = body["metadata"]
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            spec=spec,
            template=template_hash(spec),
            deleting="deletionTimestamp" in metadata,
            unknown=unknown,
            status=read_status(body.get("status")),
        )


def read_status(written: Mapping[str, Any] | None) -> EmulatorPoolStatus:
    """A status as the API server gave it. Raises UnreadableStatus."""
    return reading.read_status(EmulatorPoolStatus, written)


def template_hash(spec: EmulatorPoolSpec) -> str:
    """ "" for a pool without Pods."""
    if spec.template is None:
        return ""
    fields = EmulatorPoolSpec.model_fields
    said = {
        name: value.model_dump(by_alias=True, mode="json", exclude_defaults=True) if name == "kvm" else value
        for name in ("kvm", "readiness_path")
        if (value := getattr(spec, name)) != fields[name].default
    }
    written = spec.template.written()
    return digest(json.dumps([written, said] if said else [written], sort_keys=True, separators=(",", ":")))


# --- what is observed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """A create that the API server refused for good."""

    reason: RefusalReason
    message: str


@dataclass(frozen=True, slots=True)
class Observed:
    """What is the case now, as far as the operator knows."""

    slots: Sequence[Slot] = ()
    #: claims by the Pod's uid; a slot that is not in it is free
    held: Mapping[str, Held] = field(default_factory=dict)
    #: slots that acquires are waiting for
    waiting: int = 0
    #: slots that the TrainingRuns of the pool want in all, held ones included; none where nothing of a run can go on
    wanted: int = 0
    #: nodes by name, only those that are cordoned or lost
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    #: seconds until another node is lost, should it stay silent; None: no node is silent
    next_lost_node: float | None = None
    #: since when the cluster was followed without a gap: nothing is any older
    watching_since: float = 0.0
    #: what makes `since` of a slot a time of the epoch
    clock_offset: float = 0.0
    #: creates that the API server refused since the last plan
    refusals: Sequence[Refusal] = ()
    #: ends of logs, by Pod name, that were read since the last plan
    tails: Mapping[str, str] = field(default_factory=dict)
    #: the external devices
    devices: Sequence[Device] = ()
    #: why no device can be claimed, of a pool of external ones
    no_devices: Refusal | None = None
    #: what is wrong with the disruption budget of the claimed slots; "" when nothing is
    budget: str = ""


# --- what is remembered -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal that holds the pool's creates."""

    refusal: Refusal
    #: how often in a row
    times: int
    at: float
    #: the pool's generation: another one is tried at once
    generation: int
    #: name of the one slot that was tried again; when it exists, the refusal is over
    probe: str = ""


@dataclass(frozen=True, slots=True)
class BootFailures:
    """Boots of the current template that failed in a row."""

    times: int = 0
    at: float = 0.0
    #: creation of the newest slot that failed
    created: float = 0.0
    template: str = ""


@dataclass(frozen=True, slots=True)
class Removed:
    """Slots that went for one reason and that no Event reports yet."""

    slots: int = 0
    #: the first few of them, with how they ended
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reported:
    """What the Events of a pool have reported so far."""

    #: None: nothing is known to have been reported
    ready: bool | None = None
    desired: int | None = None
    rolling_out: bool = False
    concerns: frozenset[str] = frozenset()
    #: by the reason of their Event
    removed: Mapping[str, Removed] = field(default_factory=dict)
    #: when there was last an Event, by its reason
    at: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, status: EmulatorPoolStatus) -> Reported:
        """What can be known after a restart."""
        conditions = {condition.type: condition for condition in status.conditions}
        if not conditions:
            return cls()
        degraded = conditions.get("Degraded")
        return cls(
            ready="Ready" in conditions and conditions["Ready"].status == "True",
            desired=status.desired_replicas,
            rolling_out=status.updated < status.pods,
            concerns=frozenset([degraded.reason] if degraded is not None and degraded.status == "True" else []),
        )


@dataclass(frozen=True, slots=True)
class History:
    #: what was last reported; conditions keep the time of their last transition from it
    status: EmulatorPoolStatus = field(default_factory=EmulatorPoolStatus)
    #: replacements of sick slots within the hour: (when, how many), oldest first
    spent: tuple[tuple[float, int], ...] = ()
    #: slots whose removal was planned last time, and counted: why, by uid
    draining: Mapping[str, str] = field(default_factory=dict)
    #: uid of the Pod that last had the ordinal
    last: Mapping[int, str] = field(default_factory=dict)
    #: sizes that were needed: (until when, how many), sizes falling; None: nothing known
    needs: tuple[tuple[float, int], ...] | None = None
    boots: BootFailures = BootFailures()
    refused: Refused | None = None
    #: when a Pod on a lost node was last deleted by force, by uid
    forced: Mapping[str, float] = field(default_factory=dict)
    reported: Reported = Reported()

    @classmethod
    def of(cls, status: EmulatorPoolStatus) -> History:
        """What can be known after a restart."""
        said = [(t, r.slots) for r in status.sick_replacements if (t := _epoch(r.time)) is not None]
        failures = [(t, 1) for f in status.last_failures if (t := _epoch(f.time)) is not None]
        return cls(status=status, spent=tuple(sorted(said or failures)), reported=Reported.of(status))

    def settled(self, now: float) -> History:
        """The same, with no time later than now."""
        if not self._ahead(now):
            return self
        return replace(
            self,
            spent=tuple((min(t, now), n) for t, n in self.spent),
            needs=None if self.needs is None else tuple((min(t, now), n) for t, n in self.needs),
            boots=replace(self.boots, at=min(self.boots.at, now)),
            refused=self.refused and replace(self.refused, at=min(self.refused.at, now)),
            forced={uid: min(t, now) for uid, t in self.forced.items()},
        )

    def _ahead(self, now: float) -> bool:
        return (
            any(t > now for t, _ in self.spent)
            or any(t > now for t, _ in self.needs or ())
            or self.boots.at > now
            or (self.refused is not None and self.refused.at > now)
            or any(t > now for t in self.forced.values())
        )


def _epoch(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        # A status may have been written by hand; what can't be read as a time is ignored.
        return None


# --- what is decided --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A Pod to create."""

    name: str
    ordinal: int
    #: uid of the Pod that had the ordinal before, "" for none known; only the name is made of it
    predecessor: str = ""


@dataclass(frozen=True, slots=True)
class Removal:
    """A Pod to delete, or to keep aside."""

    slot: Slot
    reason: Reason
    #: it counts as a failure of the slot
    sick: bool = False
    #: grace period 0: its node doesn't answer
    force: bool = False
    #: worth reading the end of its log first
    tail: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and what to say. A create comes after the removals that make room for it (`apply.room_makers`),
    and is left out when they were not carried out."""

    creates: tuple[NewSlot, ...] = ()
    #: there were more slots than there may be: not every removal makes room for a create
    too_many: bool = False
    deletes: tuple[Removal, ...] = ()
    #: Pods that are annotated and stay, out of the pool
    retain: tuple[Removal, ...] = ()
    #: claims to ask back at the end of their episode: why, by the Pod's uid
    revoke: Mapping[str, str] = field(default_factory=dict)
    #: UIDs of slots that are not granted for now, claimed or not; all others of the pool may be granted
    withhold: frozenset[str] = frozenset()
    status: EmulatorPoolStatus = field(default_factory=EmulatorPoolStatus)
    #: to be written as soon as the rest is sent; no decision rests on what becomes of them
    events: tuple[Event, ...] = ()
    history: History = field(default_factory=History)
    #: seconds until time alone changes the plan; None: only a change does
    requeue_after: float | None = None

    @property
    def quiet(self) -> bool:
        return not (self.creates or self.deletes or self.retain or self.revoke)


# --- a plan in the making ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Size:
    desired: int
    #: history's needs from now on
    needs: tuple[tuple[float, int], ...] | None = None
    #: when the size shrinks if nothing happens
    shrinks_at: float | None = None
    #: slots that were asked for beyond maxReplicas
    beyond: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Slots beyond the desired number, and slots missing, while others are exchanged."""

    surge: int
    unavailable: int


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The pool's limits, seconds."""

    boot: float
    pull: float
    unready: float
    #: since when the cluster was followed without a gap
    watching: float = 0.0
    #: what makes a moment at which something was seen a time of the epoch
    offset: float = 0.0

    @classmethod
    def of(cls, spec: EmulatorPoolSpec, observed: Observed) -> Deadlines:
        return cls(
            spec.boot.deadline_seconds,
            spec.boot.pull_deadline_seconds,
            spec.health.unready_grace_seconds,
            observed.watching_since,
            observed.clock_offset,
        )

    def begin(self, slot: Slot) -> float:
        """From when on it counts that the slot is as it is."""
        return max(slot.since + self.offset, self.watching)


class Draft:
    def __init__(self, pool: Pool, observed: Observed, history: History, now: float):
        self.pool, self.observed, self.history, self.now = pool, observed, history, now
        self.deadlines = Deadlines.of(pool.spec, observed)
        slots = [slot for slot in observed.slots if slot.pool_uid == pool.uid]
        self.standing = {slot.uid: slot for slot in slots if not slot.deleting and not slot.retained}
        #: the slots that stood before this plan
        self.present = tuple(self.standing.values())
        self.ending = [slot for slot in slots if slot.deleting]
        self.retained = [slot for slot in slots if slot.retained and not slot.deleting]
        self.protected: dict[str, Held] = {
            uid: claim
            for uid, claim in observed.held.items()
            if not claim.expired and not claim.draining and uid in self.standing
        }
        #: decided by `plan.py` first: how many, how many at once, and which are to be exchanged (why, by uid)
        self.size = Size(0)
        self.limits = Limits(0, 0)
        self.outdated: dict[str, Reason] = {}
        self.removals: dict[str, Removal] = {}
        self.revocations: dict[str, str] = {}
        #: sick slots that the budget does not let go
        self.waiting: list[Slot] = []

    @property
    def desired(self) -> int:
        return self.size.desired

    def allowed(self) -> int:
        """Slots that may stand: surge only while something is left to exchange."""
        left = sum(uid in self.standing for uid in self.outdated)
        return self.desired + min(self.limits.surge, left)

    def free(self) -> list[Slot]:
        """Standing slots without a holder."""
        return [slot for uid, slot in self.standing.items() if uid not in self.protected]

    def claimed(self) -> list[Slot]:
        """Standing slots that have a holder."""
        return [self.standing[uid] for uid in self.protected if uid in self.standing]

    def give_up(self, slot: Slot, reason: Reason, *, sick: bool = False, force: bool = False) -> None:
        self.removals[slot.uid] = Removal(slot, reason, sick, force)
        self.standing.pop(slot.uid, None)

    def revoke(self, slot: Slot, reason: Reason | str) -> None:
        """Once per claim: what was revoked already is left alone."""
        if not self.is_revoked(slot):
            self.revocations[slot.uid] = str(reason)

    def is_revoked(self, slot: Slot) -> bool:
        return slot.uid in self.revocations or bool(self.protected[slot.uid].revoked)

    def revoked(self) -> int:
        """Standing slots that come back at the end of their episode."""
        return sum(map(self.is_revoked, self.claimed()))

    def draining(self, slot: Slot) -> bool:
        """It is not granted again."""
        claim = self.observed.held.get(slot.uid)
        return claim is not None and claim.draining

    def withheld(self) -> frozenset[str]:
        """One that is claimed now would be asked back at once, or its holder would play on the old image."""
        why = (Reason.CORDONED, Reason.OLD_TEMPLATE)
        return frozenset(uid for uid, reason in self.outdated.items() if reason in why)

    def known(self, slot: Slot) -> bool:
        """Its removal was planned and counted before."""
        return slot.uid in self.history.draining

    def newly_failed(self) -> list[Slot]:
        """Slots given up as sick, that were not before; newest first."""
        fresh = [r.slot for r in self.removals.values() if r.sick and not self.known(r.slot)]
        return sorted(fresh, key=lambda slot: (-slot.created, slot.uid))
