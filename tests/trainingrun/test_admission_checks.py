"""What the AdmissionCheck controller reads of Kueue and writes to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from small_api import Line, Object, SmallApi

from tapforge_operator.kube.client import ApiError
from tapforge_operator.kube.leaderelection import NotLeading
from tapforge_operator.trainingrun import admissioncheck
from tapforge_operator.trainingrun.admissioncheck import Queues
from tapforge_operator.trainingrun.kueue import CheckState, CheckUpdate, Workload, decide

CHECKS = "/apis/kueue.x-k8s.io/v1beta2/admissionchecks"
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/lab/workloads"
CHECK = {"metadata": {"name": "phones"}, "spec": {"controllerName": "tapforge.dev/phones"}}


def queues(line: Line, leads: bool = True, heard: list[str] | None = None) -> Queues:
    heard = [] if heard is None else heard
    return Queues(line, ("lab",), lambda: leads, heard.append, lambda: heard.append("checks"))  # type: ignore[arg-type]


async def until(probe: Callable[[], bool]) -> None:
    for _ in range(1000):
        if probe():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not there after 10 s")


class Busy(Line):
    """Somebody else writes to the object a moment before the first patch."""

    async def patch(self, path: str, body: Object) -> Object:
        if not self.writes:
            self.writes += 1
            self.api.patch(path.removesuffix("/status"), {"metadata": {"finalizers": ["kueue"]}})
        return await super().patch(path, body)


@pytest.mark.parametrize("kind", [Line, Busy])
async def test_our_checks_become_active_and_others_are_left_alone(kind: type[Line]) -> None:
    api, heard = SmallApi(), list[str]()
    api.create(
        CHECKS, {"metadata": {"name": "nodes"}, "spec": {"controllerName": "kueue.x-k8s.io/provisioning-request"}}
    )
    api.create(CHECKS, CHECK)
    ours = queues(kind(api), heard=heard)
    await ours.sync()
    assert ours.ours == {"phones"} and set(heard) == {"checks"} and ours.knows("lab")
    task = asyncio.create_task(ours.run())
    await until(lambda: "status" in api.get(f"{CHECKS}/phones"))
    (condition,) = api.get(f"{CHECKS}/phones")["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["observedGeneration"]) == ("Active", "True", 1)
    assert "status" not in api.get(f"{CHECKS}/nodes")
    api.delete(f"{CHECKS}/phones")
    await until(lambda: not ours.ours)
    task.cancel()


class Away(Line):
    """Kueue's kinds are there, and nobody converts them."""

    async def pages(self, path: str, selector: str = "", **_: Any) -> AsyncIterator[tuple[list[Object], str]]:
        raise ApiError("LIST", 500, "InternalError", "conversion webhook failed: connection refused")
        yield [], ""


async def test_a_kueue_that_does_not_answer_is_one_without_a_check() -> None:
    away = queues(Away(SmallApi()))
    await away.sync()
    assert away.ours == frozenset() and away.of("lab", "job") is None
    assert not away.knows("lab"), "it may hold quota for a run"


class Refusing(Line):
    async def pages(self, path: str, selector: str = "", **_: Any) -> AsyncIterator[tuple[list[Object], str]]:
        raise ApiError("LIST", 404, "NotFound", "no such kind")
        yield [], ""


class WithoutWorkloads(Line):
    """AdmissionChecks can be read, Workloads can't for now."""

    async def pages(self, path: str, selector: str = "", **more: Any) -> AsyncIterator[tuple[list[Object], str]]:
        if path == WORKLOADS:
            raise ApiError("LIST", 500, "InternalError", "conversion webhook failed: connection refused")
        async for page in super().pages(path, selector, **more):
            yield page


async def test_what_nobody_can_read_is_known_and_what_fails_for_now_is_not() -> None:
    heard: list[str] = []
    without = queues(Refusing(SmallApi()), heard=heard)
    assert not without.knows("lab")
    await without.sync()
    assert without.knows("lab") and heard, "runs that wait for the answer are looked at again"
    half = queues(WithoutWorkloads(SmallApi()))
    await half.sync()
    assert not half.knows("lab")


class Closed(Line):
    """Kueue's kinds can be read until an answer is set."""

    answer = 0

    async def pages(self, path: str, selector: str = "", **_: Any) -> AsyncIterator[tuple[list[Object], str]]:
        if self.answer:
            raise ApiError("LIST", self.answer, "NotFound", "no more")
        async for page in super().pages(path, selector):
            yield page


@pytest.mark.parametrize(("answer", "lists"), [(404, 1), (403, 2)])
async def test_what_cannot_be_read_any_more_counts_no_longer_until_it_is_read_again(answer: int, lists: int) -> None:
    line, heard = Closed(SmallApi()), list[str]()
    line.api.create(CHECKS, CHECK)
    owner = {"kind": "RayJob", "name": "run-1", "uid": "job", "controller": True}
    line.api.create(WORKLOADS, {"metadata": {"name": "w", "namespace": "lab", "ownerReferences": [owner]}})
    ours = queues(line, heard=heard)
    await ours.sync()
    assert "job" in heard and "checks" in heard
    heard.clear()
    line.answer = answer
    for _ in range(lists):
        assert ours.ours == {"phones"} and ours.of("lab", "job") is not None
        await ours.sync()
    assert ours.ours == frozenset() and ours.of("lab", "job") is None
    assert sorted(heard) == ["checks", "job"], "the runs that it concerns are told"
    line.answer = 0
    await ours.sync()
    assert ours.ours == {"phones"} and ours.of("lab", "job") is not None


