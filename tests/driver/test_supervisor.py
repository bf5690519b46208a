"""The supervisor with real processes: what it starts again, what it passes on, and what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from tapforge_trainer.cli.main import cli
from tapforge_trainer.run.supervisor import (
    RESTARTS,
    RESTARTS_LEFT,
    STARTED,
    Backoff,
    driver_command,
    ending,
    exit_message,
    supervise,
)

FAST = Backoff(first=0.01, cap=0.02)

#: ends in the ways that are listed, one after the other: a code, or minus a signal
DRIVER = f"""
import json, os, pathlib, sys
place, ways = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
count = len(list(place.iterdir()))
(place / f"start-{{count}}").write_text(os.environ["{RESTARTS}"] + "/" + os.environ["{RESTARTS_LEFT}"])
way = ways[count]
os.kill(os.getpid(), -way) if way < 0 else sys.exit(way)
"""


class Told:
    """Takes the place of the operator."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    async def __call__(self, environment: Mapping[str, str], message: str) -> None:
        self.said.append((environment[RESTARTS_LEFT], message))


@pytest.mark.parametrize(
    ("ways", "restarts", "code", "starts"),
    [
        ([0], 3, 0, 1),
        ([2], 3, 2, 1),
        ([75], 3, 75, 1),
        ([130], 3, 130, 1),
        ([1, 0], 3, 0, 2),
        ([1, -9, -11, 75], 3, 75, 4),
        ([7, 0], 1, 0, 2),
        ([1, 1], 1, 1, 2),
        ([-9, -9, -9], 2, 1, 3),
        ([1], 0, 1, 1),
    ],
)
async def test_what_is_started_again(tmp_path: Path, ways: list[int], restarts: int, code: int, starts: int) -> None:
    place, told = tmp_path / "starts", Told()
    place.mkdir()
    command = [sys.executable, "-c", DRIVER, str(place), json.dumps(ways)]
    assert await supervise(command, restarts, os.environ, backoff=FAST, report_killed=told) == code
    counted = [(place / f"start-{k}").read_text() for k in range(len(list(place.iterdir())))]
    assert counted == [f"{k}/{restarts - k}" for k in range(starts)]
    killed = [(k, way) for k, way in enumerate(ways[:starts]) if way < 0]
    assert [left for left, _ in told.said] == [str(restarts - k) for k, _ in killed], "the others report themselves"
    for (k, way), (_, message) in zip(killed, told.said, strict=True):
        assert signal.Signals(-way).name in message
        assert ("is restarted (" in message) == (k < restarts)


async def test_all_drivers_of_a_supervisor_say_when_the_first_one_was_started(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = f"import os, sys; print(os.environ['{STARTED}'], file=open(sys.argv[1], 'a')); sys.exit(1)"
    begun = int(time.time() * 1000)
    for _ in range(2):
        await supervise([sys.executable, "-c", code, str(starts)], 1, os.environ, backoff=FAST)
    first, again, second, last = map(int, starts.read_text().split())
    assert begun <= first == again < second == last


@pytest.mark.parametrize(
    ("code", "left", "told", "end"),
    [
        (1, 3, signal.SIGTERM, 1),
        (-15, 3, signal.SIGTERM, 75),
        (-9, 3, signal.SIGTERM, 1),
        (75, 3, signal.SIGTERM, 75),
        (0, 3, signal.SIGTERM, 0),
        (-2, 3, signal.SIGINT, 130),
        (1, 3, signal.SIGINT, 130),
        (-15, 3, None, None),
    ],
)
def test_who_was_told_to_stop_is_not_started_again(
    code: int, left: int, told: signal.Signals | None, end: int | None
) -> None:
    assert ending(code, left, told) == end


def test_pauses_grow_up_to_a_bound() -> None:
    pauses = [Backoff().after(count) for count in range(1001)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[3], pauses[-1]) == (1.0, 8.0, 60.0)


def test_a_driver_that_was_killed_for_its_memory_says_so() -> None:
    assert "SIGKILL" in exit_message(-9, 0, 2) and "memory" in exit_message(-9, 0, 2)
    assert "3 times" in exit_message(-11, 3, 0) and "is restarted (" not in exit_message(-11, 3, 0)


#: waits for SIGTERM or SIGINT, counts them, and obeys after a moment
PATIENT = """
import pathlib, signal, sys, time
place, heard = pathlib.Path(sys.argv[1]), []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: heard.append(number))
(place / "ready").write_text("")
while not heard:
    time.sleep(0.01)
time.sleep(0.2)
(place / "heard").write_text(str(len(heard)))
sys.exit(75 if heard[0] == signal.SIGTERM else 130)
"""


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_reaches_the_driver_once(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Also when it goes to the whole group of processes."""
    program = (
        "import asyncio, os, sys; from tapforge_trainer.run.supervisor import supervise;"
        "sys.exit(asyncio.run(supervise(sys.argv[1:], 3, os.environ)))"
    )
    command = [sys.executable, "-c", program, sys.executable, "-c", PATIENT, str(tmp_path)]
    supervisor = subprocess.Popen(command, start_new_session=True)
    _until((tmp_path / "ready").exists)
    os.killpg(supervisor.pid, number)
    assert supervisor.wait(120) == code
    assert (tmp_path / "heard").read_text() == "1"


async def test_a_stop_during_a_pause_is_obeyed() -> None:
    killed = asyncio.Event()

    async def told(environment: Mapping[str, str], message: str) -> None:
        killed.set()

    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    long = Backoff(first=3600, cap=3600)
    running = asyncio.create_task(supervise(command, 3, os.environ, backoff=long, report_killed=told))
    async with asyncio.timeout(120):
        await killed.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 75


def test_the_driver_dies_with_its_supervisor(tmp_path: Path) -> None:
    """However that one dies."""
    (tmp_path / "sleeper.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(tmp_path / 'pid.new')!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'pid.new')!r}, {str(tmp_path / 'pid')!r})\ntime.sleep(3600)\n"
    )
    program = (
        "import asyncio, os; from tapforge_trainer.run.supervisor import driver_command, supervise;"
        "command = driver_command([]);"
        "command[-1] = 'sleeper';"
        "asyncio.run(supervise(command, 3, os.environ))"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    _until((tmp_path / "pid").exists)
    driver = int((tmp_path / "pid").read_text())
    supervisor.kill()
    supervisor.wait(120)
    _until(lambda: not _alive(driver))


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_driver_is_the_same_command_without_restarts() -> None:
    command = driver_command(["run", "--file", "x.yaml"])
    assert command[0] == sys.executable and command[-3:] == ["run", "--file", "x.yaml"]


def test_a_file_that_is_wrong_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: tiny}\nspec: {sede: 3}\n"
    )
    command = [sys.executable, "-m", "tapforge_trainer.cli.main", "run", "-f", "run.yaml", "--restarts", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert done.stderr.count("spec.sede") == 1


def test_a_file_that_can_be_read_once_is_no_file_for_restarts() -> None:
    said = CliRunner().invoke(cli, ["run", "-f", "-", "--restarts", "1"], input="spec: {}\n")
    assert said.exit_code == 2
    assert "name a file" in said.output
