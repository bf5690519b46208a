"""The claims that this process holds on the phones of a pool: asked for, renewed and given back in the background.

Rules:
1. A claim that the broker calls lost, or whose hold is over on our own clock (`claimed`), is lost at that moment.
   Silence of the broker loses no other.
2. All claims are renewed in one call as soon as a third of the shortest `ttl` is over, and again with growing pauses
   while the broker is away. The call lists every claim that is ours or on its way back, so that the broker can release
   what it granted us and we never heard of.
3. What is missing is asked for by one request at a time, which is sent again under its name until it is answered or so
   old that its claims would have ended. Never more than `wanted` are held, those on their way back counted.
4. What is given back is sent until the broker has it, or the claim's life is over. `close` gives back all, also what a
   request without an answer may have been granted.
5. What a killed predecessor held (`journal`) is released as dirty before anything else.

A refusal is an error at the start; later it is trouble like any other, logged once and kept in `word`. `Owner` is
notified of each claim. Times are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import uuid
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from tapforge_api.claims import Acquire, Claim, Release, Renew

from .broker_calls import BrokerAway, BrokerCalls, BrokerRefused
from .claim_journal import ClaimJournal
from .claimed import HeldClaim
from .lease_life import Clock
from .source import SlotError

log = logging.getLogger(__name__)

#: slots in one request, as the broker allows
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things may take."""

    #: life of a claim without a renewal; the broker may give less
    ttl: float = 60.0
    #: how long the broker keeps a request for claims while it has none
    wait: float = 20.0
    #: for an answer, beyond that
    answer: float = 10.0
    #: pause after the first failure, doubled with each one in a row up to `cap`, less up to a half by chance
    first: float = 0.5
    cap: float = 30.0
    #: for the first answer of all
    start: float = 60.0
    #: to give everything back at the end
    close: float = 10.0

    def pause(self, failures: int, asked: float = 0.0, cap: float | None = None) -> float:
        """How long to wait after so many failures in a row; at least what the broker asked for, at most `cap`."""
        cap = self.cap if cap is None else min(cap, self.cap)
        grown = min(cap, self.first * 2 ** min(failures - 1, 16)) if failures else 0.0
        return max(grown * random.uniform(0.5, 1.0), min(asked, cap))


class Owner(Protocol):
    """Told at once, in the event loop. None of these may wait."""

    def came(self, claim: HeldClaim) -> None:
        """A new claim; its phone was not looked at yet."""
        ...

    def recalled(self, claim: HeldClaim) -> None:
        """The broker wants it back (`claim.recalled`) at the end of its episode."""
        ...

    def left(self, claim: HeldClaim) -> None:
        """It was lost (`claim.lost` says why), or is on its way back."""
        ...


