"""What a run and the operator's broker say to each other about phones: JSON over HTTPS.

| call | path | caller |
|---|---|---|
| acquire | POST /v1/namespaces/{namespace}/pools/{pool}/claims | a Pod of a TrainingRun by its token, others by RBAC |
| renew | POST /v1/claims/renew | the bearer of the claims' secrets |
| release | POST /v1/claims/release | the bearer of the claims' secrets |

Promises of the broker:
1. A slot has one holder. A claim is written on the slot before it is answered, and its fence is larger than that of
   every earlier claim of the slot.
2. An acquire that is sent again with the same `request` (after a lost answer) gets the same claims, not more.
3. A claim that was not renewed for `ttlSeconds` ends when its holder's Pod is gone, has ended or is on a dead node;
   otherwise when it was not renewed for `holdSeconds`. No answer, and a 503, end nothing: a holder in a Pod goes on
   with its phones until a broker says lost or the phone refuses it. A holder whose claim carries `holdSeconds` (it is
   in no Pod that the broker can look at, or has an external device) stops by itself when they are over.
4. A client that uses the phone names its claim: its requests carry the slot's UID and the fence
   (`tapforge_envs/wire.py`). A phone that checks them refuses a late holder, and one whose slot's address was reused.
5. A refusal is a 4xx with a `Refusal` that names what was wrong; 503 means: not now, or not here; ask again.

Times are seconds.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from .base import Address, Count, Otherwise, Seconds, Spec

#: audience of the projected token that a run's Pods show
AUDIENCE = "tapforge.dev/broker"
#: environment of the phone in a slot's Pod: UID of the slot, which is the Pod's
SLOT_VARIABLE: Final = "TAPFORGE_SLOT"

_Id = Annotated[str, Field(min_length=8, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]
_Secret = Annotated[str, Field(min_length=16, max_length=128)]

#: what is known of a slot that is given back: clean, it can serve the next; dirty, its phone may not be as it was;
#: broken, it no longer serves
Verdict = Literal["clean", "dirty", "broken"]


class Acquire(Spec):
    """Asks for slots of a pool."""

    request: _Id = Field(description="chosen by the caller, new for each request; the same when it is sent again")
    slots: Annotated[int, Field(ge=1, le=256)] = Field(1, description="slots at most; at least one comes, or none")
    wait_seconds: Annotated[float, Field(ge=0, le=600)] = Field(30.0, description="how long to wait for the first one")
    ttl_seconds: Annotated[float, Field(ge=5, le=3600)] = Field(
        60.0, description="silence after which the broker looks whether the holder is still there"
    )
    hold_seconds: Annotated[float, Field(ge=5, le=3600)] = Field(
        1200.0, description="silence after which a claim is over, whatever is known of its holder"
    )
    session: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")] = Field(
        "", description="names the process that asks; its renewals list all its claims"
    )
    number: Annotated[int, Field(ge=0, le=2**31)] = Field(0, description="of the request within its session, from 1")
    priority: Annotated[int, Field(ge=-1000, le=1000)] = Field(
        0, description="larger is served first, and may make others give slots back at the end of their episode"
    )


class Claim(Spec):
    """A slot that is the caller's."""

    id: _Id = Field(description="name of the claim: UID of the slot, a dot, fence")
    secret: _Secret = Field(description="renews and releases the claim; shown to its holder alone")
    slot: Annotated[str, Field(max_length=253)] = Field(description="name of the slot")
    url: Address = Field(description="address of the phone's server: a URL; with protocol adb HOST:PORT")
    fence: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(description="grows with every claim of the slot")
    ttl_seconds: Seconds = Field(description="renew it several times within these")
    hold_seconds: Seconds | None = Field(
        None, description="stop using the slot so long after the last renewal that was answered; none: go on"
    )

    @property
    def slot_uid(self) -> str:
        return self.id.rpartition(".")[0]


class Acquired(Spec):
    """The answer to Acquire; without claims when none came free in time."""

    claims: Annotated[tuple[Claim, ...], Field(max_length=256)] = Field((), description="the caller's slots")
    waiting: Annotated[str, Field(max_length=1024)] = Field("", description="why there are none")


class Held(Spec):
    """A claim that its holder still has."""

    id: _Id = Field(description="name of the claim")
    secret: _Secret = Field(description="as it was given")
    episodes: Count = Field(0, description="episodes that were played under this claim so far")


class Renew(Spec):
    """Asks for another life of many claims at once. With a session these are all that its process has: others of it are
    released, unless they answer a request that is later than `settled`."""

    claims: Annotated[tuple[Held, ...], Field(min_length=1, max_length=4096)] = Field(description="claims to renew")
    session: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")] = Field(
        "", description="of the process whose claims these are"
    )
    settled: Annotated[int, Field(ge=0, le=2**31)] = Field(
        0, description="its requests up to this number are answered or given up"
    )


class Renewed(Spec):
    """What became of a claim."""

    id: _Id = Field(description="name of the claim")
    state: Annotated[Literal["held", "recalled", "lost"], Otherwise("recalled")] = Field(
        description="held; recalled: give it back at the end of the episode; lost: stop using the slot at once"
    )
    reason: Annotated[str, Field(max_length=256)] = Field("", description="why it is recalled or lost")


class RenewedAll(Spec):
    """The answer to Renew, in the order of the question."""

    claims: Annotated[tuple[Renewed, ...], Field(max_length=4096)] = Field(description="what became of each claim")


class Given(Held):
    """A claim that is given back."""

    verdict: Annotated[Verdict, Otherwise("dirty")] = Field(
        "clean", description="what is known of the phone: clean, dirty or broken"
    )


class Release(Spec):
    """Gives claims back."""

    claims: Annotated[tuple[Given, ...], Field(min_length=1, max_length=4096)] = Field(description="claims to end")


class Released(Spec):
    """The answer to Release, in the order of the question."""

    claims: Annotated[tuple[Renewed, ...], Field(max_length=4096)] = Field(
        description="lost for each claim: it has no holder any more"
    )


class Refusal(Spec):
    """Why a call was refused; the body of every answer that is not 200."""

    reason: Annotated[str, Field(max_length=64)] = Field(description="as one word for programs: PoolNotFound, ...")
    message: Annotated[str, Field(max_length=4096)] = Field(description="as a sentence for people")
