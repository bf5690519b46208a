"""What to do about a run now. A pure function; the rules, in order:

1.  A run that is being deleted is left to the garbage collector.
2.  Complete and Failed are for ever. What is left is tidied: the own pool goes, a RayJob that does not come to its end
    goes, after `ttlSecondsAfterFinished` the last one goes.
3.  Of a run one attempt is in flight at a time. A RayJob of any other attempt goes, and a new attempt waits until it is
    gone.
4.  An attempt is written to the status before its RayJob is created, with the run as it is resolved for all attempts.
    Only the process that wrote it creates the RayJob; another one takes the next number, because it can't know. So no
    attempt has two RayJobs, whatever crashes when. All are built from the Pod templates of the start (`templates.py`).
5.  A RayJob is created once and never written to again: queues and autoscalers edit it.
6.  What became of an attempt is decided by `outcome.py`.
7.  A lost cluster is replaced by the next attempt, at most `backoffLimit` times in which the run does not get any
    further: beyond its newest checkpoint or, where checkpoints are lost with the cluster, beyond the furthest attempt.
    So what happens now and then ends no run, and what happens each time at the same point does. A driver that stops
    without an order counts as one. What the cluster took away (the head's Pod was evicted, drained or preempted, its
    node lost), or a queue, or `spec.suspend`, does not count; nor what becomes of a driver on its way out.
8.  To suspend is to order the driver to stop, to wait for its checkpoint within the grace, and to delete the RayJob. It
    can't be taken back half-way; to resume is a new attempt. The same at `activeDeadlineSeconds`, which then is Failed:
    as with Jobs, that time begins anew whenever the run is resumed, by its user or by a queue.
9.  A driver that stops because what spec.stop gives to judges is spent suspends its run, until spec.stop gives more
    than the driver has reported as used. That counts as no failure.
10. The own pool exists while the run is active. A driver whose machines a queue takes keeps it for its grace.
11. A run that a queue holds has no demand for phones, unless the queue has reserved quota and waits for them
    (`kueue.py`). While the queue's decision is unknown, nothing is given back.
12. That an attempt has no RayJob is known only where RayJobs can be read. While they can't, nothing becomes of an
    attempt whose RayJob was not seen; its status says why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tapforge_api.progress import JUDGE_BUDGET_SPENT
from tapforge_operator.kube.objectmeta import Unavailable, seconds, timestamp
from tapforge_operator.kube.types import RayJob
from tapforge_operator.trainingrun import kueue
from tapforge_operator.trainingrun.outcome import (
    FINAL,
    FINISH_TIMEOUT,
    NODE_LOST,
    Outcome,
    attempt_outcome,
    ray_job_outcome,
)
from tapforge_operator.trainingrun.prerequisites import (
    KUBERAY_REFRESH,
    fewer_phones,
    own_pool,
    phones,
    unmet_prerequisite,
)
from tapforge_operator.trainingrun.rayjob import resolve
from tapforge_operator.trainingrun.state import (
    BOOT_DEADLINE,
    UNDECIDED,
    Observed,
    PlanBuilder,
    Run,
    RunHistory,
    RunPlan,
    checkpoints_last,
    storage_note,
)
from tapforge_operator.trainingrun.status import SUSPENDED, SUSPENSIONS, Situation, ended, is_true

_PODS_REFRESH: Final = 10.0
_REFUSED_RETRY: Final = 15.0
_QUEUES_RETRY: Final = 15.0

DEADLINE: Final = "DeadlineExceeded"
DISRUPTED: Final = "Disrupted"
#: KubeRay's words for a RayJob that a queue holds and whose Ray cluster may still be there
_SUSPENDING: Final = ("Running", "Suspending")
#: outcomes of a driver that failed while its Pod was being taken away: the next attempt will show
_AT_THE_END: Final = ("DriverFailed", "Stopped")
#: phases of an attempt that may have a RayJob
_IN_FLIGHT: Final = ("Intended", "Active", "Stopping", "Removing")


def plan_run(run: Run, observed: Observed, history: RunHistory, now: float) -> RunPlan:
    plan = PlanBuilder(run, observed, history, now)
    if run.deleting:
        return RunPlan(status=run.status, history=history)
    if ended(run.status):
        return _clean_up(plan)
    _adopt(plan)
    plan.record_disruption()
    plan.count_progress()
    if plan.attempt.phase in _IN_FLIGHT and plan.job is None and plan.observed.no_ray_jobs is not None:
        _wait_for_ray_jobs(plan, plan.observed.no_ray_jobs)
        return plan.finish()
    match plan.attempt.phase:
        case "Intended":
            _intended(plan)
        case "Active":
            _active(plan)
        case "Stopping":
            _stopping(plan)
        case "Removing":
            _removing(plan)
        case _:
            _no_attempt(plan)
    plan.delete(*plan.others)
    return plan.finish()


def _adopt(plan: PlanBuilder) -> None:
    """RayJobs that the status doesn't know of: another client overwrote it, or a write was lost."""
    newest = max((job.attempt for job in plan.observed.jobs), default=0)
    if newest > plan.attempt.number:
        status, began = plan.run.status, timestamp(plan.now)
        plan.set(start_time=status.start_time or began, active_time=status.active_time or began)
        plan.set(attempts=max(newest, status.attempts))
        plan.move("Active", number=newest)


