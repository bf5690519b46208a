"""vLLM's own configuration of engines on a GPU that is not there: run as a script in a process of its own, because it
tells vLLM that it is on CUDA. Reads keyword arguments of `EngineSettings` by name from standard input as JSON, and
prints what vLLM makes of them as its last line.

Models are imported before, on CPUs: on CUDA they want kernels that this build has not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_GPU_BYTES = 80 * 2**30


def pretend_hopper() -> Any:
    """Returns the platform; `gpus` is settable."""
    import vllm.platforms as platforms
    from vllm.model_executor.models import ModelRegistry, qwen2_5_vl, qwen3_vl

    for model in (qwen2_5_vl.Qwen2_5_VLForConditionalGeneration, qwen3_vl.Qwen3VLForConditionalGeneration):
        ModelRegistry.register_model(model.__name__, model)
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        sys.modules[name] = ModuleType(name)
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Hopper(CudaPlatformBase):
        gpus = 1

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return _GPU_BYTES

        @classmethod
        def device_count(cls) -> int:
            return cls.gpus

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        def is_sleep_mode_available(self) -> bool:
            return True

        def is_cumem_allocator_available(self) -> bool:
            return True

    found = Hopper()
    platforms.current_platform = found
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm.") and "current_platform" in vars(module):
            module.current_platform = found  # type: ignore[attr-defined]
    return found


def made(given: dict[str, Any], platform: Any) -> dict[str, Any]:
    """With `measured` also what memory is measured with."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor import Executor

    from tapforge_trainer.engine.vllm import arguments
    from tapforge_trainer.learner.families import ModelConfig
    from tapforge_trainer.placement.settings import EngineSettings

    measured = given.pop("measured", False)
    settings = EngineSettings(allowed_ids=(1, 2), stop_ids=(2,), device="cuda", dtype="bfloat16", threads=None, **given)
    type(platform).gpus = settings.tensor_parallel
    config = EngineArgs(**arguments(settings, ModelConfig.of_folder(Path(settings.model)))).create_engine_config(
        UsageContext.LLM_CLASS
    )
    scheduler, mm = config.scheduler_config, config.model_config.multimodal_config
    text = config.model_config.hf_config.text_config
    part = config.with_hf_config(text, architectures=["Qwen2ForCausalLM"])
    found = {
        "executor": Executor.get_class(config).__name__,
        "world": config.parallel_config.world_size,
        "worker": config.parallel_config.worker_cls,
        "async": scheduler.async_scheduling,
        "ahead": config.max_concurrent_batches,
        "batched": scheduler.max_num_batched_tokens,
        "chunked": scheduler.enable_chunked_prefill,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "v2": config.use_v2_model_runner,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "sleep": config.model_config.enable_sleep_mode,
        "memory": config.cache_config.gpu_memory_utilization,
        "transfer": config.weight_transfer_config.backend,
        "logprobs": config.model_config.logprobs_mode,
        "bytes": mm.mm_device_do_normalize,
        # of the whole and of a language model that is a part of it, which sees its own configuration alone
        "logits": [str(one.model_config.head_dtype) for one in (config, part)],
    }
    if measured:
        budget = MultiModalBudget(config, MULTIMODAL_REGISTRY)
        _, profiled = budget.get_dummy_encoder_profile_inputs("image", 1)[0]
        found["frame_tokens"] = budget.mm_max_toks_per_item["image"]
        found["patches"] = [list(profiled["pixel_values"].data.shape), str(profiled["pixel_values"].data.dtype)]
    return found


def main() -> None:
    wanted: dict[str, dict[str, Any]] = json.load(sys.stdin)
    from tapforge_trainer.engine.vllm import environment
    from tapforge_trainer.placement.settings import EngineSettings

    os.environ.update(environment(EngineSettings("", (), (), device="cuda", threads=None), os.environ["TMPDIR"]))
    platform = pretend_hopper()
    found = {}
    for name, given in wanted.items():
        given["largest_frame"] = tuple(given["largest_frame"])
        found[name] = made(given, platform)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
