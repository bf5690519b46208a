"""A run from begin to end under an operator that dies at a write, at every one of them in turn, and is followed by
another one. KubeRay, the pool and the driver are played."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from run_house import JOBS, RUN, House, Process, config_map
from small_api import Line, SmallApi, refuse

from tapforge_api.progress import Progress
from tapforge_operator import controller as work_queue
from tapforge_operator import labels
from tapforge_operator.kube import reflector
from tapforge_operator.kube.client import ApiError
from tapforge_operator.kube.types import belongs
from tapforge_operator.trainingrun import apply, controller, plan, prerequisites
from tapforge_operator.trainingrun.status import has_ended, read_status


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(controller, "_CHECKPOINT_SECONDS", 0.01)
    monkeypatch.setattr(work_queue, "_YIELD_SECONDS", 0.0)
    monkeypatch.setattr(prerequisites, "_FIRST_BACKOFF", 0.0)


def check(house: House) -> None:
    made = Counter(path for verb, path in house.api.log if verb == "create")
    jobs = {path: count for path, count in made.items() if path.startswith(JOBS)}
    assert set(jobs.values()) == {1} and len(jobs) == 3, jobs
    status = house.status
    assert status["lostClusters"] == 1 and status["progress"]["update"] == 9
    assert status["checkpoint"]["update"] == 3
    (config,) = [o for name, o in house.api.of("configmaps").items() if name == labels.config_name("run", house.uid)]
    assert config["data"]["run.yaml"] == status["resolved"] and "ownPool" not in status["resolved"]
    kinds = ("configmaps", "rayjobs", "emulatorpools")
    made_for_it = [o for kind in kinds for o in house.api.of(kind).values() if "ownerReferences" in o["metadata"]]
    assert made_for_it and all(belongs(o["metadata"], house.uid) for o in made_for_it)
    told = Counter(event["reason"] for event in house.api.of("events").values())
    assert told["Complete"] <= 1 and told["ClusterLost"] <= 1 and told["AttemptStarted"] <= 3


async def test_a_run_lives_through_a_suspension_and_a_loss() -> None:
    house = House()
    await house.live(-1, False)
    check(house)
    told = Counter(event["reason"] for event in house.api.of("events").values())
    assert told["AttemptStarted"] == 3 and told["Complete"] == 1 and told["Suspended"] == 1
    assert house.process.told("tapforge_run_") == [], "who leads no more has nothing to say"


async def test_a_finished_run_that_nobody_can_read_any_more_stays_what_it_became() -> None:
    house = House()
    await house.live(-1, False)
    before = house.status
    house.api.patch(RUN, {"spec": {"seed": "none"}})
    process = Process(house.api, Line(house.api))
    await process.begin()
    try:
        generation = house.api.get(RUN)["metadata"]["generation"]
        async with asyncio.timeout(120):
            await house.until(lambda: house.status["observedGeneration"] == generation)
    finally:
        await process.end()
    assert house.says("Complete", "Complete") and generation > before["observedGeneration"]
    assert {**house.status, "observedGeneration": before["observedGeneration"]} == before


async def test_a_driver_whose_judges_have_spent_their_budget_gives_everything_back_until_more_is_given() -> None:
    """Written, carried out and read from the API server, as an upgrade or another operator would find it."""
    house = House()
    house.api.patch(RUN, {"spec": {"stop": {"judgeTokens": 1000}}})
    process = house.process = Process(house.api, Line(house.api))
    await process.begin()
    try:
        async with asyncio.timeout(60):
            await house.until(lambda: len(house.jobs()) == 1)
            house.kuberay("RUNNING", "Running")
            why = {"reason": "JudgeBudgetSpent", "message": "judges have used 1,010 tokens", "final": "stopped"}
            kept = {"checkpoint": {"update": 3, "path": "/storage/3"}}
            await house.report(advance={"update": 3, "judgeTokens": 1010}, **why, **kept)
            await house.until(lambda: house.says("Suspended", "JudgeBudgetSpent") and not house.jobs())
            await house.until(lambda: not house.api.of("emulatorpools"))
        await process.end()
        process = house.process = Process(house.api, Line(house.api))
        await process.begin()
        async with asyncio.timeout(60):
            house.api.patch(RUN, {"spec": {"stop": {"judgeTokens": 1005}}})
            generation = house.api.get(RUN)["metadata"]["generation"]
            await house.until(lambda: house.status["observedGeneration"] == generation)
            assert house.says("Ready", "JudgeBudgetSpent") and "which is 1,005" in house.status["message"]
            assert house.status["progress"]["judgeTokens"] == 1010
            house.api.patch(RUN, {"spec": {"stop": {"judgeTokens": 2000}}})
            await house.until(lambda: house.jobs() == [2])
        assert house.status["lostClusters"] == house.status["failures"] == 0
    finally:
        await process.end()


class Noting(Line):
    """Keeps what is written into the run's status."""

    statuses: list[Any]

    async def patch(self, path: str, body: Any) -> Any:
        if path == f"{RUN}/status":
            self.statuses.append(body["status"])
        return await super().patch(path, body)


