"""Renewals and releases: what holders say of their claims, proved by the claims' secrets alone.

1. Only a leader answers: an answer that is ready after its term is `NotLeading`, which ends nothing.
2. A renewal touches no API server: an outage of it dirties no phone. Many of them are one call.
3. A renewal with a session lists all claims of its process: what it doesn't list is released. The list counts for the
   sessions of claims that it proves, and for no other holder's.
4. Claims end by a clock that runs only while the operator does. Where the process stood still (the machine was
   suspended, one core was busy with something else), its holders' renewals are still in its sockets: that time ages no
   claim. Wall clocks, and their jumps, have no part in it.
5. Slots of which this leader may not know the newest (another leader was at work until just now, and the watch is a
   moment behind) are read again before their claims are answered for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from tapforge_api.claims import Held as HeldMessage
from tapforge_api.claims import Release, Released, Renew, RenewedAll
from tapforge_operator.broker.claim_record import Keys, SlotView, proves
from tapforge_operator.broker.ledger import Ledger
from tapforge_operator.broker.messages import UNPROVED, WRONG_SECRET, said
from tapforge_operator.broker.types import Claim, ServiceTimeouts
from tapforge_operator.broker.writer import Writer, Writing
from tapforge_operator.kube.leaderelection import NotLeading


class RunningClock:
    def __init__(self, longest_step: float = 1.0, monotonic: Callable[[], float] = time.monotonic):
        """`longest_step`: seconds; a longer time between two ticks counts as this long."""
        self._longest = longest_step
        self._monotonic = monotonic
        self._ran = 0.0
        self._ticked = monotonic()

    def now(self) -> float:
        """Seconds that the operator has run."""
        return self._ran + min(max(0.0, self._monotonic() - self._ticked), self._longest)

    def tick(self) -> float:
        """To be called more often than `longest_step`; returns `now`."""
        self._ran = self.now()
        self._ticked = self._monotonic()
        return self._ran


class Behind(Exception):
    """What this broker knows is not the newest, and it could not read it in time."""


async def refresh(
    read: Callable[[SlotView], Awaitable[SlotView | None]],
    ledger: Ledger,
    views: Sequence[SlotView],
    now: Callable[[], float],
    deadline: float,
) -> None:
    """Tells the ledger what the slots are at this moment, by `Writer.get` or `Writer.confirm`. Raises Behind after
    `deadline` seconds."""
    try:
        async with asyncio.timeout(deadline):
            found = await asyncio.gather(*(read(view) for view in views))
    except TimeoutError as error:
        names = ", ".join(f"{view.namespace}/{view.name}" for view in views[:5])
        raise Behind(f"this broker began to lead a moment ago and could not read {names}; ask again") from error
    for view, seen in zip(views, found, strict=True):
        if seen is not None:
            ledger.observe(seen, now())
        elif not view.lasting:
            ledger.forget(view.uid, now())


class Renewals:
    def __init__(
        self,
        keys: Keys,
        writer: Writer,
        clock: RunningClock,
        timeouts: ServiceTimeouts,
        *,
        lead: Callable[[], Ledger],
        fenced: Callable[[str], bool],
        work: Callable[[], None],
        writing: Writing,
        changed: Callable[[str], None],
    ):
        """`lead`: the ledger, or NotLeading. `fenced`: phones of the pool with that UID check fences. `work` carries
        out what the ledger asks for, `writing` are the writes on slots that are under way, `changed` is called with
        pools."""
        self._keys = keys
        self._writer = writer
        self._clock = clock
        self._timeouts = timeouts
        self._lead = lead
        self._fenced = fenced
        self._work = work
        self._writing = writing
        self._changed = changed

    async def renew(self, ask: Renew) -> RenewedAll:
        ledger = self._lead()
        found = await self._find(ledger, ask.claims)
        self.still(ledger)
        now, answers, holders = self._clock.now(), [], set()
        for given, claim in zip(ask.claims, found, strict=True):
            if claim is None:
                answers.append(said(given, "lost", ledger.why(given.id)))
            elif not claim.proved:  # it says what the slot says, and permits nothing
                answers.append(said(given, ledger.renew(claim, 0, now)))
            elif not self._proves(claim, given.secret):
                answers.append(said(given, "lost", WRONG_SECRET))
            else:
                state = ledger.renew(claim, given.episodes, now)
                reason = claim.revoked if state == "recalled" else ledger.why(given.id) if state == "lost" else ""
                answers.append(said(given, state, reason))
                if claim.record.session == ask.session:
                    holders.add(claim.record.holder)
        touched: set[str] = set()
        if ask.session:
            listed = {given.id for given in ask.claims}
            for holder in holders:
                touched |= ledger.release_unlisted(holder, ask.session, ask.settled, listed, now, self._fenced)
        self._work()
        for pool in touched:
            self._changed(pool)
        return RenewedAll.model_construct(claims=tuple(answers))

    async def release(self, ask: Release) -> Released:
        ledger = self._lead()
        found = await self._find(ledger, ask.claims)
        self.still(ledger)
        now = self._clock.now()
        refused: dict[str, str] = {}
        ending, pools = set(), set()
        for given, claim in zip(ask.claims, found, strict=True):
            if claim is not None and not claim.proved:
                refused[given.id] = UNPROVED
            elif claim is not None and not self._proves(claim, given.secret):
                refused[given.id] = WRONG_SECRET
            elif claim is not None:
                if (view := ledger.view(claim)) is not None:
                    pools.add(view.pool)
                ending.add(given.id)
                ledger.give_back(claim, given.verdict, given.episodes, now)
            elif self._writing.of([given.id]) and self._keys.proved(given.id, given.secret):
                ending.add(given.id)  # it was given back before, and that is not written yet
        self._work()
        for pool in pools:
            self._changed(pool)
        await self._writing.wait(ending, self._timeouts.release)
        self.still(ledger)
        answers = [said(g, "lost", refused.get(g.id) or ledger.why(g.id)) for g in ask.claims]
        return Released.model_construct(claims=tuple(answers))

    def secret(self, claim: Claim) -> str:
        if not claim.secret:
            claim.secret = self._keys.secret(claim.id)
        return claim.secret

    def _proves(self, claim: Claim, given: str) -> bool:
        if not proves(self.secret(claim), given):
            if not self._keys.proved(claim.id, given):
                return False
            claim.secret = given  # of another of our keys than the one that signs now
        return True

    def still(self, ledger: Ledger) -> None:
        """Raises NotLeading when that ledger's term is over, also when another one of this process has begun."""
        if self._lead() is not ledger:
            raise NotLeading

    async def _find(self, ledger: Ledger, asked: Sequence[HeldMessage]) -> list[Claim | None]:
        """The claims that are meant. Looks at slots whose claims are later than what is known of them: another leader
        granted them, and the watch did not report them yet. Only the proof of such a claim causes a read."""
        found = [ledger.claim(given.id) for given in asked]
        behind = [
            view
            for given, claim in zip(asked, found, strict=True)
            if claim is None
            and (view := ledger.ahead(given.id)) is not None
            and self._keys.proved(given.id, given.secret)
        ]
        if not behind:
            return found
        await refresh(self._writer.get, ledger, behind, self._clock.now, self._timeouts.refresh)
        if not await self._writing.wait({view.uid for view in behind}, self._timeouts.refresh):
            raise Behind("a slot is being written while this broker begins to lead; ask again")
        self.still(ledger)
        return [ledger.claim(given.id) for given in asked]
