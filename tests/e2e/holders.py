"""Runs that play on phones while the operator is being killed, and a judge who watches them.

A holder believes in a claim from the broker's answer until it gave the claim back, was told that it is lost, or its
time ran out by the holder's own clock, counted from before its last renewal was sent. The judge accuses whoever is
given a slot while somebody else believes in it, a fence that is not larger than all before, and a phone that is used
with an older fence than it has seen.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field

from claiming import Caller, Denied

from tapforge_api.claims import Claim


@dataclass
class Judge:
    """Any thread may tell it something."""

    accusations: list[str] = field(default_factory=list)
    #: claims that were lost although nobody harmed their slots, why
    lost: list[str] = field(default_factory=list)
    granted: int = 0
    renewed: int = 0
    #: slot UID -> claims that somebody believes in, until when
    _believed: defaultdict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    _fences: dict[str, int] = field(default_factory=dict)
    #: UIDs of slots that were given back bad
    _spoilt: set[str] = field(default_factory=set)
    _harmed: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def got(self, claim: Claim, asked: float) -> None:
        slot = slot_of(claim)
        with self._lock:
            others = [c for c, until in self._believed[slot].items() if until > time.monotonic() and c != claim.id]
            if others:
                self.accusations.append(f"slot {slot} was given as {claim.id} while {others} is believed in")
            if claim.fence <= self._fences.get(slot, -1):
                self.accusations.append(f"slot {slot} was given with fence {claim.fence} after {self._fences[slot]}")
            if slot in self._spoilt:
                self.accusations.append(f"slot {slot} was given again after it was thrown away")
            self._fences[slot] = max(claim.fence, self._fences.get(slot, -1))
            self._believed[slot][claim.id] = asked + claim.ttl_seconds
            self.granted += 1

    def used(self, claim: Claim, asked: float) -> None:
        slot = slot_of(claim)
        with self._lock:
            if claim.fence < self._fences.get(slot, -1):
                self.accusations.append(f"phone {slot} is used with fence {claim.fence} after {self._fences[slot]}")
            self._believed[slot][claim.id] = asked + claim.ttl_seconds
            self.renewed += 1

    def over(self, claim: Claim, verdict: str) -> None:
        with self._lock:
            self._believed[slot_of(claim)].pop(claim.id, None)
            if verdict != "clean":
                self._spoilt.add(slot_of(claim))

    def told_lost(self, claim: Claim, why: str) -> None:
        with self._lock:
            self._believed[slot_of(claim)].pop(claim.id, None)
            if slot_of(claim) not in self._harmed:
                self.lost.append(f"{claim.slot} ({claim.id}): {why}")

    def harm(self, uid: str) -> None:
        """Somebody is about to crash the slot: to lose a claim of it is no fault."""
        with self._lock:
            self._harmed.add(uid)


def slot_of(claim: Claim) -> str:
    return claim.id.rpartition(".")[0]


class Holder(threading.Thread):
    """Claims slots, plays on them for a moment, gives them back; through every outage. `stop` lets it finish."""

    def __init__(self, who: Caller, pool: str, judge: Judge, seed: int, *, ttl: float = 30.0, dirty: float = 0.1):
        super().__init__(name=f"holder {seed}", daemon=True)
        self._who, self._pool, self._judge = who, pool, judge
        self._ttl, self._dirty = ttl, dirty
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self.error: BaseException | None = None

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._play()
        except BaseException as error:  # noqa: BLE001 it belongs to the test, which asks for it
            self.error = error

    def _play(self) -> None:
        claims = self._acquire(self._random.choice([1, 1, 2]))
        episodes = 0
        for _ in range(self._random.randint(1, 4)):
            time.sleep(self._random.uniform(0.05, 0.4))
            episodes += 1
            claims = self._renew(claims, episodes)
        verdict = "dirty" if self._random.random() < self._dirty else "clean"
        for claim in claims:
            self._judge.over(claim, verdict)
        if claims:
            self._persist(lambda: self._who.release(*claims, verdict=verdict, episodes=episodes))

    def _acquire(self, slots: int) -> list[Claim]:
        request, asked = uuid.uuid4().hex, time.monotonic()

        def ask() -> list[Claim]:
            nonlocal asked
            asked = time.monotonic()
            return self._who.acquire(self._pool, request=request, slots=slots, waitSeconds=2, ttlSeconds=self._ttl)

        claims = self._persist(ask)
        for claim in claims:
            self._judge.got(claim, asked)
        return claims

    def _renew(self, claims: list[Claim], episodes: int) -> list[Claim]:
        if not claims:
            return []
        asked = time.monotonic()
        kept = []
        for claim, said in zip(claims, self._persist(lambda: self._who.renew(*claims, episodes=episodes)), strict=True):
            if said.state == "lost":
                self._judge.told_lost(claim, said.reason)
            else:
                self._judge.used(claim, asked)
                kept.append(claim)
        return kept

    def _persist(self, call):  # type: ignore[no-untyped-def]
        """Repeats a call until it is answered; a broker that is away for a minute is a failure."""
        end = time.monotonic() + 60
        while True:
            try:
                return call()
            except (OSError, Denied) as error:
                if (isinstance(error, Denied) and error.status < 500) or time.monotonic() > end:
                    raise
            time.sleep(0.1)
