"""What vLLM is told, by device and settings: decided without vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapforge_trainer.engine.vllm import BANNED, arguments, environment, memory_advice
from tapforge_trainer.learner.families import ModelConfig
from tapforge_trainer.placement.settings import EngineSettings

CPU = EngineSettings("nowhere", (1, 2, 5), (2,), context_tokens=1024)
GPU = replace(CPU, device="cuda", dtype="bfloat16", transfer="nccl")


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    marks: dict[str, Any] = {"image_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 6}
    found = {"model_type": "qwen2_5_vl", "vocab_size": 9, "vision_config": {}} | marks
    (tmp_path / "config.json").write_text(json.dumps(found))
    return ModelConfig.of_folder(tmp_path)


def test_every_row_of_the_output_layer_that_is_not_allowed_is_banned(config: ModelConfig) -> None:
    """Here the tokenizer ends before 7 and the output layer has 9 rows."""
    assert arguments(CPU, config)["additional_config"] == {BANNED: [0, 3, 4, 6, 7, 8]}


def test_on_gpus_vllm_chooses_what_the_run_leaves_open(config: ModelConfig) -> None:
    found = arguments(GPU, config)
    chosen = {"max_num_batched_tokens", "enforce_eager", "kv_cache_memory_bytes", "skip_mm_profiling"}
    assert not chosen & found.keys()
    assert found["async_scheduling"] is None and found["gpu_memory_utilization"] == 0.9
    assert not found["enable_sleep_mode"] and found["tensor_parallel_size"] == 1


@pytest.mark.parametrize("dtype, overridden", [("float32", False), ("bfloat16", True), ("float16", True)])
def test_logits_are_fp32_in_every_number_format(config: ModelConfig, dtype: str, overridden: bool) -> None:
    found = arguments(replace(CPU, dtype=dtype), config)
    assert ("hf_overrides" in found) == overridden
    assert not overridden or found["hf_overrides"]["head_dtype"] == "float32"


def test_on_gpus_vllm_gets_what_the_run_says(config: ModelConfig) -> None:
    given = replace(
        GPU,
        max_batched_tokens=4096,
        kv_cache_mib=2048,
        gpu_memory_share=0.5,
        prefix_caching=False,
        async_scheduling=False,
        enforce_eager=True,
        colocated=True,
        transfer="ipc",
        largest_frame=(1080, 2400),
        tensor_parallel=2,
    )
    found = arguments(given, config)
    expected = {
        "max_num_batched_tokens": 4096,
        "kv_cache_memory_bytes": 2**31,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "enforce_eager": True,
        "enable_sleep_mode": True,
        "weight_transfer_config": {"backend": "ipc"},
        "mm_processor_kwargs": {"max_pixels": 2_592_000},
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
    }
    assert {name: found.get(name) for name in expected} == expected


def test_on_cpus_it_stays_eager_and_synchronous_whatever_the_run_says(config: ModelConfig) -> None:
    found = arguments(replace(CPU, async_scheduling=True, enforce_eager=False, max_batched_tokens=512), config)
    assert found["enforce_eager"] and not found["async_scheduling"] and not found["enable_chunked_prefill"]
    assert found["max_num_batched_tokens"] == 1024 and found["kv_cache_memory_bytes"] == 128 * 2**20
    assert "enable_sleep_mode" not in found and "gpu_memory_utilization" not in found


def test_threads_are_the_runs_on_every_device_and_the_process_default_on_gpus_where_it_names_none() -> None:
    for settings in (CPU, GPU):
        assert environment(replace(settings, threads=3), "/tmp", {})["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in environment(replace(GPU, threads=None), "/tmp", {})


def test_what_is_compiled_is_kept_where_the_driver_is_told() -> None:
    given = {"VLLM_CACHE_ROOT": "/mine", "HOME": "/home"}
    assert environment(GPU, "/tmp", given)["VLLM_CACHE_ROOT"] == "/mine"
    assert not {"VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "HOME"} & environment(GPU, "/tmp", {"HOME": "/home"}).keys()
    assert "VLLM_CACHE_ROOT" not in environment(CPU, "/tmp", given)


@pytest.mark.parametrize(
    "text, first",
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", r"lower engine.gpuMemoryShare \(0.9\)"),
        ("No available memory for the cache blocks. Try", r"raise engine.gpuMemoryShare \(0.9\) or lower model"),
        ("(3.0 GiB KV cache is needed, which is larger than the available KV cache memory", "raise engine.gpuMemory"),
        ("Free memory on device 0 is less than desired GPU memory utilization (0.9)", "lower engine.gpuMemoryShare"),
    ],
)
def test_short_memory_names_the_fields_that_help(text: str, first: str) -> None:
    said = memory_advice(text, GPU)
    assert "\n" not in said and said.endswith(text)
    for field in ("engine.gpuMemoryShare", "engine.maxConcurrentSequences (64)", "engine.tensorParallel"):
        assert field in said
    with pytest.raises(RuntimeError, match=first):
        raise RuntimeError(said)
    given = memory_advice(text, replace(GPU, kv_cache_mib=9000))
    assert "lower engine.kvCacheMiB (9,000)" in given


def test_another_error_is_not_about_memory() -> None:
    assert memory_advice("Invalid weight transfer backend: x", GPU) == ""
