"""Runs whose RayJobs can't be read for now: nothing is decided on one that nobody can see."""

from __future__ import annotations

from dataclasses import replace

import pytest
from runs_made import NO_KUBERAY, OWN, Story, job, lasting, made, pool

from tapforge_operator.kube.objectmeta import Unavailable
from tapforge_operator.kube.types import RayHead

AWAY = Unavailable("RayJobsUnavailable", "conversion webhook failed")
FORBIDDEN = Unavailable("RayJobsForbidden", "may not", stalls=True)


def intended() -> Story:
    story = Story()
    story.plan()
    return story


def stopping() -> Story:
    story = lasting(suspendGraceSeconds=600).started()
    story.edit(suspend=True)
    story.plan()
    return story


def removing() -> Story:
    story = lasting().started()
    story.plan(jobs=(job(1, "RUNNING/Failed", reason="x"),))
    return story


@pytest.mark.parametrize("missing", [AWAY, FORBIDDEN, NO_KUBERAY])
@pytest.mark.parametrize("begin", [intended, lambda: lasting().started(), stopping, removing])
def test_an_attempt_whose_rayjob_can_not_be_seen_stays_as_it_is_and_says_why(begin, missing: Unavailable) -> None:
    """As under a new leader, which knows of no RayJob yet."""
    story = begin()
    before = story.run.status
    seen = story.observed.jobs
    story.restart()
    for _ in range(3):
        planned = story.plan(120.0, jobs=(), no_ray_jobs=missing)
        now = story.run.status
        assert now.attempt == before.attempt and now.attempts == before.attempts and now.failures == before.failures
        assert now.ray_job == before.ray_job
        assert not planned.create_job and not planned.delete_jobs and planned.requeue_after
        assert story.ready == ("False", missing.reason) and missing.message in now.message
        assert story.condition("Stalled")[0] == str(missing.stalls)
    assert planned.orders.stop == {"Stopping": "suspend", "Removing": "superseded"}.get(story.phase, "")
    if seen:
        story.plan(jobs=seen, no_ray_jobs=None)
        assert story.run.status.attempts == 1 and story.ready[1] != missing.reason


def test_a_rayjob_that_is_gone_when_it_can_be_read_again_was_deleted() -> None:
    story = lasting().started()
    story.plan(jobs=(), no_ray_jobs=AWAY)
    story.plan(no_ray_jobs=None)
    assert story.phase == "Removing" and story.run.status.lost_clusters == 1


def test_what_was_seen_before_counts_on() -> None:
    story = Story().started()
    story.reports(update=3)
    story.plan(no_ray_jobs=AWAY)
    assert story.ready == ("True", "Running")


def test_a_run_that_did_not_begin_waits_for_an_api_that_fails() -> None:
    story = Story()
    story.plan(no_ray_jobs=AWAY)
    assert story.condition("Reconciling") == ("True", "RayJobsUnavailable") and not story.run.status.attempts
    story.plan(no_ray_jobs=None)
    assert story.phase == "Intended"


def test_a_head_that_could_not_be_listed_may_be_there() -> None:
    """The own pool of a run that a queue takes stays for the head's grace."""
    there = pool(name="run", owned=True, largest=2)
    queue = {"kueue.x-k8s.io/queue-name": "gpus"}
    story = Story(made(labels=queue, environment=OWN), phone_checks=frozenset({"phones"}), pool=there).started()
    held = replace(job(1, "/Suspended"), suspended=True)
    assert not story.plan(jobs=(held,), heads_known=False).delete_pool
    head = RayHead("team", "run-1-head", "head", "1", story.run.uid, 1)
    assert not story.plan(heads_known=True, head=head).delete_pool
    assert story.plan(head=replace(head, gone=True)).delete_pool == there.uid