def _wait_for_ray_jobs(plan: PlanBuilder, missing: Unavailable) -> None:
    number, phase = plan.attempt.number, plan.attempt.phase
    if phase == "Stopping":  # an order can't be taken back
        _order(plan)
    elif phase == "Removing":
        plan.order("superseded")
    plan.requeue(KUBERAY_REFRESH)
    text = f"what became of attempt {number} can't be seen: {missing.message}"
    held = is_true(plan.run.status, "Suspended")
    plan.set_situation(Situation("stalled" if missing.stalls else "busy", missing.reason, text, suspended=held))


# --- no attempt is in flight -----------------------------------------------------------------------------------------


def _no_attempt(plan: PlanBuilder) -> None:
    run = plan.run
    plan.order("superseded")
    resting = plan.attempt.reason in SUSPENSIONS
    if run.status.start_time and not resting and not run.spec.suspend and plan.overdue:
        _end_at_deadline(plan)
        return
    if run.spec.suspend:
        if run.status.attempts and plan.attempt.reason not in SUSPENSIONS:
            plan.move("Over", SUSPENDED, plan.attempt.message)
        _suspended(plan, SUSPENDED, "the run is suspended")
        return
    used = run.status.progress
    # Only where a driver has said so: the stage that a run is in may ask no judge, whatever those of earlier ones used.
    spent = run.spec.stop.spent_on_judges(used.judge_tokens, used.judge_money)
    if plan.attempt.reason == JUDGE_BUDGET_SPENT and spent:
        _suspended(plan, JUDGE_BUDGET_SPENT, f"the run is suspended: {spent}")
        return
    if plan.observed.jobs:
        plan.delete(*plan.observed.jobs)
        plan.busy("Removing", f"RayJob {plan.observed.jobs[0].name} of an earlier attempt is being deleted")
        return
    if (unmet := unmet_prerequisite(plan)) is not None:
        plan.set_situation(unmet)
        return
    _begin_attempt(plan, plan.run.status.attempts + 1)


def _suspended(plan: PlanBuilder, reason: str, message: str) -> None:
    """Phones and machines are given back."""
    _delete_own_pool(plan)
    plan.delete(*plan.observed.jobs)
    on = f"; it goes on from {_checkpoint(plan)}" if plan.run.status.attempts else ""
    plan.set_situation(Situation("good", reason, f"{message}{on}", suspended=True))


