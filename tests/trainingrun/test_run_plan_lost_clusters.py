"""A lost Ray cluster is noticed, and replaced after a pause, so often and no more."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from runs_made import BUCKET, HEAD, NOON, UID, Story, begin, job, lasting, lose, made

from tapforge_api.learning import Stop
from tapforge_operator.kube.types import RayHead
from tapforge_operator.trainingrun.outcome import NODE_LOST


def test_a_lost_cluster_is_replaced_so_often_and_no_more() -> None:
    story = lasting(backoffLimit=2).started()
    for number in (2, 3):
        lose(story)
        assert story.ready == ("False", "Restarting") and story.run.status.lost_clusters == number - 1
        assert begin(story) == number
        assert story.ready == ("True", "Running")
    lose(story)
    assert story.condition("Failed") == ("True", "BackoffLimitExceeded")
    assert "3 attempts were lost" in story.run.status.message


def test_the_next_attempt_waits_longer_each_time() -> None:
    story = lasting(backoffLimit=20).started()
    pauses = []
    for _ in range(9):
        lose(story)
        pauses.append(story.plan(0).requeue_after)
        begin(story)
    assert pauses[0] == pytest.approx(5, abs=1) and pauses[1] == pytest.approx(10, abs=1)
    assert all(a <= b + 1 for a, b in itertools.pairwise(pauses)) and max(pauses) <= 300


def test_the_next_attempt_waits_until_the_last_one_is_gone() -> None:
    story = lasting().started()
    story.plan(jobs=(job(1, "RUNNING/Failed"),))
    for _ in range(3):
        assert not story.plan(100, jobs=(job(1, "RUNNING/Failed", deleting=True),)).create_job
    story.plan(jobs=())
    assert begin(story) == 2


def test_a_rayjob_that_somebody_deleted_counts_as_lost() -> None:
    story = lasting().started()
    story.plan(jobs=(job(1, "RUNNING/Running", deleting=True),))
    assert story.phase == "Active" and story.ready == ("False", "Removing")
    story.plan(jobs=())
    assert story.run.status.lost_clusters == 1 and "deleted by another client" in story.run.status.attempt.message


def test_a_driver_that_stops_without_an_order_counts_as_lost() -> None:
    story = lasting().started()
    story.reports(final="stopped", message="SIGTERM")
    assert story.run.status.lost_clusters == 1 and story.phase == "Removing"


def test_all_attempts_see_the_run_as_it_was_at_the_start() -> None:
    story = lasting().started()
    first = story.run.status.resolved
    story.edit(stop=Stop(max_updates=7))
    assert story.plan().orders.limits == Stop(max_updates=7), "the driver hears of it"
    lose(story)
    begin(story)
    assert story.run.status.resolved == first and "maxUpdates: 7" not in first


def test_a_head_that_is_gone_is_noticed_before_kuberay_does() -> None:
    story = lasting().started()
    story.reports()
    quiet = story.plan(20)
    assert not quiet.read_pods and quiet.requeue_after == pytest.approx(10, abs=1)
    silent = story.plan(15)
    assert silent.read_pods and silent.requeue_after == 10.0
    story.plan(1, pods=(HEAD,))
    assert story.ready == ("True", "Running"), "it is only silent"
    story.plan(10, pods=(replace(HEAD, phase="Failed", message="OOMKilled"),))
    assert story.run.status.lost_clusters == 0, "one look may be too early"
    story.plan(10)
    assert story.run.status.lost_clusters == 1 and "OOMKilled" in story.run.status.attempt.message


@pytest.mark.parametrize("back", ["report", "head"])
def test_a_head_that_comes_back_is_not_lost(back: str) -> None:
    story = lasting().started()
    story.plan(40, pods=())
    story.plan(5)
    if back == "report":
        story.reports(update=1)
    else:
        story.plan(1, pods=(HEAD,))
    story.plan(40, pods=())
    assert story.run.status.lost_clusters == 0 and story.ready == ("True", "Running")


def test_a_head_that_does_not_answer_for_minutes_is_lost() -> None:
    story = lasting().started()
    story.plan(200, pods=(replace(HEAD, ready=False),))
    assert story.run.status.lost_clusters == 0
    story.plan(101)
    assert story.run.status.attempt.reason == "HeadSilent"


GONE = RayHead("team", "run-1-head", "head-1", "7", UID, 1, NOON, "node-1", gone=True)


@pytest.mark.parametrize("kuberay", ["is silent", "says so"])
def test_a_driver_that_fails_because_its_head_went_has_not_failed(kuberay: str) -> None:
    story = lasting().started()
    story.reports(final="failed", message="the recorder's process ended: owner's node has crashed")
    assert story.ready == ("True", "Finishing")
    assert story.plan(head=GONE).requeue_after == pytest.approx(10)
    if kuberay == "is silent":
        story.plan(9)
        assert story.run.status.lost_clusters == 0, "KubeRay may be about to say that the driver failed"
        story.plan(1)
        assert "the recorder's process ended" in story.run.status.attempt.message
    else:
        story.plan(5, jobs=(job(1, "RUNNING/Failed", reason="SubmissionFailed"),))
    assert story.run.status.lost_clusters == 1 and story.condition("Failed")[0] == "False"


@pytest.mark.parametrize("state", ["FAILED/Failed", "RUNNING/Failed"])
def test_a_driver_that_fails_by_itself_has_failed_though_kuberay_removes_the_head(state: str) -> None:
    story = lasting().started()
    story.reports(final="failed", message="no such task")
    story.plan(1, head=GONE, jobs=(job(1, state, message="exit code 1"),))
    assert story.condition("Failed") == ("True", "DriverFailed") and "no such task" in story.run.status.message


def test_the_head_of_an_earlier_attempt_excuses_no_driver() -> None:
    story = lasting().started()
    lose(story)
    begin(story)
    story.reports(final="failed", message="no such task")
    story.plan(60, head=GONE)
    story.plan(70)
    assert story.condition("Failed") == ("True", "DriverFailed") and story.run.status.lost_clusters == 1


# --- what counts and what does not ------------------------------------------------------------------------------------


def disrupted(number: int = 1, word: str = "EvictionByEvictionAPI", **fields: Any) -> RayHead:
    head = RayHead("team", f"run-{number}-head", f"head-{number}", "7", UID, number, NOON, "node-1", word)
    return replace(head, message="Eviction API: evicting", **fields)


@pytest.mark.parametrize("state", ["RUNNING/Failed", "STOPPED/Failed", "FAILED/Failed", "RUNNING/Running"])
def test_what_the_cluster_took_away_does_not_count(state: str) -> None:
    story = lasting(backoffLimit=0).started()
    for number in range(1, 6):
        story.plan(head=disrupted(number))
        assert story.ready == ("True", "Running"), "its driver makes a checkpoint"
        if state == "RUNNING/Running":
            story.reports(final="stopped", message="SIGTERM")
        else:
            story.plan(jobs=(job(number, state, reason="AppFailed", message="exit code 1"),))
        assert story.run.status.attempt.reason == "Disrupted" and story.phase == "Removing"
        assert "EvictionByEvictionAPI" in story.run.status.message and "evicting" in story.run.status.message
        story.plan(jobs=())
        assert begin(story) == number + 1
    status = story.run.status
    assert (status.disruptions, status.lost_clusters, status.failures) == (5, 0, 0)


def test_it_is_remembered_when_its_head_is_gone_and_another_operator_looks() -> None:
    story = lasting(backoffLimit=0).started()
    story.plan(head=disrupted())
    story.restart()
    lose_now = job(1, "RUNNING/Failed", reason="SubmissionFailed")
    story.plan(head=None, jobs=(lose_now,))
    assert (story.run.status.disruptions, story.run.status.lost_clusters) == (1, 0)


def test_a_head_that_came_after_the_disrupted_one_can_be_lost() -> None:
    """KubeRay makes another one while the Ray cluster is not up yet."""
    story = lasting(backoffLimit=0).started()
    story.plan(head=disrupted())
    story.plan(head=disrupted(word="", uid="another"))
    lose(story)
    assert story.condition("Failed") == ("True", "BackoffLimitExceeded") and story.run.status.disruptions == 0


def test_what_a_disruption_of_an_earlier_attempt_says_is_of_no_use() -> None:
    story = lasting(backoffLimit=1).started()
    story.plan(head=disrupted())
    lose(story)
    begin(story)
    lose(story)
    assert (story.run.status.disruptions, story.run.status.lost_clusters) == (1, 1)


def test_a_file_that_can_not_work_fails_also_on_a_head_that_goes() -> None:
    story = lasting().started()
    story.plan(head=disrupted())
    story.reports(final="configuration")
    story.plan(121)
    assert story.condition("Failed") == ("True", "Configuration")


def test_a_head_whose_node_is_lost_is_not_waited_for() -> None:
    story = lasting(backoffLimit=0).started()
    story.reports()
    story.plan(20, head=disrupted(word=NODE_LOST))
    assert story.ready == ("True", "Running"), "a driver that is heard runs"
    story.plan(11)
    assert story.run.status.attempt.reason == "Disrupted" and story.run.status.disruptions == 1


def test_disruptions_in_a_row_are_paced() -> None:
    story = Story(made()).started()
    pauses = []
    for number in range(1, 6):
        story.plan(head=disrupted(number))
        lose(story)
        pauses.append(story.plan(0).requeue_after)
        begin(story)
    assert pauses[0] == pytest.approx(5, abs=1) and pauses[-1] == pytest.approx(80, abs=1)


def test_losses_are_forgiven_to_a_run_that_gets_further() -> None:
    story = lasting(backoffLimit=1).started()
    for number in range(1, 8):
        story.reports(update=number + 2, checkpoint={"update": number, "path": "p"})
        lose(story)
        assert story.run.status.failures == 1 and story.run.status.lost_clusters == number
        begin(story)
    for _ in range(2):
        story.reports(update=20)
        lose(story)
        if story.phase != "Over" or story.condition("Failed")[0] == "False":
            begin(story)
    assert story.condition("Failed") == ("True", "BackoffLimitExceeded"), "updates without a checkpoint are lost"


def test_checkpoints_in_object_storage_are_what_a_run_got_further_by() -> None:
    story = Story(made(checkpoints=BUCKET, cluster={"image": "i", "backoffLimit": 1})).started()
    for update in (3, 6, 9):
        story.reports(update=1, checkpoint={"update": update, "path": "s3://lab/x"})
        lose(story)
        assert (story.run.status.failures, story.run.status.furthest) == (1, update)
        begin(story)


def test_without_a_storage_only_what_no_attempt_reached_before_is_further() -> None:
    story = Story(made(cluster={"image": "i", "backoffLimit": 1})).started()
    for update in (3, 9):
        story.reports(update=update, checkpoint={"update": update, "path": "p"})
        lose(story)
        assert story.run.status.failures == 1
        begin(story)
    story.reports(update=9, checkpoint={"update": 9, "path": "p"})
    lose(story)
    assert story.condition("Failed") == ("True", "BackoffLimitExceeded"), "it fails each time at the same point"


# --- gaps -------------------------------------------------------------------------------------------------------------


def test_what_nobody_heard_is_no_silence_of_the_driver() -> None:
    """The API server was away for a quarter of an hour, or nobody led: where should its reports have gone?"""
    story = lasting().started()
    story.reports()
    watching = {"watching_since": story.now + 900}
    made = story.plan(901, pods=(replace(HEAD, ready=False),), **watching)
    assert not made.read_pods and made.requeue_after == pytest.approx(29, abs=1)
    story.plan(40, pods=())
    story.plan(9)
    assert story.run.status.lost_clusters == 0
    watching = {"watching_since": story.now}
    story.plan(40, **watching)
    assert story.run.status.lost_clusters == 0, "its head was missing before the gap, and may have been back since"
    story.plan(10)
    assert story.run.status.lost_clusters == 1


def test_a_clock_that_is_set_makes_no_driver_silent_and_hides_no_silence() -> None:
    story = lasting().started()
    story.reports()
    story.plan(3600, watching_since=story.now + 3600, pods=())
    story.plan(11)
    assert story.run.status.lost_clusters == 0
    story.reports(update=1)
    since = story.now - 3600
    story.plan(-3600 + 29, watching_since=since)
    assert story.plan(1).read_pods
    story.plan(10)
    assert story.run.status.lost_clusters == 1
