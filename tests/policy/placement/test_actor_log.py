"""What engines and ranks write is kept, and an error shows its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tapforge_trainer.engine import pool
from tapforge_trainer.engine.vllm import environment
from tapforge_trainer.learner.frame_store import PixelFormat
from tapforge_trainer.placement.actor_log import keep_output, keep_ray_logs, last_lines
from tapforge_trainer.placement.settings import EngineSettings

SETTINGS = EngineSettings("model", (), (), device="cuda", dtype="bfloat16")


def test_all_that_a_process_and_its_children_write_is_in_its_file(tmp_path: Path) -> None:
    words = f"""
import os, subprocess, sys
from tapforge_trainer.placement.actor_log import keep_output
print("before")
keep_output({str(tmp_path / "engine-*.log")!r}, 3)
print("by print")
os.write(2, b"by NCCL\\n")
subprocess.run([sys.executable, "-c", "print('by a worker')"], check=True)
raise SystemExit("the end")
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "before\n" and done.stderr == ""
    kept = (tmp_path / "engine-3.log").read_text()
    assert all(said in kept for said in ("--- process ", "by print", "by NCCL", "by a worker", "the end"))
    assert "before" not in kept


def test_a_node_without_the_run_s_folder_keeps_rays_way(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keep_output(str(tmp_path / "elsewhere" / "rank-*.log"), 0)
    keep_output(None, 0)
    os.write(1, b"as ever")
    assert capfd.readouterr().out == "as ever" and not (tmp_path / "elsewhere").exists()


def test_an_error_shows_the_last_lines_of_those_who_wrote_last(tmp_path: Path) -> None:
    now = time.time()
    for age, name in ((1, "engine-0"), (20, "rank-0"), (30, "rank-1"), (40, "rank-2"), (4000, "engine-1")):
        path = tmp_path / f"{name}.log"
        path.write_text("".join(f"{name} line {k}\n\n" for k in range(40)))
        os.utime(path, (now - age, now - age))
    (tmp_path / "engine-2.log").touch()
    said = last_lines(tmp_path, now)
    assert [line.rsplit("/", 1)[-1] for line in said.splitlines() if line.startswith("last")] == [
        "rank-1.log:",
        "rank-0.log:",
        "engine-0.log:",
    ]
    assert said.endswith("  engine-0 line 39") and "line 28\n" in said and "line 27\n" not in said
    assert last_lines(tmp_path / "none", now) == ""


def test_rays_own_logs_come_to_the_others(tmp_path: Path) -> None:
    logs, kept = tmp_path / "ray", tmp_path / "kept"
    logs.mkdir(), kept.mkdir()
    (logs / "raylet.out").write_text("out of memory")
    (logs / "worker-1.err").write_text("not this one")
    keep_ray_logs(logs, kept)
    keep_ray_logs(None, kept)
    assert [path.name for path in kept.iterdir()] == ["ray-raylet.out"]


def test_each_engine_has_its_number_and_says_more_where_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    monkeypatch.setattr(pool, "start_engine", lambda settings, place, number: numbers.append(number))
    pool.Engines(SETTINGS, PixelFormat(16, 2, (0.5,) * 3, (0.5,) * 3), 1, replicas=3)
    assert numbers == [0, 1, 2]
    kept = replace(SETTINGS, log="logs/engine-*.log")
    assert environment(kept, "/tmp", {})["VLLM_LOGGING_LEVEL"] == "INFO"
    assert environment(SETTINGS, "/tmp", {})["VLLM_LOGGING_LEVEL"] == "ERROR"
