"""What became of the attempt in flight: by its driver's report, by KubeRay's status, and by what is left of its head.

`attempt_outcome`, in order:

1. A driver that reported how it ended is believed. Its run ends when KubeRay says so too, or `FINISH_TIMEOUT` later. A
   driver that reports a failure is not believed when its head went before KubeRay had counted: what is around a driver
   ends a moment before it does, and it takes that for its own failure. Then the cluster is lost.
2. While a queue takes its machines, a driver that stopped or failed, one that is silent and a head that is gone decide
   nothing: that is the queue's doing, and the queue gives the machines back. Then KubeRay's status counts
   (`ray_job_outcome`).
3. KubeRay can take minutes to miss a head. When a driver has been silent for `REPORT_TIMEOUT`, its Pods are read: if
   the head is missing for `HEAD_MISSING_TIMEOUT`, or there and not Ready for `HEAD_UNREADY_TIMEOUT`, the cluster is
   lost. Only time that was watched counts: while the API server was away, or no operator led, reports were not received
   and heads not seen. A head whose node is lost is not waited for.
4. A driver that reports runs, though KubeRay may not know of it yet.

`ray_job_outcome` reads a RayJob's status. KubeRay (1.5 to 1.7) has three words for it that don't always agree: the Ray
job's own status, which can be old; the deployment's, which counts when they differ; and a reason. In order:

1. A terminal job status under Complete counts: SUCCEEDED; FAILED by its exit code; STOPPED, by hand.
2. Failed means that nothing runs any more. What the driver did is known only when the job status is terminal too:
   SUCCEEDED stays a success (the submitter lost its connection at the end), FAILED is read by its exit code. Any other
   one (RUNNING too, which is then out of date) says that the cluster was lost: another attempt may do better.
3. An exit code of the driver: 2 can't work, 75 stopped on request, other small ones failed. A signal's, or none at all
   (Ray lost the process that would know), counts as a lost cluster.
4. ValidationFailed is terminal, though KubeRay doesn't count it so.
5. A RayJob that is suspended (by a queue, for example) is held; its attempt is neither lost nor over.
6. Words that are not known here decide nothing: the run goes on waiting, and its status says which they were.

Times are seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal

from tapforge_api.progress import EXIT_CONFIGURATION, EXIT_STOPPED
from tapforge_operator import labels
from tapforge_operator.kube.objectmeta import seconds
from tapforge_operator.kube.types import RayJob, RayPod
from tapforge_operator.trainingrun.state import PlanBuilder

#: reason of a disruption that a Pod's own status can't report
NODE_LOST: Final = "NodeLost"

FINISH_TIMEOUT: Final = 120.0
REPORT_TIMEOUT: Final = 30.0
HEAD_MISSING_TIMEOUT: Final = 10.0
HEAD_UNREADY_TIMEOUT: Final = 300.0

#: waiting: nothing runs yet. queued: it is suspended. running: the driver runs. finishing: the driver has ended, and
#: KubeRay is about to say so. The rest is final for the attempt; of `lost` the run tries again
Kind = Literal["waiting", "queued", "running", "finishing", "succeeded", "failed", "stopped", "lost"]

FINAL: Final = ("succeeded", "failed", "stopped", "lost")

_EXIT_CODE: Final = re.compile(r"exit code (-?\d+)")
#: characters of another program's message that are worth repeating: its end, where a log ends
_EXCERPT: Final = 1500


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: Kind
    #: one word
    reason: str
    #: a sentence for people
    message: str


def ray_job_outcome(job: RayJob) -> Outcome:
    match job.deployment:
        case "Complete":
            return _ended(job)
        case "Failed":
            return _failed(job)
        case "ValidationFailed":
            return Outcome("failed", "ValidationFailed", f"KubeRay refused RayJob {job.name}: {_excerpt(job.message)}")
        case "Suspending" | "Suspended":
            return _held(job)
        # KubeRay calls one that is held from its creation on Initializing for a moment, too.
        case "" | "Initializing" if job.suspended:
            return _held(job)
        case "":
            return Outcome("waiting", "Starting", f"RayJob {job.name} waits for KubeRay")
        case "Initializing":
            return Outcome("waiting", "Starting", "the Ray cluster starts")
        case "Running":
            return _running(job)
        case "Retrying":
            return Outcome("waiting", "Starting", f"KubeRay starts RayJob {job.name} again")
        case "Waiting":
            return Outcome("waiting", "Starting", f"RayJob {job.name} waits for a Ray job to be submitted by hand")
    return Outcome("waiting", "Unknown", f"RayJob {job.name} is {job.deployment}, which this operator does not know")


def _held(job: RayJob) -> Outcome:
    return Outcome("queued", "Queued", f"RayJob {job.name} is held by a queue")


def _running(job: RayJob) -> Outcome:
    match job.job_status:
        case "RUNNING":
            return Outcome("running", "Running", "the driver runs")
        case "SUCCEEDED" | "FAILED" | "STOPPED":
            return Outcome("finishing", "Finishing", f"the driver has ended as {job.job_status}; KubeRay cleans up")
        case "" | "PENDING":
            return Outcome("waiting", "Starting", "the driver is being started")
    return Outcome("waiting", "Unknown", f"Ray job {job.job_status} is a status that this operator does not know")


def _ended(job: RayJob) -> Outcome:
    match job.job_status:
        case "SUCCEEDED":
            return Outcome("succeeded", "Complete", "the run is complete")
        case "FAILED":
            return _by_exit_code(job)
        case "STOPPED":
            return Outcome("failed", "Stopped", f"the Ray job of RayJob {job.name} was stopped by hand")
    return Outcome("lost", "ClusterLost", f"RayJob {job.name} ended without a report of what became of the driver")


def _failed(job: RayJob) -> Outcome:
    detail = f": {_excerpt(job.message)}" if job.message else ""
    match job.reason, job.job_status:
        case "ValidationFailed", _:
            return Outcome("failed", "ValidationFailed", f"KubeRay refused RayJob {job.name}{detail}")
        case "DeadlineExceeded", _:
            return Outcome("failed", "DeadlineExceeded", f"the deadline of RayJob {job.name} has passed{detail}")
        case _, "SUCCEEDED":
            return Outcome("succeeded", "Complete", "the run is complete")
        case _, "STOPPED":
            return Outcome("failed", "Stopped", f"the Ray job of RayJob {job.name} was stopped by hand")
        case "SubmissionFailed", "" | "PENDING":
            return Outcome("lost", "SubmissionFailed", f"the driver could not be handed to Ray{detail}")
        case _, "FAILED":
            return _by_exit_code(job)
    return Outcome(
        "lost", "ClusterLost", f"the Ray cluster of RayJob {job.name} was lost ({job.reason or 'Failed'}){detail}"
    )


def _by_exit_code(job: RayJob) -> Outcome:
    found = _EXIT_CODE.search(job.message)
    excerpt = _excerpt(job.message)
    if found is None:
        return Outcome("lost", "ClusterLost", f"the driver was lost: {excerpt or job.reason or 'Ray does not say why'}")
    code = int(found[1])
    if code == EXIT_CONFIGURATION:
        return Outcome("failed", "Configuration", f"the run can't work as it is written: {excerpt}")
    if code == EXIT_STOPPED:
        return Outcome("stopped", "Stopped", "the driver stopped after a checkpoint")
    if code < 0 or code > 128:
        return Outcome("lost", "DriverKilled", f"the driver was killed: {excerpt}")
    return Outcome("failed", "DriverFailed", f"the driver failed: {excerpt}")


def _excerpt(message: str) -> str:
    text = "".join(c for c in message.strip() if c in "\n\t" or c.isprintable())
    if len(text) <= _EXCERPT:
        return text
    begin = text.partition("\n")[0][:200]
    return f"{begin} ... {text[len(begin) - _EXCERPT :]}"


# --- the attempt ---------------------------------------------------------------------------------------------------


def attempt_outcome(plan: PlanBuilder) -> Outcome:
    job, report = plan.job, plan.report
    by_kuberay = ray_job_outcome(job) if job is not None else None
    taken = job is not None and job.queued
    if report is not None and report.final and not (report.final in ("stopped", "failed") and taken):
        return _by_driver(plan, by_kuberay)
    if job is None or by_kuberay is None:
        name = labels.ray_job_name(plan.run.name, plan.attempt.number)
        return Outcome("lost", "RayJobDeleted", f"RayJob {name} was deleted by another client")
    if job.deleting:
        return Outcome("waiting", "Removing", f"RayJob {job.name} is being deleted by another client")
    if taken and by_kuberay.kind not in FINAL:
        return _held(job)
    if by_kuberay.kind == "running":
        return _by_head(plan) or by_kuberay
    if by_kuberay.kind == "waiting" and report is not None:
        return Outcome("running", "Running", "the driver runs")
    return by_kuberay


def _is(outcome: Outcome | None, kind: str) -> bool:
    return outcome is not None and outcome.kind == kind


def _by_driver(plan: PlanBuilder, by_kuberay: Outcome | None) -> Outcome:
    report = plan.report
    assert report is not None
    why = report.message or "it does not say why"
    if report.final == "stopped":
        return Outcome("stopped", "Stopped", f"the driver stopped: {why}")
    left = plan.observed.reported + FINISH_TIMEOUT - plan.now
    counted = by_kuberay is None or by_kuberay.kind in FINAL
    if report.final == "failed" and (since := _head_gone_since(plan, counted)):
        if by_kuberay is not None and _is(by_kuberay, "lost"):
            return by_kuberay
        if not counted and plan.now - since >= HEAD_MISSING_TIMEOUT:
            return Outcome("lost", "HeadLost", f"the Pod of Ray's head is gone, and the driver failed with it: {why}")
        left = min(left, since + HEAD_MISSING_TIMEOUT - plan.now)
    if not counted and left > 0:
        plan.requeue(left)
        return Outcome("finishing", "Finishing", f"the driver has ended as {report.final}; KubeRay cleans up")
    match report.final:
        case "complete":
            return Outcome("succeeded", "Complete", "the run is complete")
        case "configuration":
            return Outcome("failed", "Configuration", f"the run can't work as it is written: {why}")
        case _:
            return Outcome("failed", "DriverFailed", f"the driver failed: {why}")


def _by_head(plan: PlanBuilder) -> Outcome | None:
    """That the cluster is lost, though KubeRay says that the driver runs."""
    reported = plan.observed.reported if plan.report is not None else 0.0
    # What is later than now was written before the clock was set.
    times = (reported, seconds(plan.attempt.since), plan.observed.watching_since)
    silent = plan.now - max((time for time in times if time <= plan.now), default=plan.now)
    if silent < REPORT_TIMEOUT:
        plan.requeue(REPORT_TIMEOUT - silent)
        _head_found(plan)
        return None
    if plan.attempt.disruption == NODE_LOST:
        return Outcome("lost", NODE_LOST, "the node of Ray's head does not answer")
    plan.do(read_pods=True)
    plan.requeue(HEAD_MISSING_TIMEOUT)
    pods = plan.observed.pods
    if pods is None:
        return None
    head = next((pod for pod in pods if pod.head and not pod.gone), None)
    if head is not None:
        _head_found(plan)
        if head.ready or silent < HEAD_UNREADY_TIMEOUT:
            return None
        silence = f"the driver has reported nothing for {HEAD_UNREADY_TIMEOUT:g} s"
        text = f"Pod {head.name} of Ray's head is not Ready, and {silence}"
        return Outcome("lost", "HeadSilent", text)
    since = plan.history.head_missing_since
    if not since or not plan.observed.watching_since <= since <= plan.now:
        plan.remember(replace(plan.history, head_missing_since=plan.now))
        return None
    if plan.now - since < HEAD_MISSING_TIMEOUT:
        return None
    return Outcome("lost", "HeadLost", _head_lost_message(pods))


def _head_gone_since(plan: PlanBuilder, counted: bool) -> float:
    """Since when the attempt's head is known to be gone; 0 while it is not, and for one that went after KubeRay had
    `counted`, which then tidies up."""
    head, since = plan.observed.head, plan.history.head_missing_since
    if head is None or head.attempt != plan.attempt.number or not head.gone:
        return 0.0
    if max(plan.observed.watching_since, seconds(plan.attempt.since)) <= since <= plan.now:
        return since
    if counted:
        return 0.0
    plan.remember(replace(plan.history, head_missing_since=plan.now))
    return plan.now


def _head_found(plan: PlanBuilder) -> None:
    if plan.history.head_missing_since:
        plan.remember(replace(plan.history, head_missing_since=0.0))


def _head_lost_message(pods: tuple[RayPod, ...]) -> str:
    detail = next((f": {pod.message}" for pod in pods if pod.head and pod.message), "")
    return f"the Pod of Ray's head is gone{detail}"