class Failing(Away):
    """As `Client` does, the call is repeated for a minute."""

    async def pages(self, path: str, selector: str = "", **_: Any) -> AsyncIterator[tuple[list[Object], str]]:
        self.asked = True
        await asyncio.sleep(60)
        async for page in super().pages(path, selector):
            yield page


async def test_a_kueue_that_fails_for_long_keeps_no_run_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admissioncheck, "SYNC_SECONDS", 0.01)
    line = Failing(SmallApi())
    async with asyncio.timeout(30):
        await queues(line).sync()
    assert line.asked


class Patches(Line):
    """Takes the patches of Workloads."""

    def __init__(self, answer: int = 0) -> None:
        super().__init__(SmallApi())
        self.taken: list[tuple[str, Any]] = []
        self._answer = answer

    async def patch(self, path: str, body: Any) -> Object:
        self.taken.append((path, body))
        if self._answer:
            raise ApiError("PATCH", self._answer, "Invalid", "a test failed")
        return {"metadata": {"namespace": "lab", "name": "w", "uid": "w", "resourceVersion": "8"}}


UPDATE = CheckUpdate(
    Workload("lab", "w", "w", "7", "job", checks=(CheckState("nodes", "Ready"), CheckState("phones", "Pending"))),
    "phones",
    "Retry",
    "no phones",
    requeue_after=1,
)


async def test_only_our_entry_is_written_and_only_on_the_version_that_was_seen() -> None:
    line = Patches()
    await queues(line).write(UPDATE, 0.0)
    ((path, steps),) = line.taken
    assert path == f"{WORKLOADS}/w/status"
    assert [(step["op"], step["path"].removeprefix("/status/admissionChecks/1/"), step["value"]) for step in steps] == [
        ("test", "/metadata/resourceVersion", "7"),
        ("test", "name", "phones"),
        ("add", "state", "Retry"),
        ("add", "message", "no phones"),
        ("add", "lastTransitionTime", "1970-01-01T00:00:00Z"),
        ("add", "requeueAfterSeconds", 1),
    ]


@pytest.mark.parametrize("answer", [404, 409, 422])
async def test_a_workload_that_has_changed_is_decided_on_again(answer: int) -> None:
    await queues(Patches(answer)).write(UPDATE, 0.0)
    with pytest.raises(ApiError):
        await queues(Patches(500)).write(UPDATE, 0.0)


async def test_nothing_is_written_by_one_who_does_not_lead() -> None:
    line = Patches()
    with pytest.raises(NotLeading):
        await queues(line, leads=False).write(UPDATE, 0.0)
    assert line.taken == []


async def test_the_age_of_a_demand_is_by_the_clock_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kueue's may be wrong by more than any deadline."""
    now = 1_800_000_000.0
    monkeypatch.setattr(admissioncheck, "time", SimpleNamespace(time=lambda: now))
    line = Line(SmallApi())
    line.api.create(CHECKS, CHECK)
    owner = {"kind": "RayJob", "name": "run-1", "uid": "job", "controller": True}
    line.api.create(WORKLOADS, {"metadata": {"name": "w", "namespace": "lab", "ownerReferences": [owner]}})
    ours = queues(line)
    await ours.sync()
    ages: list[float] = []
    for since, state in (("2020-01-01T00:00:00Z", "True"), ("2020-01-01T00:00:00Z", "True"), ("", "False")):
        reserved = {"type": "QuotaReserved", "status": state, "lastTransitionTime": since}
        check = {"name": "phones", "state": "Pending", "lastTransitionTime": since}
        line.api.patch(f"{WORKLOADS}/w", {"status": {"conditions": [reserved], "admissionChecks": [check]}})
        now += 100
        await ours.sync()
        workload = ours.of("lab", "job")
        assert workload is not None
        ages.append(now - workload.seen)
        if state == "True":
            left = decide(workload, ours.ours, "no phones", 300.0, now)
            assert left == pytest.approx(300.0 - ages[-1])
    assert ages == [0.0, 100.0, 0.0]


async def test_a_workload_that_gets_its_owner_later_is_seen() -> None:
    api = SmallApi()
    api.create(WORKLOADS, {"metadata": {"name": "w"}, "spec": {"queueName": "gpus"}})
    ours = queues(Line(api))
    await ours.sync()
    task = asyncio.create_task(ours.run())
    owned = api.objects[f"{WORKLOADS}/w"]
    owned["metadata"]["ownerReferences"] = [{"kind": "RayJob", "uid": "job", "controller": True}]
    owned["metadata"]["namespace"] = "lab"
    api.patch(f"{WORKLOADS}/w", {"status": {}})
    await until(lambda: ours.of("lab", "job") is not None)
    assert ours.of("other", "job") is None, "owner references don't lead out of a namespace"
    api.delete(f"{WORKLOADS}/w")
    await until(lambda: ours.of("lab", "job") is None)
    task.cancel()


class Forbidding(Line):
    async def patch(self, path: str, body: Any) -> Object:
        self.writes += 1
        raise ApiError("PATCH", 403, "Forbidden", "admissionchecks/status")


async def test_a_check_that_may_not_be_activated_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admissioncheck, "_RETRY", 0.001)
    api = SmallApi()
    api.create(CHECKS, CHECK)
    line = Forbidding(api)
    ours = queues(line)
    await ours.sync()
    task = asyncio.create_task(ours.run())
    await until(lambda: line.writes > 3)
    task.cancel()
    assert caplog.text.count("AdmissionCheck phones: ") == 1
