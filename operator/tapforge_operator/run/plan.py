"""What to do about a run now. A pure function; the rules, in order:

1.  A run that is being deleted is left to the garbage collector.
2.  Complete and Failed are for ever. What is left is tidied: the own pool goes, a RayJob that does not come to its end
    goes, after `ttlSecondsAfterFinished` the last one goes.
3.  Of a run one attempt is on at a time. A RayJob of any other attempt goes, and a new attempt waits until it is gone.
4.  An attempt is put down in the status before its RayJob is created, with the run as it is resolved for all attempts.
    Only the process that put it down creates the RayJob; another one takes the next number, because it can't know. So
    no attempt has two RayJobs, whoever crashes when.
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
9.  The own pool exists while the run is active.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from .conditions import Situation, ended
from .draft import UNDECIDED, Draft, storage_note
from .manifests import checkpoints_last
from .outcome import PATIENCE, outcome
from .records import History, RayJob, Run, RunPlan, Seen, seconds, timestamp
from .resolved import resolve
from .start import fewer_phones, obstacle, own_pool
from .translate import FINAL, Verdict, translate

_PODS_LOOK: Final = 10.0
_REFUSED_LOOK: Final = 15.0

SUSPENDED: Final = "Suspended"
DEADLINE: Final = "DeadlineExceeded"
DISRUPTED: Final = "Disrupted"
#: verdicts of a driver that failed while its Pod was being taken away: the next attempt will tell
_AT_THE_END: Final = ("DriverFailed", "Stopped")


def plan_run(run: Run, seen: Seen, history: History, now: float) -> RunPlan:
    draft = Draft(run, seen, history, now)
    if run.deleting:
        return RunPlan(status=run.status, history=history)
    if ended(run.status):
        return _tidy(draft)
    _adopt(draft)
    draft.hear_of_head()
    draft.count_progress()
    match draft.attempt.phase:
        case "Intended":
            _intended(draft)
        case "Active":
            _active(draft)
        case "Stopping":
            _stopping(draft)
        case "Removing":
            _removing(draft)
        case _:
            _between(draft)
    draft.delete(*draft.others)
    return draft.finish()


def _adopt(draft: Draft) -> None:
    """RayJobs that the status doesn't know of: somebody wrote it over, or a write was lost."""
    newest = max((job.attempt for job in draft.seen.jobs), default=0)
    if newest > draft.attempt.number:
        status, began = draft.run.status, timestamp(draft.now)
        draft.set(start_time=status.start_time or began, active_time=status.active_time or began)
        draft.set(attempts=max(newest, status.attempts))
        draft.move("Active", number=newest)


# --- no attempt is on -------------------------------------------------------------------------------------------------


def _between(draft: Draft) -> None:
    run = draft.run
    draft.order("superseded")
    if run.status.start_time and draft.attempt.reason != SUSPENDED and not run.spec.suspend and draft.overdue:
        _end_at_deadline(draft)
        return
    if run.spec.suspend:
        _drop_own_pool(draft)
        draft.delete(*draft.seen.jobs)
        if run.status.attempts and draft.attempt.reason != SUSPENDED:
            draft.move("Over", SUSPENDED, draft.attempt.message)
        on = f"; it goes on from {_checkpoint(draft)}" if run.status.attempts else ""
        draft.say(Situation("good", SUSPENDED, f"the run is suspended{on}", suspended=True))
        return
    if draft.seen.jobs:
        draft.delete(*draft.seen.jobs)
        draft.busy("Removing", f"RayJob {draft.seen.jobs[0].name} of an earlier attempt is being deleted")
        return
    if (waits := obstacle(draft)) is not None:
        draft.say(waits)
        return
    _begin(draft, draft.run.status.attempts + 1)


def _begin(draft: Draft, number: int) -> None:
    """Puts the attempt down; the next plan has its RayJob created."""
    status = draft.run.status
    if not status.resolved:
        if draft.seen.config is None:
            draft.do(look_at_config=True)
            draft.say(UNDECIDED)
            return
        # A ConfigMap that is there already is what earlier attempts saw: the status was written over.
        draft.set(resolved=draft.seen.config or resolve(draft.run))
    if not status.start_time:
        draft.set(start_time=timestamp(draft.now))
    if not status.active_time or draft.attempt.reason == SUSPENDED:
        draft.set(active_time=timestamp(draft.now))
    draft.set(attempts=number, progress=status.progress.model_copy(update={"restarts": 0, "phase": ""}))
    if not checkpoints_last(draft.run):
        draft.set(checkpoint=None)
    draft.move("Intended", number=number)
    draft.remember(replace(draft.history, intended=number))
    draft.busy("Starting", f"attempt {number} begins")


