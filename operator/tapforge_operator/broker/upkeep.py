"""Renewals and releases: what holders say of their claims, proved by the claims' secrets alone.

1. Only a leader answers: an answer that is ready after its term is `NotLeading`, which ends nothing.
2. A renewal touches no API server: an outage of it dirties no phone. Many of them are one call.
3. A renewal with a session lists all claims of its process: what it doesn't list is released. The list counts for the
   sessions of claims that it proves, and for no other holder's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tapforge_api.claims import Held as HeldMessage
from tapforge_api.claims import Release, Released, Renew, RenewedAll

from .clock import RunningClock
from .ledger import Ledger
from .looking import Behind, look_again
from .mark import Keys, proves
from .messages import WRONG_SECRET, said
from .records import Claim, Patience
from .writes import NotLeading, Writer
from .writing import Writing


class Upkeep:
    def __init__(
        self,
        keys: Keys,
        writer: Writer,
        clock: RunningClock,
        patience: Patience,
        *,
        lead: Callable[[], Ledger],
        fenced: Callable[[str], bool],
        work: Callable[[], None],
        writing: Writing,
        changed: Callable[[str], None],
    ):
        """`lead`: the ledger, or NotLeading. `fenced`: phones of the pool with that UID check fences. `work` carries
        out what the ledger asks for, `writing` are the writes on slots that are under way, `changed` is told of pools.
        """
        self._keys = keys
        self._writer = writer
        self._clock = clock
        self._patience = patience
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
            elif not proves(self.secret(claim), given.secret):
                answers.append(said(given, "lost", WRONG_SECRET))
            else:
                state = ledger.renew(claim, given.episodes, now)
                reason = claim.recalled if state == "recalled" else ledger.why(given.id) if state == "lost" else ""
                answers.append(said(given, state, reason))
                if claim.mark.session == ask.session:
                    holders.add(claim.mark.holder)
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
        refused, ending, pools = set(), set(), set()
        for given, claim in zip(ask.claims, found, strict=True):
            if claim is not None and not proves(self.secret(claim), given.secret):
                refused.add(given.id)
            elif claim is not None:
                if (view := ledger.view(claim)) is not None:
                    pools.add(view.pool)
                ending.add(given.id)
                ledger.give_back(claim, given.verdict, given.episodes, now)
            elif self._writing.of([given.id]) and proves(self._keys.secret(given.id), given.secret):
                ending.add(given.id)  # it was given back before, and that is not written yet
        self._work()
        for pool in pools:
            self._changed(pool)
        await self._writing.wait(ending, self._patience.release)
        self.still(ledger)
        answers = [said(g, "lost", WRONG_SECRET if g.id in refused else ledger.why(g.id)) for g in ask.claims]
        return Released.model_construct(claims=tuple(answers))

    def secret(self, claim: Claim) -> str:
        if not claim.secret:
            claim.secret = self._keys.secret(claim.id)
        return claim.secret

    def still(self, ledger: Ledger) -> None:
        """Raises NotLeading when that ledger's term is over, also when another one of this process has begun."""
        if self._lead() is not ledger:
            raise NotLeading

    async def _find(self, ledger: Ledger, asked: Sequence[HeldMessage]) -> list[Claim | None]:
        """The claims that are meant. Looks at slots whose claims are later than what is known of them: another leader
        granted them, and the watch did not tell yet. Only the proof of such a claim makes anybody look."""
        found = [ledger.claim(given.id) for given in asked]
        behind = [
            view
            for given, claim in zip(asked, found, strict=True)
            if claim is None
            and (view := ledger.ahead(given.id)) is not None
            and proves(self._keys.secret(given.id), given.secret)
        ]
        if not behind:
            return found
        await look_again(self._writer.look, ledger, behind, self._clock.now, self._patience.look)
        if not await self._writing.wait({view.uid for view in behind}, self._patience.look):
            raise Behind("a slot is being written while this broker begins to lead; ask again")
        self.still(ledger)
        return [ledger.claim(given.id) for given in asked]
