"""Phones of a pool, claimed from the operator's broker (`tapforge_api.claims`; where it is: `broker_calls`).

Rules, the weightiest first:
1. A phone is leased only while its claim lives (`claim_manager`). When the claim is lost, the phone is out of the table
   at once, its episode ends as lease_lost (`claimed`), and what its holder says later changes nothing. Every request to
   the phone names the claim by which it is used: the phone may know before its holder that the claim is over.
2. A claim is given back clean when the broker asks for it, at the end of its episode; and as dirty or broken when an
   episode left its phone so: the operator replaces phones, nothing repairs them.
3. A new phone is asked for its health before it is leased. A pool that gives bad phone after bad phone is asked ever
   more slowly; and while not one of its phones was ever reached, those that can't be reached are given back clean: the
   fault may be the way from here to the pool, and is not a reason to throw its phones away.

`size` counts the claims, `usable` the phones that can be leased or are; the others (sick) are looked at or on their way
back. What the broker says last is reported to a caller that waits in vain for a phone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from tapforge_api.pool import Protocol

from ..clients.http import Deadlines
from ..clients.phones import PhoneAddress, PhoneOptions
from ..protocol import EnvironmentFault
from .broker_calls import Access, BrokerCalls
from .claim_journal import ClaimJournal
from .claim_manager import ClaimManager, Pace
from .claimed import HeldClaim
from .lease_life import Clock, LeaseLife, wakeful
from .leasing import LeasedSlots
from .source import HealthProbe, Lease, SlotCounts, SlotError, Verdict

log = logging.getLogger(__name__)

#: times that a new phone is asked for its health; the way to a Pod may take a moment after it is ready
_GREETINGS = 3


class BrokerSlots(LeasedSlots):
    def __init__(
        self,
        pool: str,
        access: Access,
        *,
        slots: int = 16,
        priority: int = 0,
        deadlines: Deadlines | None = None,
        pace: Pace | None = None,
        clock: Clock = wakeful,
        journal: ClaimJournal | None = None,
        health: HealthProbe | None = None,
        protocol: Protocol = "tapforge",
        options: PhoneOptions | None = None,
    ) -> None:
        """`journal`: where a killed predecessor of this process may have left its claims."""
        super().__init__((), health=health)
        self._pool = pool
        self._deadlines = deadlines or Deadlines()
        self._protocol: Protocol = protocol
        self._options = options or PhoneOptions()
        self._pace = pace or Pace()
        self._calls = BrokerCalls(access)
        self._manager = ClaimManager(self._calls, self, pool, slots, priority, self._pace, clock, journal)
        #: slot -> claim, of the phones that can be leased: exactly the names of the table
        self._serving: dict[str, HeldClaim] = {}
        self._looks: set[asyncio.Task[None]] = set()
        #: whether any phone of the pool ever answered
        self._reached = False
        self._complaint = ""

    @property
    def size(self) -> int:
        return self._manager.size

    def counts(self) -> SlotCounts:
        return replace(super().counts(), sick=self.size - len(self._serving))

    def describe(self) -> str:
        c = self.counts()
        text = (
            f"{self.size} of at most {self._manager.wanted} phones of the pool {self._pool!r} are claimed ({c.free} "
            f"free, {c.leased} leased, {c.sick} looked at or on their way back)"
        )
        bad = f"the last bad phone: {self._complaint}" if self._complaint else ""
        return "; ".join(part for part in (text, self._manager.word, bad) if part)

    async def start(self) -> None:
        """Returns with the broker's first answer, whether there were phones or not. Raises SlotError when the broker
        refuses, or stays away for `Pace.start`."""
        try:
            await self._manager.start()
        except SlotError:
            await self.close()
            raise

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        looks = list(self._looks)
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
        await super().close()
        for slot, claim in self._serving.items():
            if self._table.leased(slot):
                claim.verdict = "dirty"
        await self._manager.close()
        await self._calls.close()

    # --- as a LeasedSlots ---

    def address(self, slot: str) -> PhoneAddress:
        return self._address(self._serving[slot])

    def life(self, slot: str) -> LeaseLife:
        return self._serving[slot].life

    def _address(self, claim: HeldClaim) -> PhoneAddress:
        return PhoneAddress(claim.slot, claim.url, self._deadlines, claim.shown, self._protocol, self._options)

    def _put_back(self, lease: Lease, verdict: Verdict, why: str, pace: float | None = None) -> None:
        claim = self._serving.get(lease.slot)
        if claim is None or claim.life is not lease.life:
            return  # lost or on its way back: there is nothing left to return
        if late := claim.life.over():
            self._manager.lose(claim, late)
        elif verdict is Verdict.DIRTY:
            claim.verdict = "dirty"
            self._table.give(lease.slot, lease.fence, verdict)
            self._withdraw(claim)
            self._bad(f"{claim.slot}: {why or 'an episode on it broke'}")
            self._look(self._part_with(claim), f"part with {claim.slot}")
        else:
            self._manager.bad_in_a_row = 0
            if claim.recalled:
                self._table.give(lease.slot, lease.fence, verdict)
                self._manager.give_back(claim)
            else:
                super()._put_back(lease, verdict, why, pace)

    # --- as the Owner of the claim manager ---

    def came(self, claim: HeldClaim) -> None:
        self._look(self._welcome(claim), f"welcome {claim.slot}")

    def recalled(self, claim: HeldClaim) -> None:
        if self._serving.get(claim.slot) is claim and not self._table.leased(claim.slot):
            self._manager.give_back(claim)

    def left(self, claim: HeldClaim) -> None:
        if claim.lost:
            self._complaint = f"{claim.slot}: the claim on it was lost: {claim.lost}"
        self._withdraw(claim)

    def _withdraw(self, claim: HeldClaim) -> None:
        if self._serving.get(claim.slot) is claim:
            del self._serving[claim.slot]
            self._forget(claim.slot)
            self._tell()

    # --- looking at phones ---

    def _look(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    async def _welcome(self, claim: HeldClaim) -> None:
        """Lets a new phone serve as soon as it is known to answer."""
        fault = None
        for greeting in range(_GREETINGS):
            await asyncio.sleep(self._pace.pause(greeting, cap=2.0))
            try:
                await self._health(self._address(claim))
            except EnvironmentFault as sick:
                fault = sick
            else:
                self._enter(claim)
                return
        if self._reached:
            claim.verdict = "broken"
            self._bad(str(fault))
        else:
            self._bad(f"{fault}; no phone of the pool was ever reached from here: is there a way to its Pods?")
        self._manager.give_back(claim)

    def _enter(self, claim: HeldClaim) -> None:
        self._reached = True
        if claim.lost:
            return
        if claim.recalled:
            self._manager.give_back(claim)
            return
        self._serving[claim.slot] = claim
        self._table.add(claim.slot)
        self._serve_changed()

    async def _part_with(self, claim: HeldClaim) -> None:
        """Gives a dirty phone back, and says whether it serves at all."""
        try:
            await self._health(self._address(claim))
        except EnvironmentFault:
            claim.verdict = "broken"
        self._manager.give_back(claim)

    def _bad(self, complaint: str) -> None:
        self._manager.bad_in_a_row += 1
        self._complaint = complaint
        log.warning("%s; it is exchanged for another phone", complaint)
