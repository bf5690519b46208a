"""Keeps a run as planned: looks, lets `run/plan.py` decide, tells the status, has `run_writes.py` act.

Promises:
1. One task per run, so that no two passes of a run overlap; what happens meanwhile wakes it once, afterwards.
2. A pass that fails is repeated with growing pauses; one run's trouble is no other's.
3. The status is written before anything is done, and only on top of the spec and status that the plan was made for. A
   plan whose status could not be written is dropped.
4. Progress alone is written at most once in `_PROGRESS_SECONDS`; everything else at once.
5. A spec that can't be read stops nothing but changes: what runs goes on, and the status says what is wrong.

Times are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from tapforge_api.base import API_VERSION
from tapforge_api.progress import Leases, Progress
from tapforge_api.reading import read_run
from tapforge_api.run_status import RunProgress, TrainingRunStatus

from .broker.fairness import within_reach
from .broker.records import run_holder
from .kube.client import ApiError, Client, path
from .logs import ref
from .objects import PoolObject, RunObject, belongs
from .reports import Reports
from .run.conditions import Situation, conditions, ended, events
from .run.outcome import NODE_LOST
from .run.plan import plan_run
from .run.records import History, PoolSeen, RayHead, RayPod, Run, RunPlan, Seen, Trial, VolumeSeen, read_status, seconds
from .run.resolved import slots_of
from .run_telemetry import RunTelemetry
from .run_writes import RunWrites
from .world import World
from .writes import Claims, NotLeading

log = logging.getLogger(__name__)

#: between two passes of a run
_PAUSE_SECONDS: Final = 0.1
#: between two when the first one asked for the second
_YIELD_SECONDS: Final = 0.01
#: a run is looked at again after this long even when nothing happened
_LOOK_SECONDS: Final = 300.0
#: between two looks whether the ConfigMaps of a run that is under way are there
_CONFIG_SECONDS: Final = 60.0
_PROGRESS_SECONDS: Final = 30.0
_TRIAL_SECONDS: Final = 10.0
_LONGEST_BACKOFF: Final = 60.0


class RunKeeper:
    def __init__(
        self,
        run: RunObject,
        world: World,
        client: Client,
        reports: Reports,
        writes: RunWrites,
        telemetry: RunTelemetry,
        leads: Callable[[], bool],
        claims: Callable[[], Claims | None],
    ):
        self._claims = claims
        self.key = f"{run.namespace}/{run.name}"
        self._uid = run.uid
        self._ref = ref("TrainingRun", run.namespace, run.name, run.uid)
        self._world = world
        self._client = client
        self._reports = reports
        self._writes = writes
        self._telemetry = telemetry
        self._leads = leads
        self._news = asyncio.Event()
        self._history = History()
        #: what the last plan wanted to be looked at
        self._wants: RunPlan | None = None
        self._trial: Trial | None = None
        self._said_at = -_PROGRESS_SECONDS
        self._checked_at = self._tried_at = time.monotonic()

    def wake(self) -> None:
        self._news.set()

    async def run(self) -> None:
        """Until the run is gone or the leadership is; or until cancelled."""
        try:
            await self._keep()
        finally:
            self._telemetry.forget(self._uid)
        if self._world.runs.get(self._uid) is None:
            self._reports.dismiss(self._uid)
        self._reports.forget(self._uid)

    async def _keep(self) -> None:
        failures = 0
        while self._leads() and (run := self._world.runs.get(self._uid)) is not None:
            self._news.clear()
            rest = _PAUSE_SECONDS
            try:
                wait = await self._pass(run)
                failures = 0
            except NotLeading:
                return
            except ApiError as trouble:
                failures += 1
                rest, wait = 1.0, min(_LONGEST_BACKOFF, 0.5 * 2 ** min(failures, 10))
                log.warning("run %s: %s; it is tried again in %.1f s", self.key, trouble, wait, extra=self._ref)
            await self._sleep(wait, max(_YIELD_SECONDS, min(wait, rest)))

    async def _sleep(self, wait: float, rest: float) -> None:
        """Until there is news; `wait` at most, `rest` at least."""
        await asyncio.sleep(rest)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait - rest):
                await self._news.wait()

    # --- one pass -----------------------------------------------------------------------------------------------------

    async def _pass(self, seen: RunObject) -> float:
        """Returns for how long nothing will be to do, should nothing happen."""
        deleting = "deletionTimestamp" in seen.body["metadata"]
        if deleting:
            self._reports.dismiss(self._uid)
        reading = read_run(seen.body)
        if reading.spec is None:
            return _LOOK_SECONDS if deleting else await self._say_unreadable(seen, reading.message)
        run = Run.of(seen.body, reading.spec)
        look = await self._look(run)
        planned = plan_run(run, look, self._history, time.time())
        self._history, self._wants = planned.history, planned
        self._measure(planned.status, look.reported)
        if deleting:
            return _LOOK_SECONDS
        written, wait = await self._say(run, seen, planned.status)
        self._settle(planned, look.report if written else None)
        if not written and wait == 0.0:
            return wait
        await self._act(run, planned)
        again = _LOOK_SECONDS if planned.look_again is None else planned.look_again
        if self._writes.refusal is not None and look.refusal is None:
            again = 0.0  # the status has to say so
        return min(wait, again, _LOOK_SECONDS if ended(run.status) else _CONFIG_SECONDS)

    async def _look(self, run: Run) -> Seen:
        wants, report = self._wants, self._reports.newest(run.uid)
        volume: VolumeSeen | None = None
        pods: tuple[RayPod, ...] | None = None
        config: str | None = None
        if wants is not None and wants.look_at_volume:
            volume = await self._writes.look_at_volume(run)
        if wants is not None and wants.look_at_pods:
            pods = await self._writes.look_at_pods(run, run.status.attempt.number)
        if wants is not None and wants.look_at_config:
            config = await self._writes.look_at_config(run)
        if wants is not None and wants.try_job and self._may_try(run):
            self._trial, self._tried_at = await self._writes.try_job(run), time.monotonic()
        seen = self._world.runs.get(run.uid)
        pool = self._world.pool(run.namespace, seen.pool) if seen is not None and seen.pool else None
        return Seen(
            jobs=tuple(self._world.ray_jobs.of(run.uid).values()),
            no_ray_jobs=self._world.no_ray_jobs.get(run.namespace) or self._world.no_ray_jobs.get("", ""),
            pool=None if pool is None else self._pool_seen(pool, run),
            volume=volume,
            pods=pods,
            head=self._head(run),
            config=config,
            report=report[0],
            reported=report[1],
            refusal=self._writes.refusal,
            trial=self._trial,
            made=self._writes.made,
            watching_since=self._world.watching_since,
        )

    def _head(self, run: Run) -> RayHead | None:
        head = self._world.heads.of(run.namespace, run.uid)
        if head is None or self._world.bad_nodes().get(head.node) != "lost":
            return head
        return replace(head, disruption=NODE_LOST, message=f"node {head.node} does not answer")

    def _pool_seen(self, pool: PoolObject, run: Run) -> PoolSeen:
        seen, claims = _pool_seen(pool, run.uid), self._claims()
        if claims is None:
            return seen
        held = claims.held(pool.uid)
        serving = {uid for uid, slot in self._world.slots.of(pool.uid).items() if slot.ready and not slot.deleting}
        if (pool.spec.get("external") or {}).get("urls"):
            serving = {uid for uid, claim in held.items() if claim.holder}
        parties = Counter((held[uid].holder, held[uid].priority) for uid in serving if uid in held and held[uid].holder)
        free = len(serving - held.keys()) + sum(d.state == "ready" and not d.claimed for d in claims.devices(pool.uid))
        source = run.spec.environment.source.pool
        me = run_holder(run.namespace, run.name, run.uid), source.priority if source is not None else 0
        ready = within_reach(me, slots_of(run), parties, free)
        return replace(seen, ready=ready, taken=max(0, free + parties.total() - ready))

    def _may_try(self, run: Run) -> bool:
        """Not the same again and again."""
        stale = self._trial is None or self._trial.generation != run.generation
        return stale or time.monotonic() - self._tried_at >= _TRIAL_SECONDS

    async def _act(self, run: Run, planned: RunPlan) -> None:
        writes = self._writes
        if planned.delete_pool:
            await writes.delete_pool(run, planned.delete_pool)
        for job in planned.delete_jobs:
            await writes.delete_job(run, job)
        if planned.create_pool:
            await writes.create_pool(run)
        if planned.create_job:
            await writes.create_job(run, planned.create_job)
        elif run.status.attempt.phase == "Active" and run.status.resolved:
            await self._keep_config(run)

    async def _keep_config(self, run: Run) -> None:
        """Pods that start later, such as a lost worker's successor, mount it too."""
        if time.monotonic() - self._checked_at >= _CONFIG_SECONDS:
            await self._writes.keep_config(run)
            self._checked_at = time.monotonic()

    # --- the status ---------------------------------------------------------------------------------------------------

    def _measure(self, status: TrainingRunStatus, reported: float) -> None:
        heard = reported or seconds(status.progress.time)
        self._telemetry.saw(self._uid, self.key, status, max(0.0, time.time() - heard) if heard else None)

    def _settle(self, planned: RunPlan, written: Progress | None) -> None:
        status = planned.status
        checkpoint = -1 if status.checkpoint is None else status.checkpoint.update
        self._reports.settle(self._uid, status.attempt.number, planned.orders, checkpoint, written)

    async def _say(self, run: Run, seen: RunObject, status: TrainingRunStatus) -> tuple[bool, float]:
        """Writes the status if it is news. Returns whether it stands there now, and after how long it should be tried
        again: 0 when the run has changed meanwhile."""
        if status == run.status:
            return True, _LOOK_SECONDS
        wait = self._said_at + _PROGRESS_SECONDS - time.monotonic()
        if wait > 0 and _lasting(status) == _lasting(run.status):
            return False, wait
        if not await self._write(seen, status):
            return False, 0.0
        await self._writes.tell(run, events(run.status, status))
        return True, _LOOK_SECONDS

    async def _write(self, seen: RunObject, status: TrainingRunStatus) -> bool:
        if not self._leads():
            raise NotLeading
        where = path("trainingruns", seen.namespace, seen.name, group=API_VERSION)
        # With UID and version: what was decided is of this spec, this status and this object alone.
        metadata = {"uid": seen.uid, "resourceVersion": seen.resource_version}
        body = {"metadata": metadata, "status": status.model_dump(mode="json", by_alias=True)}
        self._said_at = time.monotonic()
        try:
            self._world.saw_run(await self._client.patch(f"{where}/status", body))
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            await self._look_again(where)
            return False
        return True

    async def _look_again(self, where: str) -> None:
        """It is not as the watch said last."""
        try:
            found = await self._client.get(where)
        except ApiError as error:
            if error.status != 404:
                raise
            found = None
        if found is None or found["metadata"]["uid"] != self._uid:
            self._world.runs.drop(self._uid)
        if found is not None:
            self._world.saw_run(found)

    async def _say_unreadable(self, seen: RunObject, message: str) -> float:
        before = read_status(seen.body.get("status"))
        generation = seen.body["metadata"].get("generation", 0)
        if ended(before):
            # What became of it stands, whatever is asked of it now; but it has been read, and nothing is to come.
            status = before.model_copy(update={"observed_generation": generation})
        else:
            wrong = Situation("stalled", "InvalidSpec", message)
            told = conditions(wrong, before, generation, time.time())
            status = before.model_copy(
                update={"observed_generation": generation, "message": message, "conditions": told}
            )
        self._measure(status, self._reports.newest(self._uid)[1])
        if status != before and not await self._write(seen, status):
            return 0.0
        return _LOOK_SECONDS


