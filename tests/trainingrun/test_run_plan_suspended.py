"""A suspended run stops with a checkpoint, gives its machines back, and goes on from there."""

from __future__ import annotations

import pytest
from runs_made import BUCKET, POOL, Story, begin, job, lasting, made, pool


def test_to_suspend_is_to_order_a_checkpoint_and_take_the_machines_away() -> None:
    story = lasting(suspendGraceSeconds=90).started()
    story.reports(update=4)
    story.edit(suspend=True)
    plan = story.plan()
    assert plan.orders.stop == "suspend" and plan.orders.grace_seconds == pytest.approx(90) and not plan.delete_jobs
    assert story.ready == ("False", "Stopping")
    assert story.plan(30).orders.grace_seconds == pytest.approx(60, abs=1)
    story.reports(update=5, final="stopped", checkpoint={"update": 5, "path": "/storage/5"})
    assert story.plan().delete_jobs and story.plan().orders.stop == "superseded"
    story.plan(jobs=())
    story.plan()
    assert story.ready == ("True", "Suspended") and story.condition("Suspended") == ("True", "Suspended")
    assert "update 5" in story.run.status.message and story.run.status.ray_job == ""
    story.edit(suspend=False)
    assert begin(story, 1) == 2 and story.run.status.lost_clusters == 0


def test_a_driver_that_does_not_obey_loses_its_machines_after_the_grace() -> None:
    story = lasting(suspendGraceSeconds=90).started()
    story.edit(suspend=True)
    story.plan()
    assert not story.plan(88).delete_jobs
    story.plan(3)
    assert story.plan().delete_jobs


def test_a_restarted_operator_gives_no_second_grace() -> None:
    story = lasting(suspendGraceSeconds=90).started()
    story.edit(suspend=True)
    story.plan()
    story.restart()
    assert story.plan(60).orders.stop == "suspend"
    story.plan(31)
    assert story.plan().delete_jobs


def test_a_suspension_is_not_taken_back_half_way() -> None:
    story = lasting().started()
    story.edit(suspend=True)
    story.plan()
    story.edit(suspend=False)
    assert story.plan().orders.stop == "suspend"
    story.reports(final="stopped")
    story.plan()
    story.plan(jobs=())
    assert begin(story, 1) == 2


@pytest.mark.parametrize("state", ["/Initializing", "PENDING/Running", "/Suspended"])
def test_nobody_asks_a_driver_that_does_not_run(state: str) -> None:
    story = lasting().started(state)
    story.edit(suspend=True)
    story.plan()
    assert story.plan().delete_jobs


def test_a_run_that_completes_while_it_is_suspended_is_complete() -> None:
    story = lasting().started()
    story.edit(suspend=True)
    story.plan()
    story.plan(jobs=(job(1, "SUCCEEDED/Complete"),))
    assert story.ready == ("True", "Complete")


def test_a_run_that_is_applied_suspended_does_not_start() -> None:
    story = Story(made(suspend=True, environment=POOL))
    for _ in range(3):
        plan = story.plan(pool=pool())
    assert story.ready == ("True", "Suspended") and not plan.status.start_time and not plan.status.attempts


def test_checkpoints_in_object_storage_outlast_a_suspension() -> None:
    story = Story(made(checkpoints=BUCKET)).started()
    assert "lost" not in story.run.status.message
    path = "s3://lab/runs/team/uid/tiny/update-00000003"
    story.reports(update=3, checkpoint={"update": 3, "path": path})
    story.edit(suspend=True)
    story.plan()
    story.reports(final="stopped")
    story.plan()
    story.plan(jobs=())
    story.plan()
    assert "the checkpoint of update 3" in story.run.status.message
    story.edit(suspend=False)
    begin(story, 1)
    assert story.run.status.checkpoint is not None and story.run.status.checkpoint.path == path


def test_without_storage_a_suspension_says_what_it_costs() -> None:
    story = Story().started()
    assert "lost with the Ray cluster" in story.run.status.message
    story.reports(update=3, checkpoint={"update": 3, "path": "/data/3"})
    story.edit(suspend=True)
    story.plan()
    story.reports(final="stopped")
    story.plan()
    story.plan(jobs=())
    story.plan()
    assert "its beginning" in story.run.status.message
    story.edit(suspend=False)
    begin(story, 1)
    assert story.run.status.checkpoint is None
