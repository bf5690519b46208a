"""Every claim has one line in the audit log when it is granted and one when it ends, whatever ends it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from claim_cluster import Broker, Door, Lab, pod_path, until

from tapforge_operator.observability.logging import AUDIT, configure

pytestmark = pytest.mark.usefixtures("own_time")

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.INFO, AUDIT)
    return lambda: [record.msg for record in caplog.records if record.name == AUDIT and isinstance(record.msg, dict)]


async def test_the_life_of_a_claim_is_two_lines(lines: Lines) -> None:
    lab = Lab(1)
    broker = Broker(lab, 3)
    [claim] = await broker.acquire("a", request="request-1", pod="lab/driver/uid-d", priority=2)
    [granted] = lines()
    uid = lab.pod("phone-0")["metadata"]["uid"]
    common = {
        "schema": 1,
        "holder": "run/lab/a/u",
        "pod": "lab/driver/uid-d",
        "request": "request-1",
        "priority": 2,
        "namespace": "lab",
        "pool": "phones",
        "poolUid": lab.pool_uid,
        "slot": "phone-0",
        "slotUid": uid,
        "node": "n0",
        "address": "10.0.0.7",
        "fence": claim.fence,
        "term": 3,
    }
    until_when = granted.pop("until")
    assert granted == common | {"event": "granted", "ttlSeconds": 5.0, "holdSeconds": 5.0}
    await broker.release(claim, episodes=4)
    [_, ended] = lines()
    assert until_when > ended.pop("granted")
    assert ended == common | {"event": "ended", "why": "it was given back", "episodes": 4, "proved": True}
    await broker.release(claim)
    await broker.end()
    assert len(lines()) == 2


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("broken", "it was given back broken"),
        ("silent", "it was not renewed in time"),
        ("deleted", "its Pod is gone"),
        ("tampered", "its claim annotation was changed by another client"),
    ],
)
async def test_the_line_of_an_end_says_why(lines: Lines, what: str, why: str) -> None:
    lab = Lab(1)
    broker = Broker(lab, speed=20.0)  # a claim of 5 s ends after 0.25 s
    [claim] = await broker.acquire()
    if what == "broken":
        await broker.release(claim, verdict="broken")
    elif what == "deleted":
        lab.cluster.drop(pod_path("phone-0"))
    elif what == "tampered":
        pod = lab.cluster.get(pod_path("phone-0"))
        del pod["metadata"]["annotations"]["tapforge.dev/claim"]
        lab.cluster.put(pod_path("phone-0"), pod)
    await until(lambda: len(lines()) == 2)
    assert [line["event"] for line in lines()] == ["granted", "ended"]
    assert lines()[1]["why"] == why and lines()[1]["granted"]
    await broker.end()


async def test_a_claim_that_its_caller_never_heard_of_is_granted_and_ends(lines: Lines) -> None:
    lab = Lab(1)
    door = Door(lab.cluster)
    broker = Broker(lab, door=door)
    call = asyncio.create_task(broker.acquire())
    await until(lambda: door.writes)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: len(lines()) % 2 == 0 and not broker.claims.counts(lab.pool_uid).held)
    assert [line["event"] for line in lines()] in ([], ["granted", "ended"])
    await broker.end()


async def test_the_next_leader_tells_of_the_end_and_of_no_second_grant(lines: Lines) -> None:
    lab = Lab(1)
    first = Broker(lab, 1)
    [claim] = await first.acquire()
    await first.die()
    second = Broker(lab, 2)
    await second.release(claim)
    assert [(line["event"], line["term"], line["fence"]) for line in lines()] == [
        ("granted", 1, claim.fence),
        ("ended", 2, claim.fence),
    ]
    assert lines()[1]["granted"] == ""
    await second.end()


@pytest.mark.parametrize(("level", "audit"), [("INFO", True), ("WARNING", True), ("DEBUG", False)])
async def test_it_is_written_as_json_at_every_level_unless_it_is_off(level: str, audit: bool) -> None:
    root, before = logging.getLogger(), (logging.getLogger().handlers[:], logging.getLogger().level)
    stream = io.StringIO()
    try:
        configure(level, stream=stream, audit=audit)
        broker = Broker(Lab(1))
        [claim] = await broker.acquire()
        await broker.release(claim)
        await broker.end()
    finally:
        configure()
        root.handlers[:], _ = before[0], root.setLevel(before[1])
    said = [line for text in stream.getvalue().splitlines() if (line := json.loads(text))["logger"] == AUDIT]
    assert [line["event"] for line in said] == (["granted", "ended"] if audit else [])
    assert all({"time", "level", "logger", "schema"} <= line.keys() for line in said)
