"""Models that a run serves beside its policy: by name, on GPUs of their own, and never trained.

Judges name them in place of an endpoint, and `tapforge collect` has one as its teacher. Each replica is an
OpenAI-compatible server that the run, or the command, starts, watches and starts again; only its own processes may ask
it. A run starts the models that judges ask, and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from .base import Spec
from .judge import JudgeModel
from .learning import Threads
from .model import ModelSource
from .rewards import Rewards
from .stages import Stage

ServedName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]


class ServedModel(Spec):
    """A model that the run serves beside its policy, with the weights that it has."""

    name: ServedName = Field(
        description="name by which judges ask it (their `model`, without `url`), and `tapforge collect --teacher`"
    )
    source: ModelSource = Field(description="weights; exactly one member. Quantized ones need GPUs")
    replicas: Annotated[int, Field(ge=1, le=256)] = Field(1, description="servers, each with the whole model")
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = Field(1, description="GPUs that share the model of a server")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="number format, without it bfloat16 on GPUs and float32 on CPUs"
    )
    context_tokens: Annotated[int, Field(ge=64, le=1_048_576)] = Field(
        32_768, description="question and answer together, tokens; visual tokens count"
    )
    max_concurrent_sequences: Annotated[int, Field(ge=1, le=65536)] = Field(
        16, description="answers that one server samples at once"
    )
    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="share of a GPU's memory that a server takes, its weights included"
    )
    kv_cache_mib: Annotated[int, Field(ge=1, le=16_777_216)] | None = Field(
        None,
        alias="kvCacheMiB",
        description="key-value cache on each of a server's devices, MiB; without it 512 on CPUs, and on GPUs what "
        "gpuMemoryShare leaves",
    )
    enforce_eager: bool | None = Field(None, description="no CUDA graphs and no compilation; CPUs always do without")
    threads: Threads | None = Field(
        None, description="CPU threads of a server; without it 1 on CPUs, on GPUs Ray's default"
    )
    max_restarts_per_hour: Annotated[int, Field(ge=0, le=1000)] = Field(
        3, description="restarts of a dead server within an hour; after one more it answers no question"
    )

    @property
    def gpus(self) -> int:
        return self.replicas * self.tensor_parallel


def own_models(rewards: Iterable[Rewards | None]) -> dict[str, list[JudgeModel]]:
    """Names of served models that judges of these rewards ask, with the judges' models."""
    found: dict[str, list[JudgeModel]] = {}
    for one in rewards:
        for stream in one.streams if one is not None else ():
            for model in (*stream.judge.models, *stream.judge.cascade) if stream.judge is not None else ():
                if model.url is None:
                    found.setdefault(model.model, []).append(model)
    return found


def models_named(models: Sequence[ServedModel], rewards: Rewards, stages: Sequence[Stage]) -> bool:
    """Whether every judge without a url names one of the models."""
    return own_models((rewards, *(stage.rewards for stage in stages))).keys() <= {model.name for model in models}


def models_asked(models: Sequence[ServedModel], rewards: Rewards, stages: Sequence[Stage]) -> tuple[ServedModel, ...]:
    """Those that judges ask, in any stage: a run starts no others."""
    asked = own_models((rewards, *(stage.rewards for stage in stages)))
    return tuple(model for model in models if model.name in asked)
