"""What a RayJob's status means for its run.

KubeRay (1.4 to 1.7) says it by three words that don't always agree: the Ray job's own status, which can be old; the
deployment's, which counts when they differ; and a reason. In order:

1. A terminal job status under Complete counts: SUCCEEDED; FAILED by its exit code; STOPPED, which somebody did by hand.
2. Failed means that nothing runs any more. What the driver did is known only when the job status is terminal too:
   SUCCEEDED stays a success (the submitter lost its connection at the end), FAILED is read by its exit code. Any other
   one (RUNNING too, which is then old news) says that the cluster was lost: another attempt may do better.
3. An exit code of the driver: 2 can't work, 75 stopped when it was told to, other small ones failed. A signal's, or
   none at all (Ray lost the process that would know), counts as a lost cluster.
4. ValidationFailed is terminal, though KubeRay doesn't count it so.
5. Whoever suspends the RayJob (a queue) holds the attempt; it is neither lost nor over.
6. Words that are not known here decide nothing: the run goes on waiting, and says which they were.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from tapforge_api.progress import EXIT_CONFIGURATION, EXIT_STOPPED

from .records import RayJob

#: waiting: nothing runs yet. queued: somebody holds it. running: the driver runs. finishing: the driver has ended, and
#: KubeRay is about to say so. The rest is final for the attempt; of `lost` the run tries again
Kind = Literal["waiting", "queued", "running", "finishing", "succeeded", "failed", "stopped", "lost"]

FINAL: Final = ("succeeded", "failed", "stopped", "lost")

_EXIT_CODE: Final = re.compile(r"exit code (-?\d+)")
#: characters of somebody else's message that are worth repeating: its end, where a log's last words are
_WORDS: Final = 1500


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    #: as one word
    reason: str
    #: as a sentence for people
    message: str


def translate(job: RayJob) -> Verdict:
    match job.deployment:
        case "Complete":
            return _ended(job)
        case "Failed":
            return _failed(job)
        case "ValidationFailed":
            return Verdict("failed", "ValidationFailed", f"KubeRay refused RayJob {job.name}: {_words(job.message)}")
        case "Suspending" | "Suspended":
            return Verdict("queued", "Queued", f"RayJob {job.name} is held by a queue")
        case "":
            if job.suspended:
                return Verdict("queued", "Queued", f"RayJob {job.name} is held by a queue")
            return Verdict("waiting", "Starting", f"RayJob {job.name} waits for KubeRay")
        case "Initializing":
            return Verdict("waiting", "Starting", "the Ray cluster starts")
        case "Running":
            return _running(job)
        case "Retrying":
            return Verdict("waiting", "Starting", f"KubeRay starts RayJob {job.name} again")
        case "Waiting":
            return Verdict("waiting", "Starting", f"RayJob {job.name} waits for somebody to hand in a Ray job by hand")
    return Verdict("waiting", "Unknown", f"RayJob {job.name} is {job.deployment}, which this operator does not know")


def _running(job: RayJob) -> Verdict:
    match job.job_status:
        case "RUNNING":
            return Verdict("running", "Running", "the driver runs")
        case "SUCCEEDED" | "FAILED" | "STOPPED":
            return Verdict("finishing", "Finishing", f"the driver has ended as {job.job_status}; KubeRay cleans up")
        case "" | "PENDING":
            return Verdict("waiting", "Starting", "the driver is being started")
    return Verdict("waiting", "Unknown", f"Ray job {job.job_status} is a status that this operator does not know")


def _ended(job: RayJob) -> Verdict:
    match job.job_status:
        case "SUCCEEDED":
            return Verdict("succeeded", "Complete", "the run is complete")
        case "FAILED":
            return _by_exit_code(job)
        case "STOPPED":
            return Verdict("failed", "Stopped", f"somebody stopped the Ray job of RayJob {job.name} by hand")
    return Verdict("lost", "ClusterLost", f"RayJob {job.name} ended without a word of what became of the driver")


def _failed(job: RayJob) -> Verdict:
    said = f": {_words(job.message)}" if job.message else ""
    match job.reason, job.job_status:
        case "ValidationFailed", _:
            return Verdict("failed", "ValidationFailed", f"KubeRay refused RayJob {job.name}{said}")
        case "DeadlineExceeded", _:
            return Verdict("failed", "DeadlineExceeded", f"the deadline of RayJob {job.name} has passed{said}")
        case _, "SUCCEEDED":
            return Verdict("succeeded", "Complete", "the run is complete")
        case _, "STOPPED":
            return Verdict("failed", "Stopped", f"somebody stopped the Ray job of RayJob {job.name} by hand")
        case "SubmissionFailed", "" | "PENDING":
            return Verdict("lost", "SubmissionFailed", f"the driver could not be handed to Ray{said}")
        case _, "FAILED":
            return _by_exit_code(job)
    return Verdict(
        "lost", "ClusterLost", f"the Ray cluster of RayJob {job.name} was lost ({job.reason or 'Failed'}){said}"
    )


def _by_exit_code(job: RayJob) -> Verdict:
    found = _EXIT_CODE.search(job.message)
    words = _words(job.message)
    if found is None:
        return Verdict("lost", "ClusterLost", f"the driver was lost: {words or job.reason or 'Ray does not say why'}")
    code = int(found[1])
    if code == EXIT_CONFIGURATION:
        return Verdict("failed", "Configuration", f"the run can't work as it is written: {words}")
    if code == EXIT_STOPPED:
        return Verdict("stopped", "Stopped", "the driver stopped after a checkpoint")
    if code < 0 or code > 128:
        return Verdict("lost", "DriverKilled", f"the driver was killed: {words}")
    return Verdict("failed", "DriverFailed", f"the driver failed: {words}")


def _words(message: str) -> str:
    text = "".join(c for c in message.strip() if c in "\n\t" or c.isprintable())
    if len(text) <= _WORDS:
        return text
    begin = text.partition("\n")[0][:200]
    return f"{begin} ... {text[len(begin) - _WORDS :]}"
