"""The script for Slurm with stand-ins for Slurm, Ray and the driver: when the job is queued again, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "manifests" / "slurm" / "several-boxes.sbatch"
#: waits for a signal, without a child that would outlive it
WAITS = (
    f"exec {sys.executable} -c 'import signal, sys, time; "
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit({code})); {then}'"
)


def job(place: Path, driver: str, *words: str) -> subprocess.Popen[bytes]:
    stand_ins = {
        "srun": WAITS.format(code=0, then="time.sleep(60)"),
        "ray": "exit 0",
        "tapforge": f'printf "%s\\n" "$RAY_ADDRESS" "$@" > words\n{driver}',
        "scontrol": 'echo "$@" >> queued',
    }
    for name, what in stand_ins.items():
        (place / name).write_text(f"#!/bin/bash\n{what}\n")
        (place / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{place}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "RAY_HEAD_IP": "10.0.0.1",
    }
    return subprocess.Popen(["bash", str(SCRIPT), *words], cwd=place, env=environment)


@pytest.mark.parametrize(
    ("code", "queued"),
    [
        pytest.param(75, True, id="stopped after a checkpoint"),
        pytest.param(143, True, id="told before it could hear"),
        pytest.param(0, False, id="it came to its end meanwhile"),
        pytest.param(2, False, id="it can't work"),
    ],
)
def test_a_driver_that_was_told_goes_on_in_another_job(tmp_path: Path, code: int, queued: bool) -> None:
    driver = WAITS.format(code=code, then='open("up", "w").close(); time.sleep(60)')
    found = job(tmp_path, driver, "a file.yaml", "--runs", "/shared runs")
    until = time.monotonic() + 20
    while not (tmp_path / "up").exists():
        assert found.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    found.send_signal(signal.SIGTERM)
    assert found.wait(20) == code
    assert (tmp_path / "queued").exists() is queued
    said = (tmp_path / "words").read_text().splitlines()
    assert said == ["10.0.0.1:6379", "run", "-f", "a file.yaml", "--grace", "240", "--runs", "/shared runs"]


@pytest.mark.parametrize("code", [0, 1, 75])
def test_what_ends_otherwise_stays_ended(tmp_path: Path, code: int) -> None:
    assert job(tmp_path, f"exit {code}", "x.yaml").wait(20) == code
    assert not (tmp_path / "queued").exists()


def test_it_wants_a_file(tmp_path: Path) -> None:
    assert job(tmp_path, "exit 0").wait(20) == 2
