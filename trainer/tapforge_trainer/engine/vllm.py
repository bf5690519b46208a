"""What vLLM is given before and when it starts. Nothing here imports it at module level: the environment comes first.

- The engine's core runs in the actor's own process (`sampler.py` drives it step by step), on any number of devices;
  with tensor parallelism each device has a worker process beside it.
- On CPUs: eager, no chunked prefill, our own weight transfer.
- On GPUs: vLLM's choices wherever the run names none. In one pass as many tokens as vLLM gives its offline use, which
  is made for throughput as a rollout is: 8,192 or 16,384 by the card. An engine that is made as ours would get 2,048,
  less than a frame of 1080x2400. The vision tower's largest pass and the cache of its results, which holds as many
  visual tokens as a pass has tokens, are measured before the key-value cache takes the rest: with the largest frame
  that the run can show.
- Logits are fp32 in every number format, as the learner's are (`learner/head.py`): two heads that round theirs to bf16
  differ more by that than by everything before them.
- Every row of the output layer that is not an allowed token is banned, those beyond the tokenizer's vocabulary as well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..learner.families import ModelConfig, family_of
from ..placement.settings import EngineSettings, engine_rank

#: key of the banned tokens in vLLM's additional_config (`mask.OnlyAllowed`)
BANNED = "tapforge_banned_ids"
#: where what is compiled is kept between starts; else below the user's home on each node
_CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
#: what makes vLLM compute logits in fp32. Where a model is made of a tower and a language model, the latter sees its
#: own part of the configuration alone
_FULL_LOGITS = {"head_dtype": "float32", "text_config": {"head_dtype": "float32"}}
#: key-value cache on CPUs where none is given, MiB
_CPU_CACHE_MIB = 128
#: of an engine's one adapter
ADAPTER_ID = 1


def image_id(folder: Path) -> int:
    config = ModelConfig.of_folder(folder)
    family_of(config)
    return config.image_token


def environment(settings: EngineSettings, scratch: str, found: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What vLLM has to find in the environment before it is imported. `found`: what is there already."""
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": scratch,
        "VLLM_LOGGING_LEVEL": found.get("VLLM_LOGGING_LEVEL", "INFO" if settings.log else "ERROR"),
    }
    if settings.tensor_parallel > 1:
        wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork would take the actor's threads' locks with it
    if settings.device == "cpu":
        wanted |= {
            "OMP_NUM_THREADS": str(settings.threads or 1),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Else the cache of compiled kernels grows by a third of a gigabyte per 3,000 requests.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
            # Eager execution needs no compiler; without it the first answer comes 2 to 15 s earlier.
            "TORCHDYNAMO_DISABLE": "1",
        }
        return wanted
    if settings.threads is not None:
        wanted["OMP_NUM_THREADS"] = str(settings.threads)
    wanted["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the other runner takes no logits processor like `mask.OnlyAllowed`
    return wanted | {name: found[name] for name in _CACHES if name in found}


def arguments(settings: EngineSettings, config: ModelConfig) -> dict[str, Any]:
    """Of vLLM's `EngineArgs`."""
    allowed = set(settings.allowed_ids)
    found: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.context_tokens,
        "max_num_seqs": settings.max_sequences,
        "limit_mm_per_prompt": {"image": settings.images_per_prompt, "video": 0},
        "mm_processor_cache_gb": 0,  # prompts come with their patches (`prompts.py`)
        "enable_prefix_caching": settings.prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "logits_processors": ["tapforge_trainer.engine.mask:OnlyAllowed"],
        "additional_config": {BANNED: [token for token in range(config.vocabulary) if token not in allowed]},
        "weight_transfer_config": {"backend": settings.transfer},
        "tensor_parallel_size": settings.tensor_parallel,
        "worker_extension_cls": "tapforge_trainer.sync.transfer.WeightReceiver",
    }
    if settings.lora is not None:
        found |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": engine_rank(settings.lora.rank),
            "lora_target_modules": list(family_of(config).adapted(settings.lora.targets)),
        }
    if settings.dtype != "float32":
        found["hf_overrides"] = _FULL_LOGITS
    if settings.tensor_parallel > 1:
        found["distributed_executor_backend"] = "mp"  # inside a Ray actor vLLM would start actors of its own
    cpu = settings.device == "cpu"
    cache = settings.kv_cache_mib or (_CPU_CACHE_MIB if cpu else None)
    if cache is not None:
        found["kv_cache_memory_bytes"] = cache * 2**20
    if cpu:
        return found | {
            # On CPUs a request with its own seed breaks the engine when its prompt is computed in pieces.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(settings.context_tokens, settings.max_batched_tokens or 0),
            "enforce_eager": True,
            "async_scheduling": False,
            "skip_mm_profiling": True,
        }
    if settings.max_batched_tokens is not None:
        found["max_num_batched_tokens"] = settings.max_batched_tokens
    if settings.enforce_eager is not None:
        found["enforce_eager"] = settings.enforce_eager
    if settings.largest_frame is not None:
        width, height = settings.largest_frame
        found["mm_processor_kwargs"] = {"max_pixels": width * height}
    return found | {
        "gpu_memory_utilization": settings.gpu_memory_share,
        "async_scheduling": settings.async_scheduling,
        "enable_sleep_mode": settings.colocated,
    }