def _begin_attempt(plan: PlanBuilder, number: int) -> None:
    """Writes the attempt to the status; the next plan creates its RayJob."""
    status = plan.run.status
    if not status.resolved:
        if plan.observed.config is None:
            plan.do(read_config=True)
            plan.set_situation(UNDECIDED)
            return
        # A ConfigMap that is there already is what earlier attempts saw: the status was written over.
        plan.set(resolved=plan.observed.config.run or resolve(plan.run))
    if not status.start_time:
        plan.set(start_time=timestamp(plan.now))
    if not status.active_time or plan.attempt.reason in SUSPENSIONS:
        plan.set(active_time=timestamp(plan.now))
    plan.set(attempts=number, progress=status.progress.model_copy(update={"restarts": 0, "phase": ""}))
    if not checkpoints_last(plan.run):
        plan.set(checkpoint=None)
    plan.move("Intended", number=number)
    plan.remember(replace(plan.history, intended=number))
    plan.busy("Starting", f"attempt {number} begins")


def _intended(plan: PlanBuilder) -> None:
    number = plan.attempt.number
    if plan.job is not None or plan.observed.created_job == number:  # it may be gone already
        plan.move("Active")
        _active(plan)
    elif plan.run.spec.suspend:
        plan.move("Over", SUSPENDED, "it was suspended before it began")
        plan.busy("Stopping", "the run is suspended before its RayJob was created")
    elif plan.history.intended != number:
        plan.move("Over", "Unclear", "the operator that was about to begin it is gone")
        plan.busy("Starting", f"attempt {number} may or may not have begun; another one begins")
    elif plan.others:
        plan.busy("Removing", f"RayJob {plan.others[0].name} of an earlier attempt is being deleted")
    else:
        plan.do(create_job=number)
        refusal = plan.observed.config_refusal or plan.observed.refusal
        if refusal is None:
            plan.busy("Starting", f"attempt {number} begins")
            return
        plan.requeue(_REFUSED_RETRY)
        plan.set_situation(Situation("stalled" if refusal.stalls else "busy", refusal.reason, refusal.message))


# --- an attempt is in flight -----------------------------------------------------------------------------------------


def _active(plan: PlanBuilder) -> None:
    outcome = attempt_outcome(plan)
    if plan.run.spec.environment.source.own_pool is not None and outcome.kind != "queued":
        own_pool(plan)
    if not plan.run.status.active_time:  # a queue has let it in
        plan.set(active_time=timestamp(plan.now))
    match outcome.kind:
        case "succeeded":
            plan.end("Complete", _completed(plan), complete=True)
        case "stopped" if plan.report is not None and plan.report.reason == JUDGE_BUDGET_SPENT:
            plan.move("Removing", JUDGE_BUDGET_SPENT, plan.report.message)
            plan.busy("Stopping", f"attempt {plan.attempt.number} has stopped: {plan.report.message}")
        case "failed" if not (plan.attempt.disruption and outcome.reason in _AT_THE_END):
            plan.end(outcome.reason, outcome.message, complete=False)
        case "failed" | "lost" | "stopped" if plan.attempt.disruption:
            _disrupted(plan, outcome)
        case "lost" | "stopped":
            _lost(plan, outcome)
        case _ if plan.run.spec.suspend:
            _stop(plan, outcome, SUSPENDED, "the run is suspended")
        case "queued":
            _queued(plan, outcome)
        case _ if plan.overdue:
            _stop(plan, outcome, DEADLINE, "the run has been active for spec.cluster.activeDeadlineSeconds")
        case "waiting":
            _explain_waiting(plan, outcome)
        case _:
            plan.set_situation(Situation("good", outcome.reason, _running(plan, outcome)))


def _queued(plan: PlanBuilder, outcome: Outcome) -> None:
    workload, ours = plan.observed.workload, plan.observed.phone_checks
    leaving = plan.job is not None and plan.job.deployment in _SUSPENDING
    if not leaving and not plan.observed.queues_known:
        plan.requeue(_QUEUES_RETRY)
        plan.set(active_time=plan.run.status.active_time)
        _keep_waiting(plan, outcome)
        return
    plan.remember(replace(plan.history, queued=plan.now))
    plan.set(active_time="")
    if leaving or workload is None or not kueue.demand_since(workload, ours):
        if ours and not leaving and not _head_there(plan):
            _delete_own_pool(plan)
        plan.busy(outcome.reason, kueue.queue_message(workload, outcome.message), suspended=True)
        return
    short, pool = phones(plan), plan.observed.pool
    deadline = pool.boot_deadline if pool is not None else _boot_deadline(plan.run)
    match kueue.decide(workload, ours, short.message if short is not None else "", deadline, plan.now):
        case kueue.CheckUpdate() as update:
            plan.do(check_update=update)
        case float() as left:
            plan.requeue(left)
    plan.set_situation(short or Situation("busy", "Starting", f"queue {workload.queue} starts the Ray cluster"))