def _intended(draft: Draft) -> None:
    number = draft.attempt.number
    if draft.job is not None or draft.seen.made == number:  # it may be gone already
        draft.move("Active")
        _active(draft)
    elif draft.run.spec.suspend:
        draft.move("Over", SUSPENDED, "it was suspended before it began")
        draft.busy("Stopping", "the run is suspended before its RayJob was created")
    elif draft.history.intended != number:
        draft.move("Over", "Unclear", "the operator that was about to begin it is gone")
        draft.busy("Starting", f"attempt {number} may or may not have begun; another one begins")
    elif draft.others:
        draft.busy("Removing", f"RayJob {draft.others[0].name} of an earlier attempt is being deleted")
    else:
        draft.do(create_job=number)
        refusal = draft.seen.refusal
        if refusal is None:
            draft.busy("Starting", f"attempt {number} begins")
            return
        draft.again(_REFUSED_LOOK)
        draft.say(Situation("stalled" if refusal.stalls else "busy", refusal.reason, refusal.message))


# --- an attempt is on -------------------------------------------------------------------------------------------------


def _active(draft: Draft) -> None:
    verdict = outcome(draft)
    if draft.run.spec.environment.source.own_pool is not None:
        own_pool(draft)
    if not draft.run.status.active_time:  # a queue has let it in
        draft.set(active_time=timestamp(draft.now))
    match verdict.kind:
        case "succeeded":
            draft.end("Complete", _completed(draft), complete=True)
        case "failed" if not (draft.attempt.disruption and verdict.reason in _AT_THE_END):
            draft.end(verdict.reason, verdict.message, complete=False)
        case "failed" | "lost" | "stopped" if draft.attempt.disruption:
            _disrupted(draft, verdict)
        case "lost" | "stopped":
            _lost(draft, verdict)
        case _ if draft.run.spec.suspend:
            _stop(draft, verdict, SUSPENDED, "the run is suspended")
        case "queued":
            draft.remember(replace(draft.history, queued=draft.now))
            draft.set(active_time="")
            draft.busy(verdict.reason, verdict.message, suspended=True)
        case _ if draft.overdue:
            _stop(draft, verdict, DEADLINE, "the run has been active for spec.cluster.activeDeadlineSeconds")
        case "waiting":
            _wait(draft, verdict)
        case _:
            draft.say(Situation("good", verdict.reason, _running(draft, verdict)))


def _wait(draft: Draft, verdict: Verdict) -> None:
    """Says what keeps the Ray cluster from being there."""
    draft.do(look_at_pods=True)
    draft.again(_PODS_LOOK)
    word, why = draft.job.trouble if draft.job is not None else ("", "")
    if word:
        draft.busy(word, f"Pods of the Ray cluster can't be made: {why}")
        return
    pods = draft.seen.pods or ()
    troubled = [pod for pod in pods if pod.reason]
    if not troubled:
        draft.busy(verdict.reason, verdict.message)
        return
    first = troubled[0]
    groups = ", ".join(sorted({pod.group for pod in troubled}))
    text = f"{len(troubled)} of {len(pods)} Ray Pods ({groups}) can't start: {first.name}: {first.message}"
    draft.busy(first.reason, text)


def _lost(draft: Draft, verdict: Verdict) -> None:
    cluster = draft.run.spec.cluster
    limit = cluster.backoff_limit if cluster is not None else 0
    failures = draft.failures + 1
    draft.set(failures=failures, lost_clusters=draft.run.status.lost_clusters + 1)
    if failures > limit:
        text = f"{failures} attempts were lost and got no further, and spec.cluster.backoffLimit is {limit}"
        draft.end("BackoffLimitExceeded", f"{text}; the last time {verdict.message}", complete=False)
        return
    draft.move("Removing", verdict.reason, verdict.message)
    draft.busy("Restarting", f"attempt {draft.attempt.number} was lost: {verdict.message}")


def _disrupted(draft: Draft, verdict: Verdict) -> None:
    head, why = draft.seen.head, draft.attempt.disruption
    said = head.message if head is not None and head.disruption == why else ""
    text = f"the cluster took the Pod of Ray's head away ({why}): {said or verdict.message}"
    draft.set(disruptions=draft.run.status.disruptions + 1)
    draft.remember(replace(draft.history, disrupted=draft.history.disrupted + 1))
    draft.move("Removing", DISRUPTED, text)
    draft.busy("Restarting", f"attempt {draft.attempt.number} was disrupted: {text}")


