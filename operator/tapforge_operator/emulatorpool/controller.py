"""Reconciles a pool: observes it, lets `plan.py` decide, has `apply.py` act, writes the status.

Promises:
1. The status is written when it says something new: counters at most once in `_STATUS_SECONDS`, a condition at once.
2. A spec or a status that can't be read stops nothing but changes: no slot is touched, claims stay, the conditions say
   what is wrong.

Times are seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tapforge_api.base import API_VERSION
from tapforge_api.pool import EmulatorPoolSpec, EmulatorPoolStatus
from tapforge_api.reading import Reading, UnreadableStatus, read_pool
from tapforge_operator.controller import Requeue
from tapforge_operator.emulatorpool.apply import Claims, SlotWrites
from tapforge_operator.emulatorpool.plan import plan
from tapforge_operator.emulatorpool.state import History, Observed, Plan, Pool, read_status
from tapforge_operator.emulatorpool.status import unreadable
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.client import ApiError, Client, Object, path
from tapforge_operator.kube.leaderelection import NotLeading
from tapforge_operator.kube.objectmeta import (
    UNREADABLE_STATUS,
    readable_conditions,
    stored_conditions,
    unreadable_status,
)
from tapforge_operator.kube.types import Event, PoolObject, Reference
from tapforge_operator.observability.logging import ref
from tapforge_operator.observability.metrics import Telemetry, slot_counts

log = logging.getLogger(__name__)

#: between two passes of a pool: a storm of events costs a pass now and then, not one each. Twice as long after each
#: pass that found nothing to do, up to the longest: claims that come and go change nothing here but a counter
_PAUSE_SECONDS, _LONGEST_PAUSE = 0.1, 0.4
#: a pool is reconciled again after this long even when nothing happened and the plan asks for nothing
_RESYNC_SECONDS = 300.0
_STATUS_SECONDS = 1.0


class PoolController:
    def __init__(
        self,
        pool: PoolObject,
        cache: Cache,
        client: Client,
        claims: Claims,
        telemetry: Telemetry,
        leads: Callable[[], bool],
        wake: Callable[[], None],
        *,
        devices: bool = True,
    ):
        """`wake` is called when there is something to do before the next pass was asked for. `devices`: the operator
        may write Leases."""
        self.namespace, self.name = pool.namespace, pool.name
        self._key = f"{pool.namespace}/{pool.name}"
        self._uid = pool.uid
        self._ref = ref("EmulatorPool", pool.namespace, pool.name, pool.uid)
        self._cache = cache
        self._client = client
        self._claims = claims
        self._telemetry = telemetry
        self._leads = leads
        self._writes = SlotWrites(client, cache, claims, telemetry, leads, wake, devices)
        self._history: History | None = None
        self._reading: tuple[str, Reading[EmulatorPoolSpec]] | None = None
        #: the status that was written last, what the API server made of it, and when it was written
        self._written: EmulatorPoolStatus | None = None
        self._echo: EmulatorPoolStatus | None = None
        self._written_at = -_STATUS_SECONDS
        self._pause = _PAUSE_SECONDS

    async def reconcile(self) -> Requeue | None:
        found = self._cache.pools.get(self._uid)
        return None if found is None else Requeue(await self._pass(found), self._pause)

    async def close(self) -> None:
        await self._writes.end()
        if not self._cache.pools.of(self._key):  # another one of the name may have begun
            self._telemetry.forget(self._key)

    async def _pass(self, found: PoolObject) -> float:
        """Returns for how long nothing will be to do, should nothing happen."""
        try:
            last = read_status(found.body.get("status"))
        except UnreadableStatus as error:
            return await self._report_unreadable_status(found, str(error))
        reading = self._read(found)
        if reading.spec is None:
            generation = found.body["metadata"].get("generation", 0)
            status = unreadable(last, generation, reading.message, time.time())
            wait = await self._write_status(found, last, status)
            if _conditions(last) != _conditions(status):
                self._record_warning(found, "InvalidSpec", reading.message)
            return wait
        pool = Pool.of(found.body, reading.spec, reading.message)
        if self._history is None:
            self._history = History.of(pool.status)
        planned = plan(pool, self._observe(pool), self._history, time.time())
        self._history = planned.history
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if planned.quiet else _PAUSE_SECONDS
        trouble: ApiError | None = None
        try:
            await self._writes.carry_out(pool, planned)
        except ApiError as error:  # the status reports the other slots all the same
            trouble = error
        wait = await self._write_status(found, pool.status, planned.status)
        if trouble is not None:
            raise trouble
        return 0.0 if self._writes.has_news else min(wait, self._requeue_after(planned))

    def _requeue_after(self, planned: Plan) -> float:
        again = min(_RESYNC_SECONDS, self._writes.wait or _RESYNC_SECONDS)
        return again if planned.requeue_after is None else min(again, planned.requeue_after)

    def _read(self, found: PoolObject) -> Reading[EmulatorPoolSpec]:
        if self._reading is None or self._reading[0] != found.resource_version:
            self._reading = found.resource_version, read_pool(found.body)
        return self._reading[1]

    def _observe(self, pool: Pool) -> Observed:
        held, waiting = self._claims.held(pool.uid), self._claims.waiting(pool.uid)
        # Runs use the pools of their own namespace: no phone boots that the namespace's quota keeps from being claimed.
        wanted, room = self._cache.wanted(pool.namespace, pool.name), self._claims.quota_room(pool.uid, pool.namespace)
        self._telemetry.claims(self._key, sum(bool(claim.holder) for claim in held.values()), waiting)
        refusals, tails, budget, no_devices = self._writes.take_news()
        return Observed(
            slots=tuple(self._cache.slots.of(pool.uid).values()),
            held=held,
            waiting=waiting,
            wanted=wanted if room is None else min(wanted, room),
            nodes=self._cache.bad_nodes(),
            next_lost_node=self._cache.next_lost_node(),
            watching_since=self._cache.watching_since,
            clock_offset=self._cache.clock_offset,
            refusals=refusals,
            tails=tails,
            devices=self._claims.devices(pool.uid),
            no_devices=no_devices,
            budget=budget,
        )

    async def _write_status(self, pool: PoolObject, observed: EmulatorPoolStatus, status: EmulatorPoolStatus) -> float:
        """Writes the status if it changed. Returns after how long it should be tried again."""
        self._telemetry.pool_state(self._key, slot_counts(status))
        self._telemetry.pool_conditions(self._key, status.conditions)
        # What differs from the echo was written by another client, and is corrected.
        last = self._written if self._written is not None and observed == self._echo else observed
        if status == last:
            return _RESYNC_SECONDS
        wait = self._written_at + _STATUS_SECONDS - time.monotonic()
        if wait > 0 and _conditions(status) == _conditions(last):
            return wait
        self._written_at = time.monotonic()
        self._written, self._echo = None, observed
        written = await self._patch_status(pool, status.model_dump(mode="json", by_alias=True))
        if written is not None:
            self._echo = read_status(written.get("status"))
        self._written = status
        return _RESYNC_SECONDS

    async def _patch_status(self, pool: PoolObject, status: Object) -> Object | None:
        """Fields of the status that aren't named stay. None: the pool is gone, or another one has its name."""
        if not self._leads():
            raise NotLeading
        where = path("emulatorpools", pool.namespace, pool.name, "status", API_VERSION)
        # With the UID, so that a pool of the same name that was made meanwhile doesn't get it.
        body = {"metadata": {"uid": pool.uid}, "status": status}
        try:
            written = await self._client.patch(where, body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            log.info("pool %s is gone or another one: %s", self._key, error, extra=self._ref)
            return None
        self._cache.observe_pool(written)
        return written

    async def _report_unreadable_status(self, pool: PoolObject, message: str) -> float:
        stored, generation = pool.body.get("status"), pool.body["metadata"].get("generation", 0)
        now = unreadable_status(stored, message, generation, time.time(), "Degraded")
        if now != stored_conditions(stored):
            log.error("pool %s: %s", self._key, message, extra=self._ref)
            await self._patch_status(pool, {"conditions": now})
            self._record_warning(pool, UNREADABLE_STATUS, message)
        self._telemetry.pool_conditions(self._key, readable_conditions(now))
        return _RESYNC_SECONDS

    def _record_warning(self, pool: PoolObject, reason: str, message: str) -> None:
        about = Reference("EmulatorPool", pool.namespace, pool.name, pool.uid)
        self._writes.record(about, [Event("Warning", reason, message)])


def _conditions(status: EmulatorPoolStatus) -> set[tuple[str, str, str]]:
    return {(c.type, c.status, c.reason) for c in status.conditions}
