"""What a run's driver and the operator say to each other while the run is under way: JSON over HTTPS.

| call | path | caller |
|---|---|---|
| report | POST /v1/runs/{namespace}/{run}/progress | a Pod of that TrainingRun, by its token |

Promises of the operator:
1. A report is taken as the newest of its attempt; one of an earlier attempt changes nothing and is answered by the
   order `superseded`.
2. A report with a checkpoint that is new, or with `final`, is answered only when it is in the run's status; any other
   one may get there later, or be overtaken by its successor.
3. An order is repeated in every answer until the attempt is over. It never turns back.
4. A refusal is a 4xx with a `Refusal` (see claims); 503 means: not now, or not here; ask again.

Driver and operator may be of different releases: each leaves out fields that it doesn't know.

What the driver does: it reports every `report_seconds`, never waits for an answer while it trains, and obeys `stop`.
It ends with one of the codes below; a report with `final` goes before, and is sent again until it was answered or
`FINAL_SECONDS` have gone by.

Times are seconds since the run's start, or RFC 3339 where they are texts.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from .base import INT32, Count, Fraction, Otherwise, Path, Positive, Spec
from .learning import Stop

#: path of a report
REPORT: Final = "/v1/runs/{namespace}/{run}/progress"
#: how long a driver that is about to end tries to say so, seconds
FINAL_SECONDS: Final = 60.0

#: codes that `tapforge run` ends with: the run has reached its end
EXIT_COMPLETE: Final = 0
#: it failed; to start the driver again may help
EXIT_FAILED: Final = 1
#: what it is configured to do can't work: it will fail the same way until a person changes something
EXIT_CONFIGURATION: Final = 2
#: it was ordered to stop, or what spec.stop gives to judges is spent, and it did after a checkpoint: to start again is
#: to go on
EXIT_STOPPED: Final = 75

#: why a driver stopped by itself, and why its run is suspended then
JUDGE_BUDGET_SPENT: Final = "JudgeBudgetSpent"

_Time = Annotated[str, Field(max_length=40)]
_Text = Annotated[str, Field(max_length=4096)]
_Long = Annotated[int, Field(ge=0, le=2**53)]


class Checkpoint(Spec):
    """A checkpoint that is complete: a later attempt can go on from it."""

    update: Count = Field(description="updates that it holds")
    time: _Time = Field("", description="when it was complete (RFC 3339)")
    path: Path = Field(description="its folder on the run's storage")


class Leases(Spec):
    """Phones of a run."""

    wanted: Count = Field(0, description="phones that the run asks for")
    held: Count = Field(0, description="phones that it holds")


class Advance(Spec):
    """How far a run is."""

    update: Count = Field(0, description="updates that are done")
    max_updates: Count = Field(0, description="updates at which the run ends at the latest")
    episodes: _Long = Field(0, description="episodes that counted, over all attempts")
    success: Fraction | None = Field(None, description="success rate over all valid attempts of the last update")
    episodes_per_hour: Annotated[float, Field(ge=0, le=1e9)] = Field(0.0, description="episodes per hour, lately")
    policy_version: Count = Field(0, description="weight syncs that are done")
    seconds_left: Annotated[float, Field(ge=0, le=1e9)] | None = Field(
        None, description="estimate of the time to the end, seconds; without it unknown"
    )
    judge_tokens: _Long = Field(0, description="tokens that judges have used, over all attempts")
    judge_money: Annotated[float, Field(ge=0, le=1e9)] = Field(0.0, description="what they have cost")


class Progress(Spec):
    """A driver's report."""

    attempt: Positive = Field(description="number of the attempt that reports: $TAPFORGE_ATTEMPT")
    sequence: _Long = Field(description="grows with every report of an attempt, also over restarts of its driver")
    restarts: Count = Field(0, description="how often the driver was started again within this attempt")
    cluster: Annotated[str, Field(max_length=253)] = Field(
        "", description="Ray cluster that the driver is in: of an attempt that a queue held there may be two"
    )
    phase: Annotated[str, Field(max_length=64)] = Field(
        "", description="what it does, as one word: Loading, WarmStart, Training, Evaluating, Checkpointing, ..."
    )
    advance: Advance = Field(Advance(), description="how far it is")
    leases: Leases = Field(Leases(), description="its phones")
    checkpoint: Checkpoint | None = Field(None, description="the newest checkpoint that is complete")
    # How a driver of a later release ended is left to its exit code.
    final: Annotated[Literal["", "complete", "failed", "configuration", "stopped"], Otherwise("")] = Field(
        "",
        description="what the driver is about to end as: as its exit code. Of failed, only what is not tried again in "
        "place is final",
    )
    reason: Annotated[Literal["", "JudgeBudgetSpent"], Otherwise("")] = Field(
        "", description="of stopped, why it stopped by itself: what spec.stop gives to judges is spent"
    )
    message: _Text = Field("", description="why, as a sentence for people; of a failure, what to do about it")


class Orders(Spec):
    """The answer to a report."""

    # Whatever a later release means by a stop: a checkpoint goes before.
    stop: Annotated[Literal["", "suspend", "deadline", "superseded"], Otherwise("suspend")] = Field(
        "",
        description="suspend, deadline: make a checkpoint and end with code 75; superseded: another attempt has taken "
        "over, end at once and write nothing",
    )
    grace_seconds: Annotated[float, Field(ge=0, le=INT32)] = Field(
        0.0, description="how long a stop may take from now on, seconds; then the machines are taken away"
    )
    limits: Stop | None = Field(
        None, description="spec.stop as it is now: it may be edited under way; without it as the run began"
    )
    report_seconds: Annotated[float, Field(ge=1, le=600)] = Field(5.0, description="pause until the next report")