def _stop(draft: Draft, verdict: Verdict, reason: str, message: str) -> None:
    """In order where a driver can hear it, else at once."""
    if verdict.kind in ("waiting", "queued"):
        draft.move("Removing", reason, message)
    else:
        draft.move("Stopping", reason, f"{message}: the driver is to make a checkpoint and stop")
        _order(draft)
    draft.busy("Stopping", f"{message}: attempt {draft.attempt.number} is stopped")


# --- an attempt comes to its end --------------------------------------------------------------------------------------


def _stopping(draft: Draft) -> None:
    verdict = outcome(draft)
    attempt = draft.attempt
    left = _order(draft)
    match verdict.kind:
        case "succeeded":
            draft.end("Complete", _completed(draft), complete=True)
        case "failed":
            draft.end(verdict.reason, verdict.message, complete=False)
        case "running" | "finishing" | "waiting" if left > 0 and draft.job is not None:
            draft.again(left)
            draft.busy("Stopping", attempt.message)
        case _:
            draft.move("Removing", attempt.reason, attempt.message)
            draft.busy("Stopping", f"attempt {attempt.number} has stopped; its RayJob is deleted")


def _order(draft: Draft) -> float:
    """Orders the driver to stop; how long it may still take."""
    cluster, attempt = draft.run.spec.cluster, draft.attempt
    grace = cluster.suspend_grace_seconds if cluster is not None else 0
    left = seconds(attempt.since) + grace - draft.now
    draft.order("deadline" if attempt.reason == DEADLINE else "suspend", left)
    return left


def _removing(draft: Draft) -> None:
    attempt = draft.attempt
    draft.order("superseded")
    if draft.job is not None:
        draft.delete(draft.job)
        draft.busy(
            "Stopping" if attempt.reason in (SUSPENDED, DEADLINE) else "Restarting",
            _leaving(draft.job, attempt.message),
        )
    elif attempt.reason == DEADLINE:
        _end_at_deadline(draft)
    else:
        draft.move("Over", attempt.reason, attempt.message)
        draft.busy("Stopping" if attempt.reason == SUSPENDED else "Restarting", attempt.message)


def _leaving(job: RayJob, message: str) -> str:
    return f"RayJob {job.name} is being deleted: {message}"


def _end_at_deadline(draft: Draft) -> None:
    text = "the run has been active for spec.cluster.activeDeadlineSeconds"
    draft.end(DEADLINE, f"{text}; its newest checkpoint is {_checkpoint(draft)}", complete=False)


# --- after the end ----------------------------------------------------------------------------------------------------


def _tidy(draft: Draft) -> RunPlan:
    run, status, job = draft.run, draft.run.status, draft.job
    draft.order("superseded")
    _drop_own_pool(draft)
    draft.delete(*draft.others)
    completed, cluster = seconds(status.completion_time), run.spec.cluster
    if job is not None:
        times = []
        if translate(job).kind not in FINAL:
            times.append(completed + PATIENCE)
        if cluster is not None and cluster.ttl_seconds_after_finished is not None:
            times.append(completed + cluster.ttl_seconds_after_finished)
        if times and min(times) <= draft.now:
            draft.delete(job)
        elif times:
            draft.again(min(times) - draft.now)
    marked = tuple(c.model_copy(update={"observed_generation": run.generation}) for c in status.conditions)
    draft.set(observed_generation=run.generation, conditions=marked)
    return draft.finish()


def _drop_own_pool(draft: Draft) -> None:
    pool = draft.seen.pool
    if draft.run.spec.environment.source.own_pool is not None and pool is not None and pool.owned and not pool.deleting:
        draft.do(delete_pool=pool.uid)


# --- words ------------------------------------------------------------------------------------------------------------


def _running(draft: Draft, verdict: Verdict) -> str:
    number = draft.attempt.number
    which = f" (attempt {number})" if number > 1 else ""
    return f"{verdict.message}{which}{fewer_phones(draft)}{storage_note(draft.run)}"


def _completed(draft: Draft) -> str:
    report = draft.report
    updates = report.advance.update if report is not None else draft.run.status.progress.update
    return f"the run is complete after {updates} updates"


def _checkpoint(draft: Draft) -> str:
    """What the next attempt goes on from."""
    if not checkpoints_last(draft.run):
        return "its beginning, as without spec.checkpoints.storage or uri its checkpoints are lost"
    report = draft.report
    checkpoint = (report.checkpoint if report is not None else None) or draft.run.status.checkpoint
    return f"the checkpoint of update {checkpoint.update}" if checkpoint is not None else "its beginning"
