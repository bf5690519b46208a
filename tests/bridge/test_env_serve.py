"""`tapforge env serve` as its users start it: it says where it listens, lets its phones go when it is stopped, and what
it can't do it says before it listens."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
from phones import PATIENT, TASKS, phones

from tapforge_envs.clients.http import new_session
from tapforge_envs.clients.tapforge_http import TapforgeClient
from tapforge_envs.protocol import EnvironmentFault, Home, Task

SERVE = [sys.executable, "-m", "tapforge_trainer.cli.main", "env", "serve"]


async def started(*options: str) -> tuple[asyncio.subprocess.Process, dict]:
    process = await asyncio.create_subprocess_exec(
        *SERVE, "--port", "0", *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(120):
        line = await process.stdout.readline()
    if not line:
        raise AssertionError((await process.communicate())[1].decode())
    return process, json.loads(line)


async def test_two_phones_are_served_and_let_go_at_the_end(tmp_path):
    mine = Task(suite="mine", template="one")
    (tmp_path / "tasks.jsonl").write_text(mine.model_dump_json() + "\n")
    async with phones(2) as behind, new_session() as session:
        urls = [word for url in behind.urls for word in ("--url", url)]
        process, ready = await started(*urls, "--tasks", str(tmp_path / "tasks.jsonl"))
        assert ready["slots"] == 2
        clients = [
            TapforgeClient(f"http://127.0.0.1:{ready['port']}/slot/{slot}", session, PATIENT) for slot in range(2)
        ]
        for client in clients:
            await client.reset(TASKS.sample(0, 0))
            await client.step(Home(), 0)
        assert await clients[1].tasks() == [mine]
        assert all(slot.episode for slot in behind.slots)
        process.terminate()
        async with asyncio.timeout(120):
            _, said = await process.communicate()
        assert process.returncode == 0, said.decode()
        assert said == b""
        assert [slot.episode for slot in behind.slots] == [None, None]


async def test_a_token_of_the_environment_is_wanted_of_callers(monkeypatch):
    monkeypatch.setenv("TAPFORGE_TOKEN", "0123456789abcdef")
    async with phones() as behind, new_session() as session:
        process, ready = await started("--url", behind.url(), "--host", "0.0.0.0")
        url = f"http://127.0.0.1:{ready['port']}"
        with pytest.raises(EnvironmentFault, match="401"):
            await TapforgeClient(url, session, PATIENT).reset(TASKS.sample(0, 0))
        await TapforgeClient(url, session, PATIENT, token="0123456789abcdef").reset(TASKS.sample(0, 0))
        process.terminate()
        await process.communicate()
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "name a phone"),
        (["--device", "emulator-5554"], "--device, others by --url"),
        (["--protocol", "adb", "--url", "http://127.0.0.1:1"], "--device, others by --url"),
        (["--url", "http://127.0.0.1:1", "--url", "127.0.0.1:1"], "both name http://127.0.0.1:1"),
        (["--url", "ftp://127.0.0.1"], "is not an http(s) URL"),
        (["--url", "http://127.0.0.1:1", "--host", "0.0.0.0"], "set a token"),
        (["--url", "http://127.0.0.1:1", "--token-file", "/nowhere"], "/nowhere"),
        (["--url", "http://127.0.0.1:1", "--tasks", "/nowhere"], "/nowhere"),
        (["--url", "http://127.0.0.1:1", "--protocol", "telnet"], "'telnet' is not one of"),
    ],
)
def test_what_can_not_be_served_is_said_before_it_listens(options, words):
    done = subprocess.run([*SERVE, *options], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr
