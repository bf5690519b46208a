"""Ray's start beside a driver: a stop that is asked for meanwhile, and a machine that is too busy for Ray's limits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tapforge_trainer.placement import ray_environment
from tapforge_trainer.placement import ray_start as driver

#: how often a driver starts Ray at most
MOST = driver._RAY_STARTS
#: SIGTERM comes after Ray has put up its handlers and before ours are back
STARTING = """
import asyncio, os, signal
from tapforge_trainer.run.shutdown import StopSignal, become_subreaper, handling_signals
from tapforge_trainer.placement import ray_start as driver

async def starting():
    stop = StopSignal()
    with handling_signals(stop):
        with driver.own_signals():
            await asyncio.to_thread(driver.start_ray)
            os.kill(os.getpid(), signal.SIGTERM)
            print(signal.alarm(0))
        await stop.requested.wait()
        print(stop.reason)
        import ray
        await asyncio.to_thread(ray.shutdown)  # as the policy does; a thread that did not start it takes 17 s

become_subreaper()
asyncio.run(starting())
"""


def test_nobody_aborts_a_driver_that_is_told_to_stop_while_ray_starts() -> None:
    """Ray would have the process aborted in a few seconds, in which it may not even come to hear the signal. The home
    folder can't be written to: Ray would put its token there."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run(
        [sys.executable, "-c", STARTING],
        env={**mine, "HOME": f"{os.devnull}/none"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["0", "SIGTERM"]), ended.stderr
    assert "SIGTERM" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "late", "starts", "comes"),
    [
        ("The current node timed out during startup. This could happen", 2, 3, True),
        ("The current node timed out during startup. This could happen", MOST - 1, MOST, True),
        ("The current node timed out during startup. This could happen", MOST, MOST, False),
        ("Timed out waiting for file /tmp/ray/gcs_server_port_0", 1, 2, True),
        ("The disk is full", 1, 1, False),
    ],
)
def test_a_ray_that_did_not_come_up_in_time_is_started_again(
    words: str, late: int, starts: int, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    begun: list[str] = []

    def init(*, address: str, **_: Any) -> None:
        begun.append(address)
        if len(begun) <= late:
            raise Exception(words)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv(driver.RAY_ADDRESS, raising=False)
    if comes:
        driver.start_ray()
    else:
        with pytest.raises(Exception, match=words):
            driver.start_ray()
    assert begun == ["local"] * starts


@pytest.mark.parametrize(
    ("python", "given"),
    [
        ("/a/.venv/bin/python", None),
        ("/my work/.venv/bin/python", {"py_executable": "'/my work/.venv/bin/python'"}),
    ],
)
def test_workers_start_from_a_checkout_whose_path_has_blanks(
    python: str, given: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray puts the name of its Python into a line for bash as it is."""
    import ray

    found: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda **words: found.append(words["runtime_env"]))
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.delenv(driver.RAY_ADDRESS, raising=False)
    driver.start_ray()
    assert found == [given]


@pytest.mark.parametrize(
    ("environment", "file", "own"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"RAY_AUTH_MODE": "token"}, False, True),
        ({"RAY_AUTH_MODE": "disabled"}, False, False),
        ({"RAY_AUTH_TOKEN": "mine"}, False, False),
        ({"RAY_AUTH_TOKEN_PATH": "/there"}, False, False),
    ],
)
def test_a_local_ray_has_a_token_of_its_own_where_there_is_none(
    environment: dict[str, str], file: bool, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if file:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("kept")
    before = dict(environment)
    ray_environment.prepare(environment)
    assert ("RAY_AUTH_TOKEN" in environment.keys() - before.keys()) is own
    assert {**environment, **before} == environment, "what somebody has set stands"


#: as a user that has no name where that can be, so that nobody but HOME says where its home folder is
HOMELESS = """
import os, sys
from tapforge_trainer.placement import ray_environment
if not os.getuid():
    os.setgid(54321)
    os.setuid(54321)
environment = {}
ray_environment.prepare(environment)
print("RAY_AUTH_TOKEN" in environment)
"""


@pytest.mark.parametrize("home", ["closed", *([] if os.getuid() else [None])])
def test_a_local_ray_has_a_token_where_no_home_folder_can_be_searched(home: str | None, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HOME" and not name.startswith("RAY_")}
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    ended = subprocess.run(
        [sys.executable, "-c", HOMELESS],
        env=environment | ({"HOME": str(closed)} if home else {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout.split() == ["True"], ended.stderr


#: stops where Ray is imported, which is when Ray reads its settings
IMPORTING = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "ray":
            raise SystemExit("waits " + os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "as Ray does"))

sys.meta_path.insert(0, Finder())
from tapforge_trainer.placement import ray_start as driver
driver.start_ray()
"""


@pytest.mark.parametrize(
    ("environment", "waits"),
    [({}, "300"), ({"RAY_gcs_rpc_server_reconnect_timeout_s": "7"}, "7"), ({"RAY_ADDRESS": "there:1"}, "as Ray does")],
    ids=["on this machine", "as somebody has set it", "on a cluster"],
)
def test_a_control_store_that_answers_late_ends_no_driver(environment: dict[str, str], waits: str) -> None:
    """Ray ends whoever gets no answer of it for a minute, and on a machine that compiles beside it that happens."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", IMPORTING]
    ended = subprocess.run(
        command, env={**mine, **environment}, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.stderr.strip() == f"waits {waits}"
