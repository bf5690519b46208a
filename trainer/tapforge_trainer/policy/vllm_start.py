"""What vLLM is told before and when it starts. Nothing here imports it at module level: the environment comes first."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from .models import ModelConfig, family_of
from .settings import EngineSettings


def image_id(folder: Path) -> int:
    config = ModelConfig.of_folder(folder)
    family_of(config)
    return config.image_token


def environment(settings: EngineSettings, scratch: str) -> dict[str, str]:
    """What vLLM has to find in the environment before it is imported."""
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": scratch,
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if settings.device == "cpu":
        found |= {
            "OMP_NUM_THREADS": str(settings.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Else the cache of compiled kernels grows by a third of a gigabyte per 3,000 requests.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
            # Eager execution needs no compiler; without it the first answer comes 2 to 15 s earlier.
            "TORCHDYNAMO_DISABLE": "1",
        }
    else:
        found["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the other runner takes no logits processor like `mask.OnlyAllowed`
    return found


def build(settings: EngineSettings) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    options: dict[str, Any] = {}
    config = ModelConfig.of_folder(Path(settings.model))
    if settings.max_batched_tokens is not None:
        options["max_num_batched_tokens"] = settings.max_batched_tokens
    if settings.device == "cpu":
        # On CPUs a request with its own seed breaks the engine when its prompt is computed in pieces.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(settings.context_tokens, settings.max_batched_tokens or 0)
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": (settings.kv_cache_mib or 128) * 2**20}
        options["worker_extension_cls"] = "tapforge_trainer.policy.weight_transfer.Worker"
        # vLLM looks at a model in a process of its own, for CUDA's sake, and keeps what it saw. A new Pod has nothing
        # kept, and would import vLLM twice.
        from vllm.model_executor.models import ModelRegistry

        family = family_of(config)
        module = import_module(f"vllm.model_executor.models.{family.vllm_module}")
        ModelRegistry.register_model(family.architecture, getattr(module, family.architecture))
    else:
        options["gpu_memory_utilization"] = settings.gpu_memory_share
    from .mask import BANNED, OnlyAllowed

    allowed = set(settings.allowed_ids)
    banned = [token for token in range(config.vocabulary) if token not in allowed]
    args = EngineArgs(
        model=settings.model,
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=settings.context_tokens,
        max_num_seqs=settings.max_sequences,
        limit_mm_per_prompt={"image": settings.images_per_prompt, "video": 0},
        skip_mm_profiling=True,
        mm_processor_cache_gb=0,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        async_scheduling=False,
        disable_log_stats=True,
        logits_processors=[OnlyAllowed],
        additional_config={BANNED: banned},
        weight_transfer_config={"backend": settings.transfer},
        **options,
    )
    return LLMEngine.from_engine_args(args)