async def test_checkpoints_in_a_row_are_written_now_and_then_and_the_one_of_a_stop_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller, "_CHECKPOINT_SECONDS", 3600.0)
    house = House()
    line = Noting(house.api)
    line.statuses = []
    house.process = process = Process(house.api, line)
    await process.begin()
    try:
        async with asyncio.timeout(60):
            await house.until(lambda: len(house.jobs()) == 1)
            house.kuberay("RUNNING", "Running")
            await house.report(update=3, checkpoint={"update": 3, "path": "/storage/3"})
            assert house.status["checkpoint"]["update"] == 3
            waiting = asyncio.create_task(house.report(update=4, checkpoint={"update": 4, "path": "/storage/4"}))
            await house.until(lambda: process.runs.reports.newest(house.uid)[0].advance.update == 4)
            await house.report(update=4)
            repeated = {"attempt": 1, "sequence": 1000, "checkpoint": {"update": 4, "path": "/storage/4"}}
            again = asyncio.create_task(process.runs.reports.take(house.uid, Progress.model_validate(repeated)))
            await house.until(lambda: process.runs.reports.newest(house.uid)[0].sequence == 1000)
            await asyncio.sleep(0.05)
            assert house.status["checkpoint"]["update"] == 3 and not waiting.done() and not again.done()
            house.api.patch(RUN, {"spec": {"suspend": True}})
            assert (await again).stop == "suspend" and house.status["checkpoint"]["update"] == 4
            await waiting
            house.sequence = 1000
            await house.report(update=5, final="stopped", checkpoint={"update": 5, "path": "/storage/5"})
            assert house.status["checkpoint"]["update"] == 5
    finally:
        await process.end()
    assert sum("resolved" in status and bool(status["resolved"]) for status in line.statuses) == 1, "it never changes"


@pytest.mark.parametrize(
    ("phase", "final", "checkpoint", "message", "expected"),
    [
        ("Active", "", 3, "", 30.0),
        ("Active", "", 4, "", 0.01),
        ("Active", "complete", 4, "", 0.0),
        ("Active", "", 4, "it is something else", 0.0),
        ("Stopping", "", 4, "", 0.0),
    ],
)
def test_what_a_driver_waits_for_before_it_ends_is_written_at_once(
    phase: str, final: str, checkpoint: int, message: str, expected: float
) -> None:
    there = {"attempts": 1, "attempt": {"number": 1, "phase": phase}, "checkpoint": {"update": 3, "path": "p"}}
    now = {**there, "progress": {"update": 9}, "checkpoint": {"update": checkpoint, "path": "p"}, "message": message}
    report = Progress.model_validate({"attempt": 1, "sequence": 1, "final": final})
    assert controller.pause(read_status(there), read_status(now), report) == expected


async def test_a_run_whose_status_can_not_be_read_is_stopped_and_goes_on_when_it_can() -> None:
    house = House()
    house.process = process = Process(house.api, Line(house.api))
    await process.begin()
    try:
        async with asyncio.timeout(60):
            await house.until(lambda: len(house.jobs()) == 1)
            house.kuberay("RUNNING", "Running")
            await house.until(lambda: house.status["attempt"]["phase"] == "Active")
            await process.end()
            house.api.patch(f"{RUN}/status", {"status": {"attempts": "many", "later": {"a": 1}}})
            before, log = house.status, house.changes()
            process = house.process = Process(house.api, Line(house.api))
            await process.begin()
            await house.until(lambda: house.says("Stalled", "UnreadableStatus"))
            await house.until(lambda: "UnreadableStatus" in [e["reason"] for e in house.api.of("events").values()])
            house.api.patch(RUN, {"metadata": {}, "spec": {"suspend": True}})  # news
            await house.until(lambda: not house.process.cache.runs.get(house.uid).wanted)
            assert {k: v for k, v in house.status.items() if k != "conditions"} == {
                k: v for k, v in before.items() if k != "conditions"
            }
            assert house.changes() == log
            house.api.patch(f"{RUN}/status", {"status": {"attempts": 1}})
            await house.until(house.stopping)
            assert house.status["attempts"] == 1 and house.status["later"] == {"a": 1}
    finally:
        await process.end()


