"""Keeps a pool as planned: looks, lets `pool/plan.py` decide, has `writes.py` act, tells the status.

Promises:
1. One task per pool, so that no two passes of a pool overlap; what happens meanwhile wakes it once, afterwards.
2. A pass that fails is repeated with growing pauses; one pool's trouble is no other's.
3. Status is written when it says something new: counters at most once in `_STATUS_SECONDS`, a condition at once.
4. A spec that can't be read stops nothing but changes: no slot is touched, claims stay, the status says what is wrong.

Times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from tapforge_api.base import API_VERSION
from tapforge_api.pool import EmulatorPoolSpec, EmulatorPoolStatus
from tapforge_api.reading import Reading, read_pool

from .kube.client import ApiError, Client, path
from .logs import ref
from .objects import PoolObject
from .pool.history import History
from .pool.plan import plan
from .pool.records import Plan, Pool, Seen, read_status
from .pool.status import unreadable
from .telemetry import Telemetry, slot_counts
from .world import World
from .writes import Claims, NotLeading, SlotWrites

log = logging.getLogger(__name__)

#: between two passes of a pool: a storm of events costs a pass now and then, not one each. Twice as long after each
#: pass that found nothing to do, up to the longest: claims that come and go change nothing here but a counter
_PAUSE_SECONDS, _LONGEST_PAUSE = 0.1, 0.4
#: a pool is looked at again after this long even when nothing happened and the plan asks for nothing
_LOOK_SECONDS = 300.0
_STATUS_SECONDS = 1.0
_LONGEST_BACKOFF = 60.0


class PoolKeeper:
    def __init__(
        self,
        pool: PoolObject,
        world: World,
        client: Client,
        claims: Claims,
        telemetry: Telemetry,
        leads: Callable[[], bool],
    ):
        self.key = f"{pool.namespace}/{pool.name}"
        self._uid = pool.uid
        self._ref = ref("EmulatorPool", pool.namespace, pool.name, pool.uid)
        self._world = world
        self._client = client
        self._claims = claims
        self._telemetry = telemetry
        self._leads = leads
        self._writes = SlotWrites(client, world, claims, telemetry, leads, self.wake)
        self._news = asyncio.Event()
        self._history: History | None = None
        self._reading: tuple[str, Reading[EmulatorPoolSpec]] | None = None
        #: the status that was written last, what the API server made of it, and when it was written
        self._said: EmulatorPoolStatus | None = None
        self._echo: EmulatorPoolStatus | None = None
        self._said_at = -_STATUS_SECONDS
        #: the last pass asked for no write
        self._idle = False

    def wake(self) -> None:
        self._news.set()

    async def run(self) -> None:
        """Until the pool is gone or the leadership is; or until cancelled."""
        try:
            await self._keep()
        finally:
            await self._writes.end()
        if not self._world.pools.of(self.key):  # another one of the name may have begun
            self._telemetry.forget(self.key)

    async def _keep(self) -> None:
        failures, pause = 0, _PAUSE_SECONDS
        while self._leads() and (pool := self._world.pools.get(self._uid)) is not None:
            self._news.clear()
            began, error = time.monotonic(), None
            try:
                wait = await self._pass(pool)
                failures, pause = 0, min(2 * pause, _LONGEST_PAUSE) if self._idle else _PAUSE_SECONDS
            except NotLeading:
                return
            except ApiError as trouble:
                failures += 1
                error, wait = trouble.reason or str(trouble.status), min(_LONGEST_BACKOFF, 0.5 * 2 ** min(failures, 10))
                log.warning("pool %s: %s; it is tried again in %.1f s", self.key, trouble, wait, extra=self._ref)
            self._telemetry.reconciled(self.key, time.monotonic() - began, error)
            await self._sleep(wait, rest=min(wait, pause if error is None else 1.0))

    async def _sleep(self, wait: float, rest: float) -> None:
        """Until there is news; `wait` at most, `rest` at least."""
        await asyncio.sleep(rest)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait - rest):
                await self._news.wait()

    async def _pass(self, seen: PoolObject) -> float:
        """Returns for how long nothing will be to do, should nothing happen."""
        reading = self._read(seen)
        if reading.spec is None:
            last = read_status(seen.body.get("status"))
            generation = seen.body["metadata"].get("generation", 0)
            return await self._say(seen, last, unreadable(last, generation, reading.message, time.time()))
        pool = Pool.of(seen.body, reading.spec, reading.message)
        if self._history is None:
            self._history = History.of(pool.status)
        planned = plan(pool, self._look(pool), self._history, time.time())
        self._history = planned.history
        self._idle = not (planned.creates or planned.deletes or planned.retain or planned.recall)
        trouble: ApiError | None = None
        try:
            await self._writes.carry_out(pool, planned)
        except ApiError as error:  # one slot that can't be written is no reason to say nothing of the others
            trouble = error
        wait = await self._say(seen, pool.status, planned.status)
        if trouble is not None:
            raise trouble
        return 0.0 if self._writes.has_news else min(wait, self._again(planned))

    def _again(self, planned: Plan) -> float:
        again = min(_LOOK_SECONDS, self._writes.wait or _LOOK_SECONDS)
        return again if planned.look_again is None else min(again, planned.look_again)

    def _read(self, seen: PoolObject) -> Reading[EmulatorPoolSpec]:
        if self._reading is None or self._reading[0] != seen.resource_version:
            self._reading = seen.resource_version, read_pool(seen.body)
        return self._reading[1]

    def _look(self, pool: Pool) -> Seen:
        held, waiting = self._claims.held(pool.uid), self._claims.waiting(pool.uid)
        self._telemetry.claims(self.key, sum(bool(claim.holder) for claim in held.values()), waiting)
        refusals, tails, budget = self._writes.take_news()
        return Seen(
            slots=tuple(self._world.slots.of(pool.uid).values()),
            held=held,
            waiting=waiting,
            wanted=self._world.wanted(pool.namespace, pool.name),
            nodes=self._world.bad_nodes(),
            next_lost_node=self._world.next_lost_node(),
            watching_since=self._world.watching_since,
            refusals=refusals,
            tails=tails,
            devices=self._claims.devices(pool.uid),
            budget=budget,
        )

    async def _say(self, pool: PoolObject, observed: EmulatorPoolStatus, status: EmulatorPoolStatus) -> float:
        """Writes the status if it is news. Returns after how long it should be tried again."""
        self._telemetry.pool_state(self.key, slot_counts(status))
        # What differs from the echo was written by somebody else, and is put right.
        last = self._said if self._said is not None and observed == self._echo else observed
        if status == last:
            return _LOOK_SECONDS
        wait = self._said_at + _STATUS_SECONDS - time.monotonic()
        if wait > 0 and _conditions(status) == _conditions(last):
            return wait
        if not self._leads():
            raise NotLeading
        where = path("emulatorpools", pool.namespace, pool.name, "status", API_VERSION)
        # With the UID, so that a pool of the same name that was made meanwhile doesn't get it.
        body = {"metadata": {"uid": pool.uid}, "status": status.model_dump(mode="json", by_alias=True)}
        self._said_at = time.monotonic()
        self._said, self._echo = None, observed
        try:
            written = await self._client.patch(where, body)
            self._world.saw_pool(written)
            self._echo = read_status(written.get("status"))
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            log.info("pool %s is gone or another one: %s", self.key, error, extra=self._ref)
        self._said = status
        return _LOOK_SECONDS


def _conditions(status: EmulatorPoolStatus) -> set[tuple[str, str, str]]:
    return {(c.type, c.status, c.reason) for c in status.conditions}
