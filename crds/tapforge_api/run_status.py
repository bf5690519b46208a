"""What the operator writes into a TrainingRun's status: for people and tools, and for itself after a restart.

Another release may have written it, before an upgrade or a rollback (`reading.read_status`). So of a field that exists
neither meaning nor type changes in a later release, no bound becomes wider, and a list of words grows only where
`Otherwise` says how earlier releases read the new ones. A field that a later release adds has a default, and stays as
it is while an earlier one leads: it says itself which attempt or update it is about.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from .base import Conditions, Count, Otherwise, Spec
from .progress import Advance, Checkpoint, Leases

#: characters of a resolved run; a larger one fits no ConfigMap beside its own status
MAX_RESOLVED: Final = 400_000

#: Intended: it has a number, and its RayJob may exist. Active: its RayJob exists. Stopping: its driver was asked to
#: end. Removing: its RayJob is being deleted. Over: nothing of it runs. A phase of a later release counts as Intended
AttemptPhase = Literal["", "Intended", "Active", "Stopping", "Removing", "Over"]

_Time = Annotated[str, Field(max_length=40)]
_Name = Annotated[str, Field(max_length=253)]
_Word = Annotated[str, Field(max_length=128)]
_Text = Annotated[str, Field(max_length=4096)]


class Attempt(Spec):
    """The newest attempt."""

    number: Count = Field(0, description="number of the attempt, from 1")
    phase: Annotated[AttemptPhase, Otherwise("Intended")] = Field(
        "", description="Intended, Active, Stopping, Removing or Over"
    )
    since: _Time = Field("", description="when the phase began (RFC 3339)")
    reason: _Word = Field("", description="why it stops or is over, as one word")
    message: _Text = Field("", description="why, as a sentence for people")
    disruption: _Word = Field(
        "", description="why the cluster took the Pod of its head away, as one word; empty when it did not"
    )


class RunProgress(Advance):
    """How far the run is, as its driver said last."""

    phase: Annotated[str, Field(max_length=64)] = Field("", description="what the driver does, as one word")
    restarts: Count = Field(0, description="how often the driver was started again within the attempt")
    time: _Time = Field("", description="when the driver said so (RFC 3339)")


class TrainingRunStatus(Spec):
    """What the operator last saw. Written by the operator only."""

    observed_generation: Count = Field(0, description="metadata.generation that this status speaks of")
    start_time: _Time = Field(
        "", description="when the first attempt began (RFC 3339); from then on most of spec is fixed"
    )
    active_time: _Time = Field(
        "",
        description="when the run was last started, resumed, or let in by a queue (RFC 3339): its active deadline "
        "counts from then; empty while a queue holds it",
    )
    completion_time: _Time = Field("", description="when the run ended for good (RFC 3339)")
    attempts: Count = Field(0, description="attempts that were begun")
    lost_clusters: Count = Field(
        0, description="attempts that ended with the loss of their Ray cluster, disruptions not counted"
    )
    disruptions: Count = Field(
        0,
        description="attempts that the cluster ended: the Pod of their head was evicted, drained or preempted, or its "
        "node was lost",
    )
    failures: Count = Field(
        0,
        description="lost clusters since the run last got further; one more than spec.cluster.backoffLimit fails it",
    )
    furthest: Count = Field(
        0,
        description="update that the run has got to: of its newest checkpoint; where checkpoints are lost with the Ray "
        "cluster, the largest of any attempt",
    )
    attempt: Attempt = Field(Attempt(), description="the newest attempt")
    ray_job: _Name = Field("", description="RayJob of the newest attempt, while it exists")
    ray_cluster: _Name = Field("", description="its RayCluster")
    dashboard: Annotated[str, Field(max_length=2048)] = Field("", description="address of Ray's dashboard")
    pool: _Name = Field("", description="EmulatorPool that the phones come from")
    checkpoint: Checkpoint | None = Field(None, description="the newest checkpoint")
    progress: RunProgress = Field(RunProgress(), description="how far the run is")
    leases: Leases = Field(Leases(), description="phones")
    message: _Text = Field("", description="how the run is, as a sentence for people")
    resolved: Annotated[str, Field(max_length=MAX_RESOLVED)] = Field(
        "", description="the run as all its attempts see it (YAML), fixed at its start"
    )
    conditions: Conditions = Field(
        (), description="Ready, Reconciling, Stalled, Suspended, Complete, Failed, SpecChanged"
    )
