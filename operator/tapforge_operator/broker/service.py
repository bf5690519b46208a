"""The broker's shell: it waits, writes and answers as the ledger says.

1. Nothing is answered before it is written. A claim is reported after its record is on the slot.
2. Only a leader grants, renews and deletes; when the leadership ends, callers that wait get `NotLeading`, and nothing
   more is written. The next leader finds everything on the slots.
3. A holder that is silent loses its claims when its Pod is found gone, not before (`evidence.py`).
4. Every wait has an end: the caller's for the first slot, `Siblings` for the writes after it.

Between `begin` and `end` of a leadership the watches feed `observe`, `forget`, ... One event loop. Times are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final

from tapforge_api.claims import Acquire, Acquired, Release, Released, Renew, RenewedAll
from tapforge_operator.broker import claim_record, external
from tapforge_operator.broker.audit import Audit
from tapforge_operator.broker.claim_record import Clear, Keys
from tapforge_operator.broker.devices import DeviceRules
from tapforge_operator.broker.evidence import Evidence
from tapforge_operator.broker.ledger import Ledger
from tapforge_operator.broker.messages import claim_message, want_of, why_none
from tapforge_operator.broker.pools import PoolIndex
from tapforge_operator.broker.renewals import Renewals, RunningClock, refresh
from tapforge_operator.broker.types import (
    Answer,
    ClaimQuotas,
    Counts,
    Device,
    Grant,
    Held,
    Holder,
    LedgerTimeouts,
    PoolNotFound,
    Remove,
    ServiceTimeouts,
    account_of,
)
from tapforge_operator.broker.writer import Api, Siblings, Tickets, Writer, Writing
from tapforge_operator.kube.leaderelection import NotLeading
from tapforge_operator.kube.types import PoolObject, Slot
from tapforge_operator.observability.metrics import Telemetry

#: why it is not granted any more
UNLISTED: Final = "its URL is no longer in the pool"


log = logging.getLogger(__name__)
Object = Mapping[str, Any]


class Claims:
    def __init__(
        self,
        api: Api,
        keys: Keys,
        leads: Callable[[], bool],
        *,
        on_change: Callable[[str], None] = lambda pool_uid: None,
        on_quota: Callable[[str], None] = lambda namespace: None,
        idle: Callable[[str], bool] = lambda holder: False,
        lost: Callable[[str], bool] = lambda node: False,
        elsewhere: Callable[[str], bool] | None = None,
        observe_pod: Callable[[Object], Slot | None] | None = None,
        telemetry: Telemetry | None = None,
        ledger_timeouts: LedgerTimeouts | None = None,
        timeouts: ServiceTimeouts | None = None,
        clock: RunningClock | None = None,
        quotas: ClaimQuotas | None = None,
        devices: DeviceRules | None = None,
    ):
        """`on_change`: claims or demand of the pool with that UID changed. `on_quota`: the namespace uses more or
        less of its quota, which leaves its pools another room. `observe_pod`: a Pod as an answer showed it.
        `devices`: which namespace may name which. `lost`, `elsewhere`: as in `Evidence`.
        `idle`: the holder of that name is a run that wants no phones any more."""
        self._keys = keys
        self._leads = leads
        self._on_change, self._on_quota = on_change, on_quota
        self._telemetry = telemetry
        self._ledger_timeouts = ledger_timeouts
        self._timeouts = timeouts or ServiceTimeouts()
        self._quotas = quotas
        self._clock = clock or RunningClock()
        self._index = PoolIndex(devices)
        self._writer = Writer(api, keys, leads, self._index.name, observe_pod)
        self._api = api
        self._idle = idle
        self._evidence = Evidence(api, lost, elsewhere)
        self._ledger: Ledger | None = None
        self._audit = Audit(0, self._index.key)
        self._tickets = Tickets()
        self._siblings = Siblings(self._timeouts)
        self._writing = Writing(self._ended)
        self._renewals = Renewals(
            keys,
            self._writer,
            self._clock,
            self._timeouts,
            lead=self._lead,
            fenced=self._index.checks_fences,
            work=self._work,
            writing=self._writing,
            changed=lambda pool: self._serve(pool, changed=True),
        )
        self._leases = external.Leases()
        #: version of the last list of Leases
        self._listed = 0
        #: pools that a caller waits for
        self._hungry: set[str] = set()

    # --- leadership ---------------------------------------------------------------------------------------------------

    def begin(
        self, term: int, pools: Iterable[PoolObject], slots: Iterable[Slot], leases: Iterable[Object] = ()
    ) -> None:
        """This process leads in that term and has read everything once: claims found on slots live again from now."""
        if self._ledger is not None:
            raise RuntimeError(f"the broker already leads; end that leadership before term {term} begins")
        self._clock.tick()
        self._audit = Audit(term, self._index.key)
        self._ledger, self._leases = Ledger(term, self._ledger_timeouts, self._quotas), external.Leases(leases)
        self._ledger.began(max([self._listed, *(view.order for view in self._leases.views(self._keys))]))
        for pool in pools:
            self._adopt_pool(self._ledger, pool)
        for view in self._index.unlisted(self._leases.views(self._keys)):
            self._ledger.observe(view, self._clock.now())
            self._ledger.retire(view.uid, UNLISTED)
        for slot in slots:
            self.observe(slot)
        self._work()
        self._report_unproved(self._ledger)
        self._writing.begin(self._keep_time(self._ledger))
        self._writing.begin(self._look_after_holders(self._ledger))

    async def end(self) -> None:
        """The leadership is over. May be called again."""
        if self._ledger is not None:
            self._audit.write(self._ledger.take_events())
        self._ledger = None
        self._writing.cancel()
        self._siblings.clear()
        self._tickets.send_away()
        self._leases, self._hungry = external.Leases(), set()
        for uid in self._index.uids():
            self._index.drop(uid)
        await self._writing.ended()

    @property
    def leading(self) -> bool:
        return self._ledger is not None and self._leads()

    def reread(self, slots: Iterable[Slot]) -> None:
        """The keys are others than before: what is written on slots is read again."""
        if (ledger := self._ledger) is None:
            return
        now = self._clock.now()
        for view in [claim_record.view_of(slot, self._keys) for slot in slots] + self._leases.views(self._keys):
            ledger.reread(view, now)
        self._work()
        self._report_unproved(ledger)

    def unproved(self) -> int:
        """Claims that are signed with a key that is not ours."""
        return self._ledger.unproved() if self._ledger is not None else 0

    def is_unproved(self, claim_id: str) -> bool:
        """The claim is signed with a key that is not ours, and is its holder's all the same."""
        claim = self._ledger.claim(claim_id) if self._ledger is not None else None
        return claim is not None and not claim.proved

    @staticmethod
    def _report_unproved(ledger: Ledger) -> None:
        if count := ledger.unproved():
            log.error(
                "%d claims are signed with a key that the Secret tapforge-broker doesn't hold: their holders keep "
                "them, but can't give them back; put the lost key into the Secret again (docs/keys.md, Restore)",
                count,
            )

    # --- what the watches said ----------------------------------------------------------------------------------------

    def observe(self, slot: Slot) -> None:
        if self._ledger is not None:
            self._ledger.observe(claim_record.view_of(slot, self._keys), self._clock.now(), back=True)
            self._serve(slot.pool_uid)

    def forget(self, slot: Slot) -> None:
        if self._ledger is not None:
            self._ledger.forget(slot.uid, self._clock.now(), back=True)
            self._serve(slot.pool_uid)

    def observe_pool(self, pool: PoolObject) -> None:
        if self._ledger is not None:
            self._adopt_pool(self._ledger, pool)
            self._serve(pool.uid)

    def forget_pool(self, uid: str) -> None:
        urls = self._index.drop(uid)
        if self._ledger is not None:
            for url in urls:
                self._ledger.forget(url.uid, self._clock.now(), "its pool was deleted")
            self._ledger.close(uid, self._clock.now())
            self._work()

    def observe_lease(self, lease: Object, deleted: bool = False) -> None:
        """A Lease with the labels of a pool's slot."""
        if self._ledger is None or (uid := self._leases.note(lease, deleted)) is None:
            return
        if (url := self._index.url(uid)) is None or url.namespace != lease["metadata"]["namespace"]:
            return
        view = external.view_of(url, lease, self._keys)
        if deleted:
            self._ledger.vanished(view.uid, view.order, self._clock.now())
        else:
            self._ledger.observe(view, self._clock.now())
        self._serve(url.pool_uid, changed=deleted)

    def keep_leases(self, there: Iterable[Object], namespace: str, version: str) -> None:
        """These Leases are there, and according to a list of that version no others in the namespace ("": anywhere)."""
        self._listed = int(version)
        if self._ledger is None:
            return
        known = self._leases.keep(there)
        for url in self._index.urls():
            missing = (url.namespace, url.uid) not in known and namespace in ("", url.namespace)
            if missing and self._ledger.missing(url.uid, int(version), self._clock.now()):
                self._on_change(url.pool_uid)

    def _adopt_pool(self, ledger: Ledger, pool: PoolObject) -> None:
        after = (pool.spec.get("recycle") or {}).get("afterEpisodes")
        ledger.wear(pool.uid, int(after) if after else None)
        urls, removed = self._index.put(pool)
        for url in urls:
            ledger.reinstate(url.uid)
            ledger.observe(external.view_of(url, self._leases.get(url), self._keys), self._clock.now())
        for url in removed:
            ledger.retire(url.uid, UNLISTED)

    # --- what the pool's controller asks ------------------------------------------------------------------------------

    def held(self, pool_uid: str) -> Mapping[str, Held]:
        return self._ledger.held(pool_uid) if self._ledger else {}

    def waiting(self, pool_uid: str) -> int:
        return self._ledger.waiting(pool_uid) if self._ledger else 0

    def quota(self, namespace: str) -> int | None:
        """Slots that claimants of the namespace may hold in all; None: any number."""
        return self._quotas.of(namespace) if self._quotas is not None else None

    def quota_room(self, pool_uid: str, namespace: str) -> int | None:
        return self._ledger.quota_room(pool_uid, namespace) if self._ledger else None

    def quota_use(self) -> dict[str, tuple[int, int]]:
        """Quota and use of each namespace that has one of its own; of none while this process does not lead."""
        if self._ledger is None or self._quotas is None:
            return {}
        found = {name: self._ledger.quota_use(name) for name in self._quotas.by_namespace}
        return {name: (use.quota, use.held) for name, use in found.items() if use is not None}

    def counts(self, pool_uid: str) -> Counts:
        return self._ledger.counts(pool_uid) if self._ledger else Counts()

    def devices(self, pool_uid: str) -> Sequence[Device]:
        if self._ledger is None:
            return ()
        known = {device.url: device for device in self._ledger.devices(pool_uid)}
        for url in self._index.refused(pool_uid):
            there = known.get(url.url)
            known[url.url] = Device(url.url, "refused", there is not None and there.claimed)
        return list(known.values())

    def drain(self, uid: str) -> bool:
        """True: the slot has no holder and is not granted again. False: it is claimed, or that is unknown."""
        return self._ledger.drain(uid) if self._ledger else False

    def revoke(self, uid: str, reason: str) -> None:
        if self._ledger is not None:
            self._ledger.revoke(uid, reason)

    def withhold(self, pool_uid: str, uids: Set[str]) -> None:
        if self._ledger is not None and self._ledger.withhold(pool_uid, uids):
            self._serve(pool_uid)

    def find_pool(self, namespace: str, name: str) -> PoolObject:
        """Raises PoolNotFound, and NotLeading: a broker that does not lead knows of no pool."""
        self._lead()
        return self._index.find(namespace, name)

    # --- what callers ask ---------------------------------------------------------------------------------------------

    async def acquire(self, namespace: str, name: str, holder: Holder, ask: Acquire) -> Acquired:
        """Raises PoolNotFound, NotLeading. Cancelled, it leaves nothing claimed."""
        ledger, began = self._lead(), time.monotonic()
        pool = self.find_pool(namespace, name)
        ticket = ledger.enqueue(want_of(pool.uid, holder, ask), self._clock.now())
        future = self._tickets.wait_on(ticket)
        self._serve(pool.uid, changed=True)
        try:
            answer = await self._wait(ledger, ticket, future, ask.wait_seconds)
        except asyncio.CancelledError:
            if self._tickets.leave(ticket, future) and self._ledger is ledger:
                self._siblings.drop(ticket)
                ledger.withdraw(ticket, self._clock.now())
                self._serve(pool.uid, changed=True)
            raise
        self._tickets.leave(ticket, future)
        if answer.repeated:
            # Claims of an earlier leader are reported after a write: it may have ended them with its last write, and
            # what it sent for the slot as it was then must not be carried out afterwards.
            views = [v for c in answer.claims if not c.ticket and (v := ledger.view(c)) is not None]
            adopted = [view for view in views if not view.is_confirmed]
            if adopted:
                await refresh(self._writer.confirm, ledger, adopted, self._clock.now, self._timeouts.refresh)
        self._renewals.still(ledger)
        ledger.delivered(ticket)
        claims = [(claim, view) for claim in answer.claims if (view := ledger.view(claim)) is not None]
        if self._telemetry is not None:
            self._telemetry.claim_waited(f"{namespace}/{name}", time.monotonic() - began, bool(claims))
        if claims:
            return Acquired(claims=tuple(claim_message(c, self._renewals.secret(c), view, pool) for c, view in claims))
        if pool.uid not in self._index:
            raise PoolNotFound(f"EmulatorPool {name} in namespace {namespace} was deleted")
        mine = ledger.held_by(pool.uid, holder.name)
        use = ledger.quota_use(account_of(holder.name))
        return Acquired(waiting=why_none(ask, holder, mine, ledger.counts(pool.uid), answer.repeated, use))

    async def renew(self, ask: Renew) -> RenewedAll:
        return await self._renewals.renew(ask)

    async def release(self, ask: Release) -> Released:
        return await self._renewals.release(ask)

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def _wait(self, ledger: Ledger, ticket: int, future: asyncio.Future[Answer], seconds: float) -> Answer:
        await asyncio.wait([future], timeout=seconds)
        if not future.done() and ledger.granting(ticket):
            await asyncio.wait([future], timeout=self._timeouts.settle)
        if not future.done():
            ledger.conclude(ticket, self._clock.now())
            self._work()
        return await future

    # --- what the ledger asks for -------------------------------------------------------------------------------------

    def _lead(self) -> Ledger:
        if self._ledger is None or not self._leads():
            raise NotLeading
        return self._ledger

    def _serve(self, pool_uid: str, changed: bool = False) -> None:
        """Grants what can be granted."""
        if self._ledger is None:
            return
        if self._ledger.has_waiters(pool_uid):
            self._hungry.add(pool_uid)
            self._ledger.assign(pool_uid, self._clock.now())
        self._work()
        if changed:
            self._on_change(pool_uid)

    def _work(self) -> None:
        if self._ledger is None:
            return
        self._audit.write(self._ledger.take_events())
        for work in self._ledger.take_work():
            match work:
                case Answer():
                    self._siblings.drop(work.ticket)
                    self._tickets.answer(work)
                case Grant():
                    ends = (work.replaces.record.id,) if work.replaces is not None else ()
                    self._writing.begin(self._grant(self._ledger, work), work.view.uid, *ends)
                case Clear():
                    self._writing.begin(self._clear(self._ledger, work), work.view.uid, work.record.id)
                case Remove():
                    self._writing.begin(self._remove(work), work.view.uid, f"{work.view.uid}.{work.fence}")
        for pool_uid in self._ledger.take_touched():
            self._on_change(pool_uid)

    async def _grant(self, ledger: Ledger, work: Grant) -> None:
        outcome = await self._writer.claim(work.view, work.record, work.replaces)
        if self._ledger is not ledger:
            return
        uid, fence, now = work.record.uid, work.record.fence, self._clock.now()
        if outcome.done and outcome.view is not None:
            ticket = ledger.granted(uid, fence, outcome.view, now)
            waited, pool = self._tickets.waited(ticket), self._index.key(work.view.pool)
            if self._telemetry is not None and waited is not None and pool:
                self._telemetry.claim_granted(pool, waited)
            if ledger.granting(ticket):
                self._siblings.wait(ticket, lambda: self._conclude(ledger, ticket))
        else:
            ledger.refused(uid, fence, outcome.view, now, outcome.pause)
        self._serve(work.view.pool, changed=True)

    async def _clear(self, ledger: Ledger, work: Clear) -> None:
        if work.replaceable:
            await asyncio.sleep(self._timeouts.handover)
        if self._ledger is not ledger or not ledger.begin_clear(work, self._clock.now()):
            return
        view = await self._writer.clear(work)
        if self._ledger is ledger:
            ledger.cleared(work.view.uid, view, self._clock.now())
            self._serve(work.view.pool, changed=True)

    async def _remove(self, work: Remove) -> None:
        await self._writer.remove(work)
        self._on_change(work.view.pool)

    def _conclude(self, ledger: Ledger, ticket: int) -> None:
        """The slots that are written have waited long enough for the others of their call."""
        if self._ledger is ledger and ledger.granting(ticket):
            ledger.conclude(ticket, self._clock.now())
            self._work()

    async def _keep_time(self, ledger: Ledger) -> None:
        next_quotas = 0.0
        while self._ledger is ledger:
            await asyncio.sleep(self._timeouts.tick)
            now = self._clock.tick()
            if not self._leads():
                continue
            changed = ledger.expire(now)
            for pool_uid in list(self._hungry):
                if ledger.balance(pool_uid, now):
                    changed.add(pool_uid)
                if not ledger.has_waiters(pool_uid):
                    self._hungry.discard(pool_uid)
                self._serve(pool_uid)
            for pool_uid in changed:
                self._serve(pool_uid, changed=True)
            if now >= next_quotas:
                next_quotas = now + self._timeouts.quotas
                for namespace in ledger.take_used():
                    self._on_quota(namespace)

    async def _look_after_holders(self, ledger: Ledger) -> None:
        """Ends claims of holders that are silent, or idle, and not there any more."""
        while self._ledger is ledger:
            await asyncio.sleep(self._timeouts.holders)
            if not self._leads():
                continue
            suspects = ledger.suspects(self._clock.now(), self._idle)
            self._evidence.forget_others(suspects)
            for pod in suspects:
                gone = await self._evidence.of(pod, self._clock.now)
                if gone is None or not self.leading:
                    continue
                log.info("claims of %s end: %s", pod, gone.why)
                now, fenced = self._clock.now(), self._index.checks_fences
                changed = ledger.holder_gone(pod, gone.why, now, stopped=gone.stopped, idle=self._idle, fenced=fenced)
                for pool_uid in changed:
                    self._serve(pool_uid, changed=True)

    def _ended(self, error: BaseException | None) -> None:
        if isinstance(error, NotLeading | None):
            return
        # A slot that is not managed any more must not be granted: to lead no longer is the safe end.
        log.critical("the broker stops leading: %s", error, exc_info=error)
        self._ledger = None
        self._tickets.send_away()
