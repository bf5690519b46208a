"""What the benchmarks of the operator count with: the audit log, percentiles, targets, Pods equal to the operator's."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.bench import pools
from e2e.bench.audit import Audit, read
from e2e.bench.availability import longest_gap
from e2e.bench.claiming import Refused
from e2e.bench.claims import Measured, share
from e2e.bench.claims_load import insist
from e2e.bench.figures import percentile, ratios
from e2e.bench.replicas import Service
from e2e.bench.targets import HEADLINES, REPORTED, TARGETS, results, rows
from hypothesis import given
from hypothesis import strategies as st

from tapforge_operator.kube.types import observe


def line(name: str = "a", stage: str = "ResponseComplete", **more: Any) -> str:
    event = {
        "stage": stage,
        "verb": "create",
        "user": {"username": "somebody"},
        "userAgent": "client/1",
        "objectRef": {"resource": "pods", "namespace": "phones", "name": name},
        "responseStatus": {"code": 201},
        "requestReceivedTimestamp": "2026-01-01T00:00:00.000250Z",
        "stageTimestamp": "2026-01-01T00:00:00.250000Z",
    }
    return json.dumps(event | more)


def test_a_line_of_the_audit_log():
    write = read(line())
    assert write is not None
    assert (write.user, write.agent, write.verb, write.resource) == ("somebody", "client/1", "create", "pods")
    assert (write.namespace, write.name, write.status, write.done) == ("phones", "a", 201, True)
    assert write.ended - write.began == pytest.approx(0.24975)


def test_subresources_are_told_apart_and_refusals_are_not_done():
    about = {"resource": "pods", "subresource": "status", "namespace": "phones", "name": "a"}
    write = read(line(objectRef=about, responseStatus={"code": 409}))
    assert write is not None
    assert (write.resource, write.done) == ("pods/status", False)


@pytest.mark.parametrize("text", [line(stage="RequestReceived"), line(stage="Panic"), line(objectRef=None)])
def test_what_is_no_finished_write_is_passed_over(text):
    assert read(text) is None


def test_the_log_is_followed_while_it_grows_also_in_the_middle_of_a_line(tmp_path: Path):
    path = tmp_path / "audit.log"
    audit = Audit(path)
    assert audit.mark() == 0
    first, second = line("a") + "\n", line("b") + "\n"
    path.write_text(first + second[:40])
    mark = audit.mark()
    assert mark == 1
    with path.open("a") as log:
        log.write(second[40:])
    assert [write.name for write in audit.since(mark)] == ["b"]
    assert [write.name for write in audit.since(0)] == ["a", "b"]


def test_waiting_counts_each_object_once_and_says_how_many_were_missing(tmp_path: Path):
    path = tmp_path / "audit.log"
    path.write_text("".join(line(name) + "\n" for name in ("a", "a", "b")))
    audit = Audit(path)
    assert [w.name for w in audit.wait("pods", 0, lambda w: w.done, 2, seconds=0)] == ["a", "b"]
    with pytest.raises(TimeoutError, match="pods: 2 of 3"):
        audit.wait("pods", 0, lambda w: w.done, 3, seconds=0)


@pytest.mark.parametrize(
    ("values", "percent", "found"),
    [([3.0], 99, 3.0), ([1.0, 2.0, 3.0, 4.0], 50, 2.0), (list(range(1, 101)), 99, 99), (list(range(1, 1001)), 99, 990)],
)
def test_percentiles_are_values_that_were_measured(values, percent, found):
    assert percentile(values, percent) == found


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.integers(1, 100))
def test_so_many_values_do_not_exceed_a_percentile(values, percent):
    found = percentile(values, percent)
    assert sum(value <= found for value in values) >= len(values) * percent / 100
    assert sum(value < found for value in values) < len(values) * percent / 100


def test_of_nothing_there_is_no_percentile():
    with pytest.raises(ValueError, match="nothing was measured"):
        percentile([], 50)


def test_times_are_compared_at_both_percentiles_and_with_nothing_not_at_all():
    assert ratios([2.0, 2.0, 9.0], [1.0, 1.0, 3.0]) == {"p50_ratio": 2.0, "p99_ratio": 3.0}
    assert ratios([], [1.0]) == ratios([1.0], []) == {}


def test_a_side_that_measured_nothing_ends_no_benchmark():
    found = Measured().figures("claims_", "raw_", "relay_")
    assert found["claims_refused_share"] == 0.0
    assert "claims_p50_ms" not in found
    assert (share(1, [1.0] * 4), share(0, [])) == (0.25, 0.0)


def answers(*given: object) -> Callable[[], Awaitable[Any]]:
    left = list(given)

    async def call() -> Any:
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    return call


async def test_a_caller_that_is_refused_asks_again_when_it_was_told_to_until_it_has_a_claim():
    errors, began = Counter[str](), time.monotonic()
    tries = answers(Refused(429, '{"reason": "TooManyWaiters"}', 0.2), TimeoutError(), [], ["a claim"])
    assert await insist(tries, began + 60, errors) == ["a claim"]
    assert errors == {"429 TooManyWaiters": 1, "TimeoutError": 1, "no slot": 1}
    assert time.monotonic() - began >= 0.2 + 1 + 1


async def test_a_caller_gives_up_when_its_time_is_over():
    errors = Counter[str]()
    assert await insist(answers(Refused(503, "{}", 0.1)), time.monotonic() + 0.25, errors) is None
    assert errors["503 "] in (1, 2, 3)


def figures(value: float) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: dict.fromkeys(keys, value) for name, keys in HEADLINES.items()}
    names = ("slots_created_s", "slots_ready_s", "cpu_s", "claims_p50_ms", "claims_p99_ms")
    for times in ("peer_times", "peer_ten_times"):
        found["peer"][times] = dict.fromkeys(names, value)
    return found


def test_every_target_and_every_reported_figure_is_one_that_a_scenario_gives():
    made = results(figures(1.0), {})
    assert len(made["targets"]) == len(TARGETS)
    assert len(rows(made)) == len(TARGETS) + len(REPORTED)


@pytest.mark.parametrize(("value", "met"), [(0.0, {">=": False, "<=": True}), (1e6, {">=": True, "<=": False})])
def test_targets_are_met_from_the_right_side(value, met):
    for target in results(figures(value), {})["targets"]:
        assert target["met"] is met[target["target"].split()[0]]


def test_scenarios_that_did_not_run_have_no_row():
    some = {"steady": figures(0.0)["steady"]}
    assert [row[0] for row in rows(results(some, {}))] == ["steady writes per minute, beside the Lease"]


def test_the_raw_clients_pods_are_slots_of_the_pool_like_the_operators():
    made = pools.pool("phones", "default", 0)
    made["metadata"] |= {"uid": "u", "generation": 1, "resourceVersion": "1"}
    pods = pools.equal_pods(made, 3, first=2)
    assert len({pod["metadata"]["name"] for pod in pods}) == 3
    for pod, ordinal in zip(pods, (2, 3, 4), strict=True):
        stored = {**pod, "metadata": {**pod["metadata"], "uid": "p", "resourceVersion": "2"}}
        slot = observe(stored)
        assert slot is not None
        assert (slot.pool, slot.pool_uid, slot.ordinal) == ("phones", "u", ordinal)


def test_a_replica_set_has_the_pods_containers_and_none_of_the_operators_labels():
    made = pools.pool("phones", "default", 0)
    made["metadata"] |= {"uid": "u", "generation": 1, "resourceVersion": "1"}
    template = pools.replica_set("phones", "default")["spec"]["template"]
    pod = pools.equal_pods(made, 1)[0]
    assert template["spec"] == {**pod["spec"], "restartPolicy": "Always"}
    assert not [label for label in template["metadata"]["labels"] if label.startswith("tapforge.dev/")]


def test_the_longest_gap_is_between_two_answers():
    assert longest_gap([1.0, 2.0, 4.5, 5.0]) == 2.5


async def test_a_service_takes_its_endpoints_in_turn_and_refuses_where_there_are_none():
    async def say(name: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(name)
        writer.close()

    servers = [
        await asyncio.start_server(lambda _, writer, name=name: say(name, writer), "127.0.0.1", 0)
        for name in (b"a", b"b")
    ]
    async with Service() as service:

        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            said = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            return said

        assert await ask() == b"", "nobody is there"
        service.endpoints = [server.sockets[0].getsockname()[1] for server in servers]
        assert sorted([await ask(), await ask()]) == [b"a", b"b"]
        del service.endpoints[0]
        assert [await ask(), await ask()] == [b"b", b"b"]
    for server in servers:
        server.close()
