"""Every status that KubeRay can write, in every combination."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs_made import job

from tapforge_operator.trainingrun.outcome import FINAL, ray_job_outcome

JOB = ("", "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED")
DEPLOYMENT = (
    "",
    "Initializing",
    "Running",
    "Complete",
    "Failed",
    "ValidationFailed",
    "Suspending",
    "Suspended",
    "Retrying",
    "Waiting",
)
REASON = (
    "",
    "SubmissionFailed",
    "DeadlineExceeded",
    "PreRunningDeadlineExceeded",
    "AppFailed",
    "JobDeploymentStatusTransitionGracePeriodExceeded",
    "JobStatusCheckTimeoutExceeded",
    "ValidationFailed",
)

# What each column (the job's status) is under each row (the deployment's), with no reason and no message.
TABLE = """
                   (none)     PENDING    RUNNING    STOPPED    SUCCEEDED  FAILED
(none)             waiting    waiting    waiting    waiting    waiting    waiting
Initializing       waiting    waiting    waiting    waiting    waiting    waiting
Running            waiting    waiting    running    finishing  finishing  finishing
Complete           lost       lost       lost       failed     succeeded  lost
Failed             lost       lost       lost       failed     succeeded  lost
ValidationFailed   failed     failed     failed     failed     failed     failed
Suspending         queued     queued     queued     queued     queued     queued
Suspended          queued     queued     queued     queued     queued     queued
Retrying           waiting    waiting    waiting    waiting    waiting    waiting
Waiting            waiting    waiting    waiting    waiting    waiting    waiting
"""

# The same under Failed with a reason.
FAILED = """
                                                   (none)  PENDING  RUNNING  STOPPED  SUCCEEDED  FAILED
SubmissionFailed                                   lost    lost     lost     failed   succeeded  lost
DeadlineExceeded                                   failed  failed   failed   failed   failed     failed
PreRunningDeadlineExceeded                         lost    lost     lost     failed   succeeded  lost
AppFailed                                          lost    lost     lost     failed   succeeded  lost
JobDeploymentStatusTransitionGracePeriodExceeded   lost    lost     lost     failed   succeeded  lost
JobStatusCheckTimeoutExceeded                      lost    lost     lost     failed   succeeded  lost
ValidationFailed                                   failed  failed   failed   failed   failed     failed
"""


def rows(table: str) -> dict[tuple[str, str], str]:
    head, *lines = [line.split() for line in table.strip().splitlines()]
    plain = {"(none)": ""}
    return {
        (plain.get(row, row), plain.get(column, column)): kind
        for row, *kinds in lines
        for column, kind in zip(head, kinds, strict=True)
    }


def test_the_table_is_complete() -> None:
    assert set(rows(TABLE)) == set(itertools.product(DEPLOYMENT, JOB))
    assert set(rows(FAILED)) == set(itertools.product(REASON[1:], JOB))


@pytest.mark.parametrize(("where", "kind"), rows(TABLE).items(), ids=str)
def test_a_status_means_this(where: tuple[str, str], kind: str) -> None:
    deployment, status = where
    assert ray_job_outcome(job(job_status=status, deployment=deployment)).kind == kind


@pytest.mark.parametrize(("where", "kind"), rows(FAILED).items(), ids=str)
def test_a_failure_with_a_reason_means_this(where: tuple[str, str], kind: str) -> None:
    reason, status = where
    assert ray_job_outcome(job(job_status=status, deployment="Failed", reason=reason)).kind == kind


@pytest.mark.parametrize("deployment", [d for d in DEPLOYMENT if d != "Failed"])
@pytest.mark.parametrize("status", JOB)
def test_a_reason_decides_nothing_but_a_failure(deployment: str, status: str) -> None:
    kinds = {ray_job_outcome(job(job_status=status, deployment=deployment, reason=reason)).kind for reason in REASON}
    assert len(kinds) == 1


EXIT = "Job entrypoint command failed with exit code {}, last available logs (truncated to 20,000 chars):\nBoom\n"


@pytest.mark.parametrize("deployment", ["Failed", "Complete"])
@pytest.mark.parametrize("reason", ["AppFailed", "SubmissionFailed", ""])
@pytest.mark.parametrize(
    ("code", "kind", "word"),
    [
        ("1", "failed", "DriverFailed"),
        ("2", "failed", "Configuration"),
        ("75", "stopped", "Stopped"),
        ("127", "failed", "DriverFailed"),
        ("137", "lost", "DriverKilled"),
        ("-9", "lost", "DriverKilled"),
    ],
)
def test_a_failed_driver_is_read_by_its_exit_code(
    deployment: str, reason: str, code: str, kind: str, word: str
) -> None:
    verdict = ray_job_outcome(job(state=f"FAILED/{deployment}", reason=reason, message=EXIT.format(code)))
    assert (verdict.kind, verdict.reason) == (kind, word)
    assert kind == "stopped" or "Boom" in verdict.message


@pytest.mark.parametrize(
    ("state", "reason", "message", "kind"),
    [
        ("FAILED/Failed", "AppFailed", "Unexpected error occurred: The actor died unexpectedly before...", "lost"),
        ("FAILED/Failed", "AppFailed", "Job supervisor actor failed to start within 900 seconds.", "lost"),
        ("RUNNING/Failed", "SubmissionFailed", "Job submission has failed. Reason: BackoffLimitExceeded.", "lost"),
        ("RUNNING/Failed", "AppFailed", "Submitter completed but Ray job not found in RayCluster.", "lost"),
        ("/Failed", "AppFailed", "Ray head pod not found.", "lost"),
        ("SUCCEEDED/Complete", "JobDeploymentStatusTransitionGracePeriodExceeded", "…", "succeeded"),
    ],
)
def test_what_kuberay_was_seen_to_write(state: str, reason: str, message: str, kind: str) -> None:
    assert ray_job_outcome(job(state=state, reason=reason, message=message)).kind == kind


def test_a_rayjob_that_a_queue_holds_from_its_birth_is_queued() -> None:
    assert ray_job_outcome(job(suspended=True)).kind == "queued"


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30), st.text(max_size=5000))
def test_words_that_nobody_knows_decide_nothing(status: str, deployment: str, reason: str, message: str) -> None:
    verdict = ray_job_outcome(job(job_status=status, deployment=deployment, reason=reason, message=message))
    assert verdict.kind not in FINAL or deployment in ("Complete", "Failed", "ValidationFailed")
    assert verdict.reason.isalnum() and len(verdict.message) < 4096


def test_a_long_message_keeps_its_end() -> None:
    verdict = ray_job_outcome(
        job(state="FAILED/Failed", message=EXIT.format(1) + "x" * 20_000 + "\nCUDA out of memory")
    )
    assert verdict.message.endswith("CUDA out of memory") and "exit code 1" in verdict.message
