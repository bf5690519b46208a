"""At its deadline a run stops in order and fails; only time in which it was active counts."""

from __future__ import annotations

from runs_made import begin, job, lasting, lose

from tapforge_operator.kube.objectmeta import timestamp
from tapforge_operator.trainingrun.status import events


def test_time_in_a_queue_does_not_count() -> None:
    story = lasting(activeDeadlineSeconds=1000).started("/Suspended")
    story.plan(5000)
    assert story.ready == ("False", "Queued") and story.run.status.active_time == ""
    story.plan(jobs=(job(1, "/Initializing"),))
    let_in = story.run.status.active_time
    assert let_in == timestamp(story.now)
    assert story.plan(900, jobs=(job(1, "RUNNING/Running"),)).orders.stop == ""
    story.plan(jobs=(job(1, "RUNNING/Suspending", suspended=True),))
    story.plan(5000, jobs=(job(1, "/Suspended", suspended=True),))
    assert story.ready == ("False", "Queued"), "held for longer than it may be active"
    story.plan(jobs=(job(1, "RUNNING/Running"),))
    assert story.run.status.active_time > let_in
    assert story.plan(999).orders.stop == ""
    assert story.plan(2).orders.stop == "deadline"


def test_at_its_deadline_a_run_stops_in_order_and_fails() -> None:
    story = lasting(activeDeadlineSeconds=1000, suspendGraceSeconds=50).started()
    assert story.plan(900).orders.stop == ""
    assert story.plan(100).orders.stop == "deadline"
    story.reports(update=6, final="stopped", checkpoint={"update": 6, "path": "/storage/6"})
    assert story.plan().delete_jobs
    story.plan(jobs=())
    assert story.condition("Failed") == ("True", "DeadlineExceeded") and "update 6" in story.run.status.message


def test_time_that_a_run_was_suspended_does_not_count() -> None:
    story = lasting(activeDeadlineSeconds=1000).started()
    story.plan(500)
    story.edit(suspend=True)
    story.plan()
    story.reports(final="stopped")
    story.plan()
    story.plan(jobs=())
    story.plan(5000)
    assert story.ready == ("True", "Suspended")
    story.edit(suspend=False)
    begin(story, 1)
    story.plan(900)
    assert story.ready == ("True", "Running")


def test_a_deadline_passes_between_attempts_too() -> None:
    story = lasting(activeDeadlineSeconds=1000).started()
    lose(story)
    story.plan(2000)
    assert story.condition("Failed") == ("True", "DeadlineExceeded")


def test_the_last_word_about_a_run_is_its_end_also_when_a_late_rayjob_arrives() -> None:
    """A create that an operator had sent before it died: its attempt was given up at the deadline meanwhile."""
    story = lasting(activeDeadlineSeconds=1000).started()
    lose(story)
    story.plan(6)
    story.plan()
    assert story.phase == "Intended"
    story.restart()
    story.plan(2000)
    story.plan()
    assert story.condition("Failed") == ("True", "DeadlineExceeded")
    before = story.run.status
    late = job(before.attempt.number, "RUNNING/Running")
    assert story.plan(jobs=(late,)).orders.stop == "superseded"
    assert list(events(before, story.run.status)) == []
    assert story.plan(121).delete_jobs == (late,)
