"""What a server of one of `spec.models` gets: plain data, vLLM's command line and environment. Pure.

- vLLM's own OpenAI server, with its own choices: nothing of the policy's engines is in it (allowed tokens, weight
  transfer, probes), and judges ask it as they ask any endpoint.
- The token is in the environment, which the machine's other users can't read, and in no command line. Without it
  nothing is answered (`gate.py`).
- Of a request's images as many are allowed as the run's judges send at most.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from ..model_source.ref import ModelRef
from .gate import TOKEN, TokenGate

_GATE: Final = f"{TokenGate.__module__}.{TokenGate.__qualname__}"
#: key-value cache on CPUs where none is given, MiB
_CPU_CACHE_MIB: Final = 512
#: where what is compiled is kept between starts
_CACHES: Final = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """A server, of which a model has `replicas`."""

    name: str
    source: ModelRef
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    #: that it must send to be answered
    token: str = field(repr=False)
    replicas: int = 1
    tensor_parallel: int = 1
    context_tokens: int = 32_768
    max_sequences: int = 16
    #: of a request, at most; 0: none
    images: int = 16
    gpu_memory_share: float = 0.9
    kv_cache_mib: int | None = None
    enforce_eager: bool | None = None
    #: CPU threads; None: the process's default
    threads: int | None = None
    seed: int = 0
    #: until it answers, seconds
    start_seconds: float = 3600.0
    restarts_per_hour: int = 3
    #: all of the run is on one machine: nothing from outside reaches the server
    one_machine: bool = False
    #: file that it writes to, with `actor_log.NUMBER` for its number; None: wherever Ray has it
    log: str | None = None


def arguments(settings: ServerSettings, folder: Path, host: str, port: int) -> list[str]:
    """Of `vllm.entrypoints.openai.api_server`."""
    found = [
        *("--model", str(folder), "--served-model-name", settings.name, "--host", host, "--port", str(port)),
        *("--dtype", settings.dtype, "--max-model-len", str(settings.context_tokens), "--seed", str(settings.seed)),
        *("--max-num-seqs", str(settings.max_sequences), "--tensor-parallel-size", str(settings.tensor_parallel)),
        *("--generation-config", "vllm", "--disable-uvicorn-access-log", "--middleware", _GATE),
    ]
    if settings.images:
        found += ["--limit-mm-per-prompt", json.dumps({"image": settings.images, "video": 0})]
    cpu = settings.device == "cpu"
    cache = settings.kv_cache_mib or (_CPU_CACHE_MIB if cpu else None)
    if cache is not None:
        found += ["--kv-cache-memory-bytes", str(cache * 2**20)]
    if cpu:
        # On CPUs a request with its own seed breaks the engine when its prompt is computed in pieces.
        batched = max(settings.context_tokens, 2048)
        return [*found, "--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched)]
    found += ["--gpu-memory-utilization", str(settings.gpu_memory_share)]
    return [*found, "--enforce-eager"] if settings.enforce_eager else found


def environment(settings: ServerSettings, found: Mapping[str, str]) -> dict[str, str]:
    """What the server finds in its environment beside `found`, what is there already."""
    wanted = {
        TOKEN: settings.token,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": found.get("VLLM_LOGGING_LEVEL", "INFO"),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if settings.threads is not None or settings.device == "cpu":
        wanted["OMP_NUM_THREADS"] = str(settings.threads or 1)
    if settings.device == "cpu":
        return wanted | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Else the cache of compiled kernels grows by a third of a gigabyte per 3,000 requests.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
            "TORCHDYNAMO_DISABLE": "1",
        }
    return wanted | {name: found[name] for name in _CACHES if name in found}
