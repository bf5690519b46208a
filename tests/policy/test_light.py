"""What the driver and the command line import of this room stays light."""

from __future__ import annotations

import subprocess
import sys


def test_the_drivers_side_imports_neither_torch_nor_vllm_nor_ray() -> None:
    rooms = (
        "driver",
        "engine",
        "engine_client",
        "engines",
        "learner",
        "sync",
        "checkpoints",
        "export",
        "settings",
        "metrics",
        "batches",
    )
    code = "; ".join(f"import tapforge_trainer.policy.{room}" for room in rooms)
    heavy = "sorted({'torch', 'vllm', 'ray', 'transformers', 'safetensors'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print({heavy})"], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
