"""RayJobs that are watched, that can't be watched, and that nobody knows yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from runs_made import UID, made
from small_api import Line, SmallApi, refuse

from tapforge_operator.kube import reflector
from tapforge_operator.kube.cache import Cache
from tapforge_operator.kube.informers import job_reflector
from tapforge_operator.observability.metrics import Telemetry
from tapforge_operator.trainingrun.rayjob import Broker, ray_job

LAB = "/apis/ray.io/v1/namespaces/lab/rayjobs"
JOB = f"{LAB}/run-1"
#: as a status: no answer ever
HANGS = -1


class Refusing(Line):
    """Lists and watches of some paths fail, as long as they are here."""

    def __init__(self, api: SmallApi) -> None:
        super().__init__(api)
        self.refusals: dict[str, tuple[int, str]] = {}
        self.cuts = 0
        #: questions that got nothing
        self.in_vain = 0

    async def pages(self, path: str, selector: str = "", **more: Any) -> AsyncIterator[tuple[list[Any], str]]:
        if path in self.refusals or self.dead.is_set():
            self.in_vain += 1
        if path in self.refusals and self.refusals[path][0] == HANGS:
            await asyncio.Event().wait()
        if path in self.refusals:
            raise refuse(*self.refusals[path])
        async for page in super().pages(path, selector, **more):
            yield page

    async def watch(self, path: str, selector: str = "", *, since: str, **more: Any) -> AsyncIterator[Any]:
        seen = 0
        self.in_vain += self.dead.is_set()
        async for event in super().watch(path, selector, since=since, **more):
            if seen == 1 and self.cuts:
                self.cuts -= 1
                raise refuse(410, "Expired")
            seen += 1
            yield event


class Ground:
    def __init__(self, *spaces: str) -> None:
        self.api = SmallApi()
        self.line = Refusing(self.api)
        self.cache = Cache(Telemetry(), lambda _: None)
        self.changes = 0
        self.watch = job_reflector(self.cache, self.line, spaces, self._changed)  # type: ignore[arg-type]
        body = ray_job(made(), 1, Broker("u", "c"))
        body["metadata"]["namespace"] = "lab"
        self.api.create(LAB, body)

    def _changed(self) -> None:
        self.changes += 1

    def deployments(self) -> list[str]:
        return [job.deployment for job in self.cache.ray_jobs_of("lab", UID)]

    def says(self, deployment: str) -> None:
        self.api.patch(f"{JOB}/status", {"status": {"jobDeploymentStatus": deployment}})

    async def asked_in_vain(self, times: int) -> None:
        async with asyncio.timeout(60):
            while self.line.in_vain < times:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def until(self, *deployments: str) -> None:
        async with asyncio.timeout(60):
            while self.deployments() != list(deployments):  # noqa: ASYNC110 - the cache tells nobody here
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "_MISSING_SECONDS", 0.01)
    monkeypatch.setattr(reflector, "_FIRST_PAUSE", 0.001)


async def test_what_happens_between_list_and_watch_and_through_cuts_is_not_missed() -> None:
    ground = Ground("lab")
    await ground.watch.sync()
    assert ground.deployments() == [""]
    ground.says("Initializing")
    ground.line.cuts = 2
    task = asyncio.create_task(ground.watch.run())
    for deployment in ("Running", "Complete", "Failed", "Retrying"):
        ground.says(deployment)
        await ground.until(deployment)
    ground.api.delete(JOB)
    ground.api.finalise(JOB)
    await ground.until()
    task.cancel()


async def test_what_vanished_while_nobody_watched_is_gone() -> None:
    ground = Ground("lab")
    await ground.watch.sync()
    ground.api.delete(JOB)
    ground.api.finalise(JOB)
    await ground.watch.sync()
    assert ground.deployments() == []


@pytest.mark.parametrize(
    ("status", "words"), [(404, "install KubeRay"), (403, "may not look"), (500, "can't answer"), (0, "can't answer")]
)
async def test_rayjobs_that_come_later_are_found(status: int, words: str) -> None:
    ground = Ground("lab")
    ground.line.refusals[LAB] = (status, "No")
    await ground.watch.begin(60.0)
    assert words in ground.cache.no_ray_jobs["lab"].message and ground.changes == 1
    task = asyncio.create_task(ground.watch.run())
    await ground.asked_in_vain(4)
    assert ground.changes == 1, "told once"
    del ground.line.refusals[LAB]
    await ground.until("")
    assert not ground.cache.no_ray_jobs and ground.changes == 2
    task.cancel()


async def test_one_namespaces_trouble_is_no_others() -> None:
    ground = Ground("lab", "other")
    ground.line.refusals["/apis/ray.io/v1/namespaces/other/rayjobs"] = (403, "Forbidden")
    await ground.watch.sync()
    assert not ground.cache.no_ray_jobs.get("lab") and ground.cache.no_ray_jobs["other"]
    assert ground.deployments() == [""]


async def test_an_api_server_that_is_away_is_asked_again() -> None:
    ground = Ground("lab")
    await ground.watch.sync()
    ground.line.dead.set()
    task = asyncio.create_task(ground.watch.run())
    await ground.asked_in_vain(4)
    ground.says("Running")
    ground.line.dead.clear()
    await ground.until("Running")
    assert not ground.cache.no_ray_jobs.get("lab"), "to be away is no reason to give up"
    task.cancel()


async def test_a_list_that_does_not_end_is_not_waited_for() -> None:
    """As where a conversion webhook hangs."""
    ground = Ground("lab", "other")
    ground.line.refusals[LAB] = (HANGS, "")
    async with asyncio.timeout(60):
        await ground.watch.begin(0.05)
    assert {space: found.reason for space, found in ground.cache.no_ray_jobs.items()} == {"lab": "RayJobsUnavailable"}


async def test_rayjobs_that_fail_in_the_middle_of_a_watch_stay_known() -> None:
    ground = Ground("lab")
    await ground.watch.begin(60.0)
    ground.line.refusals[LAB] = (500, "InternalError")
    task = asyncio.create_task(ground.watch.run())
    ground.line.cuts = 1
    ground.says("Running")
    ground.says("Complete")
    await ground.asked_in_vain(2)
    assert "lab" in ground.cache.no_ray_jobs and ground.deployments()
    del ground.line.refusals[LAB]
    await ground.until("Complete")
    assert not ground.cache.no_ray_jobs
    task.cancel()


async def test_a_server_that_forgets_everything_is_left_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is asked again at once, and then after a pause, which here has no end."""
    monkeypatch.setattr(reflector, "_FIRST_PAUSE", 3600.0)
    ground = Ground("lab")
    ground.line.refusals[LAB] = (410, "Expired")
    task = asyncio.create_task(ground.watch.run())
    await ground.asked_in_vain(2)
    await asyncio.sleep(0.3)
    assert ground.line.in_vain == 2
    task.cancel()
