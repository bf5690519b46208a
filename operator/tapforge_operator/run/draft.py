"""A plan of a run in the making: what was decided so far, and the questions that several rules ask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, Literal

from tapforge_api.progress import Orders, Progress
from tapforge_api.run_status import Attempt, AttemptPhase, RunProgress

from .. import names
from .conditions import Situation, conditions
from .manifests import checkpoints_last
from .records import History, RayJob, Run, RunPlan, Seen, seconds, timestamp
from .resolved import pool_of

#: of a run that has to be looked at once more before anything can be said: its status stays as it is
UNDECIDED: Final = Situation("busy", "Undecided", "")


class Draft:
    def __init__(self, run: Run, seen: Seen, history: History, now: float):
        self.run = run
        self.seen = seen
        self.now = now
        self._plan = RunPlan(status=run.status, history=history, orders=Orders(limits=run.spec.stop))
        self._status: dict[str, Any] = {}
        self._situation: Situation | None = None
        self._look_again: list[float] = []

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        return self._plan.history

    @property
    def attempt(self) -> Attempt:
        """As it is after what was decided so far."""
        return self._status.get("attempt", self.run.status.attempt)

    @property
    def job(self) -> RayJob | None:
        """RayJob of the newest attempt."""
        return next((job for job in self.seen.jobs if job.attempt == self.attempt.number), None)

    @property
    def others(self) -> tuple[RayJob, ...]:
        return tuple(job for job in self.seen.jobs if job.attempt != self.attempt.number)

    @property
    def report(self) -> Progress | None:
        """The newest one of the newest attempt, from the Ray cluster that it is in by now."""
        report, job = self.seen.report, self.job
        if report is None or report.attempt != self.attempt.number or self.seen.reported <= self.history.queued:
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
            self.again(deadline - self.now)
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
        self.again(0.0)

    def say(self, situation: Situation) -> None:
        self._situation = situation

    def busy(self, reason: str, message: str, **more: bool) -> None:
        self.say(Situation("busy", reason, message, **more))

    def again(self, after: float) -> None:
        self._look_again.append(max(0.0, after))

    def do(self, **actions: Any) -> None:
        self._plan = replace(self._plan, **actions)

    def delete(self, *jobs: RayJob) -> None:
        fresh = tuple(job for job in jobs if not job.deleting)
        self.do(delete_jobs=(*self._plan.delete_jobs, *fresh))

    def remember(self, history: History) -> None:
        self.do(history=history)

    def hear_of_head(self) -> None:
        """Puts down whether the cluster takes the attempt's head away: it may be gone the next time."""
        head, attempt = self.seen.head, self.attempt
        if head is None or head.attempt != attempt.number or attempt.phase not in ("Active", "Stopping"):
            return
        if head.disruption != attempt.disruption:
            self.set(attempt=attempt.model_copy(update={"disruption": head.disruption}))

    def count_progress(self) -> None:
        """What was lost before is forgiven to a run that gets further than ever."""
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
        self.say(Situation("good" if complete else "stalled", reason, message, complete=complete, failed=not complete))

    # --- the plan -----------------------------------------------------------------------------------------------------

    def finish(self) -> RunPlan:
        if self._situation is UNDECIDED:
            return replace(self._plan, status=self.run.status, look_again=0.0)
        self._observe()
        status = self.run.status.model_copy(update=self._status)
        if self._situation is not None:
            status = status.model_copy(
                update={
                    "observed_generation": self.run.generation,
                    "message": self._situation.message[:4096],
                    "conditions": conditions(self._situation, self.run.status, self.run.generation, self.now),
                }
            )
        return replace(self._plan, status=status, look_again=min(self._look_again, default=None))

    def _observe(self) -> None:
        job = self.job
        known = job is not None and self.attempt.phase not in ("", "Intended")
        self.set(
            ray_job=names.ray_job_name(self.run.name, job.attempt) if job is not None and known else "",
            ray_cluster=job.cluster if job is not None and known else "",
            dashboard=job.dashboard if job is not None and known else "",
            pool=pool_of(self.run),
        )
        report = self.report
        if report is None:
            return
        told = {name: getattr(report.advance, name) for name in type(report.advance).model_fields}
        progress = RunProgress(**told, phase=report.phase, restarts=report.restarts, time=timestamp(self.seen.reported))
        self.set(progress=progress, leases=report.leases)
        if report.checkpoint is not None:
            self.set(checkpoint=report.checkpoint)


def storage_note(run: Run) -> str:
    """What a person should know about where checkpoints are."""
    if checkpoints_last(run):
        return ""
    return "; its checkpoints are lost with the Ray cluster, as neither spec.checkpoints.storage nor uri is set"
