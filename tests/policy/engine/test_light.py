"""What the driver and the command line import of learner, engines and syncs stays light."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def test_the_drivers_side_imports_neither_torch_nor_vllm_nor_ray() -> None:
    modules = (
        "policy",
        "engine.actor",
        "engine.client",
        "engine.pool",
        "learner.batches",
        "learner.checkpoints",
        "learner.client",
        "learner.export",
        "learner.metrics",
        "placement.settings",
        "sync.sync",
    )
    code = "; ".join(f"import tapforge_trainer.{module}" for module in modules)
    heavy = "sorted({'torch', 'vllm', 'ray', 'transformers', 'safetensors'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print({heavy})"], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


_ONE_SYNC = """
import asyncio, json, sys
from types import SimpleNamespace
from tapforge_trainer.sync import sync
from tapforge_trainer.placement.settings import EngineSettings

calls = []

def noting(name, answer=None):
    async def call(*arguments, **deadline):
        calls.append((name, *arguments))
        return answer
    return call

engines = SimpleNamespace(
    settings=EngineSettings("m", (), (), transfer="nccl"), members=[(0, 0)], actors=["engine"], asleep=False,
    pause=noting("pause"), wake=noting("wake"), proceed=noting("proceed"),
)
learner = SimpleNamespace(run=noting("run", [8]), address=noting("address", "tcp://10.0.0.1:29500"))
asyncio.run(sync._transfer(learner, engines, 3, "keep", 60.0))
heavy = sorted({"torch", "vllm", "ray", "transformers"} & set(sys.modules))
print(json.dumps({"heavy": heavy, "order": [call[0] for call in calls], "run": calls[3][1:3]}))
"""


def test_a_sync_between_gpus_imports_neither_torch_nor_vllm_into_the_driver() -> None:
    done = subprocess.run([sys.executable, "-c", _ONE_SYNC], capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert found["heavy"] == []
    assert found["order"] == ["pause", "wake", "address", "run", "wake", "proceed"]
    name, members = found["run"]
    assert members == [[0, 0]]
    # What the ranks import by that name is there: the driver finds nothing wrong with it.
    module, _, function = name.partition(":")
    path = find_spec(module).origin
    assert f"def {function}(" in Path(path).read_text()