async def test_a_finished_run_whose_status_can_not_be_read_stays_what_it_became(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House()
    await house.live(-1, False)
    house.api.patch(f"{RUN}/status", {"status": {"disruptions": "many"}})
    before, log = house.status, house.changes()
    asked: list[Any] = []
    monkeypatch.setattr(controller, "has_ended", lambda status: asked.append(status) or has_ended(status))
    process = Process(house.api, Line(house.api))
    await process.begin()
    try:
        async with asyncio.timeout(60):
            await house.until(lambda: len(asked) == 1)
    finally:
        await process.end()
    assert house.status == before and house.changes() == log


async def test_what_is_measured_of_a_run_is_as_its_status_and_goes_with_it() -> None:
    house = House()
    house.process = process = Process(house.api, Line(house.api))
    await process.begin()
    try:
        async with asyncio.timeout(120):
            await house.until(lambda: len(house.jobs()) == 1)
            assert 'tapforge_runs{phase="starting"} 1.0' in process.told("tapforge_runs")
            house.kuberay("RUNNING", "Running")
            await house.report(update=3, checkpoint={"update": 3, "path": "/storage/3"})
            await house.until(lambda: 'tapforge_run_updates{run="lab/run"} 3.0' in process.told("tapforge_run_"))
            assert 'tapforge_runs{phase="running"} 1.0' in process.told("tapforge_runs")
            assert 'tapforge_run_attempts_total{run="lab/run"} 1.0' in process.told("tapforge_run_")
            assert any(line.startswith("tapforge_run_progress_age") for line in process.told("tapforge_run_"))
            house.api.delete(RUN)
            await house.until(lambda: not process.told("tapforge_run_"))
            assert 'tapforge_runs{phase="running"} 0.0' in process.told("tapforge_runs")
    finally:
        await process.end()


@pytest.mark.parametrize("carried_out", [False, True], ids=["lost", "carried-out"])
async def test_an_operator_may_die_at_any_write(carried_out: bool) -> None:
    fatal = 0
    while True:
        house = House()
        first = await house.live(fatal, carried_out)
        check(house)
        if not first.line.dead.is_set():
            break
        fatal += 1
    assert fatal > 20


class Unconverted(Line):
    """RayJobs' API answers nothing but failures from a step on, as without its conversion webhook: "list" from the
    start, "dry run", "create" before or after it was carried out."""

    def __init__(self, api: SmallApi, step: str) -> None:
        super().__init__(api)
        self.step = step
        self.failing = step == "list"

    async def pages(self, path: str, selector: str = "", **more: Any) -> AsyncIterator[tuple[list[Any], str]]:
        self._answer(path)
        async for page in super().pages(path, selector, **more):
            yield page

    async def get(self, path: str, deadline: float | None = None) -> Any:
        self._answer(path)
        return await super().get(path)

    async def create(self, path: str, body: Any, deadline: float | None = None, **more: Any) -> Any:
        if path == JOBS and self.step == "lost" and not more.get("dry_run"):
            self.failing, self.step = True, ""
            await super().create(path, body)
        self.failing = self.failing or (path == JOBS and self.step == ("dry run" if more.get("dry_run") else "create"))
        self._answer(path)
        return await super().create(path, body, **more)

    def mend(self) -> None:
        self.failing, self.step = False, ""

    def _answer(self, path: str) -> None:
        if self.failing and path.startswith(JOBS):
            raise refuse(500, "InternalError")


@pytest.mark.parametrize("step", ["list", "dry run", "create", "lost"])
async def test_a_rayjobs_api_that_fails_is_a_condition_of_the_run_and_goes_by(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (prerequisites, "_REFRESH"),
        (plan, "_REFUSED_RETRY"),
        (apply, "_REFUSED_SECONDS"),
        (controller, "_DRY_RUN_SECONDS"),
        (reflector, "_FIRST_PAUSE"),
    ):
        monkeypatch.setattr(module, name, 0.01)
    house = House()
    line = Unconverted(house.api, step)
    process = Process(house.api, line)
    try:
        async with asyncio.timeout(60):
            await process.begin()
            if step != "lost":  # the watch, which goes on, tells of that one
                await house.until(lambda: house.says("Reconciling", "RayJobsUnavailable"))
                line.mend()
            await house.until(lambda: bool(house.jobs()) and house.status["attempt"]["phase"] == "Active")
    finally:
        await process.end()
    assert [path for verb, path in house.api.log if verb == "create" and "/rayjobs/" in path] == [f"{JOBS}/run-1"]


async def test_a_run_that_an_earlier_release_started_goes_on() -> None:
    """Its ConfigMap has no Pod templates, and its status no digest of them."""
    house = House()
    process = Process(house.api, Line(house.api))
    await process.begin()
    async with asyncio.timeout(60):
        await house.until(lambda: house.jobs() == [1])
        house.kuberay("RUNNING", "Running")
        await house.until(lambda: house.says("Ready", "Running"))
    await process.end()
    resolved = "".join(line for line in house.status["resolved"].splitlines(True) if labels.POD_TEMPLATES not in line)
    assert resolved != house.status["resolved"]
    house.api.patch(f"{RUN}/status", {"status": {"resolved": resolved}})
    config = f"/api/v1/namespaces/lab/configmaps/{labels.config_name('run', house.uid)}"
    house.api.patch(config, {"data": {"run.yaml": resolved, "templates.json": None}})
    successor = Process(house.api, Line(house.api))
    await successor.begin()
    try:
        async with asyncio.timeout(60):
            house.kuberay("RUNNING", "Failed", "the head is gone")
            await house.until(lambda: house.jobs() == [2])
    finally:
        await successor.end()
    assert house.api.get(config)["data"] == {"run.yaml": resolved} and house.status["resolved"] == resolved


class Refusing(Line):
    """Refuses the writes to Kueue's checks for a while."""

    refuses = True

    async def patch(self, path: str, body: Any) -> Any:
        if self.refuses and "/admissionchecks/" in path:
            self.writes += 1
            raise refuse(503, "Unavailable")
        return await super().patch(path, body)


async def test_a_check_that_a_term_could_not_activate_is_activated_in_the_next_one() -> None:
    house, kueue = House(), "/apis/kueue.x-k8s.io/v1beta2/admissionchecks"
    house.api.create(kueue, {"metadata": {"name": "phones"}, "spec": {"controllerName": "tapforge.dev/phones"}})
    house.api.delete(RUN)
    line = Refusing(house.api)
    process = Process(house.api, line)
    try:
        async with asyncio.timeout(60):
            await process.begin()
            await house.until(lambda: line.writes > 0)
            await process.end()
            line.refuses = False
            await process.begin()
            await house.until(lambda: "status" in house.api.get(f"{kueue}/phones"))
    finally:
        await process.end()


class Answered(Line):
    """Takes the answers to Kueue's checks."""

    answers: list[Any]

    async def patch(self, path: str, body: Any) -> Any:
        if "/workloads/" in path:
            self.answers.append({step["path"].rpartition("/")[2]: step["value"] for step in body})
            raise refuse(422, "Invalid")
        return await super().patch(path, body)


async def test_a_run_that_can_not_be_read_gives_its_quota_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "BOOT_DEADLINE", 0.01)
    house, kueue = House(), "/apis/kueue.x-k8s.io/v1beta2"
    line = Answered(house.api)
    line.answers = []
    process = Process(house.api, line)
    try:
        async with asyncio.timeout(60):
            await process.begin()
            await house.until(lambda: len(house.jobs()) == 1)
            (job,) = house.api.of("rayjobs").values()
            house.api.patch(RUN, {"spec": {"seed": "none"}})
            await house.until(lambda: house.says("Stalled", "InvalidSpec"))
            await process.end()
            house.api.create(
                f"{kueue}/admissionchecks",
                {"metadata": {"name": "phones"}, "spec": {"controllerName": "tapforge.dev/phones"}},
            )
            owner = {"kind": "RayJob", "uid": job["metadata"]["uid"], "controller": True}
            reserved = {"type": "QuotaReserved", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            check = {"name": "phones", "state": "Pending", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            house.api.create(
                f"{kueue}/namespaces/lab/workloads",
                {
                    "metadata": {"name": "w", "namespace": "lab", "ownerReferences": [owner]},
                    "status": {"conditions": [reserved], "admissionChecks": [check]},
                },
            )
            await process.begin()
            await house.until(lambda: bool(line.answers))
    finally:
        await process.end()
    assert line.answers[0]["state"] == "Retry" and "seed" in line.answers[0]["message"]


async def test_a_controller_that_breaks_leaves_its_driver_an_answer_until_the_run_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House()
    house.process = process = Process(house.api, Line(house.api))
    await process.begin()
    reports, broken = process.runs.reports, asyncio.Event()

    def breaks(*_: Any) -> Any:
        broken.set()
        raise RuntimeError("a fault of the plan")

    try:
        async with asyncio.timeout(60):
            await house.until(lambda: len(house.jobs()) == 1)
            house.kuberay("RUNNING", "Running")
            await house.report(update=1)
            with monkeypatch.context() as patched:
                patched.setattr(controller, "plan_run", breaks)
                house.kuberay("RUNNING", "Running", "again")
                await broken.wait()
                await house.until(lambda: not process.runs._queue._loops)  # its controller is gone
                assert reports.newest(house.uid)[0] is not None
                last = {"attempt": 1, "sequence": house.sequence, "advance": {"update": 1}}
                assert not (await reports.take(house.uid, Progress.model_validate(last))).stop
                house.api.delete(RUN)
                assert not reports.knows(house.uid)
                assert not (await reports.take(house.uid, Progress.model_validate(last))).stop, "it waits for nobody"
    finally:
        await process.end()


async def test_an_authority_that_somebody_took_out_of_its_config_map_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House()
    where = "/api/v1/namespaces/tapforge-system/configmaps/tapforge-broker-ca"
    house.api.patch(where, {"data": {"ca.crt": None}})
    reads, read = Counter[str](), house.api.get

    def get(path: str) -> Any:
        reads[path] += 1
        return read(path)

    monkeypatch.setattr(house.api, "get", get)
    house.process = Process(house.api, Line(house.api))
    await house.process.begin()
    try:
        async with asyncio.timeout(60):
            await house.until(lambda: reads[where] >= 2)
            assert not house.jobs()
            house.api.patch(where, config_map("tapforge-broker-ca"))
            await house.until(lambda: len(house.jobs()) == 1)
    finally:
        await house.process.end()


class Vetoing(Line):
    """Somebody's admission refuses updates of ConfigMaps, also those that change nothing."""

    vetoes = True

    async def patch(self, path: str, body: Any) -> Any:
        if self.vetoes and "/configmaps/" in path:
            raise ApiError(f"PATCH {path}", 403, "Forbidden", "admission webhook denied the request: no updates")
        return await super().patch(path, body)


async def test_a_run_whose_config_map_can_not_be_read_is_suspended_all_the_same_and_says_why_it_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prerequisites, "_REFRESH", 0.01)
    house = House()
    line = Vetoing(house.api)
    house.process = Process(house.api, line)
    try:
        async with asyncio.timeout(60):
            await house.process.begin()
            await house.until(lambda: house.says("Stalled", "Forbidden"))
            line.vetoes = False
            await house.until(lambda: house.jobs() == [1])
            house.kuberay("RUNNING", "Running")
            await house.report(update=1)
            await house.process.end()
            house.process = Process(house.api, line := Vetoing(house.api))
            await house.process.begin()
            house.api.patch(RUN, {"spec": {"suspend": True}})
            await house.until(lambda: house.status["attempt"]["phase"] == "Stopping")
            await house.report(update=2, checkpoint={"update": 2, "path": "/storage/2"}, final="stopped")
            await house.until(lambda: not house.jobs() and house.says("Suspended", "Suspended"))
            house.api.patch(RUN, {"spec": {"suspend": False}})
            await house.until(lambda: house.says("Stalled", "Forbidden"))
            line.vetoes = False
            await house.until(lambda: house.jobs() == [2])
    finally:
        await house.process.end()
