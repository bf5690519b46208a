"""What the planner of a run reads and what it returns, and `PlanBuilder`: what was decided so far, and the questions
that several rules ask. Pure.

Times are seconds since the epoch. `uid` is always metadata.uid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from tapforge_api.pool import Boot
from tapforge_api.progress import Orders, Progress
from tapforge_api.run_status import Attempt, AttemptPhase, RunProgress, TrainingRunStatus
from tapforge_api.training_run import TrainingRunSpec
from tapforge_operator import labels
from tapforge_operator.kube.objectmeta import Unavailable, readable_conditions, seconds, stored_conditions, timestamp
from tapforge_operator.kube.types import PoolObject, RayHead, RayJob, RayPod, belongs
from tapforge_operator.trainingrun.kueue import CheckUpdate, Workload
from tapforge_operator.trainingrun.status import Situation, conditions, read_status, with_unknown
from tapforge_operator.trainingrun.templates import StoredConfig, edited_message

#: of a pool that is not there, seconds
BOOT_DEADLINE: Final = float(Boot.model_fields["deadline_seconds"].default)
#: largest number of an attempt whose RayJob's name KubeRay takes
MAX_ATTEMPTS = 999


@dataclass(frozen=True, slots=True)
class Run:
    """A TrainingRun as its user wrote it, and the status that was last written to it."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: float
    spec: TrainingRunSpec
    labels: Mapping[str, str] = field(default_factory=dict)
    deleting: bool = False
    #: fields of the spec that this release doesn't know and leaves out, in words; "" for none
    unknown: str = ""
    status: TrainingRunStatus = field(default_factory=TrainingRunStatus)
    #: the Pod templates that it was started with, as its ConfigMap keeps them; spec has them then
    templates: str = ""
    #: what its user changed of them since
    edited: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        body: Mapping[str, Any],
        spec: TrainingRunSpec,
        templates: str = "",
        edited: tuple[str, ...] = (),
        unknown: str = "",
    ) -> Run:
        """An object of the API server, whose spec was read already."""
        metadata = body["metadata"]
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            created=seconds(metadata.get("creationTimestamp") or ""),
            spec=spec,
            labels=metadata.get("labels") or {},
            deleting="deletionTimestamp" in metadata,
            unknown=unknown,
            status=read_status(body.get("status")),
            templates=templates,
            edited=edited,
        )


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """The EmulatorPool of a run, as far as the run is concerned."""

    name: str
    uid: str
    #: its controller is the run
    owned: bool = False
    deleting: bool = False
    #: phones that the run can claim now: ready, and not claimed by others beyond what would be revoked for it
    ready: int = 0
    #: phones whose claims others keep
    taken: int = 0
    #: phones of it that the quota of the run's namespace allows all its claimants; None: any number
    quota_room: int | None = None
    #: protocol of its phones
    protocol: str = "tapforge"
    #: slots that it can have at most
    largest: int = 0
    #: of an own pool: hash of its spec in the run
    spec: str = ""
    #: why it is not ready, by its own status
    message: str = ""
    #: how long one of its phones may take to start
    boot_deadline: float = BOOT_DEADLINE


def observe_pool(pool: PoolObject, run_uid: str) -> ObservedPool:
    metadata, spec, status = pool.body["metadata"], pool.spec, pool.body.get("status")
    ready = status.get("ready") if isinstance(status, dict) else 0
    external, scaling = (spec.get("external") or {}).get("urls"), spec.get("scaling")
    largest = (
        len(external) if external else (scaling or {}).get("maxReplicas", 0) if scaling else spec.get("replicas", 0)
    )
    messages = [
        c.message
        for kind in ("Stalled", "Degraded")
        for c in readable_conditions(stored_conditions(status))
        if c.type == kind and c.status == "True"
    ]
    return ObservedPool(
        name=pool.name,
        uid=pool.uid,
        owned=belongs(metadata, run_uid),
        deleting=pool.deleting,
        ready=ready if isinstance(ready, int) else 0,
        largest=int(largest or 0),
        protocol=spec.get("protocol") or "tapforge",
        spec=(metadata.get("annotations") or {}).get(labels.SPEC, ""),
        message=next(iter(messages), ""),
        boot_deadline=float((spec.get("boot") or {}).get("deadlineSeconds") or BOOT_DEADLINE),
    )