def adapter_request(settings: EngineSettings, version: int) -> Any:
    """What a request says of the adapter that answers it; None where weights are whole. vLLM's prefix cache tells
    adapters apart by their name, so the version is in it; which of them a worker has, `sync/adapters.py` decides."""
    if settings.lora is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"tapforge-{version}", ADAPTER_ID, f"version {version} of this run's adapter")


def build(settings: EngineSettings) -> Any:
    """An `LLMEngine`. Raises what vLLM raises; RuntimeError with a remedy where memory is short."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    config = ModelConfig.of_folder(Path(settings.model))
    if settings.device == "cpu":
        # vLLM looks at a model in a process of its own, for CUDA's sake, and keeps what it saw. A new Pod has nothing
        # kept, and would import vLLM twice.
        from vllm.model_executor.models import ModelRegistry

        family = family_of(config)
        module = import_module(family.engine_module)
        ModelRegistry.register_model(family.architecture, getattr(module, family.architecture))
    _keep_pixels()
    args = EngineArgs(**arguments(settings, config))
    try:
        llm = LLMEngine.from_engine_args(args, UsageContext.LLM_CLASS)
        if settings.lora is not None:
            llm.collective_rpc("load_adapter", kwargs={"adapter_id": ADAPTER_ID, "payload": None})
        return llm
    except Exception as error:
        if advice := memory_advice(str(error), settings):
            raise RuntimeError(advice) from error
        raise


def _keep_pixels() -> None:
    """Workers get the pixels of a frame also when the prefix cache covers it. vLLM leaves them out then, and when new
    weights preempt such a request, no process has what its frames are computed from again: the engine dies."""
    from vllm.v1.core.sched import output

    output.strip_covered_mm_data = lambda features, *_, **__: features


#: how torch and vLLM word a lack of memory
_SHORT = (
    "out of memory",
    "No available memory for the cache blocks",
    "larger than the available KV cache",
    "less than desired GPU memory utilization",
)


def memory_advice(text: str, settings: EngineSettings) -> str:
    """What to do about an error of this text, in one line that ends with it; empty if it is not about memory."""
    if not any(words in text for words in _SHORT):
        return ""
    share = f"engine.gpuMemoryShare ({settings.gpu_memory_share:g})"
    if settings.kv_cache_mib is not None:
        first = f"lower engine.kvCacheMiB ({settings.kv_cache_mib:,})"
    elif "cache" in text:
        first = f"raise {share} or lower model.contextTokens ({settings.context_tokens:,})"
    else:
        first = f"lower {share}"
    line = " ".join(text.split())[-300:]
    return (
        f"the engine's GPU memory is too small: {first}, lower engine.maxConcurrentSequences "
        f"({settings.max_sequences}), or share the model by engine.tensorParallel ({settings.tensor_parallel}); vLLM "
        f"said: {line}"
    )
