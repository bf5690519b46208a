"""What the pool's planner is told and what it answers: plain records, no behaviour beyond reading an object.

Times are seconds since the epoch. `uid` is always metadata.uid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from pydantic import ValidationError

from tapforge_api.pool import EmulatorPoolSpec, EmulatorPoolStatus

from ..slots import Slot
from .history import History, Refusal
from .template import template_hash

NodeState = Literal["cordoned", "lost"]
#: "unknown": nobody asked the device yet; "quarantined": it broke too often and is left alone for a while
DeviceState = Literal["ready", "unready", "quarantined", "unknown"]


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
    #: was kept for a look at its log, and newer failures need the place
    RETAINED = "Retained"
    #: was given up for a reason that has passed since
    GIVEN_UP = "GivenUp"


def read_status(written: Mapping[str, Any] | None) -> EmulatorPoolStatus:
    """A status as the API server gave it; an empty one when it can't be read. Another release may have written it: then
    it is written anew, and nothing but counters and times of transitions is lost."""
    try:
        return EmulatorPoolStatus.model_validate(written or {})
    except ValidationError:
        return EmulatorPoolStatus()


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


@dataclass(frozen=True, slots=True)
class Held:
    """A claim of a slot, as the ledger knows it."""

    holder: str
    #: its time ran out: the slot is nobody's and nobody gets it again
    expired: bool = False
    #: nobody holds it and nobody gets it again: the pool gave it up, or had asked it back
    condemned: bool = False
    #: why it was asked back; "" when it was not
    recalled: str = ""
    #: episodes played under this claim so far
    episodes: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """An external URL, as its keeper knows it."""

    url: str
    state: DeviceState = "unknown"
    claimed: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
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
    #: creates that the API server refused since the last plan
    refusals: Sequence[Refusal] = ()
    #: ends of logs, by Pod name, that were read since the last plan
    tails: Mapping[str, str] = field(default_factory=dict)
    #: the external devices
    devices: Sequence[Device] = ()
    #: what is wrong with the disruption budget of the claimed slots; "" when nothing is
    budget: str = ""


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
    #: grace period 0: nobody on its node answers
    force: bool = False
    #: worth reading the end of its log first
    tail: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and what to say. A create comes after the removals that make room for it (`room.py`), and is left
    out when they were not carried out."""

    creates: tuple[NewSlot, ...] = ()
    #: there were more slots than there may be: not every removal makes room for a create
    too_many: bool = False
    deletes: tuple[Removal, ...] = ()
    #: Pods that are annotated and stay, out of the pool
    retain: tuple[Removal, ...] = ()
    #: claims to ask back at the end of their episode: why, by the Pod's uid
    recall: Mapping[str, str] = field(default_factory=dict)
    #: UIDs of slots that nobody gets for now, whether they are claimed or not; all others of the pool may be granted
    withhold: frozenset[str] = frozenset()
    status: EmulatorPoolStatus = field(default_factory=EmulatorPoolStatus)
    history: History = field(default_factory=History)
    #: seconds until time alone changes the plan; None: only news do
    look_again: float | None = None

    @property
    def quiet(self) -> bool:
        return not (self.creates or self.deletes or self.retain or self.recall)
