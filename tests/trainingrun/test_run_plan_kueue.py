"""Runs in Kueue's queues: when their phones count, and what the AdmissionCheck says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from runs_made import NOON, OWN, POOL, UID, Story, job, made, pool

from tapforge_operator.kube.types import RayHead
from tapforge_operator.trainingrun.kueue import (
    CheckState,
    CheckUpdate,
    Workload,
    decide,
    demand_since,
    observe_check,
    observe_workload,
    queue_message,
)

OURS = frozenset({"phones"})
QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}
HELD = CheckState("phones", "Pending", NOON)
GPUS = CheckState("gpu-nodes", "Pending", NOON)


def workload(*checks: CheckState, **fields: Any) -> Workload:
    plain = Workload("team", "rayjob-run-1-abcde", "w", "7", "job-1", "gpus", checks=checks or (HELD,))
    return replace(plain, **fields)


@pytest.mark.parametrize(
    ("seen", "since"),
    [
        (None, 0.0),
        (workload(), 0.0),
        (workload(reserved=NOON), NOON),
        (workload(reserved=NOON, leaving=True), 0.0),
        (workload(replace(HELD, state="Ready"), reserved=NOON), NOON),
        (workload(replace(HELD, state="Retry"), reserved=NOON), 0.0),
        (workload(HELD, GPUS, reserved=NOON), 0.0),
        (workload(HELD, replace(GPUS, state="Ready", since=NOON + 9), reserved=NOON), NOON + 9),
    ],
    ids=["no Kueue", "queued", "reserved", "evicted", "ready", "given back", "no nodes yet", "nodes at last"],
)
def test_phones_count_from_the_reservation_of_quota_to_its_end(seen: Workload | None, since: float) -> None:
    assert demand_since(seen, OURS) == since


@pytest.mark.parametrize(
    ("check", "short", "after", "decided"),
    [
        (HELD, "", 0, ("Ready", None)),
        (HELD, "0 of 2", 0, 60.0),
        (HELD, "0 of 2", 59, 1.0),
        (HELD, "0 of 2", 60, ("Retry", 1)),
        (HELD, "", 99, ("Ready", None)),
        (replace(HELD, state="Ready"), "0 of 2", 99, None),
        (replace(HELD, name="gpu-nodes", state="Ready"), "", 0, None),
    ],
)
def test_quota_is_held_for_the_boot_deadline_and_no_longer(
    check: CheckState, short: str, after: float, decided: object
) -> None:
    found = decide(workload(check, reserved=NOON), OURS, short, 60.0, NOON + after)
    if isinstance(found, CheckUpdate):
        assert found.check == "phones" and (found.state == "Ready" or short in found.message)
        assert (found.state, found.requeue_after) == decided
    else:
        assert found == decided


def story(**seen: Any) -> Story:
    return Story(made(labels=QUEUE, environment=POOL), **{"phone_checks": OURS, "pool": pool(ready=0), **seen})


def test_the_queue_comes_before_the_phones_and_phones_with_the_quota() -> None:
    run = story().started("/Suspended")
    run.plan(workload=workload(message="insufficient unused quota for nvidia.com/gpu"))
    assert run.ready == ("False", "Queued") and run.condition("Suspended")[0] == "True", "it counts for no phones"
    assert "insufficient unused quota" in run.run.status.message and not run.run.status.active_time
    planned = run.plan(workload=workload(reserved=run.now))
    assert run.ready == ("False", "WaitingForPhones") and run.condition("Suspended")[0] == "False"
    assert planned.check_update is None and planned.requeue_after is not None
    update = run.plan(pool=pool(ready=2)).check_update
    assert update is not None and update.state == "Ready"
    run.plan(workload=workload(replace(HELD, state="Ready"), reserved=run.now))
    assert run.ready == ("False", "Starting") and run.condition("Suspended")[0] == "False"
    run.plan(jobs=(job(1, "RUNNING/Running"),))
    assert run.ready == ("True", "Running") and run.run.status.active_time
    # Preempted, and in the queue again: no attempt is lost.
    run.plan(workload=workload(replace(HELD, state="Ready"), reserved=run.now, leaving=True))
    run.plan(jobs=(job(1, "RUNNING/Suspending", suspended=True),))
    assert run.ready == ("False", "Queued") and run.condition("Suspended")[0] == "True"
    run.plan(jobs=(job(1, "/Suspended", suspended=True),), workload=workload())
    assert run.ready == ("False", "Queued")
    status = run.run.status
    assert (status.attempts, status.lost_clusters, status.failures) == (1, 0, 0)


def test_phones_that_do_not_boot_give_the_quota_back() -> None:
    run = story(pool=pool(ready=0, boot_deadline=30.0)).started("/Suspended")
    run.plan(workload=workload(reserved=run.now))
    assert run.plan(20).check_update is None
    update = run.plan(20).check_update
    assert update is not None and (update.state, update.requeue_after) == ("Retry", 1)
    assert "0 of 1 phones" in update.message
    run.plan(workload=workload(replace(HELD, state="Retry"), reserved=run.now))
    assert run.ready == ("False", "Queued"), "its phones are not wanted any more"


def test_without_a_check_phones_come_first() -> None:
    run = story(phone_checks=frozenset())
    run.plan()
    assert run.ready == ("False", "WaitingForPhones") and run.phase == ""


def test_what_only_a_person_can_correct_comes_before_the_queue() -> None:
    run = story(pool=pool(ready=0, largest=0))
    run.plan()
    assert run.ready == ("False", "PoolTooSmall")


@pytest.mark.parametrize("environment", [POOL, OWN])
def test_a_claim_quota_that_is_never_enough_comes_before_the_queue(environment: dict[str, Any]) -> None:
    spec = {"labels": QUEUE, "environment": environment, "cluster": {"image": "i", "minReadySlots": 2}}
    run = Story(made(**spec), phone_checks=OURS, claim_quota=1, pool=None if environment is OWN else pool(ready=0))
    planned = run.plan()
    assert run.condition("Stalled") == ("True", "ClaimQuotaTooSmall") and not planned.create_pool
    assert "claim quota of namespace team is 1" in run.run.status.message
    run.plan(claim_quota=2)
    assert run.phase == "Intended"


def test_quota_is_held_for_the_deadline_of_an_own_pool_that_can_not_be_made() -> None:
    own = {**OWN["source"]["ownPool"], "spec": {**OWN["source"]["ownPool"]["spec"], "boot": {"deadlineSeconds": 30}}}
    run = Story(made(labels=QUEUE, environment={"source": {"ownPool": own}}), phone_checks=OURS).started("/Suspended")
    assert run.plan(workload=workload(reserved=run.now)).check_update is None
    update = run.plan(40).check_update
    assert update is not None and update.state == "Retry"


def test_a_pool_of_the_runs_own_is_made_with_the_quota_and_goes_with_it() -> None:
    run = Story(made(labels=QUEUE, environment=OWN), phone_checks=OURS).started("/Suspended")
    assert not run.plan(workload=workload()).create_pool
    assert run.plan(workload=workload(reserved=run.now)).create_pool
    there = pool(name="run", owned=True, ready=0, largest=2)
    assert run.plan(pool=there).check_update is None
    assert run.plan(workload=workload()).delete_pool == there.uid


RUNNING = replace(HELD, state="Ready")
EVICTED = workload(RUNNING, reserved=NOON, leaving=True)
HEAD = RayHead("team", "run-1-head", "h", "5", UID, 1, created=NOON, node="n")


def preempted(backoff: int = 0, **spec: Any) -> Story:
    """Whose driver reported, and whose Ray cluster Kueue has taken."""
    cluster = {"image": "i", "backoffLimit": backoff}
    run = Story(made(labels=QUEUE, cluster=cluster, **spec), phone_checks=OURS, head=HEAD).started("/Suspended")
    run.plan(workload=workload(RUNNING, reserved=NOON))
    run.plan(jobs=(job(1, "RUNNING/Running"),))
    run.reports(update=1)
    run.plan(workload=EVICTED, jobs=(job(1, "RUNNING/Running", suspended=True),))
    return run


def is_queued(run: Story) -> bool:
    status = run.run.status
    return (
        run.phase == "Active"
        and run.ready == ("False", "Queued")
        and run.condition("Suspended")[0] == "True"
        and (status.attempts, status.lost_clusters, status.failures) == (1, 0, 0)
    )


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("state", ["RUNNING/Running", "RUNNING/Suspending", "/Suspended"])
def test_a_driver_that_fails_because_a_queue_takes_its_machines_fails_no_run(state: str, gone: bool) -> None:
    run = preempted(environment=POOL)
    assert is_queued(run)
    run.plan(jobs=(job(1, state, suspended=True),))
    run.reports(update=1, final="failed", message="a rank was lost")
    assert is_queued(run)
    run.plan(head=replace(HEAD, gone=gone))
    assert is_queued(run)
    run.plan(130)
    assert is_queued(run)
    run.plan(workload=workload(), jobs=(job(1, "/Suspended", suspended=True),), head=replace(HEAD, gone=True))
    run.plan(workload=workload(RUNNING, reserved=run.now), jobs=(job(1, "RUNNING/Running", cluster="c2"),))
    assert run.ready == ("True", "Running") and run.phase == "Active"


def test_a_driver_that_is_silent_while_a_queue_takes_its_machines_is_not_lost() -> None:
    run = preempted(environment=POOL)
    run.plan(60, pods=(), head=replace(HEAD, gone=True))
    run.plan(60)
    assert is_queued(run)


@pytest.mark.parametrize(("final", "ends"), [("complete", "Complete"), ("configuration", "Configuration")])
def test_a_driver_that_came_to_its_end_while_a_queue_took_its_machines_is_believed(final: str, ends: str) -> None:
    run = preempted(environment=POOL)
    run.plan(jobs=(job(1, "RUNNING/Suspending", suspended=True),))
    run.reports(update=10, final=final)
    run.plan(jobs=(job(1, "/Suspended", suspended=True),), head=replace(HEAD, gone=True))
    run.plan(130)
    assert run.ready[1] == ends and run.run.status.completion_time


def test_a_driver_keeps_its_own_pool_for_its_grace_and_its_last_checkpoint_counts() -> None:
    there = pool(name="run", owned=True, ready=2, largest=2)
    run = preempted(environment=OWN)
    assert not run.plan(pool=there, jobs=(job(1, "RUNNING/Suspending", suspended=True),)).delete_pool
    assert is_queued(run), "its phones count for no demand"
    run.reports(update=5, checkpoint={"update": 5, "path": "/storage/5"})
    assert run.run.status.checkpoint is not None and run.run.status.checkpoint.update == 5
    # The RayCluster is gone, and the Pod of the head has its grace.
    assert not run.plan(jobs=(job(1, "/Suspended", suspended=True),), workload=workload()).delete_pool
    # The last report comes with the news that the head is gone.
    run.observed = replace(run.observed, head=replace(HEAD, gone=True))
    planned = run.reports(update=6, final="stopped", checkpoint={"update": 6, "path": "/storage/6"})
    assert planned.delete_pool == there.uid
    assert run.run.status.checkpoint.update == 6 and is_queued(run)


def test_while_nobody_knows_the_queue_nothing_is_given_back() -> None:
    there = pool(name="run", owned=True, ready=0, largest=2)
    run = Story(made(labels=QUEUE, environment=OWN), phone_checks=OURS).started("/Suspended")
    run.plan(workload=workload(reserved=run.now), pool=there)
    before = run.run.status
    run.restart()
    planned = run.plan(workload=None, queues_known=False)
    assert not planned.delete_pool and planned.requeue_after and "Kueue" in run.run.status.message
    assert run.run.status.active_time == before.active_time and run.ready == ("False", "WaitingForPhones")
    assert run.condition("Suspended") == ("False", "NotSuspended"), "its phones stay wanted"
    assert run.plan(queues_known=True).delete_pool == there.uid and run.ready == ("False", "Queued")


def test_a_workload_is_read_for_what_it_says_of_rayjobs() -> None:
    owner = {"kind": "RayJob", "uid": "job-1", "controller": True}
    body: dict[str, Any] = {
        "metadata": {
            "namespace": "team",
            "name": "rayjob-run-1-abcde",
            "uid": "w",
            "resourceVersion": "7",
            "ownerReferences": [owner],
        },
        "spec": {"queueName": "gpus"},
        "status": {
            "conditions": [
                {
                    "type": "QuotaReserved",
                    "status": "True",
                    "lastTransitionTime": "2026-11-20T12:00:00Z",
                    "message": "Quota reserved in ClusterQueue gpus",
                }
            ],
            "admissionChecks": [
                {"name": "phones", "state": "Pending", "lastTransitionTime": "2026-11-20T12:00:00Z", "message": ""}
            ],
        },
    }
    seen = observe_workload(body)
    assert seen == workload(reserved=NOON, message="Quota reserved in ClusterQueue gpus")
    body["status"]["conditions"][0]["status"] = "False"
    waits = observe_workload(body)
    assert waits is not None and waits.reserved == 0.0 and "Quota reserved" in queue_message(waits, "held")
    body["status"]["conditions"].append({"type": "Evicted", "status": "True"})
    leaving = observe_workload(body)
    assert leaving is not None and leaving.leaving
    assert (
        observe_workload({**body, "metadata": {**body["metadata"], "ownerReferences": [{**owner, "kind": "Job"}]}})
        is None
    )


def test_checks_of_other_controllers_are_theirs() -> None:
    body = {"metadata": {"name": "phones", "uid": "c", "resourceVersion": "1", "generation": 2}, "spec": {}}
    assert observe_check(body) is None
    mine = observe_check({**body, "spec": {"controllerName": "tapforge.dev/phones"}})
    assert mine is not None and not mine.active
