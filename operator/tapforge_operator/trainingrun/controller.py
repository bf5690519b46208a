"""Reconciles runs: observes one, lets `plan.py` decide, writes the status, has `apply.py` act; and what all runs share.

Promises:
1. The status is written before anything is done, and only on top of the spec and status that the plan was made for. A
   plan whose status could not be written is dropped.
2. Progress alone is written at most once in `_PROGRESS_SECONDS`, a checkpoint of a run that goes on at most once in
   `_CHECKPOINT_SECONDS`; everything else at once, and what a driver that is about to end reports. Of the status only
   what has changed is sent.
3. A spec or a status that can't be read stops nothing but changes: what runs goes on, nothing is created or deleted,
   and the conditions say what is wrong.

Times are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from tapforge_api.base import API_VERSION
from tapforge_api.progress import Leases, Progress
from tapforge_api.reading import UnreadableStatus, read_run
from tapforge_api.run_status import RunProgress, TrainingRunStatus
from tapforge_operator.broker.scheduling import within_reach
from tapforge_operator.broker.types import run_holder
from tapforge_operator.config import Settings
from tapforge_operator.controller import Requeue, WorkQueue
from tapforge_operator.emulatorpool.apply import Claims
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.client import ApiError, Client, Object, path
from tapforge_operator.kube.informers import head_reflector, job_reflector
from tapforge_operator.kube.leaderelection import NotLeading
from tapforge_operator.kube.objectmeta import (
    UNREADABLE_STATUS,
    seconds,
    stored_conditions,
    unreadable_status,
)
from tapforge_operator.kube.reflector import Reflector
from tapforge_operator.kube.types import Event, PoolObject, RayHead, RayPod, Reference, RunObject
from tapforge_operator.observability.logging import ref
from tapforge_operator.observability.metrics import RunTelemetry, Telemetry
from tapforge_operator.trainingrun.admissioncheck import SYNC_SECONDS, Queues
from tapforge_operator.trainingrun.apply import RunWrites
from tapforge_operator.trainingrun.kueue import CheckUpdate, decide, demand_since
from tapforge_operator.trainingrun.outcome import NODE_LOST
from tapforge_operator.trainingrun.plan import plan_run
from tapforge_operator.trainingrun.progress import Reports
from tapforge_operator.trainingrun.state import (
    BOOT_DEADLINE,
    DryRunResult,
    Observed,
    ObservedPool,
    ObservedVolume,
    Refusal,
    Run,
    RunHistory,
    RunPlan,
    observe_pool,
    slots_of,
)
from tapforge_operator.trainingrun.status import Situation, conditions, ended, events, has_ended, read_status
from tapforge_operator.trainingrun.templates import StoredConfig, as_started, digest_of, fits

log = logging.getLogger(__name__)

#: between two passes of a run
_PAUSE_SECONDS: Final = 0.1
#: a run is reconciled after this even when nothing happened
_RESYNC_SECONDS: Final = 300.0
#: between two checks that the ConfigMaps of a run in flight are there
_CONFIG_SECONDS: Final = 60.0
#: phases in which an attempt's RayJob has been made
_UNDER_WAY: Final = ("Active", "Stopping", "Removing")
_PROGRESS_SECONDS: Final = 30.0
#: well within the time that a driver waits for its answer, and that it may be silent for
_CHECKPOINT_SECONDS: Final = 10.0
_DRY_RUN_SECONDS: Final = 10.0


class RunQueue:
    """All runs while this process leads: their work queue, the watch that they need, their drivers' reports."""

    def __init__(
        self,
        settings: Settings,
        cache: Cache,
        client: Client,
        telemetry: Telemetry,
        leads: Callable[[], bool],
        claims: Callable[[], Claims | None] = lambda: None,
    ):
        """`claims` says which holders the phones have; while it returns None they have none."""
        self._claims = claims
        self._settings = settings
        self._telemetry = telemetry.runs
        self._cache = cache
        self._client = client
        self._leads = leads
        self._queue = WorkQueue("TrainingRun", self._controller, leads)
        #: of the present term: what an earlier one saw, and could not write, is seen anew
        self._kueue: Queues | None = None
        self._watch: asyncio.Task[None] | None = None
        self.reports = Reports(self._queue.wake)
        cache.run_listeners.append(self._run_changed)

    async def start(self) -> asyncio.Task[None]:
        """After everything was listed once. Returns the watch of RayJobs, heads and queues; it ends only when it
        breaks."""
        jobs = job_reflector(self._cache, self._client, self._settings.scope.each, self._wake_all)
        heads = head_reflector(self._cache.heads, self._client, self._settings.scope.each)
        kueue = self._kueue = Queues(
            self._client, self._settings.scope.each, self._leads, self._job_changed, self._wake_all
        )
        # None of these kinds is ours: one that can't be read affects only the runs that need it.
        await asyncio.gather(jobs.begin(SYNC_SECONDS), heads.begin(SYNC_SECONDS), kueue.sync())
        self._watch = asyncio.create_task(_all_of(jobs, heads, kueue), name="the watch of RayJobs")
        self._queue.start()
        self._wake_all()
        return self._watch

    async def stop(self) -> None:
        """Nothing is written any more afterwards."""
        watch = [self._watch] if self._watch is not None else []
        for task in watch:
            task.cancel()
        await asyncio.gather(self._queue.stop(), *watch, return_exceptions=True)
        self.reports.clear()

    def _run_changed(self, uid: str) -> None:
        if self._cache.runs.get(uid) is None and self.reports.knows(uid):  # it may have no controller that would do it
            self.reports.end(uid)
        self._queue.wake(uid)

    def _job_changed(self, uid: str) -> None:
        if (job := self._cache.ray_jobs.get(uid)) is not None:
            self._queue.wake(job.run_uid)

    def wake_waiting(self, namespace: str) -> None:
        """Another number of phones can be claimed there."""
        for run in [run for run in self._cache.runs.all() if run.namespace == namespace and run.wanted]:
            self._queue.wake(run.uid)

    def _wake_all(self) -> None:
        for run in list(self._cache.runs.all()):
            self._queue.wake(run.uid)

    def _controller(self, uid: str) -> RunController | None:
        run = self._cache.runs.get(uid)
        if run is None or self._kueue is None:
            return None
        settings = self._settings
        writes = RunWrites(self._client, self._cache, self._leads, settings)
        return RunController(
            run,
            self._cache,
            self._client,
            self.reports,
            writes,
            self._kueue,
            self._telemetry,
            self._leads,
            self._claims,
        )


