"""What vLLM makes of an engine's arguments where there are GPUs, and that its workers take what ranks tell them."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.families import real

from tapforge_trainer.sync.gpu import EngineWire
from tapforge_trainer.sync.transfer import WeightReceiver

END = 240.0


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder, frame = str(real.folder("qwen3-vl-8b-tiny")), (768, 1696)
    apart = {"model": folder, "largest_frame": frame, "transfer": "nccl"}
    older = apart | {"model": str(real.folder("qwen2.5-vl-7b-tiny")), "largest_frame": (644, 1428), "measured": True}
    wanted = {
        "apart": apart,
        "measured": apart | {"measured": True},
        "two GPUs": apart | {"tensor_parallel": 2},
        "colocated": apart | {"transfer": "ipc", "colocated": True, "gpu_memory_share": 0.5},
        "older": older,
    }
    script = Path(__file__).parent / "hopper_configs.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path_factory.mktemp("vllm"))}
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(wanted),
        env=environment,
        capture_output=True,
        text=True,
        timeout=END,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_an_engine_with_a_gpu_of_its_own(configs: dict[str, dict[str, Any]]) -> None:
    expected = {
        "executor": "UniProcExecutor",
        "world": 1,
        "worker": "vllm.v1.worker.gpu_worker.Worker",
        "async": True,
        "ahead": 2,
        "batched": 16384,
        "chunked": True,
        "prefix_caching": True,
        "v2": False,
        "graphs": "FULL_AND_PIECEWISE",
        "sleep": False,
        "memory": 0.9,
        "transfer": "nccl",
        "logprobs": "processed_logprobs",
        "bytes": True,
        "logits": ["torch.float32"] * 2,
    }
    assert configs["apart"] == expected


@pytest.mark.long
def test_logits_are_fp32_also_where_the_language_model_is_built_as_a_part(configs: dict[str, dict[str, Any]]) -> None:
    assert configs["older"]["logits"] == configs["apart"]["logits"]


@pytest.mark.long
def test_an_engine_of_two_gpus_has_worker_processes_and_no_actors(configs: dict[str, dict[str, Any]]) -> None:
    found = {"executor": "MultiprocExecutor", "world": 2}
    assert configs["two GPUs"] == configs["apart"] | found


@pytest.mark.long
def test_an_engine_that_shares_its_gpu_can_sleep(configs: dict[str, dict[str, Any]]) -> None:
    assert configs["colocated"] == configs["apart"] | {"sleep": True, "memory": 0.5, "transfer": "ipc"}


@pytest.mark.long
@pytest.mark.parametrize("name, size, patch", [("measured", (768, 1696), 16), ("older", (644, 1428), 14)])
def test_the_memory_of_frames_is_measured_with_patches_as_ours_are(
    configs: dict[str, dict[str, Any]], name: str, size: tuple[int, int], patch: int
) -> None:
    """vLLM is told a number of pixels, and makes of it the largest picture that it can."""
    tokens, (patches, kind) = configs[name]["frame_tokens"], configs[name]["patches"]
    ours = size[0] * size[1] // (2 * patch) ** 2
    assert abs(tokens - ours) <= 0.02 * ours
    assert patches == [4 * tokens, 3 * 2 * patch**2] and kind == "torch.uint8"


def test_vllms_workers_take_what_ranks_call() -> None:
    """By the signatures of the methods, and with the fields that vLLM's own trainer side sends."""
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    from vllm.v1.worker.gpu_worker import Worker

    calls: list[tuple[str, dict[str, Any]]] = []
    handle = SimpleNamespace(worker=SimpleNamespace(remote=lambda *call: calls.append(call)))
    wire = EngineWire([handle, handle], 2, 60.0)
    with pytest.MonkeyPatch.context() as patched:
        import ray

        patched.setattr(ray, "get", lambda found, timeout: None)
        info = NCCLWeightTransferInitInfo(master_address="h", master_port=1, rank_offset=1, world_size=5, packed=True)
        wire.init_weight_transfer_engine(worker_init_payload(info))
        wire.start_weight_update()
        wire.update_weights({"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]})
        wire.finish_weight_update()

    class Extended(WeightReceiver, Worker):
        """As vLLM makes it of its own worker and `worker_extension_cls`."""

    for method, arguments in calls:
        inspect.signature(getattr(Extended, method)).bind(SimpleNamespace(), **arguments)
    assert "watch_arrivals" in [method for method, _ in calls]
    engine = NCCLWeightTransferEngine.__new__(NCCLWeightTransferEngine)
    inits = [arguments["init_info"] for method, arguments in calls if method == "init_weight_transfer_engine"]
    assert [engine.parse_init_info(one).rank_offset for one in inits] == [1, 3]
    (update, _) = [arguments["update_info"] for method, arguments in calls if method == "update_weights"]
    assert engine.parse_update_info(update).shapes == [[2, 3]]
