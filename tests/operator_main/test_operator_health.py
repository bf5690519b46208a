"""The kubelet is told the truth with its reason, Prometheus gets its text, and neither asks the API server."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from tapforge_operator.config import advertised
from tapforge_operator.observability.health import application, silence
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