async def _all_of(*watches: Reflector | Queues) -> None:
    async with asyncio.TaskGroup() as group:
        for watch in watches:
            group.create_task(watch.run())


class RunController:
    def __init__(
        self,
        run: RunObject,
        cache: Cache,
        client: Client,
        reports: Reports,
        writes: RunWrites,
        kueue: Queues,
        telemetry: RunTelemetry,
        leads: Callable[[], bool],
        claims: Callable[[], Claims | None],
    ):
        self._claims = claims
        self.namespace, self.name = run.namespace, run.name
        self._key = f"{run.namespace}/{run.name}"
        self._uid = run.uid
        self._ref = ref("TrainingRun", run.namespace, run.name, run.uid)
        self._cache = cache
        self._client = client
        self._reports = reports
        self._writes = writes
        self._kueue = kueue
        self._telemetry = telemetry
        self._leads = leads
        self._history = RunHistory()
        #: the last plan, which says what to read
        self._wants: RunPlan | None = None
        self._dry_run: DryRunResult | None = None
        #: with the Pod templates that the run was started with
        self._config = StoredConfig()
        #: why they could not be read when that was last said
        self._unread = ""
        self._written_at, self._checkpoint_at = -_PROGRESS_SECONDS, -_CHECKPOINT_SECONDS
        self._checked_at = self._dry_run_at = time.monotonic()

    async def reconcile(self) -> Requeue | None:
        run = self._cache.runs.get(self._uid)
        return None if run is None else Requeue(await self._pass(run), _PAUSE_SECONDS)

    async def close(self) -> None:
        self._telemetry.forget(self._uid)
        if self._cache.runs.get(self._uid) is None:
            self._reports.end(self._uid)

    # --- one pass -----------------------------------------------------------------------------------------------------

    async def _pass(self, run_object: RunObject) -> float:
        """Returns for how long nothing will be to do, should nothing happen."""
        deleting = "deletionTimestamp" in run_object.body["metadata"]
        if deleting:
            self._reports.dismiss(self._uid)
        try:
            read_status(run_object.body.get("status"))
        except UnreadableStatus as error:
            return _RESYNC_SECONDS if deleting else await self._report_unreadable_status(run_object, str(error))
        config = None if deleting else await self._read_config(run_object)
        started = as_started(run_object.body, config if isinstance(config, StoredConfig) else None)
        reading = read_run(started.body)
        if reading.spec is None:
            return _RESYNC_SECONDS if deleting else await self._update_unreadable(run_object, reading.message)
        run = Run.of(started.body, reading.spec, started.templates, started.edited, reading.message)
        observed = await self._observe(run, config)
        planned = plan_run(run, observed, self._history, time.time())
        self._history, self._wants = planned.history, planned
        self._measure(planned.status, observed.reported)
        if deleting:
            return _RESYNC_SECONDS
        written, wait = await self._update_status(run, run_object, planned.status, observed.report)
        self._answer_driver(planned, planned.status if written else run.status, observed.report if written else None)
        if not written and wait == 0.0:
            return wait
        await self._act(run, planned)
        again = _RESYNC_SECONDS if planned.requeue_after is None else planned.requeue_after
        if self._writes.refusal is not None and observed.refusal is None:
            again = 0.0  # the status has to say so
        return min(wait, again, _RESYNC_SECONDS if ended(run.status) else _CONFIG_SECONDS)

    async def _read_config(self, run_object: RunObject) -> StoredConfig | Refusal | None:
        """Where a plan asks for it, and from the start on: every plan is for the templates of the start. What was read
        of an immutable ConfigMap stays, also when it is deleted. Templates are needed to make something: a run that is
        under way goes on without them, and can be suspended and ended."""
        status, asked = run_object.body.get("status") or {}, self._wants is not None and self._wants.read_config
        resolved = status.get("resolved") or ""
        if not asked and (not digest_of(resolved) or status.get("completionTime")):
            return None
        if fits(self._config, resolved):
            return self._config
        try:
            self._config = await self._writes.read_config(run_object)
        except ApiError as error:
            if (status.get("attempt") or {}).get("phase") in _UNDER_WAY:
                if str(error) != self._unread:
                    text = "run %s goes on, but its ConfigMap can't be read: %s"
                    log.warning(text, self._key, error, extra=self._ref)
                self._unread = str(error)
                return None
            if (refused := self._writes.refused_config(run_object, error)) is None:
                raise
            return refused
        return self._config

    async def _observe(self, run: Run, config: StoredConfig | Refusal | None) -> Observed:
        wants, report = self._wants, self._reports.newest(run.uid)
        volume: ObservedVolume | None = None
        pods: tuple[RayPod, ...] | None = None
        if wants is not None and wants.read_volume:
            volume = await self._writes.read_volume(run)
        if wants is not None and wants.read_pods:
            pods = await self._writes.read_pods(run, run.status.attempt.number)
        if wants is not None and wants.dry_run_job and self._dry_run_due(run):
            self._dry_run, self._dry_run_at = await self._writes.dry_run_job(run), time.monotonic()
        current = self._cache.runs.get(run.uid)
        pool = self._cache.pool(run.namespace, current.pool) if current is not None and current.pool else None
        jobs = self._cache.ray_jobs_of(run.namespace, run.uid)
        newest = max(jobs, key=lambda job: job.attempt, default=None)
        return Observed(
            jobs=jobs,
            no_ray_jobs=self._cache.no_ray_jobs.get(run.namespace) or self._cache.no_ray_jobs.get(""),
            pool=None if pool is None else self._observe_pool(pool, run),
            volume=volume,
            pods=pods,
            workload=None if newest is None else self._kueue.of(newest.namespace, newest.uid),
            phone_checks=self._kueue.ours,
            claim_quota=None if (claims := self._claims()) is None else claims.quota(run.namespace),
            queues_known=self._kueue.knows(run.namespace),
            head=self._head(run),
            heads_known=self._cache.heads.known(run.namespace),
            config=config if isinstance(config, StoredConfig) else None,
            config_refusal=config if isinstance(config, Refusal) else None,
            report=report[0],
            reported=report[1],
            refusal=self._writes.refusal,
            dry_run=self._dry_run,
            created_job=self._writes.created_job,
            watching_since=self._cache.watching_since,
        )

    def _head(self, run: Run) -> RayHead | None:
        head = self._cache.heads.of(run.namespace, run.uid)
        if head is None or self._cache.bad_nodes().get(head.node) != "lost":
            return head
        return replace(head, disruption=NODE_LOST, message=f"node {head.node} does not answer")

    def _observe_pool(self, pool: PoolObject, run: Run) -> ObservedPool:
        observed, claims = observe_pool(pool, run.uid), self._claims()
        if claims is None:
            return observed
        held = claims.held(pool.uid)
        serving = {uid for uid, slot in self._cache.slots.of(pool.uid).items() if slot.ready and not slot.deleting}
        if (pool.spec.get("external") or {}).get("urls"):
            serving = {uid for uid, claim in held.items() if claim.holder}
        claimed = Counter((held[uid].holder, held[uid].priority) for uid in serving if uid in held and held[uid].holder)
        free = len(serving - held.keys()) + sum(d.state == "ready" and not d.claimed for d in claims.devices(pool.uid))
        source = run.spec.environment.source.pool
        me = run_holder(run.namespace, run.name, run.uid), source.priority if source is not None else 0
        ready = within_reach(me, slots_of(run), claimed, free)
        taken, room = max(0, free + claimed.total() - ready), claims.quota_room(pool.uid, run.namespace)
        return replace(observed, ready=ready if room is None else min(ready, room), taken=taken, quota_room=room)

    def _dry_run_due(self, run: Run) -> bool:
        """Not the same every moment."""
        stale = self._dry_run is None or self._dry_run.generation != run.generation
        return stale or time.monotonic() - self._dry_run_at >= _DRY_RUN_SECONDS

    async def _act(self, run: Run, planned: RunPlan) -> None:
        writes = self._writes
        if planned.delete_pool:
            await writes.delete_pool(run, planned.delete_pool)
        for job in planned.delete_jobs:
            await writes.delete_job(run, job)
        if planned.create_pool:
            await writes.create_pool(run)
        if planned.check_update is not None:
            await self._kueue.write(planned.check_update, time.time())
        if planned.create_job:
            await writes.create_job(run, planned.create_job)
        elif run.status.attempt.phase == "Active" and run.status.resolved:
            await self._check_config(run)

    async def _check_config(self, run: Run) -> None:
        """Pods that start later, such as a lost worker's successor, mount it too."""
        if time.monotonic() - self._checked_at >= _CONFIG_SECONDS:
            self._checked_at = time.monotonic()
            await self._writes.ensure_config(run)

    # --- the status ---------------------------------------------------------------------------------------------------

    def _measure(self, status: TrainingRunStatus, reported: float) -> None:
        reported_at = reported or seconds(status.progress.time)
        silence = max(0.0, time.time() - reported_at) if reported_at else None
        self._telemetry.observe(self._uid, self._key, status, silence)

    def _answer_driver(self, planned: RunPlan, stored: TrainingRunStatus, written: Progress | None) -> None:
        checkpoint = -1 if stored.checkpoint is None else stored.checkpoint.update
        self._reports.settle(self._uid, planned.status.attempt.number, planned.orders, checkpoint, written)

    async def _update_status(
        self, run: Run, run_object: RunObject, status: TrainingRunStatus, report: Progress | None
    ) -> tuple[bool, float]:
        """Writes the status if it changed. Returns whether it is there now, and after how long it should be tried
        again: 0 when the run has changed meanwhile."""
        if status == run.status:
            return True, _RESYNC_SECONDS
        checkpoint = status.checkpoint != run.status.checkpoint
        last = self._checkpoint_at if checkpoint else self._written_at
        wait = last + pause(run.status, status, report) - time.monotonic()
        if wait > 0:
            return False, wait
        if not await self._patch_status(run_object, status.model_dump(mode="json", by_alias=True)):
            return False, 0.0
        if checkpoint:
            self._checkpoint_at = time.monotonic()
        about = Reference("TrainingRun", run.namespace, run.name, run.uid)
        await self._writes.record_events(about, events(run.status, status, run.unknown))
        return True, _RESYNC_SECONDS

    async def _patch_status(self, run_object: RunObject, status: Object) -> bool:
        """Fields of the status that aren't named stay."""
        if not self._leads():
            raise NotLeading
        where = path("trainingruns", run_object.namespace, run_object.name, group=API_VERSION)
        # With UID and version: what was decided is of this spec, this status and this object alone.
        metadata = {"uid": run_object.uid, "resourceVersion": run_object.resource_version}
        there = run_object.body.get("status")
        stored = there if isinstance(there, dict) else {}
        news = {name: value for name, value in status.items() if name not in stored or stored[name] != value}
        body = {"metadata": metadata, "status": news}
        self._written_at = time.monotonic()
        try:
            self._cache.observe_run(await self._client.patch(f"{where}/status", body))
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            await self._refresh(where)
            return False
        return True

    async def _refresh(self, where: str) -> None:
        """Reads the run: it is not as the watch delivered it last."""
        try:
            found = await self._client.get(where)
        except ApiError as error:
            if error.status != 404:
                raise
            found = None
        if found is None or found["metadata"]["uid"] != self._uid:
            self._cache.runs.drop(self._uid)
        if found is not None:
            self._cache.observe_run(found)

    async def _update_unreadable(self, run_object: RunObject, message: str) -> float:
        before = read_status(run_object.body.get("status"))
        generation = run_object.body["metadata"].get("generation", 0)
        if ended(before):
            # Its end is final, whatever its spec says now; but that spec was observed.
            status = before.model_copy(update={"observed_generation": generation})
        else:
            wrong = Situation("stalled", "InvalidSpec", message)
            now = conditions(wrong, before, generation, time.time())
            status = before.model_copy(
                update={"observed_generation": generation, "message": message, "conditions": now}
            )
        self._measure(status, self._reports.newest(self._uid)[1])
        changed = status != before
        if changed and not await self._patch_status(run_object, status.model_dump(mode="json", by_alias=True)):
            return 0.0
        return _RESYNC_SECONDS if ended(status) else await self._give_quota_back(message)

    async def _report_unreadable_status(self, run_object: RunObject, message: str) -> float:
        stored, generation = run_object.body.get("status"), run_object.body["metadata"].get("generation", 0)
        if has_ended(stored):
            return _RESYNC_SECONDS  # its end is final
        now = unreadable_status(stored, message, generation, time.time())
        if now != stored_conditions(stored):
            log.error("run %s: %s", self._key, message, extra=self._ref)
            if not await self._patch_status(run_object, {"conditions": now}):
                return 0.0
            about = Reference("TrainingRun", run_object.namespace, run_object.name, run_object.uid)
            await self._writes.record_events(about, [Event("Warning", UNREADABLE_STATUS, message)])
        return await self._give_quota_back(message)

    async def _give_quota_back(self, message: str) -> float:
        """Which phones a run wants that can't be read is unknown: Kueue's quota is held for the default deadline of a
        pool. Returns for how long nothing is to do."""
        jobs, ours, now = self._cache.ray_jobs_of(self.namespace, self._uid), self._kueue.ours, time.time()
        newest = max(jobs, key=lambda job: job.attempt, default=None)
        workload = None if newest is None else self._kueue.of(newest.namespace, newest.uid)
        if workload is None or not demand_since(workload, ours):
            return _RESYNC_SECONDS
        match decide(workload, ours, f"the run can't be read: {message}", BOOT_DEADLINE, now):
            case CheckUpdate() as update:
                await self._kueue.write(update, now)
            case float() as left:
                return min(left, _RESYNC_SECONDS)
        return _RESYNC_SECONDS


def pause(stored: TrainingRunStatus, status: TrainingRunStatus, report: Progress | None) -> float:
    """Between the last write, of a checkpoint if this status has another one, and that of this status, seconds."""
    if report is not None and report.final and report.attempt == status.attempt.number:
        return 0.0
    if status.attempt.phase != "Active" or _urgent(status) != _urgent(stored):
        return 0.0
    return _PROGRESS_SECONDS if status.checkpoint == stored.checkpoint else _CHECKPOINT_SECONDS


def _urgent(status: TrainingRunStatus) -> TrainingRunStatus:
    """Without what may be written later."""
    progress = RunProgress(restarts=status.progress.restarts)
    return status.model_copy(update={"progress": progress, "leases": Leases(), "furthest": 0, "checkpoint": None})
