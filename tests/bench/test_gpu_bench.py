"""The benchmark for GPUs: what it says where there is none, and that its parts compute at a small scale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


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
