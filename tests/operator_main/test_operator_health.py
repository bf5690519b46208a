"""The kubelet is told the truth with its reason, Prometheus gets its text, and neither asks the API server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from tapforge_operator.broker.writer import Api
from tapforge_operator.config import advertised
from tapforge_operator.kube.client import ApiError
from tapforge_operator.metricsaccess import MetricsAccess
from tapforge_operator.observability.health import FRESH, Rendered, application, silence
from tapforge_operator.observability.metrics import STATES, Telemetry


async def ask(path: str, telemetry: Telemetry, alive: str = "", ready: str = "") -> tuple[int, str, str]:
    async with TestClient(TestServer(application(telemetry, lambda: alive, lambda: ready))) as client:
        response = await client.get(path)
        return response.status, response.headers["Content-Type"], await response.text()


@pytest.mark.parametrize(
    ("path", "alive", "ready", "status", "body"),
    [
        ("/healthz", "", "", 200, "ok\n"),
        ("/healthz", "", "not synced", 200, "ok\n"),
        ("/healthz", "no watch has said anything for 70 s", "", 503, "no watch has said anything for 70 s\n"),
        ("/readyz", "", "", 200, "ok\n"),
        ("/readyz", "", "pools are not listed yet", 503, "pools are not listed yet\n"),
        ("/readyz", "hung", "", 200, "ok\n"),
    ],
)
async def test_probes_answer_with_the_reason(path, alive, ready, status, body):
    assert await ask(path, Telemetry(), alive, ready) == (status, "text/plain; charset=utf-8", body)


@pytest.mark.parametrize("role", ["leads in term 3", "standing by; tapforge-operator-abc leads"])
async def test_who_is_ready_says_for_what(role):
    telemetry = Telemetry()
    async with TestClient(TestServer(application(telemetry, lambda: "", lambda: "", lambda: role))) as client:
        response = await client.get("/readyz")
        assert (response.status, await response.text()) == (200, f"{role}\n")
        assert await (await client.get("/healthz")).text() == "ok\n"


@pytest.mark.parametrize(
    ("address", "port", "told"),
    [
        ("", 8443, ""),
        ("10.0.0.7", 8443, "10.0.0.7:8443"),
        ("fd00::7", 8443, "[fd00::7]:8443"),
        ("[fd00::7]", 8443, "[fd00::7]:8443"),
        ("[fd00::7]:9443", 8443, "[fd00::7]:9443"),
        ("10.0.0.7:9443", 8443, "10.0.0.7:9443"),
        ("operator-0.lab", 8443, "operator-0.lab:8443"),
        ("10.0.0.7", 0, ""),
    ],
)
def test_what_other_replicas_are_told(address, port, told):
    assert advertised(address, port) == told


async def test_the_verdict_is_asked_anew_each_time():
    said = iter(["", "hung", ""])
    async with TestClient(TestServer(application(Telemetry(), lambda: next(said), lambda: ""))) as client:
        assert [(await client.get("/healthz")).status for _ in range(3)] == [200, 503, 200]


async def test_metrics_are_prometheus_text():
    telemetry = Telemetry()
    telemetry.pool_state("a/phones", dict.fromkeys(STATES, 4))
    status, kind, body = await ask("/metrics", telemetry)
    assert status == 200
    assert kind.startswith("text/plain; version=")
    names = {family.name for family in text_string_to_metric_families(body)}
    assert {"tapforge_pool_slots", "tapforge_leader", "process_resident_memory_bytes"} <= names


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_metrics_are_rendered_once_for_all_who_ask() -> None:
    clock, texts = Clock(), iter([b"first", b"second"])
    rendered = Rendered(lambda: next(texts), clock)
    assert await asyncio.gather(*(rendered.text() for _ in range(50))) == [b"first"] * 50
    clock.now += FRESH - 0.1
    assert await rendered.text() == b"first"
    clock.now += 0.2
    assert await asyncio.gather(*(rendered.text() for _ in range(50))) == [b"second"] * 50


async def test_who_goes_away_while_metrics_are_rendered_costs_nobody_their_text() -> None:
    go_on = threading.Event()

    def slowly() -> bytes:
        assert go_on.wait(60)
        return b"text"

    rendered = Rendered(slowly)
    first, second = (asyncio.create_task(rendered.text()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    go_on.set()
    assert await second == b"text"


class Reviews:
    """An API server that knows two tokens, and that prometheus may get /metrics."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.away = False

    async def create(self, _: str, body: Any) -> Any:
        self.asked.append(body["kind"])
        if self.away:
            raise ApiError("review", 0, "Deadline", "no answer")
        spec = body["spec"]
        if body["kind"] == "TokenReview":
            user = {"username": spec["token"], "groups": ["system:authenticated"]}
            return {"status": {"authenticated": spec["token"] in ("prometheus", "somebody"), "user": user}}
        assert spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        return {"status": {"allowed": spec["user"] == "prometheus"}}


@pytest.fixture
async def guarded() -> AsyncIterator[tuple[Callable[..., Awaitable[int]], Reviews, Clock]]:
    """Metrics that ask for a token."""
    reviews, clock = Reviews(), Clock()
    access = MetricsAccess(cast(Api, reviews), clock)
    app = application(Telemetry(), lambda: "", lambda: "", lambda: "ok", access.refusal)
    async with TestClient(TestServer(app)) as client:

        async def get(token: str | None = None, path: str = "/metrics") -> int:
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            answer = await client.get(path, headers=headers)
            assert answer.status == 200 or b"tapforge_leader" not in await answer.read()
            return answer.status

        yield get, reviews, clock


async def test_metrics_are_for_who_may_read_them(guarded) -> None:
    get, *_ = guarded
    assert [await get(token) for token in (None, "", "forged", "somebody", "prometheus")] == [401, 401, 401, 403, 200]
    assert [await get(path=path) for path in ("/healthz", "/readyz")] == [200, 200], "the kubelet has no token"


async def test_a_scraper_is_asked_about_once_a_minute_and_is_let_in_while_nobody_can_be_asked(guarded) -> None:
    get, reviews, clock = guarded
    assert await asyncio.gather(*(get("prometheus") for _ in range(20))) == [200] * 20
    assert reviews.asked == ["TokenReview", "SubjectAccessReview"]
    reviews.away = True
    clock.now += 3600
    assert await get("prometheus") == 200
    assert await get("another") == 503


async def test_nothing_else_is_served():
    status, _, _ = await ask("/debug", Telemetry())
    assert status == 404


def test_silence_is_a_fault_after_its_limit_and_an_event_ends_it():
    now = 100.0
    telemetry = Telemetry(clock=lambda: now)
    verdict = silence(telemetry, limit_seconds=60)
    now += 1000
    assert verdict() == "", "it stands by, and may have nothing to hear"
    telemetry.leading(1)
    assert verdict() == ""
    now += 60
    assert verdict() == ""
    now += 11
    assert verdict() == "no watch has said anything for 71 s, the limit is 60 s"
    telemetry.event("leases")
    assert verdict() == ""
