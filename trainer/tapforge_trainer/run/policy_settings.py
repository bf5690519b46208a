"""From a run to the settings of engines and learner ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from tapforge_api import TrainingRun
from tapforge_api.algorithm import Critic

from ..agents.agent import Agent
from ..algorithms.composition import objective_of
from ..model_source.ref import ModelRef
from ..placement.machine import Device, Machine
from ..placement.settings import (
    CriticSettings,
    EngineSettings,
    LearnerSettings,
    LoraSettings,
    Transfer,
    UpdateSettings,
)
from ..rollout.frame_budget import engine_frames_mib, largest_frame
from .adapters import prompted_of
from .assembly import ConfigurationError
from .feasibility import ATTENTION_ON_CPUS

#: of a sync at most, one after another: pause, memory for weights, transfer, memory for caches, first step, what
#: arrived, probe, release; a second round where the first proof fails, behind a discard and a sleep
_SYNC_STEPS = 2 * 8 + 2


def engine_settings(
    run: TrainingRun, folder: Path, agent: Agent, machine: Machine, device: Device, source: ModelRef | None = None
) -> EngineSettings:
    """`source`: where each node gets the model from; None: `folder`, which they all have."""
    spec = run.spec
    return EngineSettings(
        model=str(folder),
        allowed_ids=agent.allowed_ids,
        stop_ids=agent.stop_ids,
        dtype=dtype_of(run, device),
        device=device,
        context_tokens=spec.model.context_tokens,
        max_sequences=spec.engine.max_concurrent_sequences,
        max_batched_tokens=spec.engine.max_batched_tokens,
        kv_cache_mib=spec.engine.kv_cache_mib,
        tensor_parallel=spec.engine.tensor_parallel,
        prefix_caching=spec.engine.prefix_caching,
        async_scheduling=spec.engine.async_scheduling,
        enforce_eager=spec.engine.enforce_eager,
        colocated=_colocated(run, device),
        gpu_memory_share=gpu_share_of(run, device),
        images_per_prompt=max(2, spec.model.adapter.images),
        largest_frame=largest_frame(run, folder),
        threads=spec.engine.threads or (_share(machine, spec.engine.replicas) if device == "cpu" else None),
        seed=spec.seed,
        frames_mib=spec.engine.frame_store_mib or engine_frames_mib(run),
        transfer=_transfer(run, device),
        start_seconds=spec.deadlines.start_seconds,
        answer_seconds=answer_seconds(run),
        # Each step of a round of weights has this deadline; a sleep lasts for an update before it.
        pause_seconds=_SYNC_STEPS * spec.deadlines.sync_seconds
        + (spec.deadlines.update_seconds if _colocated(run, device) else 0.0),
        restarts_per_hour=spec.engine.max_restarts_per_hour,
        lora=lora_settings(run) if spec.sync.lora == "adapter" else None,
        source=source,
    )


def lora_settings(run: TrainingRun) -> LoraSettings | None:
    lora = run.spec.model.lora
    return None if lora is None else LoraSettings(lora.rank, lora.alpha, lora.targets)


def dtype_of(run: TrainingRun, device: Device) -> Literal["float32", "bfloat16"]:
    """The number format of engines and of the learner's passes."""
    return run.spec.model.dtype or ("bfloat16" if device == "cuda" else "float32")


def gpu_share_of(run: TrainingRun, device: Device) -> float:
    """Of a GPU's memory, that an engine takes."""
    return run.spec.engine.gpu_memory_share or (0.5 if _colocated(run, device) else 0.9)


def critic_of(critic: Critic | None) -> CriticSettings | None:
    if critic is None:
        return None
    return CriticSettings(critic.coefficient, critic.clip, critic.learning_rate, critic.backbone == "shared")


def _colocated(run: TrainingRun, device: Device) -> bool:
    return device == "cuda" and run.spec.placement.mode == "colocated"


def _transfer(run: TrainingRun, device: Device) -> Transfer:
    if device == "cpu":
        return "tapforge-cpu"
    return "ipc" if _colocated(run, device) else "nccl"


def answer_seconds(run: TrainingRun) -> float:
    """What an answer may take, the wait for its turn included."""
    given = run.spec.deadlines.answer_seconds
    return 120.0 + 2.0 * run.spec.rollout.response_tokens if given is None else given


def learner_settings(
    run: TrainingRun,
    folder: Path,
    agent: Agent,
    machine: Machine,
    device: Device,
    source: ModelRef | None = None,
    teacher: Path | None = None,
    teacher_source: ModelRef | None = None,
) -> LearnerSettings:
    """`source` and `teacher_source` as in `engine_settings`; `teacher`: a distillation's, None: none is loaded."""
    spec = run.spec
    if spec.learner.attention == "flash-attn" and device == "cpu":
        raise ConfigurationError(ATTENTION_ON_CPUS)
    return LearnerSettings(
        model=str(folder),
        allowed_ids=agent.allowed_ids,
        ranks=spec.learner.ranks,
        threads=spec.learner.threads or _share(machine, spec.learner.ranks),
        device=device,
        dtype=dtype_of(run, device),
        freeze_vision=spec.model.freeze_vision,
        lora=lora_settings(run),
        reference=spec.algorithm.kl.coefficient > 0,
        teacher="" if teacher is None else str(teacher),
        critic=critic_of(spec.algorithm.critic),
        activation_checkpointing=device == "cuda"
        if spec.learner.activation_checkpointing is None
        else spec.learner.activation_checkpointing,
        checkpointed_share=spec.learner.checkpointed_share,
        attention="flash-attn" if spec.learner.attention == "flash-attn" else "torch",
        sharded_gradients=(spec.learner.gradient_accumulation or ("sharded" if device == "cuda" else "unsharded"))
        == "sharded",
        cpu_offload=spec.learner.cpu_offload,
        reshard_after_forward=spec.learner.reshard_after_forward,
        colocated=_colocated(run, device),
        betas=(spec.learner.beta1, spec.learner.beta2),
        weight_decay=spec.learner.weight_decay,
        tokens_per_micro_batch=spec.learner.tokens_per_micro_batch,
        seed=spec.seed,
        transfer=_transfer(run, device),
        start_seconds=spec.deadlines.start_seconds,
        update_seconds=spec.deadlines.update_seconds,
        source=source,
        prompted=json.dumps(prompted_of(run), indent=2),
        teacher_source=teacher_source,
    )


def _share(machine: Machine, processes: int) -> int:
    """Half of the cores belong to the engines and half to the learner: both work at the same time."""
    return max(1, machine.cores // 2 // processes)


def update_settings(run: TrainingRun, update: int) -> UpdateSettings:
    spec = run.spec
    return UpdateSettings(
        objective=objective_of(spec.algorithm, spec.rollout.response_tokens),
        learning_rate=spec.learner.learning_rate,
        warmup_steps=spec.learner.warmup_updates * spec.learner.mini_batches,
        gradient_clip=spec.learner.gradient_clip,
        temperature=spec.rollout.temperature,
        mini_batches=spec.learner.mini_batches,
        off_policy=spec.rollout.max_staleness > 0,
        seed=spec.seed * 1_000_003 + update,
    )