def _keep_waiting(plan: PlanBuilder, outcome: Outcome) -> None:
    """As before, but for the words."""
    status = plan.run.status
    reason = next((c.reason for c in status.conditions if c.type == "Ready"), outcome.reason)
    text = f"{outcome.message}, and what the queue has decided can't be read (Kueue)"
    plan.busy(reason, text, suspended=is_true(status, "Suspended"))


def _boot_deadline(run: Run) -> float:
    """Of a pool that is not there, or not yet."""
    own = run.spec.environment.source.own_pool
    return float(own.spec.boot.deadline_seconds) if own is not None else BOOT_DEADLINE


def _head_there(plan: PlanBuilder) -> bool:
    """KubeRay calls a RayJob Suspended when its RayCluster is deleted, and the Pods still have their grace then."""
    head = plan.observed.head
    if head is None or head.attempt != plan.attempt.number:
        return not plan.observed.heads_known
    return not head.gone and head.disruption != NODE_LOST


def _explain_waiting(plan: PlanBuilder, outcome: Outcome) -> None:
    """Says what keeps the Ray cluster from being there."""
    plan.do(read_pods=True)
    plan.requeue(_PODS_REFRESH)
    reason, detail = plan.job.trouble if plan.job is not None else ("", "")
    if reason:
        plan.busy(reason, f"Pods of the Ray cluster can't be made: {detail}")
        return
    pods = plan.observed.pods or ()
    troubled = [pod for pod in pods if pod.reason]
    if not troubled:
        plan.busy(outcome.reason, outcome.message)
        return
    first = troubled[0]
    groups = ", ".join(sorted({pod.group for pod in troubled}))
    text = f"{len(troubled)} of {len(pods)} Ray Pods ({groups}) can't start: {first.name}: {first.message}"
    plan.busy(first.reason, text)


def _lost(plan: PlanBuilder, outcome: Outcome) -> None:
    cluster = plan.run.spec.cluster
    limit = cluster.backoff_limit if cluster is not None else 0
    failures = plan.failures + 1
    plan.set(failures=failures, lost_clusters=plan.run.status.lost_clusters + 1)
    if failures > limit:
        text = f"{failures} attempts were lost and got no further, and spec.cluster.backoffLimit is {limit}"
        plan.end("BackoffLimitExceeded", f"{text}; the last time {outcome.message}", complete=False)
        return
    plan.move("Removing", outcome.reason, outcome.message)
    plan.busy("Restarting", f"attempt {plan.attempt.number} was lost: {outcome.message}")


def _disrupted(plan: PlanBuilder, outcome: Outcome) -> None:
    head, why = plan.observed.head, plan.attempt.disruption
    detail = head.message if head is not None and head.disruption == why else ""
    text = f"the cluster took the Pod of Ray's head away ({why}): {detail or outcome.message}"
    plan.set(disruptions=plan.run.status.disruptions + 1)
    plan.remember(replace(plan.history, disrupted=plan.history.disrupted + 1))
    plan.move("Removing", DISRUPTED, text)
    plan.busy("Restarting", f"attempt {plan.attempt.number} was disrupted: {text}")


def _stop(plan: PlanBuilder, outcome: Outcome, reason: str, message: str) -> None:
    """In order where a driver can receive it, else at once."""
    if outcome.kind in ("waiting", "queued"):
        plan.move("Removing", reason, message)
    else:
        plan.move("Stopping", reason, f"{message}: the driver is to make a checkpoint and stop")
        _order(plan)
    plan.busy("Stopping", f"{message}: attempt {plan.attempt.number} is stopped")


# --- an attempt comes to its end --------------------------------------------------------------------------------------


