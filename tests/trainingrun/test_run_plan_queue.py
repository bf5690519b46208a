"""A queue may hold a run's RayJob and evict it: that is neither a lost cluster nor another attempt."""

from __future__ import annotations

import pytest
from runs_made import job, lasting


def test_a_queue_may_hold_the_rayjob_and_take_it_back() -> None:
    story = lasting().started("/Initializing")
    story.plan(jobs=(job(1, "/Initializing", suspended=True),))
    assert story.ready == ("False", "Queued"), "KubeRay has not come to it yet"
    story.plan(jobs=(job(1, "/Suspended", suspended=True),))
    assert story.ready == ("False", "Queued") and story.condition("Suspended") == ("True", "Queued")
    story.plan(jobs=(job(1, "RUNNING/Running"),))
    story.reports(update=2)
    assert story.ready == ("True", "Running")
    story.plan(jobs=(job(1, "RUNNING/Suspending", suspended=True),))
    story.reports(final="stopped", message="SIGTERM")
    assert story.ready == ("False", "Queued") and story.run.status.lost_clusters == 0
    story.plan(jobs=(job(1, "/Initializing"),))
    assert story.ready == ("False", "Starting"), "what the driver said before is old"
    story.plan(jobs=(job(1, "RUNNING/Running"),))
    assert story.ready == ("True", "Running") and story.run.status.attempts == 1


def test_a_driver_may_stop_for_a_queue_before_kuberay_says_that_one_has_its_rayjob() -> None:
    story = lasting().started()
    story.plan(jobs=(job(1, "RUNNING/Running", suspended=True),))
    story.reports(update=2, final="stopped", message="SIGTERM")
    assert story.phase == "Active" and story.run.status.lost_clusters == 0
    story.plan(jobs=(job(1, "RUNNING/Suspending", suspended=True),))
    story.plan(jobs=(job(1, "/Suspended", suspended=True),))
    assert story.ready == ("False", "Queued")
    story.plan(jobs=(job(1, "/Initializing"),))
    assert story.ready == ("False", "Starting") and story.run.status.attempts == 1


@pytest.mark.parametrize("final", ["stopped", "failed", "complete"])
def test_what_a_driver_of_an_evicted_cluster_says_late_is_not_about_the_new_one(final: str) -> None:
    story = lasting().started()
    story.plan(jobs=(job(1, "RUNNING/Running", cluster="run-1-old"),))
    story.reports(update=2, cluster="run-1-old")
    story.plan(jobs=(job(1, "/Suspended", suspended=True),))
    story.plan(jobs=(job(1, "/Initializing", cluster="run-1-new"),))
    story.reports(update=3, final=final, cluster="run-1-old")
    assert story.ready == ("False", "Starting") and story.phase == "Active"
    story.plan(jobs=(job(1, "RUNNING/Running", cluster="run-1-new"),))
    assert story.ready == ("True", "Running") and story.run.status.progress.update == 2
    story.reports(update=4, cluster="run-1-new")
    assert story.run.status.progress.update == 4
