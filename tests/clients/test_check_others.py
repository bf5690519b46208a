"""`tapforge env check` of other people's protocols: silent on servers that keep to them, and the right words, with the
request that showed it, for those that don't."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from androidworld_stub import AndroidWorldStub
from e2e import packages
from osworld_stub import WorkerStub
from test_androidlab import TASK as ALARM
from test_androidlab import AndroidLabStub
from test_osworld import TASK as HELLO

from tapforge_envs.bridge.adb_server import own_adb_server
from tapforge_envs.check import examine, run_check
from tapforge_envs.protocol import Task

LATE = 100.0


@pytest.fixture(scope="module")
def mobileworld() -> Iterator[str]:
    command = [sys.executable, "-m", "tapforge_envs.phone.server", "--protocol", "mobileworld"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}"
        server.terminate()


def test_the_simulated_phone_conforms_to_mobileworlds_protocol(mobileworld, capsys):
    assert run_check(mobileworld, LATE, "mobileworld") == 0
    said = capsys.readouterr().out
    assert "its screen is 96x160 pixels" in said and "conforms to mobileworld" in said
    assert "not sent again" in said


async def test_an_unknown_task_is_shown_with_the_request(mobileworld):
    (violation,) = (
        await examine(mobileworld, "mobileworld", Task(suite="mobileworld", template="none"), LATE)
    ).violations
    assert violation.rule == "reset" and "answered 500" in violation.words
    assert violation.request == f"curl -sS '{mobileworld}/task/goal?task_name=none'"


@asynccontextmanager
async def androidworld():
    stub = AndroidWorldStub()
    async with TestServer(stub.application()) as server:
        yield stub, str(server.make_url("")).rstrip("/")


BROWSE = Task(suite="androidworld", template="Browse")


async def test_androidworlds_server_is_checked_with_a_named_task():
    async with androidworld() as (stub, url):
        checked = await examine(url, "androidworld", BROWSE, LATE)
        assert list(checked.violations) == []
        assert stub.torn_down == [("Browse", 0)] * 2
        assert list((await examine(url, "androidworld", None, LATE)).violations) == []  # the first of its list


@pytest.mark.parametrize(
    ("stub", "protocol", "task"),
    [
        (WorkerStub, "osworld", HELLO),
        (AndroidLabStub, "androidlab", ALARM),
    ],
)
async def test_desktops_and_their_like_are_checked_with_a_named_task(stub, protocol, task):
    async with TestServer(stub().application()) as server:
        url = str(server.make_url("")).rstrip("/")
        assert list((await examine(url, protocol, task, LATE)).violations) == []
        checked = await examine(url, protocol, None, LATE)
        assert list(checked.violations) == [] and "name one (--task)" in " ".join(checked.notes)


@pytest.mark.parametrize(
    ("path", "answer", "rule", "words"),
    [
        ("/health", web.json_response, "health", "expected status 'success'"),
        ("/task/score", lambda: web.json_response({"score": 2}), "evaluate", "must be a number from 0 to 1"),
        ("/execute_action", lambda: web.json_response({"status": "no"}), "step", "expected status 'success'"),
        ("/screenshot", lambda: web.json_response({"pixels": []}), "reset", "is not a screen"),
    ],
)
async def test_what_a_server_does_wrong_is_said_with_the_request_that_showed_it(path, answer, rule, words):
    async with androidworld() as (stub, url):

        async def wrong(request: web.Request) -> web.StreamResponse:
            return answer() if answer is not web.json_response else web.json_response({})

        stub.rough.plan[path] = [wrong] * 100
        violations = (await examine(url, "androidworld", BROWSE, LATE)).violations
        assert [v for v in violations if v.rule == rule and words in v.words and path in v.request], violations


async def test_an_action_that_shows_it_comes_with_its_body():
    async with androidworld() as (stub, url):

        async def wrong(request: web.Request) -> web.StreamResponse:
            return web.json_response({"status": "no"})

        stub.rough.plan["/execute_action"] = [wrong]
        violations = (await examine(url, "androidworld", BROWSE, LATE)).violations
        assert '"action_type": "click"' in violations[0].request and "-X POST" in violations[0].request


async def test_a_server_that_serves_what_it_can_not_is_found_out():
    async def fine(request: web.Request) -> web.Response:
        return web.json_response({"status": "success"})

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", fine)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        violations = (await examine(url, "androidworld", None, LATE)).violations
    refused = [v for v in violations if v.rule == "refusal"]
    assert len(refused) == 4
    assert "a path that there isn't: answers 200 instead of 404" in refused[0].words
    assert refused[0].request == f"curl -sS {url}/no-such-path"


async def test_a_phone_over_adb_is_checked_without_a_task(monkeypatch):
    packages.ensure(packages.ADB)
    command = [sys.executable, "-m", "tapforge_envs.phone.adbd", "--width", "360", "--height", "800"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        adb_port = free.getsockname()[1]
    monkeypatch.setenv("ADB_SERVER_SOCKET", f"tcp:127.0.0.1:{adb_port}")
    phone = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert phone.stdout is not None
    port = json.loads(await phone.stdout.readline())["ports"][0]
    async with own_adb_server(adb_port):
        checked = await examine(f"127.0.0.1:{port}", "adb", None, LATE)
        assert list(checked.violations) == []
        assert "its screen is 360x800 pixels" in checked.notes
        phone.terminate()
        await phone.wait()
        (violation,) = (await examine(f"127.0.0.1:{port}", "adb", None, LATE)).violations
        assert violation.rule == "health" and f"127.0.0.1:{port}" in violation.words
