"""A run that is over stays so, says why, and leaves no machines behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from runs_made import begin, job, lasting, lose

from tapforge_operator.trainingrun.status import read_status


def test_complete_is_for_ever() -> None:
    story = lasting().started()
    story.reports(update=10)
    done = story.plan(jobs=(job(1, "SUCCEEDED/Complete"),))
    assert story.ready == ("True", "Complete") and "10 updates" in done.status.message
    for jobs in ((), (job(1, "FAILED/Failed"),), (job(2, "RUNNING/Running"),)):
        plan = story.plan(jobs=jobs)
        assert story.ready == ("True", "Complete") and plan.status.completion_time == done.status.completion_time
        assert not plan.create_job and plan.orders.stop == "superseded"
    story.edit(suspend=True)
    story.plan()
    assert story.ready == ("True", "Complete") and story.condition("Suspended")[0] == "False"
    assert story.run.status.observed_generation == 2


def test_complete_is_for_ever_also_when_a_later_release_said_more_of_it() -> None:
    story = lasting().started()
    story.reports(update=10, final="complete")
    story.plan(jobs=(job(1, "SUCCEEDED/Complete"),))
    written = story.run.status.model_dump(mode="json", by_alias=True)
    written |= {"evaluation": {"success": 0.98}, "attempt": {**written["attempt"], "phase": "Archived"}}
    story.run = replace(story.run, status=read_status(written))
    story.restart()
    plan = story.plan(jobs=(), config=written["resolved"])
    assert story.ready == ("True", "Complete") and not plan.create_job and plan.status.attempts == 1


@pytest.mark.parametrize("there", [True, False])
def test_after_a_phase_of_a_later_release_no_attempt_number_is_used_twice(there: bool) -> None:
    story = lasting().started()
    written = story.run.status.model_dump(mode="json", by_alias=True)
    written["attempt"] = {**written["attempt"], "phase": "Draining", "node": "n"}
    story.run = replace(story.run, status=read_status(written))
    story.restart()
    plan = story.plan(jobs=(job(1, "RUNNING/Running"),) if there else ())
    if there:
        assert (story.phase, plan.status.attempt.number) == ("Active", 1)
        return
    assert (story.phase, plan.create_job) == ("Over", 0)
    for _ in range(3):
        plan = story.plan(400.0)
    assert plan.create_job == plan.status.attempts == 2


@pytest.mark.parametrize(
    ("state", "message", "reason"),
    [
        ("FAILED/Failed", "exit code 2: unknown task", "Configuration"),
        ("FAILED/Failed", "exit code 1: boom", "DriverFailed"),
        ("/ValidationFailed", "name too long", "ValidationFailed"),
        ("STOPPED/Complete", "", "Stopped"),
    ],
)
def test_what_another_attempt_would_not_mend_fails_at_once(state: str, message: str, reason: str) -> None:
    story = lasting().started()
    story.plan(jobs=(job(1, state, message=message),))
    assert story.condition("Failed") == ("True", reason) and story.condition("Stalled") == ("True", reason)
    assert message.rpartition(": ")[2] in story.run.status.message
    assert not story.plan().create_job


def test_what_the_driver_says_counts_more_than_how_its_rayjob_ends() -> None:
    for final, kind, reason in [
        ("complete", "Complete", "Complete"),
        ("failed", "Failed", "DriverFailed"),
        ("configuration", "Failed", "Configuration"),
    ]:
        story = lasting().started()
        story.reports(final=final, message="no such task")
        assert story.ready == ("True", "Finishing"), "KubeRay has not said it yet"
        story.plan(jobs=(job(1, "RUNNING/Failed", reason="SubmissionFailed"),))
        assert story.condition(kind) == ("True", reason)
        assert final == "complete" or "no such task" in story.run.status.message


def test_kuberay_has_two_minutes_to_see_that_a_driver_ended() -> None:
    story = lasting().started()
    plan = story.reports(final="complete")
    assert plan.requeue_after == pytest.approx(120)
    story.plan(119)
    assert story.ready == ("True", "Finishing")
    story.plan(2)
    assert story.ready == ("True", "Complete")
    assert not story.plan(100).delete_jobs
    assert story.plan(21).delete_jobs == (job(1, "RUNNING/Running"),), "its machines are not left behind"


def test_the_rayjob_goes_when_its_time_is_up() -> None:
    story = lasting(ttlSecondsAfterFinished=600).started()
    story.plan(jobs=(job(1, "SUCCEEDED/Complete"),))
    assert story.plan().requeue_after == pytest.approx(599)
    assert not story.plan(597).delete_jobs
    assert story.plan(2).delete_jobs
    assert not story.plan(jobs=()).requeue_after


def test_without_a_time_it_stays_with_the_run() -> None:
    story = lasting().started()
    story.plan(jobs=(job(1, "SUCCEEDED/Complete"),))
    plan = story.plan(1e7)
    assert not plan.delete_jobs and plan.requeue_after is None and plan.status.ray_job == "run-1"


@pytest.mark.parametrize("suspended", [False, True])
def test_rayjobs_of_other_attempts_go_whenever_they_turn_up(suspended: bool) -> None:
    stray = job(1, "RUNNING/Running")
    story = lasting().started()
    lose(story)
    begin(story)
    now = story.observed.jobs
    assert story.plan(jobs=(stray, *now)).delete_jobs == (stray,)
    story.plan(jobs=(stray, job(2, "SUCCEEDED/Complete")))
    assert story.plan().delete_jobs == (stray,)
    story = lasting().started()
    lose(story)
    story.edit(suspend=suspended)
    story.plan(400, jobs=(stray,))
    assert story.last is not None and story.last.delete_jobs == (stray,) and not story.last.create_job
    assert story.ready == (("True", "Suspended") if suspended else ("False", "Removing"))


def test_a_run_that_is_being_deleted_is_left_alone() -> None:
    story = lasting().started()
    story.run = replace(story.run, deleting=True)
    plan = story.plan(jobs=())
    assert plan.status == story.run.status and not plan.create_job and not plan.delete_jobs
