"""Runs, RayJobs and reports for the tests of this folder, each as small as it can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tapforge_api.progress import Progress
from tapforge_api.reading import read_run
from tapforge_operator import labels as wellknown
from tapforge_operator.kube.objectmeta import Unavailable
from tapforge_operator.kube.types import RayJob, RayPod
from tapforge_operator.trainingrun.plan import plan_run
from tapforge_operator.trainingrun.state import (
    DryRunResult,
    Observed,
    ObservedPool,
    ObservedVolume,
    Run,
    RunHistory,
    RunPlan,
)
from tapforge_operator.trainingrun.templates import StoredConfig

#: 2026-11-20T12:00:00Z
NOON = 1795176000.0
UID = "0d1a6d2c-9a57-4f5c-8f5e-3f0a6c1f2b11"
#: checkpoints that last, and their volume
BUCKET = {"uri": "s3://lab/runs"}
SAFE = {"storage": {"volumeClaim": {"claimName": "disk"}}}
DISK = ObservedVolume(True, ("ReadWriteMany",))
#: environments: on somebody's pool, and on one of the run's own
POOL = {"source": {"pool": {"name": "phones", "slots": 4}}}
OWN = {"source": {"ownPool": {"slots": 2, "spec": {"external": {"urls": ["http://a", "http://b"]}}}}}
WORKERS = [{"name": "gpu", "replicas": 2}]
NO_KUBERAY = Unavailable("KubeRayMissing", "install KubeRay", stalls=True)
HEAD = RayPod("run-1-head", "headgroup", "Running", head=True, ready=True)


def body(name: str = "run", labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """A TrainingRun as the API server has it. Without `cluster` it gets the smallest one."""
    spec.setdefault("cluster", {"image": "trainer:1"})
    return {
        "apiVersion": "tapforge.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": UID,
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": "2026-11-20T11:00:00Z",
            "labels": labels or {},
        },
        "spec": {k: v for k, v in spec.items() if v is not None},
    }


def made(name: str = "run", **spec: Any) -> Run:
    data = body(name, **spec)
    reading = read_run(data)
    assert reading.spec is not None, reading.message
    return Run.of(data, reading.spec)


def pool(**fields: Any) -> ObservedPool:
    return replace(ObservedPool(name="phones", uid="pool-uid", ready=4, largest=8), **fields)


def job(attempt: int = 1, state: str = "/", **fields: Any) -> RayJob:
    """`state` is job status and deployment status: RUNNING/Running."""
    status, deployment = state.split("/")
    name = wellknown.ray_job_name("run", attempt)
    plain = RayJob("team", name, f"job-{attempt}", "1", UID, attempt, job_status=status, deployment=deployment)
    return replace(plain, **fields)


def report(attempt: int = 1, sequence: int = 1, update: int = 0, **fields: Any) -> Progress:
    return Progress.model_validate(
        {"attempt": attempt, "sequence": sequence, "advance": {"update": update, "maxUpdates": 10}, **fields}
    )


class Story:
    """A run that is planned again and again, each time with the status that the last plan wrote."""

    def __init__(self, run: Run | None = None, **seen: Any) -> None:
        self.run = made() if run is None else run
        self.observed = Observed(**{"dry_run": DryRunResult(1), "config": StoredConfig(), "volume": DISK, **seen})
        self.history = RunHistory()
        self.now = NOON
        self.last: RunPlan | None = None

    def plan(self, seconds: float = 1.0, **seen: Any) -> RunPlan:
        """After so many seconds, with these things changed; they stay so."""
        self.now += seconds
        self.observed = replace(self.observed, **seen)
        self.last = plan_run(self.run, self.observed, self.history, self.now)
        self.history = self.last.history
        self.run = replace(self.run, status=self.last.status)
        return self.last

    def reports(self, seconds: float = 1.0, **fields: Any) -> RunPlan:
        said = report(self.run.status.attempt.number, int(self.now * 1000), **fields)
        return self.plan(seconds, report=said, reported=self.now + seconds)

    def edit(self, **spec: Any) -> None:
        changed = self.run.spec.model_copy(update=spec)
        self.run = replace(self.run, spec=changed, generation=self.run.generation + 1)

    def restart(self) -> None:
        """The operator forgets what only it knows."""
        self.history = RunHistory()
        self.observed = replace(self.observed, report=None, reported=0.0)

    @property
    def phase(self) -> str:
        return self.run.status.attempt.phase

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(c for c in self.run.status.conditions if c.type == kind)
        return found.status, found.reason

    @property
    def ready(self) -> tuple[str, str]:
        return self.condition("Ready")

    def started(self, state: str = "RUNNING/Running") -> Story:
        """With its first RayJob in that state."""
        self.plan()
        number = self.plan().create_job
        assert number == self.run.status.attempts
        self.plan(jobs=(job(number, state),))
        return self


def lasting(**cluster: Any) -> Story:
    """With a storage that lasts."""
    return Story(made(checkpoints=SAFE, cluster={"image": "i", **cluster}))


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
