"""The status and its events say what goes on with a run, and change only when that does."""

from __future__ import annotations

from typing import Any

from runs_made import HEAD, POOL, SAFE, WORKERS, Story, begin, body, job, lasting, lose, made, pool

from tapforge_api.reading import read_run
from tapforge_operator.kube.types import RayPod, observe_ray_job
from tapforge_operator.trainingrun import rayjob
from tapforge_operator.trainingrun.state import Run
from tapforge_operator.trainingrun.status import events


def test_pods_that_no_node_has_room_for_are_named() -> None:
    story = lasting(workers=WORKERS).started("/Initializing")
    assert story.plan().requeue_after == 10.0 and story.plan().read_pods
    gpu = RayPod("run-1-gpu", "gpu", "Pending", "Unschedulable", "0/3 nodes: 3 Insufficient nvidia.com/gpu")
    story.plan(pods=(HEAD, gpu))
    assert story.ready == ("False", "Unschedulable")
    assert "1 of 2 Ray Pods (gpu)" in story.run.status.message and "nvidia.com/gpu" in story.run.status.message
    story.plan(pods=(HEAD,))
    assert story.ready == ("False", "Starting")


def test_pods_that_may_not_be_made_are_explained() -> None:
    ray_job = {
        **rayjob.ray_job(made(), 1, rayjob.Broker("u", "c")),
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
    ray_job["metadata"] |= {"uid": "job-1", "resourceVersion": "1"}
    seen = observe_ray_job(ray_job)
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
    late = story.observed.report
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


def test_fields_that_this_release_does_not_know_are_reported_and_change_nothing_else() -> None:
    data = body()
    data["spec"]["rollout"] = {"groupSize": 4, "weather": "fine"}
    reading = read_run(data)
    assert reading.spec is not None
    story, plain = Story(Run.of(data, reading.spec, unknown=reading.message)), Story(made(rollout={"groupSize": 4}))
    before = story.run.status
    story.plan()
    plain.plan()
    assert [(c.type, c.status, c.reason) for c in story.run.status.conditions] == [
        (c.type, c.status, c.reason) for c in plain.run.status.conditions
    ]
    assert "spec.rollout.weather" in story.run.status.message and "weather" not in story.run.status.resolved
    first = next(events(before, story.run.status, story.run.unknown))
    assert (first.type, first.reason) == ("Warning", "UnknownFields") and "spec.rollout.weather" in first.message
    later = story.run.status
    story.plan()
    assert "UnknownFields" not in [e.reason for e in events(later, story.run.status, story.run.unknown)], (
        "once per spec"
    )
