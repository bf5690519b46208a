"""Pools and runs as the API server shows them, with the statuses that the operator's planners write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, product
from typing import Any

from pools import NEW_IMAGE, NOW, booting, decide, failed, pool, pulling, ready, unready, unschedulable
from runs_made import NO_KUBERAY, NOON, Story, job, made
from runs_made import pool as phones

from tapforge_api import crd
from tapforge_operator.broker.types import Device, Held
from tapforge_operator.emulatorpool.state import BootFailures, History, Plan, Pool, Refusal
from tapforge_operator.emulatorpool.status import unreadable
from tapforge_operator.trainingrun.status import Situation, conditions

Json = dict[str, Any]


def thing(kind: str, status: Json | None = None, generation: int = 1, **metadata: Any) -> Json:
    """As the API server shows it. Without a status it fills one in."""
    if status is None:
        version = crd(kind)["spec"]["versions"][0]
        status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["default"]
    about = {"name": "one", "namespace": "team", "generation": generation, **metadata}
    return {"apiVersion": "tapforge.dev/v1alpha1", "kind": kind, "metadata": about, "spec": {}, "status": status}


# --- pools ------------------------------------------------------------------------------------------------------------


def a_pool(of: Pool, plan: Plan, **metadata: Any) -> Json:
    status = plan.status.model_dump(mode="json", by_alias=True)
    return thing("EmulatorPool", status, **{"generation": of.generation, **metadata})


def _whole(of: Pool, **metadata: Any) -> Json:
    return a_pool(of, decide(of, [ready(of, i) for i in range(3)]), **metadata)


def _one_of_many_is_exchanged() -> Json:
    of = pool(replicas=10, updateStrategy={"maxUnavailable": 2})
    slots = [ready(of, i) for i in range(10)]
    before = decide(of, slots)
    return a_pool(of, decide(of, [*slots[:9], unready(of, 9, NOW - 500)], before.history, NOW + 1))


def _grows_by_one() -> Json:
    of = pool(replicas=9, updateStrategy={"maxUnavailable": 2})
    slots = [ready(of, i) for i in range(9)]
    before = decide(of, slots)
    larger = pool(replicas=10, generation=2, updateStrategy={"maxUnavailable": 2})
    return a_pool(larger, decide(larger, slots, before.history, NOW + 1))


def _rolls_out() -> Json:
    old, of = pool(), pool(template=NEW_IMAGE, generation=2)
    slots = [ready(old, i) for i in range(3)]
    held = {f"uid-{i}": Held("run", revoked="OldTemplate") for i in range(3)}
    return a_pool(of, decide(of, slots, decide(old, slots).history, NOW + 1, held=held))


def _boots_fail() -> Json:
    of = pool()
    history = History(boots=BootFailures(times=9, at=NOW - 10, created=NOW - 50, template=of.template))
    return a_pool(of, decide(of, [], history))


def _devices(state: Any) -> Json:
    of = pool(external={"urls": ["http://a", "http://b"]})
    return a_pool(of, decide(of, devices=[Device("http://a", "ready"), Device("http://b", state, reason="rests")]))


def _refused(reason: Any) -> Json:
    of = pool()
    return a_pool(of, decide(of, [], refusals=[Refusal(reason, "the API server says no")]))


def _pool_unreadable() -> Json:
    of = pool()
    status = unreadable(decide(of).status, 2, "spec.replicas: too many", NOW)
    return thing("EmulatorPool", status.model_dump(mode="json", by_alias=True), 2)


POOLS: dict[str, Callable[[], Json]] = {
    "new": lambda: thing("EmulatorPool"),
    "boots": lambda: a_pool(pool(), decide(pool(), [booting(pool(), i, started=NOW) for i in range(3)])),
    "ready": lambda: _whole(pool()),
    "edited": lambda: _whole(pool(), generation=2),
    "empty": lambda: a_pool(pool(replicas=0), decide(pool(replicas=0))),
    "at rest": lambda: a_pool(pool(scaling={"maxReplicas": 3}), decide(pool(scaling={"maxReplicas": 3}))),
    "one is exchanged": _one_of_many_is_exchanged,
    "grows by one": _grows_by_one,
    "rolls out": _rolls_out,
    "no room": lambda: a_pool(pool(), decide(pool(), [unschedulable(pool(), i) for i in range(3)])),
    "slow pull": lambda: a_pool(pool(), decide(pool(), [pulling(pool(), i, created=NOW - 9000) for i in range(3)])),
    "bad image": lambda: a_pool(
        pool(), decide(pool(), [pulling(pool(), i, waiting="ImagePullBackOff") for i in range(3)])
    ),
    "boots fail": _boots_fail,
    "a device rests": lambda: _devices("quarantined"),
    "all devices": lambda: _devices("ready"),
    "over quota": lambda: _refused("QuotaExceeded"),
    "forbidden": lambda: _refused("Forbidden"),
    "unreadable": _pool_unreadable,
    "deleted": lambda: _whole(pool(), deletionTimestamp="2026-11-20T12:00:00Z"),
}


def all_pools() -> Iterator[Json]:
    """Three slots, each in any state. Their operator has just begun, knows them, or was refused another slot."""
    of, old = pool(), pool(template=NEW_IMAGE)
    states = [
        lambda i: ready(of, i),
        lambda i: ready(old, i),
        lambda i: ready(of, i, node="cordoned"),
        lambda i: unready(of, i, NOW - 5),
        lambda i: unready(of, i, NOW - 500),
        lambda i: booting(of, i, started=NOW - 5),
        lambda i: booting(of, i, started=NOW - 5000),
        lambda i: pulling(of, i, created=NOW - 5),
        lambda i: pulling(of, i, waiting="ImagePullBackOff"),
        lambda i: unschedulable(of, i),
        lambda i: failed(of, i),
        lambda i: replace(ready(of, i), deleting=True),
    ]
    whole = decide(of, [ready(of, i) for i in range(3)]).history
    seen = [(History(), ()), (whole, ()), (whole, (Refusal("Forbidden", "no"),))]
    for chosen, (history, refusals) in product(combinations_with_replacement(states, 3), seen):
        slots = [make(i) for i, make in enumerate(chosen)]
        yield a_pool(of, decide(of, slots, history, NOW + 1, nodes={"cordoned": "cordoned"}, refusals=refusals))


# --- runs -------------------------------------------------------------------------------------------------------------


def a_run(story: Story, **metadata: Any) -> Json:
    status = story.run.status.model_dump(mode="json", by_alias=True)
    return thing("TrainingRun", status, story.run.generation, **metadata)


def _planned(story: Story, *times: dict[str, Any]) -> Story:
    for seen in times:
        story.plan(**seen)
    return story


def _suspended(story: Story) -> Story:
    story.edit(suspend=True)
    story.plan()
    story.plan(600)
    story.plan(jobs=())
    return _planned(story, {}, {})


def _edited(story: Story, *times: dict[str, Any], **spec: Any) -> Story:
    story.edit(**spec)
    return _planned(story, *times)


def _waits_for_phones() -> Story:
    spec = {"environment": {"source": {"pool": {"name": "phones", "slots": 4}}}}
    return _planned(Story(made(**spec, cluster={"image": "i", "minReadySlots": 3})), {"pool": phones(ready=1)})


def _ended(state: str, **fields: Any) -> Story:
    return _planned(Story().started(), {"jobs": (job(1, state, **fields),)})


def _unreadable_run() -> Json:
    story = Story()
    wrong = Situation("stalled", "InvalidSpec", "spec.seed: not a number")
    status = story.run.status.model_copy(
        update={"observed_generation": 1, "conditions": conditions(wrong, story.run.status, 1, NOON)}
    )
    return a_run(_with_status(story, status))


def _with_status(story: Story, status: Any) -> Story:
    story.run = replace(story.run, status=status)
    return story


RUNS: dict[str, Callable[[], Json]] = {
    "new": lambda: thing("TrainingRun"),
    "begins": lambda: a_run(_planned(Story(), {})),
    "waits for phones": lambda: a_run(_waits_for_phones()),
    "starts": lambda: a_run(Story().started("/Initializing")),
    "runs": lambda: a_run(Story().started()),
    "without KubeRay": lambda: a_run(_planned(Story(), {"no_ray_jobs": NO_KUBERAY})),
    "held by a queue": lambda: a_run(Story().started("/Suspended")),
    "stops": lambda: a_run(_edited(Story().started(), {}, suspend=True)),
    "suspended": lambda: a_run(_suspended(Story().started())),
    "suspended from the start": lambda: a_run(_planned(Story(made(suspend=True)), {})),
    "resumed": lambda: a_run(_edited(_suspended(Story().started()), suspend=False)),
    "lost its cluster": lambda: a_run(_ended("RUNNING/Failed")),
    "complete": lambda: a_run(_ended("SUCCEEDED/Complete")),
    "complete and edited": lambda: a_run(_edited(_ended("SUCCEEDED/Complete"), {}, suspend=True)),
    "failed": lambda: a_run(_ended("FAILED/Failed", message="exit code 2")),
    "unreadable": _unreadable_run,
    "deleted": lambda: a_run(Story().started(), deletionTimestamp="2026-11-20T12:00:00Z"),
}


def all_runs() -> Iterator[Json]:
    """Whatever KubeRay says of the first attempt, of runs that go on, are suspended, or were told to stop before."""
    jobs = ("", "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED")
    deployments = ("", "Initializing", "Running", "Complete", "Failed", "ValidationFailed", "Suspended", "Retrying")
    exits = ("", "exit code 1", "exit code 2", "exit code 75")
    for status, deployment, message, suspend in product(jobs, deployments, exits, (False, True)):
        story = Story().started()
        if suspend:
            story.edit(suspend=True)
        for seconds in (1, 600, 600):
            story.plan(seconds, jobs=(job(1, f"{status}/{deployment}", message=message),))
            yield a_run(story)
        story.plan(jobs=())
        yield a_run(story)