def _lasting(status: TrainingRunStatus) -> TrainingRunStatus:
    """Without what may be told later."""
    progress = RunProgress(restarts=status.progress.restarts)
    return status.model_copy(update={"progress": progress, "leases": Leases(), "furthest": 0})


def _pool_seen(pool: PoolObject, run_uid: str) -> PoolSeen:
    metadata, spec, status = pool.body["metadata"], pool.spec, pool.body.get("status") or {}
    external, scaling = (spec.get("external") or {}).get("urls"), spec.get("scaling")
    largest = (
        len(external) if external else (scaling or {}).get("maxReplicas", 0) if scaling else spec.get("replicas", 0)
    )
    troubles = [
        c.get("message") or ""
        for kind in ("Stalled", "Degraded")
        for c in status.get("conditions") or ()
        if c.get("type") == kind and c.get("status") == "True"
    ]
    return PoolSeen(
        name=pool.name,
        uid=pool.uid,
        owned=belongs(metadata, run_uid),
        deleting=pool.deleting,
        ready=int(status.get("ready") or 0),
        largest=int(largest or 0),
        protocol=spec.get("protocol") or "tapforge",
        spec=(metadata.get("annotations") or {}).get("tapforge.dev/spec", ""),
        trouble=next(iter(troubles), ""),
    )
