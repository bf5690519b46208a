"""What a run does next, case by case; each a short story."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from runs_made import NOON, SAFE, Story, job, made, pool

from tapforge_api.learning import Stop
from tapforge_operator.run import manifests
from tapforge_operator.run.conditions import events, is_true
from tapforge_operator.run.records import RayPod, Refusal, Trial, VolumeSeen, observe_ray_job, timestamp

POOL = {"source": {"pool": {"name": "phones", "slots": 4}}}
OWN = {"source": {"ownPool": {"slots": 2, "spec": {"external": {"urls": ["http://a", "http://b"]}}}}}


def lasting(**cluster: Any) -> Story:
    """With a storage that lasts."""
    return Story(made(checkpoints=SAFE, cluster={"image": "i", **cluster}))


# --- the beginning ----------------------------------------------------------------------------------------------------


def test_an_attempt_is_put_down_before_its_rayjob_is_made_and_only_once() -> None:
    story = Story()
    first = story.plan()
    assert not first.create_job and first.status.attempts == 1 and first.status.start_time
    assert "image" not in first.status.resolved and first.look_again == 0.0
    assert story.plan().create_job == 1
    made_ = story.plan(jobs=(job(1, "/Initializing"),))
    assert not made_.create_job and story.phase == "Active" and made_.status.ray_job == "run-1"
    assert story.ready == ("False", "Starting")


def test_another_operator_takes_the_next_number() -> None:
    story = Story()
    story.plan()
    story.restart()
    assert not story.plan().create_job
    story.plan()
    assert story.plan().create_job == 2 and story.run.status.lost_clusters == 0


def test_another_operator_goes_on_with_the_rayjob_that_is_there() -> None:
    story = Story()
    story.plan()
    story.restart()
    story.plan(jobs=(job(1, "/Running"),))
    assert story.phase == "Active" and story.run.status.attempts == 1


def test_a_status_that_was_written_over_is_made_again() -> None:
    story = Story(made(checkpoints=SAFE)).started()
    story.run = made(checkpoints=SAFE)
    story.restart()
    plan = story.plan(jobs=(job(3, "RUNNING/Running"),))
    assert (plan.status.attempts, plan.status.ray_job, story.phase) == (3, "run-3", "Active")
    assert plan.status.start_time and not plan.create_job and not plan.delete_jobs


def test_what_the_config_map_holds_is_what_earlier_attempts_saw() -> None:
    story = Story()
    story.plan(config="as it was\n")
    assert story.run.status.resolved == "as it was\n"


@pytest.mark.parametrize(
    ("spec", "seen", "reason", "word"),
    [
        ({"cluster": None}, {}, "ClusterMissing", "spec.cluster"),
        ({}, {"no_ray_jobs": "install KubeRay"}, "KubeRayMissing", "install KubeRay"),
        ({"environment": POOL}, {}, "PoolNotFound", "phones"),
        (
            {"environment": POOL, "cluster": {"image": "i", "minReadySlots": 3}},
            {"pool": pool(ready=0, largest=2)},
            "PoolTooSmall",
            "2 phones at most",
        ),
        ({"environment": OWN}, {"pool": pool(name="run")}, "PoolNameTaken", "not this run's"),
        ({"environment": POOL}, {"pool": pool(protocol="adb")}, "ProtocolMismatch", "speak adb"),
        ({}, {"trial": Trial(1, Refusal("Invalid", "cpu: 1x", stalls=True))}, "Invalid", "1x"),
    ],
)
def test_what_a_person_has_to_put_right_stalls_the_run(
    spec: dict[str, Any], seen: dict[str, Any], reason: str, word: str
) -> None:
    story = Story(made(**spec))
    plan = story.plan(**seen)
    assert story.ready == ("False", reason) and story.condition("Stalled") == ("True", reason)
    assert word in plan.status.message and not plan.status.start_time and not plan.create_job
    #: of these nobody tells when they are put right
    unseen = {"KubeRayMissing": 60.0, "PoolNotFound": 15.0, "Invalid": 15.0}
    assert plan.look_again == unseen.get(reason)
    assert plan.try_job is (reason == "Invalid")


def test_what_was_applied_a_moment_ago_may_miss_what_comes_after_it() -> None:
    story = Story(replace(made(environment=POOL), created=NOON - 5))
    story.plan()
    assert story.condition("Reconciling") == ("True", "PoolNotFound")
    story.plan(60)
    assert story.condition("Stalled") == ("True", "PoolNotFound")
    story.plan(pool=pool())
    assert story.phase == "Intended"


def test_the_machines_wait_for_the_phones() -> None:
    story = Story(made(environment=POOL, cluster={"image": "i", "minReadySlots": 3}))
    story.plan(pool=pool(ready=2, trouble="no node has room"))
    assert story.ready == ("False", "WaitingForPhones")
    assert story.run.status.message == "2 of 3 phones of pool phones are ready; the pool says: no node has room"
    assert not story.run.status.start_time
    story.plan(pool=pool(ready=3))
    assert story.plan().create_job == 1
    story.plan(pool=pool(ready=0), jobs=(job(1, "RUNNING/Running"),))
    assert story.ready == ("True", "Running"), "what runs isn't stopped"


WORKERS = [{"name": "gpu", "replicas": 2}]


@pytest.mark.parametrize(
    ("modes", "workers", "reason"),
    [
        (("ReadWriteOnce",), WORKERS, "VolumeNotShared"),
        (("ReadWriteOncePod",), WORKERS, "VolumeNotShared"),
        (("ReadOnlyMany",), [], "VolumeReadOnly"),
        ((), [], "VolumeReadOnly"),
        (("ReadWriteOnce",), [], ""),
        (("ReadWriteOnce",), [{"name": "gpu", "replicas": 0}], ""),
        (("ReadWriteMany",), WORKERS, ""),
        (("ReadWriteOnce", "ReadWriteMany"), WORKERS, ""),
    ],
)
def test_a_volume_has_to_fit_the_pods(modes: tuple[str, ...], workers: list[Any], reason: str) -> None:
    story = Story(made(checkpoints=SAFE, cluster={"image": "i", "workers": workers}), volume=None)
    before = story.run.status
    first = story.plan()
    assert first.look_at_volume and first.look_again == 0.0 and first.status == before
    story.plan(volume=VolumeSeen(True, modes))
    if reason:
        assert story.condition("Stalled") == ("True", reason) and "disk" in story.run.status.message
    else:
        assert story.phase == "Intended"


def test_a_volume_that_is_not_there_is_looked_for() -> None:
    story = Story(made(checkpoints=SAFE), volume=VolumeSeen(False))
    plan = story.plan()
    assert story.condition("Stalled") == ("True", "VolumeNotFound") and plan.look_at_volume and plan.look_again


def test_the_file_can_be_put_right_before_the_start() -> None:
    story = Story(trial=None)
    assert story.plan().try_job and not story.run.status.conditions, "nothing is said before it is known"
    story.plan(trial=Trial(1, Refusal("Invalid", "no", stalls=True)))
    story.edit(seed=2)
    assert story.plan().try_job and story.condition("Stalled")[0] == "True"
    story.plan(trial=Trial(2))
    assert story.phase == "Intended"


@pytest.mark.parametrize("stalls", [True, False])
def test_a_refused_rayjob_is_tried_again(stalls: bool) -> None:
    story = Story()
    story.plan()
    story.plan()
    plan = story.plan(refusal=Refusal("QuotaExceeded", "exceeded quota: gpus", stalls))
    assert plan.create_job == 1 and plan.look_again and story.ready == ("False", "QuotaExceeded")
    assert is_true(plan.status, "Stalled") is stalls
    story.plan(refusal=None, jobs=(job(1, "/Running"),))
    assert story.phase == "Active"


# --- its own pool -----------------------------------------------------------------------------------------------------


def mine(story: Story, **fields: Any) -> Any:
    plain = {"name": "run", "owned": True, "spec": manifests.pool_spec_hash(story.run), "ready": 2, "largest": 2}
    return pool(**{**plain, **fields})


def test_an_own_pool_is_there_while_the_run_is_active() -> None:
    story = Story(made(environment=OWN, checkpoints=SAFE))
    assert story.plan().create_pool and story.ready == ("False", "WaitingForPhones")
    story.plan(pool=mine(story))
    assert story.plan().create_job == 1
    assert not story.plan(jobs=(job(1, "RUNNING/Running"),)).delete_pool
    assert story.plan(pool=None).create_pool, "somebody deleted it"
    story.plan(pool=mine(story))
    story.edit(suspend=True)
    story.plan()
    story.reports(final="stopped")
    story.plan()
    story.plan(jobs=())
    assert story.plan().delete_pool == "pool-uid" and story.condition("Suspended")[0] == "True"
    assert not story.plan(pool=mine(story, deleting=True)).delete_pool
    assert not story.plan(pool=None).create_pool
    story.edit(suspend=False)
    assert story.plan().create_pool


def test_an_own_pool_is_made_again_when_the_file_is_edited_before_the_start() -> None:
    story = Story(made(environment=OWN))
    story.plan(pool=mine(story, ready=0))
    assert not story.plan().delete_pool
    story.run = made(environment={"source": {"ownPool": {"spec": {"external": {"urls": ["http://c"]}}}}})
    assert story.plan().delete_pool == "pool-uid" and not story.run.status.start_time


@pytest.mark.parametrize("state", ["SUCCEEDED/Complete", "STOPPED/Complete"])
def test_an_own_pool_ends_with_the_run(state: str) -> None:
    story = Story(made(environment=OWN))
    story.plan(pool=mine(story))
    story.started()
    assert not story.plan(jobs=(job(1, state),)).delete_pool
    assert story.plan().delete_pool == "pool-uid"


# --- the end ----------------------------------------------------------------------------------------------------------


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
    assert plan.look_again == pytest.approx(120)
    story.plan(119)
    assert story.ready == ("True", "Finishing")
    story.plan(2)
    assert story.ready == ("True", "Complete")
    assert not story.plan(100).delete_jobs
    assert story.plan(21).delete_jobs == (job(1, "RUNNING/Running"),), "its machines are not left behind"


def test_the_rayjob_goes_when_its_time_is_up() -> None:
    story = lasting(ttlSecondsAfterFinished=600).started()
    story.plan(jobs=(job(1, "SUCCEEDED/Complete"),))
    assert story.plan().look_again == pytest.approx(599)
    assert not story.plan(597).delete_jobs
    assert story.plan(2).delete_jobs
    assert not story.plan(jobs=()).look_again


@pytest.mark.parametrize("suspended", [False, True])
def test_rayjobs_of_other_attempts_go_whenever_they_turn_up(suspended: bool) -> None:
    stray = job(1, "RUNNING/Running")
    story = lasting().started()
    lose(story)
    begin(story)
    now = story.seen.jobs
    assert story.plan(jobs=(stray, *now)).delete_jobs == (stray,)
    story.plan(jobs=(stray, job(2, "SUCCEEDED/Complete")))
    assert story.plan().delete_jobs == (stray,)
    story = lasting().started()
    lose(story)
    story.edit(suspend=suspended)
    story.plan(400, jobs=(stray,))
    assert story.last is not None and story.last.delete_jobs == (stray,) and not story.last.create_job
    assert story.ready == (("True", "Suspended") if suspended else ("False", "Removing"))


def test_the_start_waits_for_a_look_at_the_config_map() -> None:
    story = Story(config=None)
    plan = story.plan()
    assert plan.look_at_config and plan.look_again == 0.0 and not plan.status.attempts
    assert not story.plan(config="").look_at_config and story.phase == "Intended"


def test_without_a_time_it_stays_with_the_run() -> None:
    story = lasting().started()
    story.plan(jobs=(job(1, "SUCCEEDED/Complete"),))
    plan = story.plan(1e7)
    assert not plan.delete_jobs and plan.look_again is None and plan.status.ray_job == "run-1"


# --- lost clusters ----------------------------------------------------------------------------------------------------


def lose(story: Story, state: str = "RUNNING/Failed") -> None:
    """The RayJob of the present attempt is lost and removed."""
    number = story.run.status.attempts
    story.plan(jobs=(job(number, state, reason="SubmissionFailed"),))
    if story.phase == "Removing":
        assert story.plan().delete_jobs
        assert not story.plan(jobs=(job(number, state, deleting=True),)).delete_jobs
        story.plan(jobs=())


def begin(story: Story, seconds: float = 400.0) -> int:
    story.plan(seconds)
    number = story.plan().create_job
    assert number
    story.plan(jobs=(job(number, "RUNNING/Running"),))
    return number


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
        pauses.append(story.plan(0).look_again)
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
    assert story.run.status.lost_clusters == 1 and "deleted by somebody" in story.run.status.attempt.message


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


HEAD = RayPod("run-1-head", "headgroup", "Running", head=True, ready=True)


def test_a_head_that_is_gone_is_noticed_before_kuberay_does() -> None:
    story = lasting().started()
    story.reports()
    quiet = story.plan(20)
    assert not quiet.look_at_pods and quiet.look_again == pytest.approx(10, abs=1)
    silent = story.plan(15)
    assert silent.look_at_pods and silent.look_again == 10.0
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


# --- suspended --------------------------------------------------------------------------------------------------------


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


# --- a queue ----------------------------------------------------------------------------------------------------------


def test_a_queue_may_hold_the_rayjob_and_take_it_back() -> None:
    story = lasting().started("/Suspended")
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


# --- the deadline -----------------------------------------------------------------------------------------------------


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


# --- words ------------------------------------------------------------------------------------------------------------


def test_pods_that_no_node_has_room_for_are_named() -> None:
    story = lasting(workers=WORKERS).started("/Initializing")
    assert story.plan().look_again == 10.0 and story.plan().look_at_pods
    gpu = RayPod("run-1-gpu", "gpu", "Pending", "Unschedulable", "0/3 nodes: 3 Insufficient nvidia.com/gpu")
    story.plan(pods=(HEAD, gpu))
    assert story.ready == ("False", "Unschedulable")
    assert "1 of 2 Ray Pods (gpu)" in story.run.status.message and "nvidia.com/gpu" in story.run.status.message
    story.plan(pods=(HEAD,))
    assert story.ready == ("False", "Starting")


def test_pods_that_may_not_be_made_are_explained() -> None:
    body = {
        **manifests.ray_job(made(), 1, manifests.Broker("u", "c")),
        "status": {
            "jobDeploymentStatus": "Initializing",
            "rayClusterStatus": {
                "conditions": [
                    {
                        "type": "ReplicaFailure",
                        "status": "True",
                        "reason": "FailedCreateHeadPod",
                        "message": 'pods "a" is forbidden: violates PodSecurity "restricted:latest"',
                    }
                ]
            },
        },
    }
    body["metadata"] |= {"uid": "job-1", "resourceVersion": "1"}
    seen = observe_ray_job(body)
    assert seen is not None
    story = lasting().started("/Initializing")
    before = story.run.status
    story.plan(jobs=(seen,))
    assert story.ready == ("False", "FailedCreateHeadPod") and "restricted" in story.run.status.message
    (event,) = events(before, story.run.status)
    assert event.type == "Warning"


def test_progress_is_repeated_in_the_status() -> None:
    story = lasting().started()
    told = {"update": 4, "phase": "Training", "restarts": 1, "leases": {"wanted": 4, "held": 3}}
    status = story.reports(**told, checkpoint={"update": 3, "path": "/storage/3"}).status
    assert (status.progress.update, status.progress.max_updates, status.progress.phase) == (4, 10, "Training")
    assert status.leases.held == 3 and status.checkpoint is not None and status.checkpoint.update == 3
    story.restart()
    kept = story.plan().status
    assert kept.progress.update == 4 and kept.leases.held == 3, "an operator that knows nothing unsays nothing"


def test_a_report_of_an_earlier_attempt_is_of_no_interest() -> None:
    story = lasting().started()
    old = story.reports(update=4)
    assert old.status.progress.update == 4
    lose(story)
    begin(story)
    story.plan(report=None)
    story.reports(update=5)
    late = story.seen.report
    assert late is not None
    plan = story.plan(report=late.model_copy(update={"attempt": 1, "final": "failed"}))
    assert story.ready == ("True", "Running") and plan.status.progress.update == 5


def test_events_tell_a_run_from_begin_to_end() -> None:
    story = Story(made(environment=POOL, checkpoints=SAFE), pool=pool(ready=0))
    told: list[str] = []

    def plan(seconds: float = 1.0, **seen: Any) -> None:
        before = story.run.status
        told.extend(event.reason for event in events(before, story.plan(seconds, **seen).status))

    plan()
    plan(pool=pool())
    plan()
    plan(jobs=(job(1, "/Initializing"),))
    plan(jobs=(job(1, "RUNNING/Running"),))
    plan()
    plan(jobs=(job(1, "RUNNING/Failed"),))
    plan(jobs=())
    plan(100)
    plan()
    plan(jobs=(job(2, "RUNNING/Running"),))
    plan(jobs=(job(2, "SUCCEEDED/Complete"),))
    plan()
    assert told == [
        *("WaitingForPhones", "Starting", "AttemptStarted", "Running"),
        *("ClusterLost", "Restarting", "Starting", "AttemptStarted", "Running", "Complete"),
    ]


def test_a_condition_keeps_the_time_of_its_last_turn() -> None:
    story = lasting().started()
    times = lambda: {c.type: c.last_transition_time for c in story.run.status.conditions}  # noqa: E731
    before = times()
    story.plan(100)
    assert times() == before
    story.plan(100, jobs=(job(1, "SUCCEEDED/Complete"),))
    assert {k for k, v in times().items() if v != before[k]} == {"Complete"}


def test_a_run_at_rest_is_not_written_again() -> None:
    for story in (lasting().started(), Story(made(suspend=True)), Story(made(cluster=None))):
        story.plan()
        before = story.run.status
        assert story.plan(20).status == before


def test_a_run_that_is_being_deleted_is_left_alone() -> None:
    story = lasting().started()
    story.run = replace(story.run, deleting=True)
    plan = story.plan(jobs=())
    assert plan.status == story.run.status and not plan.create_job and not plan.delete_jobs