class ClaimManager:
    def __init__(
        self,
        calls: BrokerCalls,
        owner: Owner,
        pool: str,
        wanted: int,
        priority: int,
        pace: Pace,
        clock: Clock,
        journal: ClaimJournal | None = None,
    ) -> None:
        self._calls = calls
        self._owner = owner
        self._pool = pool
        self.wanted = wanted
        self._priority = priority
        self._pace = pace
        self._clock = clock
        self._journal = journal
        #: id -> claim
        self._held: dict[str, HeldClaim] = {}
        #: id -> claim on its way back: not ours any more, but not yet another holder's
        self._outbox: dict[str, HeldClaim] = {}
        self._alarms: dict[str, asyncio.TimerHandle] = {}
        #: the request that may have been granted without our knowing
        self._unclear: Acquire | None = None
        #: wake the tasks that ask, renew and give back
        self._room, self._hurry, self._outgoing = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._session = uuid.uuid4().hex
        #: requests of this session so far, and up to which of them all are answered or given up
        self._requests = self._settled = 0
        #: how many phones in a row were bad: each doubles the pause before the next request
        self.bad_in_a_row = 0
        #: what the last request for claims, and the last renewal or release, met with
        self._waiting = self._trouble = ""

    @property
    def size(self) -> int:
        """Claims that are ours, or were and may not be another holder's yet."""
        return len(self._held) + len(self._outbox)

    @property
    def word(self) -> str:
        """Why there is no phone, as far as the broker or the way to it is the reason; "" when all is well."""
        return "; ".join(filter(None, (self._waiting, self._trouble)))

    async def start(self) -> None:
        """Returns with the broker's first answer, whether there were phones or not."""
        try:
            async with asyncio.timeout(self._pace.start):
                await self._inherit()
                await self._ask(self._request(0.0), patient=False)
        except TimeoutError as error:
            trouble = self.word or f"the broker at {self._calls.access.url} gave no answer"
            raise SlotError(f"no phones within {self._pace.start:g} s: {trouble}") from error
        works = {
            "ask for claims": self._keep_asking(),
            "renew claims": self._keep_renewing(),
            "give claims back": self._keep_giving_back(),
        }
        self._tasks = [asyncio.create_task(self._reported(work), name=name) for name, work in works.items()]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for alarm in self._alarms.values():
            alarm.cancel()
        try:
            async with asyncio.timeout(self._pace.close):
                await self._give_all_back()
        except (TimeoutError, BrokerRefused) as error:
            names = ", ".join(c.slot for c in (*self._held.values(), *self._outbox.values())) or "none known"
            why = str(error) or self.word or "no time was left"
            log.warning("phones that could not be given back (%s): %s; their claims end by themselves", why, names)

    def give_back(self, claim: HeldClaim) -> None:
        """With `claim.verdict`. A claim that was lost meanwhile is not given back."""
        if self._held.pop(claim.id, None) is not None:
            self._outbox[claim.id] = claim
            self._outgoing.set()
            self._leave(claim)

    def lose(self, claim: HeldClaim, why: str) -> None:
        """It is not ours any more."""
        if self._held.pop(claim.id, None) is not None:
            log.warning("%s: the claim on it is lost: %s", claim.slot, why)
            claim.life.lose(why)
            self._leave(claim)
            self._note()
            self._room.set()

    async def _inherit(self) -> None:
        """Tried once: claims that could not be released expire by themselves."""
        dead = self._journal.unreleased() if self._journal else ()
        if dead:
            log.warning("%d phones of a process that was killed are given back", len(dead))
            claims = tuple(claim.model_copy(update={"verdict": "dirty"}) for claim in dead)
            try:
                await self._calls.release(Release(claims=claims), self._pace.answer)
            except (BrokerAway, BrokerRefused) as trouble:
                log.warning("they could not be given back, and are free when their claims end: %s", trouble)

    def _note(self) -> None:
        if self._journal is not None:
            self._journal.write(claim.given() for claim in (*self._held.values(), *self._outbox.values()))

    def _leave(self, claim: HeldClaim) -> None:
        if alarm := self._alarms.pop(claim.id, None):
            alarm.cancel()
        self._owner.left(claim)

    async def _reported(self, work: Coroutine[Any, Any, None]) -> None:
        """None of the tasks ends by itself; when one did, callers that wait in vain for a phone get the reason."""
        try:
            await work
        except Exception as error:
            self._trouble = f"claims are not kept any more: {error!r}"
            log.exception("claims are not kept any more")
            raise

    # --- asking ---

    def _request(self, wait: float) -> Acquire:
        self._requests += 1
        return Acquire(
            request=uuid.uuid4().hex,
            slots=min(_AT_ONCE, self.wanted - self.size),
            wait_seconds=wait,
            ttl_seconds=self._pace.ttl,
            priority=self._priority,
            session=self._session,
            number=self._requests,
        )

    async def _keep_asking(self) -> None:
        in_vain = 0
        while True:
            while self.size >= self.wanted:
                self._room.clear()
                await self._room.wait()
            await asyncio.sleep(self._pace.pause(max(self.bad_in_a_row, in_vain)))
            begun = self._clock()
            came = await self._ask(self._request(self._pace.wait), patient=True)
            # The broker waits for phones; one that doesn't is asked ever more slowly.
            in_vain = 0 if came or self._clock() - begun > self._pace.wait / 2 else in_vain + 1

    async def _ask(self, request: Acquire, *, patient: bool) -> int:
        """Sends the request until it is answered, or too old. The number of claims that came. Not `patient`: refusals
        are raised, and nothing is too old."""
        asked, failures = self._clock(), 0
        sent = False
        while not patient or self._clock() < asked + request.hold_seconds:
            pause = 0.0
            self._unclear = request
            try:
                answer = await self._calls.acquire(self._pool, request, request.wait_seconds + self._pace.answer)
            except BrokerAway as away:
                self._waiting = _logged(away, self._waiting)
                pause, sent = away.pause, sent or away.sent
            except BrokerRefused as refused:
                if not sent:
                    self._unclear = None
                if not patient:
                    raise
                self._waiting = _logged(refused, self._waiting)
            else:
                self._unclear = None
                self._waiting = f"no phone is free: {answer.waiting}" if answer.waiting else ""
                for claim in answer.claims:
                    self._take_in(claim, asked)
                self._settled = request.number
                self._note()
                return len(answer.claims)
            if not sent:
                self._unclear = None
            failures += 1
            await asyncio.sleep(self._pace.pause(failures, pause))
        self._unclear, self._settled = None, request.number
        return 0

    def _take_in(self, given: Claim, asked: float) -> None:
        if given.id in self._held or given.id in self._outbox:
            return
        for older in [c for c in self._held.values() if c.slot == given.slot]:
            self.lose(older, f"it was claimed again, with fence {given.fence} after {older.fence}")
        claim = HeldClaim.of(given, asked, self._clock)
        if claim.life.over():  # an answer that took so long is not proof that the claim still lives
            self._outbox[claim.id] = claim
            self._outgoing.set()
            return
        self._held[claim.id] = claim
        self._watch(claim)
        self._hurry.set()
        self._owner.came(claim)

    # --- renewing ---

    async def _keep_renewing(self) -> None:
        failures = 0
        while True:
            if not failures:
                await self._until_due()
            claims = list(self._held.values())
            if not claims:
                failures = 0
                continue
            asked, shortest = self._clock(), min(c.ttl for c in claims)
            try:
                listed = tuple(c.held() for c in (*claims, *self._outbox.values()))
                request = Renew(claims=listed, session=self._session, settled=self._settled)
                answer = await self._calls.renew(request, min(self._pace.answer, shortest / 3))
            except (BrokerAway, BrokerRefused) as trouble:
                failures += 1
                self._trouble = _logged(trouble, self._trouble)
                pause = trouble.pause if isinstance(trouble, BrokerAway) else 0.0
                await asyncio.sleep(self._pace.pause(failures, pause, cap=shortest / 6))
                continue
            failures, self._trouble = 0, ""
            for told in answer.claims:
                claim = self._held.get(told.id)
                if claim is None:
                    continue
                if told.state == "lost":
                    self.lose(claim, told.reason or "the broker says so")
                    continue
                claim.renewed(asked)
                claim.recalled = (told.reason or "no reason given") if told.state == "recalled" else ""
                if claim.recalled:
                    self._owner.recalled(claim)

    async def _until_due(self) -> None:
        """Until a third of some claim's `ttl` is over."""
        while True:
            now = self._clock()
            due = min((c.heard + c.ttl / 3 - now for c in self._held.values()), default=None)
            if due is not None and due <= 0:
                return
            self._hurry.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(due):
                    await self._hurry.wait()

    def _watch(self, claim: HeldClaim) -> None:
        """Loses the claim as soon as its hold is over."""
        if late := claim.life.over():
            self.lose(claim, late)
        elif claim.hold < math.inf:
            loop = asyncio.get_running_loop()
            self._alarms[claim.id] = loop.call_later(claim.alive_until - self._clock(), self._watch, claim)

    # --- giving back ---

    async def _keep_giving_back(self) -> None:
        failures = 0
        while True:
            while not self._outbox:
                self._outgoing.clear()
                await self._outgoing.wait()
            try:
                await self._release()
                failures, self._trouble = 0, ""
                continue
            except (BrokerAway, BrokerRefused) as trouble:
                failures += 1
                self._trouble = _logged(trouble, self._trouble)
                pause = trouble.pause if isinstance(trouble, BrokerAway) else 0.0
            await asyncio.sleep(self._pace.pause(failures, pause))
            self._drop([c for c in self._outbox.values() if c.life.over()])

    async def _release(self) -> None:
        if claims := list(self._outbox.values()):
            await self._calls.release(Release(claims=tuple(c.given() for c in claims)), self._pace.answer)
            self._drop(claims)

    def _drop(self, claims: Iterable[HeldClaim]) -> None:
        for claim in claims:
            self._outbox.pop(claim.id, None)
        self._note()
        self._room.set()

    async def _give_all_back(self) -> None:
        failures = 0
        while self._unclear or self._held or self._outbox:
            try:
                if self._unclear is not None:
                    await self._learn(self._unclear.model_copy(update={"wait_seconds": 0.0}))
                self._outbox |= self._held
                self._held.clear()
                await self._release()
            except BrokerAway as away:
                failures += 1
                self._trouble = _logged(away, self._trouble)
                await asyncio.sleep(self._pace.pause(failures, away.pause, cap=1.0))

    async def _learn(self, request: Acquire) -> None:
        """What the request was granted before we stopped to listen goes back too."""
        try:
            answer = await self._calls.acquire(self._pool, request, self._pace.answer)
        except BrokerRefused:
            pass  # then nothing is ours
        else:
            for claim in answer.claims:
                self._outbox.setdefault(claim.id, HeldClaim.of(claim, self._clock(), self._clock))
        self._unclear = None


def _logged(error: BrokerAway | BrokerRefused, before: str) -> str:
    """What it says; logged when that is new."""
    if str(error) != before:
        log.warning("%s", error)
    return str(error)