def _stopping(plan: PlanBuilder) -> None:
    outcome = attempt_outcome(plan)
    attempt = plan.attempt
    left = _order(plan)
    match outcome.kind:
        case "succeeded":
            plan.end("Complete", _completed(plan), complete=True)
        case "failed":
            plan.end(outcome.reason, outcome.message, complete=False)
        case "running" | "finishing" | "waiting" if left > 0 and plan.job is not None:
            plan.requeue(left)
            plan.busy("Stopping", attempt.message)
        case _:
            plan.move("Removing", attempt.reason, attempt.message)
            plan.busy("Stopping", f"attempt {attempt.number} has stopped; its RayJob is deleted")


def _order(plan: PlanBuilder) -> float:
    """Orders the driver to stop; how long it may still take."""
    cluster, attempt = plan.run.spec.cluster, plan.attempt
    grace = cluster.suspend_grace_seconds if cluster is not None else 0
    left = seconds(attempt.since) + grace - plan.now
    plan.order("deadline" if attempt.reason == DEADLINE else "suspend", left)
    return left


def _removing(plan: PlanBuilder) -> None:
    attempt = plan.attempt
    plan.order("superseded")
    if plan.job is not None:
        plan.delete(plan.job)
        plan.busy(
            "Stopping" if attempt.reason in (*SUSPENSIONS, DEADLINE) else "Restarting",
            _deleting(plan.job, attempt.message),
        )
    elif attempt.reason == DEADLINE:
        _end_at_deadline(plan)
    else:
        plan.move("Over", attempt.reason, attempt.message)
        plan.busy("Stopping" if attempt.reason in SUSPENSIONS else "Restarting", attempt.message)


def _deleting(job: RayJob, message: str) -> str:
    return f"RayJob {job.name} is being deleted: {message}"


def _end_at_deadline(plan: PlanBuilder) -> None:
    text = "the run has been active for spec.cluster.activeDeadlineSeconds"
    plan.end(DEADLINE, f"{text}; its newest checkpoint is {_checkpoint(plan)}", complete=False)


# --- after the end ----------------------------------------------------------------------------------------------------


def _clean_up(plan: PlanBuilder) -> RunPlan:
    run, status, job = plan.run, plan.run.status, plan.job
    plan.order("superseded")
    _delete_own_pool(plan)
    plan.delete(*plan.others)
    completed, cluster = seconds(status.completion_time), run.spec.cluster
    if job is not None:
        times = []
        if ray_job_outcome(job).kind not in FINAL:
            times.append(completed + FINISH_TIMEOUT)
        if cluster is not None and cluster.ttl_seconds_after_finished is not None:
            times.append(completed + cluster.ttl_seconds_after_finished)
        if times and min(times) <= plan.now:
            plan.delete(job)
        elif times:
            plan.requeue(min(times) - plan.now)
    marked = tuple(c.model_copy(update={"observed_generation": run.generation}) for c in status.conditions)
    plan.set(observed_generation=run.generation, conditions=marked)
    return plan.finish()


def _delete_own_pool(plan: PlanBuilder) -> None:
    pool = plan.observed.pool
    if plan.run.spec.environment.source.own_pool is not None and pool is not None and pool.owned and not pool.deleting:
        plan.do(delete_pool=pool.uid)


# --- messages -------------------------------------------------------------------------------------------------------


def _running(plan: PlanBuilder, outcome: Outcome) -> str:
    number = plan.attempt.number
    which = f" (attempt {number})" if number > 1 else ""
    return f"{outcome.message}{which}{fewer_phones(plan)}{storage_note(plan.run)}"


def _completed(plan: PlanBuilder) -> str:
    report = plan.report
    updates = report.advance.update if report is not None else plan.run.status.progress.update
    return f"the run is complete after {updates} updates"


def _checkpoint(plan: PlanBuilder) -> str:
    """What the next attempt resumes from."""
    if not checkpoints_last(plan.run):
        return "its beginning, as without spec.checkpoints.storage or uri its checkpoints are lost"
    report = plan.report
    checkpoint = (report.checkpoint if report is not None else None) or plan.run.status.checkpoint
    return f"the checkpoint of update {checkpoint.update}" if checkpoint is not None else "its beginning"
