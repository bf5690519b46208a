"""An attempt begins once, when all it needs is there; until then the status says what is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from runs_made import NO_KUBERAY, NOON, OWN, POOL, SAFE, WORKERS, Story, job, made, pool

from tapforge_operator.trainingrun.state import DryRunResult, ObservedVolume, Refusal, pool_of, slots_of
from tapforge_operator.trainingrun.status import is_true
from tapforge_operator.trainingrun.templates import StoredConfig


def test_an_attempt_is_put_down_before_its_rayjob_is_made_and_only_once() -> None:
    story = Story()
    first = story.plan()
    assert not first.create_job and first.status.attempts == 1 and first.status.start_time
    assert first.status.resolved and first.requeue_after == 0.0
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
    story.plan(config=StoredConfig("as it was\n"))
    assert story.run.status.resolved == "as it was\n"


def _head_with(name: str, value: str) -> dict[str, Any]:
    ray = {"name": "ray", "env": [{"name": name, "value": value}]}
    return {"cluster": {"image": "i", "head": {"template": {"spec": {"containers": [ray]}}}}}


@pytest.mark.parametrize(
    ("spec", "seen", "reason", "word"),
    [
        ({"cluster": None}, {}, "ClusterMissing", "spec.cluster"),
        ({}, {"no_ray_jobs": NO_KUBERAY}, "KubeRayMissing", "install KubeRay"),
        ({"environment": POOL}, {}, "PoolNotFound", "phones"),
        (
            {"environment": POOL, "cluster": {"image": "i", "minReadySlots": 3}},
            {"pool": pool(ready=0, largest=2)},
            "PoolTooSmall",
            "2 phones at most",
        ),
        ({"environment": OWN}, {"pool": pool(name="run")}, "PoolNameTaken", "not this run's"),
        (_head_with("RAY_AUTH_MODE", "disabled"), {}, "RayAuthentication", "RAY_AUTH_MODE is 'disabled'"),
        (_head_with("RAY_AUTH_TOKEN", "mine"), {}, "RayAuthentication", "head.template.spec.containers[ray].env sets"),
        ({"environment": POOL}, {"pool": pool(protocol="adb")}, "ProtocolMismatch", "speak adb"),
        ({}, {"dry_run": DryRunResult(1, Refusal("Invalid", "cpu: 1x", stalls=True))}, "Invalid", "1x"),
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
    assert plan.requeue_after == unseen.get(reason)
    assert plan.dry_run_job is (reason == "Invalid")


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
    story.plan(pool=pool(ready=2, message="no node has room"))
    assert story.ready == ("False", "WaitingForPhones")
    assert story.run.status.message == "2 of 3 phones of pool phones are ready; the pool reports: no node has room"
    assert not story.run.status.start_time
    again = story.plan(pool=pool(ready=1, taken=3)).requeue_after
    assert story.run.status.message == "1 of 3 phones of pool phones are ready and free; 3 are claimed by others"
    assert again == 15.0
    story.plan(pool=pool(ready=2, quota_room=2))
    assert "the claim quota of namespace team allows 2 here at present" in story.run.status.message
    story.plan(pool=pool(ready=3))
    assert story.plan().create_job == 1
    story.plan(pool=pool(ready=0), jobs=(job(1, "RUNNING/Running"),))
    assert story.ready == ("True", "Running"), "what runs isn't stopped"


def test_a_run_on_recorded_steps_waits_for_no_phone() -> None:
    recorded = {"source": {"dataset": {"path": "/data/set"}}}
    story = Story(made(environment=recorded, cluster={"image": "i", "minReadySlots": 3}))
    story.plan()
    assert story.run.status.start_time and story.plan().create_job == 1
    assert pool_of(story.run) == "" and slots_of(story.run) == 0, "no claim and no pool"


def test_a_run_that_needs_more_gpus_than_its_pods_ask_for_asks_for_no_pods() -> None:
    template = {"spec": {"containers": [{"name": "ray", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]}}
    cluster = {"image": "i", "workers": [{"name": "gpu", "replicas": 1, "template": template}]}
    story = Story(made(cluster=cluster, learner={"ranks": 4}, engine={"replicas": 2}))
    story.plan()
    assert story.condition("Stalled") == ("True", "GPUsMissing")
    assert "need 6 GPUs, but Pods of spec.cluster ask for 4" in story.run.status.message
    assert not story.run.status.start_time


def test_a_run_whose_pods_ask_for_slices_of_gpus_asks_for_no_pods() -> None:
    template = {"spec": {"containers": [{"name": "ray", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "4"}}}]}}
    workers = {"name": "gpu", "replicas": 1, "template": template}
    story = Story(made(cluster={"image": "i", "workers": [workers]}))
    story.plan()
    assert story.condition("Stalled") == ("True", "GPUsMissing")
    assert "set spec.cluster.workers[0].rayStartParams.num-gpus" in story.run.status.message


def test_a_run_that_an_earlier_release_started_without_counting_its_gpus_goes_on() -> None:
    claim = {"name": "gpus", "resourceClaimTemplateName": "four"}
    container = {"name": "ray", "resources": {"claims": [{"name": "gpus"}]}}
    head = {"template": {"spec": {"resourceClaims": [claim], "containers": [container]}}}
    story = Story(made(checkpoints=SAFE, cluster={"image": "i", "head": head}))
    story.plan()
    assert story.condition("Stalled") == ("True", "GPUsMissing")
    status = story.run.status.model_copy(update={"start_time": "2026-11-20T12:00:00Z", "attempts": 1})
    story.run = replace(story.run, status=status)
    story.plan()
    assert story.plan().create_job == 2


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
    assert first.read_volume and first.requeue_after == 0.0 and first.status == before
    story.plan(volume=ObservedVolume(True, modes))
    if reason:
        assert story.condition("Stalled") == ("True", reason) and "disk" in story.run.status.message
    else:
        assert story.phase == "Intended"


def test_a_volume_that_is_not_there_is_looked_for() -> None:
    story = Story(made(checkpoints=SAFE), volume=ObservedVolume(False))
    plan = story.plan()
    assert story.condition("Stalled") == ("True", "VolumeNotFound") and plan.read_volume and plan.requeue_after


def test_the_file_can_be_put_right_before_the_start() -> None:
    story = Story(dry_run=None)
    assert story.plan().dry_run_job and not story.run.status.conditions, "nothing is said before it is known"
    story.plan(dry_run=DryRunResult(1, Refusal("Invalid", "no", stalls=True)))
    story.edit(seed=2)
    assert story.plan().dry_run_job and story.condition("Stalled")[0] == "True"
    story.plan(dry_run=DryRunResult(2))
    assert story.phase == "Intended"


@pytest.mark.parametrize("stalls", [True, False])
def test_a_refused_rayjob_is_tried_again(stalls: bool) -> None:
    story = Story()
    story.plan()
    story.plan()
    plan = story.plan(refusal=Refusal("QuotaExceeded", "exceeded quota: gpus", stalls))
    assert plan.create_job == 1 and plan.requeue_after and story.ready == ("False", "QuotaExceeded")
    assert is_true(plan.status, "Stalled") is stalls
    story.plan(refusal=None, jobs=(job(1, "/Running"),))
    assert story.phase == "Active"


def test_the_start_waits_for_a_look_at_the_config_map() -> None:
    story = Story(config=None)
    plan = story.plan()
    assert plan.read_config and plan.requeue_after == 0.0 and not plan.status.attempts
    assert not story.plan(config=StoredConfig()).read_config and story.phase == "Intended"
