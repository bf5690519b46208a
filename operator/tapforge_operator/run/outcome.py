"""What becomes of the attempt that is on: by its driver's own word, by KubeRay's, and by what is left of its head.

1. A driver that said how it ended is believed. Its run ends when KubeRay says so too, or when it had `PATIENCE` for it.
   A driver that stopped because a queue took its machines has said nothing: the queue gives them back. One that says
   that it failed is not believed when its head went before KubeRay had counted: what is around a driver ends a moment
   before it does, and it takes that for its own failure. Then the cluster is lost.
2. Then KubeRay counts (`translate.py`).
3. KubeRay can take minutes to miss a head. A driver that is silent for `SILENCE` makes us look: if its head is not
   there for `HEADLESS`, or is there and not Ready for `DEAF`, the cluster is lost. Only what was watched counts: while
   the API server was away, or no operator led, nobody could hear the driver or see its head.
   A head whose node is lost is not waited for.
4. A driver that reports runs, though KubeRay may not have heard of it yet.

Times are seconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from .. import names
from .draft import Draft
from .records import RayPod, seconds
from .translate import FINAL, Verdict, translate

#: of a head whose Pod can't say it itself
NODE_LOST: Final = "NodeLost"

PATIENCE: Final = 120.0
SILENCE: Final = 30.0
HEADLESS: Final = 10.0
DEAF: Final = 300.0


def outcome(draft: Draft) -> Verdict:
    job, report = draft.job, draft.report
    by_kuberay = translate(job) if job is not None else None
    taken = _is(by_kuberay, "queued") or (job is not None and job.suspended)
    if report is not None and report.final and not (report.final == "stopped" and taken):
        return _by_driver(draft, by_kuberay)
    if job is None or by_kuberay is None:
        name = names.ray_job_name(draft.run.name, draft.attempt.number)
        return Verdict("lost", "RayJobDeleted", f"RayJob {name} was deleted by somebody")
    if job.deleting:
        return Verdict("waiting", "Removing", f"RayJob {job.name} is being deleted by somebody")
    if by_kuberay.kind == "running":
        return _by_head(draft) or by_kuberay
    if by_kuberay.kind == "waiting" and report is not None:
        return Verdict("running", "Running", "the driver runs")
    return by_kuberay


def _is(verdict: Verdict | None, kind: str) -> bool:
    return verdict is not None and verdict.kind == kind


def _by_driver(draft: Draft, by_kuberay: Verdict | None) -> Verdict:
    report = draft.report
    assert report is not None
    why = report.message or "it does not say why"
    if report.final == "stopped":
        return Verdict("stopped", "Stopped", f"the driver stopped: {why}")
    left = draft.seen.reported + PATIENCE - draft.now
    counted = by_kuberay is None or by_kuberay.kind in FINAL
    if report.final == "failed" and (since := _head_went(draft, counted)):
        if by_kuberay is not None and _is(by_kuberay, "lost"):
            return by_kuberay
        if not counted and draft.now - since >= HEADLESS:
            return Verdict("lost", "HeadLost", f"the Pod of Ray's head is gone, and the driver failed with it: {why}")
        left = min(left, since + HEADLESS - draft.now)
    if not counted and left > 0:
        draft.again(left)
        return Verdict("finishing", "Finishing", f"the driver has ended as {report.final}; KubeRay cleans up")
    match report.final:
        case "complete":
            return Verdict("succeeded", "Complete", "the run is complete")
        case "configuration":
            return Verdict("failed", "Configuration", f"the run can't work as it is written: {why}")
        case _:
            return Verdict("failed", "DriverFailed", f"the driver failed: {why}")


def _by_head(draft: Draft) -> Verdict | None:
    """That the cluster is lost, though KubeRay says that the driver runs."""
    reported = draft.seen.reported if draft.report is not None else 0.0
    # What is later than now was written before the clock was set.
    times = (reported, seconds(draft.attempt.since), draft.seen.watching_since)
    silent = draft.now - max((time for time in times if time <= draft.now), default=draft.now)
    if silent < SILENCE:
        draft.again(SILENCE - silent)
        _head_is_there(draft)
        return None
    if draft.attempt.disruption == NODE_LOST:
        return Verdict("lost", NODE_LOST, "the node of Ray's head does not answer")
    draft.do(look_at_pods=True)
    draft.again(HEADLESS)
    pods = draft.seen.pods
    if pods is None:
        return None
    head = next((pod for pod in pods if pod.head and not pod.gone), None)
    if head is not None:
        _head_is_there(draft)
        if head.ready or silent < DEAF:
            return None
        text = f"Pod {head.name} of Ray's head is not Ready, and the driver has said nothing for {DEAF:g} s"
        return Verdict("lost", "HeadSilent", text)
    since = draft.history.headless
    if not since or not draft.seen.watching_since <= since <= draft.now:
        draft.remember(replace(draft.history, headless=draft.now))
        return None
    if draft.now - since < HEADLESS:
        return None
    return Verdict("lost", "HeadLost", _last_words(pods))


def _head_went(draft: Draft, counted: bool) -> float:
    """Since when the attempt's head is known to be gone; 0 while it is not, and for one that went after KubeRay had
    `counted`, which then tidies up."""
    head, since = draft.seen.head, draft.history.headless
    if head is None or head.attempt != draft.attempt.number or not head.gone:
        return 0.0
    if max(draft.seen.watching_since, seconds(draft.attempt.since)) <= since <= draft.now:
        return since
    if counted:
        return 0.0
    draft.remember(replace(draft.history, headless=draft.now))
    return draft.now


def _head_is_there(draft: Draft) -> None:
    if draft.history.headless:
        draft.remember(replace(draft.history, headless=0.0))


def _last_words(pods: tuple[RayPod, ...]) -> str:
    said = next((f": {pod.message}" for pod in pods if pod.head and pod.message), "")
    return f"the Pod of Ray's head is gone{said}"
