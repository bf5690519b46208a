"""The benchmark for GPUs: what it says where there is none, and that its parts compute at a small scale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import pytest
from load import gpu_part

from tapforge_trainer.placement.placement import ActorPlacement, Placement
from tapforge_trainer.placement.settings import EngineSettings, LearnerSettings
from tapforge_trainer.tiny.folder import write_model

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "bench")]), "OMP_NUM_THREADS": "1"}


def test_without_a_gpu_it_ends_at_once_and_says_why(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--out", str(tmp_path / "gpu.json")]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "has no NVIDIA GPU" in done.stderr
    assert not (tmp_path / "gpu.json").exists()


def _part(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "load.gpu_part", *words, "--device", "cpu"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_parts_take_an_hour_together_and_what_has_to_be_known_comes_first() -> None:
    assert sum(seconds for _, seconds in gpu.PARTS.values()) <= 3600
    assert list(gpu.PARTS)[:3] == ["doctor", "proof", "transfer"]


def test_at_full_size_each_sequence_holds_its_screen_and_its_answer() -> None:
    from tapforge_trainer.learner.frame_store import PixelFormat

    form = PixelFormat(16, 2, (0.5,) * 3, (0.5,) * 3)
    made, frames = gpu_part._samples(form, sorted(set(gpu_part.LENGTHS))[:1], gpu_part.FRAME)
    assert made[0].length == min(gpu_part.LENGTHS) and len(frames) == 1


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("say(a=1); say(a=1, b=2)", {"a": 1, "b": 2}),
        ("say(a=1); print('{\"a\": 2, \"b', end=''); sys.stdout.flush(); hang()", {"a": 1, "cut_off": "after 3 s"}),
        ("hang()", {"cut_off": "after 3 s"}),
        ("say(a=1); sys.exit('no memory')", {"a": 1, "failed": "no memory"}),
        ("sys.exit(3)", {"failed": "exit code 3"}),
    ],
)
def test_a_part_that_is_cut_off_or_fails_keeps_its_figures(script: str, found: dict[str, Any]) -> None:
    """Also where something that it has started, and that ignores a SIGTERM, would hold its output open."""
    words = (
        "import json, signal, subprocess, sys, time\n"
        "say = lambda **found: print(json.dumps(found), flush=True)\n"
        "hang = lambda: subprocess.run([sys.executable, '-c', 'import signal, time; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'])\n"
    )
    assert gpu.bounded([sys.executable, "-c", words + script], ENVIRONMENT, 3) == found


def _sync_part(name: str, folder: Path) -> dict[str, Any]:
    write_model(folder / "model", 0)
    return _part(name, "--folder", str(folder / "model"), "--scale", "16")


@pytest.mark.long
def test_the_proof_s_part_tells_what_heads_of_either_format_differ_by(tmp_path: Path) -> None:
    found = _sync_part("proof", tmp_path)
    for heads in ("fp32", "bf16"):
        assert len(found[f"{heads} rms"]) == len(found["moves"]) == len(found[f"{heads} slope"]) + 1
        assert min(found[f"{heads} tokens"]) >= 1024
        assert found[f"{heads} slope"][-1] > 0.5 > found[f"{heads} slope_error"][-1]
    assert found["bf16 rms"][-1] > found["fp32 rms"][-1] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["transfer", "lora", "tensor_parallel"])
def test_parts_about_syncs_run_on_cpus(tmp_path: Path, name: str) -> None:
    found = _sync_part(name, tmp_path)
    if name == "transfer":
        assert found["tapforge-cpu"]["sync_bytes"] > 0 and found["tapforge-cpu"]["seconds"] > 0
    else:
        assert min(found["tokens"]) >= 1024 and len(found["slope"]) == len(found["rms"]) - 1


@pytest.mark.long
def test_the_learner_s_part_computes_an_update() -> None:
    found = _part("learner", "--model", "qwen3-vl-8b-tiny", "--layers", "2", "--scale", "64")
    assert found["tokens_per_second"] > 0 and found["mfu"] is None, "nothing is known of what a CPU can do"
    assert set(found["seconds_by_phase"]) == {"forward", "backward", "optimizer"}


@pytest.mark.long
def test_attention_is_measured_and_what_is_not_installed_is_named() -> None:
    found = _part("attention", "--scale", "32")
    assert found["packed_torch"]["ms"] > 0 and found["padded_sdpa"]["ms"] > 0
    assert set(found["skipped"]) >= {"packed_FA3", "packed_FA4"}


async def test_engine_and_learner_get_seats_of_their_own_where_there_are_two_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as their actors; which GPUs seats are is in `tests/driver/test_raylets.py`."""
    write_model(tmp_path / "model", 0)
    seats = Placement([ActorPlacement({"num_gpus": 1, "engine": 0})], [ActorPlacement({"num_gpus": 1, "rank": 0})])
    seated: dict[str, Any] = {}

    class Seated(Exception):
        pass

    async def placed(engine: EngineSettings, replicas: int, learner: LearnerSettings, _: Any) -> Placement:
        assert (engine.device, learner.device, replicas, engine.colocated) == ("cuda", "cuda", 1, False)
        return seats

    def engines(*_: Any, places: Any = ()) -> None:
        seated["engines"] = places

    def learner(_: LearnerSettings, places: Any = ()) -> None:
        seated["ranks"] = places
        raise Seated

    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("tapforge_trainer.placement.placement.placed", placed)
    monkeypatch.setattr("tapforge_trainer.engine.pool.Engines", engines)
    monkeypatch.setattr("tapforge_trainer.learner.client.Learner", learner)
    with pytest.raises(Seated):
        await gpu_part._engine(tmp_path / "model", "cuda", 1)
    assert seated == {"engines": seats.engines, "ranks": seats.ranks}
