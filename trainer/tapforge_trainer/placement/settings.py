"""The settings of engines and learner ranks. Plain data, made by the loop from a TrainingRun; no torch, no Ray."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from tapforge_trainer.algorithms.objective import Objective
from tapforge_trainer.model_source.ref import ModelRef
from tapforge_trainer.model_source.resolve import resolve, stay_offline

#: "keep": requests in flight wait and go on with the new weights; "wait": they finish with the old ones first
PauseMode = Literal["keep", "wait"]
#: of a sleeping engine's memory, in the order in which it wakes
SleepPart = Literal["weights", "kv_cache"]
#: how weights travel: ours through Ray's object store; vLLM's own over NCCL or CUDA IPC
Transfer = Literal["tapforge-cpu", "nccl", "ipc"]


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Adapters of `rank` count alpha / rank times. `targets`: names of linear layers; none: the family's."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()


#: file of an export: how its run prompted it
PROMPTED = "tapforge.json"
#: ranks of adapters that vLLM has room and kernels for (its `MaxLoRARanks`)
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def engine_rank(rank: int) -> int:
    """That an engine has room for where adapters of `rank` come in: the next one that vLLM has. Raises ValueError where
    it has none."""
    fitting = [one for one in ENGINE_RANKS if one >= rank]
    if not fitting:
        raise ValueError(f"an engine takes adapters of a rank up to {ENGINE_RANKS[-1]}, not of {rank}")
    return fitting[0]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One vLLM engine."""

    #: folder; where `source` is set, it is the driver's, which may have no weights, until `on_this_node`
    model: str
    #: the tokens that may be sampled; every other one is banned
    allowed_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    dtype: str = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    context_tokens: int = 8192
    max_sequences: int = 64
    #: None: vLLM's choice
    max_batched_tokens: int | None = None
    #: on each device; None: what `gpu_memory_share` leaves, and 128 on CPUs
    kv_cache_mib: int | None = None
    #: devices that share the model
    tensor_parallel: int = 1
    prefix_caching: bool = True
    #: None: the engine's choice
    async_scheduling: bool | None = None
    enforce_eager: bool | None = None
    #: it shares its GPUs with learner ranks, and sleeps while they work
    colocated: bool = False
    images_per_prompt: int = 8
    #: width and height that the run's largest screen has for the model, pixels: a sync is proved with such a frame, and
    #: on GPUs the memory for frames is measured with it
    largest_frame: tuple[int, int] | None = None
    #: CPU threads; None: the process's default, on GPUs only
    threads: int | None = 1
    seed: int = 0
    #: decoded frames kept, MiB
    frames_mib: int = 256
    #: share of a GPU's memory that the engine takes
    gpu_memory_share: float = 0.9
    transfer: Transfer = "tapforge-cpu"
    #: until it can answer, and for an answer with the wait for its turn; seconds
    start_seconds: float = 3600.0
    answer_seconds: float = 600.0
    #: for which new weights may stop the time of an answer
    pause_seconds: float = 4800.0
    #: file that it writes to, with `actor_log.NUMBER` for its number; None: wherever Ray has it
    log: str | None = None
    #: of one engine; one more death within an hour ends the run
    restarts_per_hour: int = 3
    #: adapters come in alone, beside the folder's weights; None: whole weights do, with adapters merged where there are
    lora: LoraSettings | None = None
    source: ModelRef | None = None


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """A value head (`learner/critic.py`)."""

    #: of its loss, beside the policy's
    coefficient: float = 1.0
    #: a value counts as moved at most so far in an update; None: as far as it did
    clip: float | None = None
    #: of the head alone
    learning_rate: float = 0.05
    #: its loss moves the policy's backbone as well
    shared: bool = True


#: by which the learner's packed attention is computed
AttentionKernel = Literal["torch", "flash-attn"]


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """The FSDP2 ranks."""

    #: as an engine's
    model: str
    allowed_ids: tuple[int, ...]
    ranks: int = 1
    #: CPU threads of a rank
    threads: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    #: forward pass; what is trained is always float32
    dtype: Literal["float32", "bfloat16"] = "float32"
    freeze_vision: bool = True
    #: adapters are trained, and nothing else
    lora: LoraSettings | None = None
    #: load the initial weights a second time, frozen, for the KL term
    reference: bool = False
    #: folder of a frozen model whose log-probabilities a distillation has; "": none is loaded
    teacher: str = ""
    critic: CriticSettings | None = None
    #: keep only the layers' inputs and compute the rest again in the backward pass: less memory, a third more work
    activation_checkpointing: bool = False
    #: of the layers, the first ones, that this is for
    checkpointed_share: float = 1.0
    attention: AttentionKernel = "torch"
    #: reduce gradients after every micro-batch and keep a share of them, instead of all of them until the step
    sharded_gradients: bool = False
    #: master weights, gradients and moments are in the host's memory
    cpu_offload: bool = False
    #: free a layer's gathered weights after its forward pass
    reshard_after_forward: bool = True
    #: the rank shares its GPU with an engine
    colocated: bool = False
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    tokens_per_micro_batch: int = 8192
    seed: int = 0
    transfer: Transfer = "tapforge-cpu"
    #: as an engine's
    log: str | None = None
    #: until it can work, and for an update or a checkpoint; seconds
    start_seconds: float = 3600.0
    update_seconds: float = 7200.0
    source: ModelRef | None = None
    #: how the model is prompted, as JSON, for its exports; "": not written
    prompted: str = ""
    #: of `teacher`, as `source` is of `model`
    teacher_source: ModelRef | None = None


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """One call of `Learner.update`."""

    objective: Objective = field(default_factory=Objective)
    learning_rate: float = 1e-6
    #: optimizer steps over which the rate rises linearly from 0, counted over the learner's life
    warmup_steps: int = 0
    gradient_clip: float = 1.0
    temperature: float = 1.0
    #: optimizer steps; a group is never split between two
    mini_batches: int = 1
    #: the samples may come from older weights than the learner's (staleness bound S > 0)
    off_policy: bool = False
    #: seed of the order of groups
    seed: int = 0


#: what `PolicySettings.gap_alarm` is by the engine's number format: engines and learner round differently, each token
#: by itself
GAP_ALARM = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}


Placed = TypeVar("Placed", EngineSettings, LearnerSettings)


def on_this_node(settings: Placed) -> Placed:
    """With the model's folder on this node, which is fetched where it is not there; from here on nothing asks the hub.
    Raises ModelError."""
    if settings.source is not None:
        folder = resolve(settings.source, seconds=settings.start_seconds)
        settings = replace(settings, model=str(folder))
    if isinstance(settings, LearnerSettings) and settings.teacher_source is not None:
        folder = resolve(settings.teacher_source, seconds=settings.start_seconds)
        settings = replace(settings, teacher=str(folder))
    stay_offline()
    return settings