@dataclass(frozen=True, slots=True)
class ObservedVolume:
    """A PersistentVolumeClaim."""

    found: bool
    modes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A create that the API server refused."""

    reason: str
    message: str
    #: only a person can help
    stalls: bool = False


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """How the API server answered to a create of the run's RayJob with `dryRun`."""

    #: of the run at that time
    generation: int
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """The cluster as the operator knows it now."""

    #: RayJobs whose controller is the run
    jobs: tuple[RayJob, ...] = ()
    #: why RayJobs can't be read: that there is none is not known then; None when they can
    no_ray_jobs: Unavailable | None = None
    pool: ObservedPool | None = None
    #: None: not read
    volume: ObservedVolume | None = None
    #: of the present attempt; None: not read
    pods: tuple[RayPod, ...] | None = None
    #: Kueue's, of the newest RayJob
    workload: Workload | None = None
    #: names of the AdmissionChecks that wait for phones; empty where the cluster has none
    phone_checks: frozenset[str] = frozenset()
    #: slots that claims of the run's namespace may have over all pools; None: any number
    claim_quota: int | None = None
    #: Workloads and AdmissionChecks were read since this process leads, or there are none to be read
    queues_known: bool = True
    #: the newest head of the run
    head: RayHead | None = None
    #: heads were listed: that there is none is known
    heads_known: bool = True
    #: what the ConfigMap of the run holds; None: not read
    config: StoredConfig | None = None
    #: why it can't be read
    config_refusal: Refusal | None = None
    #: the driver's newest report, and when it came
    report: Progress | None = None
    reported: float = 0.0
    #: why the last create was refused
    refusal: Refusal | None = None
    dry_run: DryRunResult | None = None
    #: newest attempt whose RayJob this process has created
    created_job: int = 0
    #: since when the cluster is watched without a gap, and reports could come: no silence is older than that
    watching_since: float = 0.0


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What this process remembers; lost with it, and with no harm."""

    #: attempt that this process wrote to the status before it creates its RayJob
    intended: int = 0
    #: when a queue was last observed to hold the attempt: reports of its driver from before are void when it goes on
    queued: float = 0.0
    #: since when the driver is silent and its head missing; 0 when it is not
    head_missing_since: float = 0.0
    #: attempts that the cluster ended since the run last progressed
    disrupted: int = 0


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What to write and what to do now. The status is written first; the actions were decided on the status that is
    already stored."""

    status: TrainingRunStatus
    history: RunHistory
    create_pool: bool = False
    #: UIDs that may be deleted
    delete_pool: str = ""
    #: create what the attempt needs and then its RayJob
    create_job: int = 0
    delete_jobs: tuple[RayJob, ...] = ()
    check_update: CheckUpdate | None = None
    orders: Orders = field(default_factory=Orders)
    #: what to read before the next plan
    read_volume: bool = False
    read_pods: bool = False
    read_config: bool = False
    #: create the RayJob with `dryRun`
    dry_run_job: bool = False
    #: seconds until time alone changes the plan; None: only events do
    requeue_after: float | None = None


# --- questions about a run -------------------------------------------------------------------------------------------


def pool_of(run: Run) -> str:
    """Name of the EmulatorPool that the run's phones come from; "" when they don't come from one."""
    source = run.spec.environment.source
    if source.pool is not None:
        return source.pool.name
    return run.name if source.own_pool is not None else ""


def slots_of(run: Run) -> int:
    """Phones that it claims at most; 0 without a pool."""
    source = run.spec.environment.source
    wants = source.pool or source.own_pool
    return wants.slots if wants is not None else 0


def checkpoints_last(run: Run) -> bool:
    """Whether they outlast a Ray cluster: on a volume, or in object storage."""
    return run.spec.checkpoints.storage is not None or run.spec.checkpoints.uri is not None


# --- the plan while it is built --------------------------------------------------------------------------------------

#: something has to be read before anything can be decided: the status stays as it is
UNDECIDED: Final = Situation("busy", "Undecided", "")


