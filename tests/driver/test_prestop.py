"""The preStop hook of a Ray Pod, with real processes: which get SIGTERM, and which are waited for."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_broker import NAMESPACE, Authority
from small_operator import RUN, SmallOperator
from test_drive import SPEC

from tapforge_api import attempt as variables
from tapforge_api.progress import EXIT_STOPPED
from tapforge_envs.slots.urls import PROBES_AT_ONCE
from tapforge_trainer.cluster.prestop import ACTORS, lock_path, prestop

TRAINER = Path(__file__).parents[2] / "trainer" / "tapforge_trainer"

#: a driver that makes a checkpoint when it is told to stop, or that is deaf; it says when it has begun
DRIVER = """
import os, pathlib, signal, sys, time
from tapforge_trainer.cluster.prestop import registered

place, deaf = pathlib.Path(os.environ["TAPFORGE_WORK"]), sys.argv[1] == "deaf"

def stop(*_):
    (place / "told").write_text("")
    if not deaf:
        time.sleep(0.3)
        (place / "checkpoint").write_text("")
        sys.exit(75)

signal.signal(signal.SIGTERM, stop)
with registered(os.environ):
    print("begun", flush=True)
    while True:
        time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Pod has it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@contextmanager
def _process(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _pod(work: Path, uid: str = "") -> dict[str, str]:
    """The environment of a Pod of a run that only this test knows."""
    uid = uid or str(uuid.uuid5(uuid.NAMESPACE_URL, str(work)))
    return {variables.RUN: RUN, variables.RUN_UID: uid, variables.WORK: str(work)}


@contextmanager
def _driver(pod: dict[str, str], kind: str = "good") -> Iterator[subprocess.Popen[str]]:
    with _process(sys.executable, "-c", DRIVER, kind, **pod) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        yield process


def _soon(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 120
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()


def test_a_driver_is_told_and_waited_for_until_its_checkpoint_is_there(tmp_path: Path) -> None:
    pod = _pod(tmp_path)
    with _driver(pod) as driver:
        assert prestop(pod, 120)
        assert (tmp_path / "checkpoint").exists()
        assert driver.wait(120) == EXIT_STOPPED
    assert prestop(pod, 120) and not lock_path(pod).exists(), "a second hook finds nobody"


@pytest.mark.parametrize(("kind", "seconds", "code"), [("good", 60, 0), ("deaf", 0, 1)])
def test_the_command_of_the_hook(tmp_path: Path, kind: str, seconds: int, code: int) -> None:
    pod = _pod(tmp_path)
    command = [sys.executable, "-m", "tapforge_trainer.cli.main", *variables.prestop(seconds)[1:]]
    with _driver(pod, kind) as driver:
        ended = subprocess.run(command, env={**os.environ, **pod}, stderr=subprocess.PIPE, text=True, check=False)
        assert ended.returncode == code, ended.stderr
        assert ("has not stopped within 0 s" in ended.stderr) is (code == 1)
        assert kind == "deaf" or driver.wait(120) == EXIT_STOPPED


def test_a_driver_that_does_not_stop_is_left_when_the_time_is_over(tmp_path: Path) -> None:
    pod = _pod(tmp_path)
    with _driver(pod, "deaf") as driver:
        assert not prestop(pod, 1.0)
        assert driver.poll() is None
        assert _soon((tmp_path / "told").exists)


def test_nobody_is_taken_for_a_driver_that_was_killed(tmp_path: Path) -> None:
    pod = _pod(tmp_path)
    with _driver(pod) as driver:
        driver.kill()
        driver.wait()
    with _process("sleep", "600") as stranger:
        lock_path(pod).write_text(str(stranger.pid))
        try:
            assert prestop(pod, 120)
        finally:
            lock_path(pod).unlink()
        assert stranger.poll() is None


def test_without_a_driver_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    assert prestop(_pod(tmp_path), 60) and prestop(_pod(tmp_path / "nowhere"), 60)


@pytest.mark.parametrize("actor", ACTORS)
@pytest.mark.parametrize("parted", [False, True], ids=["alone", "with its environment at its parent"])
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a process that is called as one of Ray's")
def test_a_pod_of_ranks_or_engines_waits_for_them(tmp_path: Path, actor: str, parted: bool) -> None:
    pod = _pod(tmp_path)
    named = f"exec -a {actor}.run sleep 600"
    command = f"(unset {variables.RUN_UID}; echo $BASHPID; {named}); true" if parted else f"echo $$; {named}"
    with _process("bash", "-c", command, **pod) as started:
        assert started.stdout is not None
        rank = int(started.stdout.readline())
        assert _soon(lambda: Path(f"/proc/{rank}/cmdline").read_bytes().startswith(actor.encode()))
        assert not prestop(pod, 0.5)
        assert prestop(_pod(tmp_path, "of another run"), 60)
        left: list[bool] = []
        waiting = threading.Thread(target=lambda: left.append(prestop(pod, 120)))
        waiting.start()
        os.kill(rank, signal.SIGTERM)
        started.wait()
        waiting.join(120)
        assert left == [True]


def test_actors_are_called_so() -> None:
    """Actors are classes; a function that Ray calls once is none."""
    code = "".join(file.read_text() for file in TRAINER.rglob("*.py"))
    assert {f"ray::{name}" for name in re.findall(r"ray\.remote(?:\(\w+=[^)]*\))?\(([A-Z]\w+)\)", code)} == set(ACTORS)


@pytest.mark.parametrize("restarts", ["0", "2"])
async def test_a_run_that_is_left_stops_in_order_and_says_so(
    operator: SmallOperator, authority: Authority, tmp_path: Path, restarts: str
) -> None:
    access = authority.access(operator.port)
    pod = {
        variables.RUN: RUN,
        variables.NAMESPACE: NAMESPACE,
        variables.RUN_UID: str(uuid.uuid4()),
        variables.ATTEMPT: "1",
        variables.STORAGE: str(tmp_path / "storage"),
        variables.WORK: str(tmp_path / "work"),
        variables.GRACE: "50",
        variables.BROKER_URL: str(access.url),
        variables.BROKER_CA: str(access.ca),
        variables.BROKER_TOKEN_FILE: str(access.token),
    }
    # The driver begins with waiting for its phones: 5 s for as many as it asks at once, so for minutes in all.
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        phones = [f"http://127.0.0.1:{deaf.getsockname()[1]}/{number}" for number in range(40 * PROBES_AT_ONCE)]
        (tmp_path / "run.yaml").write_text(SPEC % '", "'.join(phones))
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tapforge_trainer.cli.main", "run", "-f", "run.yaml", "--restarts", restarts),
            cwd=tmp_path,
            env={**os.environ, **pod},
        )
        try:
            await operator.until(lambda: any(report.phase == "Loading" for report in operator.reports))
            assert await asyncio.to_thread(prestop, pod, 60)
            assert await asyncio.wait_for(run.wait(), 120) == EXIT_STOPPED
        finally:
            if run.returncode is None:
                run.kill()
                await run.wait()
    (last,) = operator.finals
    assert last.final == "stopped" and "SIGTERM" in last.message
