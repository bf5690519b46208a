"""A claim as its holder knows it.

A broker that is silent, or that says "not here", ends nothing: an outage of the operator or of the API server costs no
phone. A claim is lost when a leader says so, or when the phone refuses its fence. Only a claim with a `hold` ends by
itself, so many seconds after the last question that the broker answered was asked, on the holder's own clock: of a
holder that the broker can't look at, or of an external device, which another holder gets then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tapforge_api.claims import Claim, Given, Held, Verdict

from ..wire import Fence
from .lease_life import Clock, LeaseLife


@dataclass(slots=True, eq=False)
class HeldClaim:
    """A claim that the broker gave and that was not given back. Changed by the source alone."""

    id: str
    secret: str = field(repr=False)
    slot: str
    #: UID of the slot
    uid: str
    url: str
    fence: int
    #: seconds within which the broker expects a renewal of it
    ttl: float
    #: seconds of the broker's silence after which it is over; infinity: never
    hold: float
    #: on the holder's clock: when the last question was asked that the broker answered
    heard: float
    #: of every lease of the slot under it
    life: LeaseLife
    #: what would be said of the phone if it were given back now
    verdict: Verdict = "clean"
    #: why the broker wants it back at the end of its episode; "" while it doesn't
    recalled: str = ""

    @staticmethod
    def of(claim: Claim, asked: float, clock: Clock) -> HeldClaim:
        """`asked`: when the request that was answered with it was first sent. A broker of an earlier release says
        nothing of holds, and throws the phone away after `ttl`."""
        given = claim.hold_seconds if "hold_seconds" in claim.model_fields_set else claim.ttl_seconds
        hold = math.inf if given is None else given
        return HeldClaim(
            claim.id,
            claim.secret,
            claim.slot,
            claim.slot_uid,
            claim.url,
            claim.fence,
            claim.ttl_seconds,
            hold,
            asked,
            LeaseLife(claim.slot, asked + hold, f"the broker was not heard of for {hold:g} s", clock),
        )

    def renewed(self, asked: float) -> None:
        if asked > self.heard:
            self.heard = asked
            self.life.extend(self.alive_until)

    @property
    def alive_until(self) -> float:
        return self.heard + self.hold

    @property
    def lost(self) -> str:
        """Why it is not the holder's any more; "" while it is."""
        return self.life.lost

    @property
    def shown(self) -> Fence:
        """What is sent to the phone with every request."""
        return Fence(self.uid, self.fence)

    def held(self) -> Held:
        return Held(id=self.id, secret=self.secret, episodes=self.life.episodes)

    def given(self) -> Given:
        return Given(id=self.id, secret=self.secret, episodes=self.life.episodes, verdict=self.verdict)