class PlanBuilder:
    def __init__(self, run: Run, observed: Observed, history: RunHistory, now: float):
        self.run = run
        self.observed = observed
        self.now = now
        self._plan = RunPlan(status=run.status, history=history, orders=Orders(limits=run.spec.stop))
        self._status: dict[str, Any] = {}
        self._situation: Situation | None = None
        self._requeue_after: list[float] = []

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def history(self) -> RunHistory:
        return self._plan.history

    @property
    def attempt(self) -> Attempt:
        """As it is after what was decided so far."""
        return self._status.get("attempt", self.run.status.attempt)

    @property
    def job(self) -> RayJob | None:
        """RayJob of the newest attempt."""
        return next((job for job in self.observed.jobs if job.attempt == self.attempt.number), None)

    @property
    def others(self) -> tuple[RayJob, ...]:
        return tuple(job for job in self.observed.jobs if job.attempt != self.attempt.number)

    @property
    def report(self) -> Progress | None:
        """The newest one of the newest attempt, from the Ray cluster that it is in by now. While a queue holds the
        attempt, that is the last one of the grace."""
        report, job = self.observed.report, self.job
        if report is None or report.attempt != self.attempt.number:
            return None
        if self.observed.reported <= self.history.queued and not (job is not None and job.queued):
            return None
        elsewhere = job is not None and job.cluster and report.cluster not in ("", job.cluster)
        return None if elsewhere else report

    @property
    def deadline(self) -> float | None:
        """When the run has been active for long enough."""
        cluster, status = self.run.spec.cluster, self.run.status
        if cluster is None or cluster.active_deadline_seconds is None or not status.active_time:
            return None
        return seconds(status.active_time) + cluster.active_deadline_seconds

    @property
    def overdue(self) -> bool:
        deadline = self.deadline
        if deadline is not None and self.now < deadline:
            self.requeue(deadline - self.now)
        return deadline is not None and self.now >= deadline

    # --- decisions ----------------------------------------------------------------------------------------------------

    def set(self, **fields: Any) -> None:
        self._status.update(fields)

    def move(self, phase: AttemptPhase, reason: str = "", message: str = "", number: int | None = None) -> None:
        """The newest attempt enters a phase."""
        self.set(
            attempt=Attempt(
                number=self.attempt.number if number is None else number,
                phase=phase,
                since=timestamp(self.now),
                reason=reason,
                message=message[:4096],
                disruption=self.attempt.disruption if number in (None, self.attempt.number) else "",
            )
        )
        self.requeue(0.0)

    def set_situation(self, situation: Situation) -> None:
        self._situation = situation

    def busy(self, reason: str, message: str, **more: bool) -> None:
        self.set_situation(Situation("busy", reason, message, **more))

    def requeue(self, after: float) -> None:
        self._requeue_after.append(max(0.0, after))

    def do(self, **actions: Any) -> None:
        self._plan = replace(self._plan, **actions)

    def delete(self, *jobs: RayJob) -> None:
        fresh = tuple(job for job in jobs if not job.deleting)
        self.do(delete_jobs=(*self._plan.delete_jobs, *fresh))

    def remember(self, history: RunHistory) -> None:
        self.do(history=history)

    def record_disruption(self) -> None:
        """Records in the status that the cluster ends the attempt's head: its Pod may be gone the next time."""
        head, attempt = self.observed.head, self.attempt
        if head is None or head.attempt != attempt.number or attempt.phase not in ("Active", "Stopping"):
            return
        if head.disruption != attempt.disruption:
            self.set(attempt=attempt.model_copy(update={"disruption": head.disruption}))

    def count_progress(self) -> None:
        """Failures are reset when the run gets further than it ever was."""
        report = self.report
        if report is None:
            return
        checkpoint = report.checkpoint.update if report.checkpoint is not None else 0
        reached = checkpoint if checkpoints_last(self.run) else report.advance.update
        if reached > self.run.status.furthest:
            self.set(furthest=reached, failures=0)
            self.remember(replace(self.history, disrupted=0))

    @property
    def failures(self) -> int:
        """Lost clusters that count, by what was decided so far."""
        return int(self._status.get("failures", self.run.status.failures))

    def order(self, stop: Literal["suspend", "deadline", "superseded"], grace: float = 0.0) -> None:
        self.do(orders=Orders(stop=stop, grace_seconds=max(0.0, grace), limits=self.run.spec.stop))

    def end(self, reason: str, message: str, *, complete: bool) -> None:
        """For good."""
        self.move("Over", reason, message)
        self.set(completion_time=timestamp(self.now))
        self.set_situation(
            Situation("good" if complete else "stalled", reason, message, complete=complete, failed=not complete)
        )

    # --- the plan -----------------------------------------------------------------------------------------------------

    def finish(self) -> RunPlan:
        if self._situation is UNDECIDED:
            return replace(self._plan, status=self.run.status, requeue_after=0.0)
        self._set_observed()
        status = self.run.status.model_copy(update=self._status)
        if self._situation is not None:
            run, situation = self.run, with_unknown(self._situation, self.run.unknown)
            edited = edited_message(run.edited, labels.config_name(run.name, run.uid)) if run.edited else ""
            status = status.model_copy(
                update={
                    "observed_generation": run.generation,
                    "message": situation.message[:4096],
                    "conditions": conditions(situation, run.status, run.generation, self.now, edited),
                }
            )
        return replace(self._plan, status=status, requeue_after=min(self._requeue_after, default=None))

    def _set_observed(self) -> None:
        job = self.job
        known = job is not None and self.attempt.phase not in ("", "Intended")
        self.set(pool=pool_of(self.run))
        if job is not None or self.observed.no_ray_jobs is None:
            self.set(
                ray_job=labels.ray_job_name(self.run.name, job.attempt) if job is not None and known else "",
                ray_cluster=job.cluster if job is not None and known else "",
                dashboard=job.dashboard if job is not None and known else "",
            )
        report = self.report
        if report is None:
            return
        advance = {name: getattr(report.advance, name) for name in type(report.advance).model_fields}
        progress = RunProgress(
            **advance, phase=report.phase, restarts=report.restarts, time=timestamp(self.observed.reported)
        )
        self.set(progress=progress, leases=report.leases)
        if report.checkpoint is not None:
            self.set(checkpoint=report.checkpoint)


def storage_note(run: Run) -> str:
    """Where checkpoints are lost with the cluster, a sentence that says so."""
    if checkpoints_last(run):
        return ""
    return "; its checkpoints are lost with the Ray cluster, as neither spec.checkpoints.storage nor uri is set"
