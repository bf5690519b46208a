"""From a TrainingRun to the parts that carry it out: model folder, agent, phones, tasks, limits, settings.

Every function here translates one part of the spec and starts nothing; what is missing is a `SetupError`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tapforge_api import TrainingRun
from tapforge_api.algorithm import Critic
from tapforge_api.attempt import RUN_UID
from tapforge_api.environment import Processes, Screen
from tapforge_api.stages import updates_at_most
from tapforge_envs.clients.androidlab import DIALECT as ANDROIDLAB
from tapforge_envs.clients.http import Deadlines
from tapforge_envs.clients.osworld import DIALECT as OSWORLD
from tapforge_envs.clients.phones import PhoneOptions
from tapforge_envs.slots.broker import BrokerSlots
from tapforge_envs.slots.broker_calls import Access
from tapforge_envs.slots.claim_journal import ClaimJournal
from tapforge_envs.slots.managed import ManagedSlots
from tapforge_envs.slots.places import Places
from tapforge_envs.slots.processes import ProcessSlots, Recycle, ServerCommand
from tapforge_envs.slots.source import HealthProbe, SlotSource
from tapforge_envs.slots.urls import UrlSlots, parse_urls, read_urls

from ..agents import make_agent
from ..agents.agent import Agent
from ..algorithms.composition import objective_of
from ..attempt import EpisodeLimits, Player
from ..data.episodes import DataError
from ..data.folder import DataFolder
from ..data.imitation import imitated_tasks
from ..data.recorded import RecordedSteps
from ..data.recorded_tasks import HELD_OUT, PRACTISED
from ..learner.families.check import check_folder
from ..model_source.ref import ModelError, ModelRef, ModelRefused
from ..model_source.resolve import resolve
from ..placement.machine import Device, Machine
from ..placement.settings import (
    CriticSettings,
    EngineSettings,
    LearnerSettings,
    LoraSettings,
    Transfer,
    UpdateSettings,
)
from ..recording.queue import OpenRecording, record_here
from ..recording.retention import Retention
from ..rollout.frame_budget import engine_frames_mib, frame_budget, largest_frame
from ..rollout.groups import GroupLimits
from ..rollout.held_frames import FrameBudget
from ..tasks.selection import contamination_of, sampler_errors, shared_on_purpose, task_errors, training_tasks
from ..tasks.stages import stages_of
from .adapters import adapter_errors, adapter_options
from .feasibility import ATTENTION_ON_CPUS, judge
from .learning_errors import algorithm_errors, reward_errors
from .local_files import COMPARED, LocalFiles, inspect_files
from .model_errors import model_errors
from .model_facts import facts_of
from .named_paths import where_relative
from .plan import longest_member
from .stage_errors import stage_errors, tasks_budget_errors

#: of a sync at most, one after another: pause, memory for weights, transfer, memory for caches, first step, what
#: arrived, probe, release; a second round where the first proof fails, behind a discard and a sleep
_SYNC_STEPS = 2 * 8 + 2
#: protocols of ZeroGUI's managers
_MANAGED = {"osworld": OSWORLD, "androidlab": ANDROIDLAB}


class SetupError(Exception):
    """Something that a run needs is not there. The message names it and the remedy."""


class ConfigurationError(SetupError):
    """The configuration can't work, and will fail the same way until it is changed."""


def described(model: ModelRef) -> Path:
    """A folder of this node that holds all but the weights."""
    try:
        return resolve(model, weights=False)
    except ModelRefused as error:
        raise ConfigurationError(str(error)) from error
    except ModelError as error:
        raise SetupError(str(error)) from error


def inspect(run: TrainingRun, runs: Path) -> LocalFiles:
    """Looks at everything that a run names, before anything is started. Raises ConfigurationError with all that is
    wrong."""
    files = inspect_files(run, runs)
    local = run.spec.model.source.path
    wrong = [
        *task_errors(run),
        *sampler_errors(run),
        *reward_errors(run, [stage.spec.rewards for stage in stages_of(run)]),
        *algorithm_errors(run),
        *(model_errors(run, Path(local.folder)) if local is not None else []),
    ]
    if not files.errors:
        wrong += adapter_errors(run, None if local is None else Path(local.folder))
    if not (files.errors or wrong):
        wrong = tasks_budget_errors(run) or stage_errors(run, runs)
    facts = None if files.errors or wrong else facts_of(run)
    wrong += judge(run, facts).errors
    if errors := [*files.errors, *wrong]:
        raise ConfigurationError("\n".join([*errors, *where_relative(run, errors, Path.cwd())]))
    drawn = updates_at_most(run.spec.stop.max_updates, run.spec.stages) * run.spec.rollout.groups_per_update
    shared = contamination_of(run, drawn, COMPARED, imitated_tasks(run))
    on_purpose = shared_on_purpose(run, drawn, COMPARED)
    return replace(files, contamination=shared, on_purpose=on_purpose, model=facts)


def agent_of(run: TrainingRun, folder: Path) -> Agent:
    """Raises ConfigurationError for a folder that the adapter can't read."""
    name = run.spec.model.adapter.name
    try:
        check_folder(folder)
        return make_agent(name, folder, **adapter_options(run))
    except (ValueError, KeyError, OSError) as error:
        raise ConfigurationError(f"spec.model: {name} can't use {folder}: {error}") from error


def agent_on_node(run: TrainingRun, model: ModelRef) -> Agent:
    """For a process that may be on another node than the driver."""
    return agent_of(run, described(model))


def slots_of(run: TrainingRun, health: HealthProbe) -> SlotSource:
    """`health` asks phones from where they are used."""
    environment = run.spec.environment
    source, calls = environment.source, environment.call_seconds
    if source.dataset is not None:
        return Places(answers_at_once(run))
    deadlines = Deadlines(reset=calls.reset, step=calls.step, evaluate=calls.evaluate)
    if source.processes is not None:
        command = _server_command(source.processes, environment.screen)
        given = source.processes.recycle
        recycle = None
        if given.after_episodes is not None or given.after_seconds is not None:
            recycle = Recycle(given.after_episodes, given.after_seconds)
        return ProcessSlots(
            source.processes.count, source.processes.servers, command, deadlines, health=health, recycle=recycle
        )
    if source.urls is not None:
        if source.urls.file is not None:
            addresses = read_urls(Path(source.urls.file), environment.protocol)
        else:
            listed = source.urls.list or ()
            addresses = parse_urls(listed, "spec.environment.source.urls.list", environment.protocol)
        if (dialect := _MANAGED.get(environment.protocol)) is not None:
            return ManagedSlots(
                addresses, environment.protocol, dialect, deadlines, health=health, options=options_of(run)
            )
        return UrlSlots(addresses, deadlines, health=health, protocol=environment.protocol, options=options_of(run))
    if source.own_pool is not None:  # the operator resolves it to a pool before a run's driver starts
        raise ConfigurationError(
            "spec.environment.source.ownPool: only the operator makes pools, on a cluster; here use processes or urls"
        )
    pool = source.pool
    assert pool is not None, "exactly one source is set"
    access = Access.of(os.environ)
    # On a laptop a driver that was killed is not restarted. Not in $TAPFORGE_WORK, which may be a
    # volume that Pods share: claims of a run that lives in another Pod would be taken for those of a dead one.
    uid = os.environ.get(RUN_UID)
    journal = ClaimJournal(Path(tempfile.gettempdir(), f"tapforge-claims-{uid}-{pool.name}.json")) if uid else None
    return BrokerSlots(
        pool.name,
        access,
        slots=pool.slots,
        priority=pool.priority,
        deadlines=deadlines,
        journal=journal,
        protocol=environment.protocol,
        options=options_of(run),
    )


def answers_at_once(run: TrainingRun) -> int:
    """Of all engines."""
    return run.spec.engine.replicas * run.spec.engine.max_concurrent_sequences


def recorded_steps(run: TrainingRun, agent: Agent) -> RecordedSteps | None:
    """What is played in place of phones; None: phones are. Raises ConfigurationError."""
    source = run.spec.environment.source.dataset
    if source is None:
        return None
    try:
        folders = {PRACTISED: DataFolder(Path(source.path))}
        if source.held_out is not None:
            folders[HELD_OUT] = DataFolder(Path(source.held_out))
    except DataError as error:
        raise ConfigurationError(f"spec.environment.source.dataset: {error}") from error
    return RecordedSteps(agent, folders, source.reward, run.spec.model.adapter.history_images)


def options_of(run: TrainingRun) -> PhoneOptions:
    """How phones of other people's making are used."""
    environment = run.spec.environment
    return PhoneOptions(settle=environment.settle, adb=environment.adb)


def _server_command(processes: Processes, screen: Screen) -> ServerCommand:
    if processes.environment == "miniwob":
        scale = ("--scale", str(screen.width // 160))
        return ServerCommand("tapforge_envs.web.server", scale, start_seconds=180.0, stop_seconds=15.0)
    arguments: tuple[str, ...] = ("--width", str(screen.width), "--height", str(screen.height))
    if (latency := processes.latency) is not None:
        fault = {"kind": "slow", "medianSeconds": latency.median_seconds, "sigma": latency.sigma}
        arguments += ("--faults", json.dumps([fault]))
    return ServerCommand(arguments=arguments)


def slots_wanted(run: TrainingRun) -> int | None:
    """How many phones a run asks for; None: whatever its source has."""
    source = run.spec.environment.source
    wants = source.pool or source.own_pool
    return None if wants is None else wants.slots


def episode_limits(run: TrainingRun) -> EpisodeLimits:
    # A recorded step takes one answer: what is no action ended it, and no limit of steps did.
    once = run.spec.environment.source.dataset is not None
    return EpisodeLimits(
        max_parse_failures=1 if once else run.spec.model.adapter.max_parse_failures,
        episode_seconds=run.spec.environment.call_seconds.episode,
    )


def group_limits(run: TrainingRun) -> GroupLimits:
    r = run.spec.rollout
    return GroupLimits(
        group_size=r.group_size,
        groups_per_update=r.groups_per_update,
        max_staleness=r.max_staleness,
        max_reruns=r.max_reruns,
        min_valid=r.min_valid,
        deadline_seconds=longest_member(run.spec) if r.group_deadline_seconds is None else r.group_deadline_seconds,
        dynamic_sampling=r.dynamic_sampling.enabled,
        max_rounds=r.dynamic_sampling.max_rounds,
        mask_step_limit=run.spec.algorithm.truncated.episodes == "masked",
    )


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """Where and by whom episodes are played."""

    slots: SlotSource
    agent: Agent
    player: Player
    episodes: EpisodeLimits
    groups: GroupLimits
    response_tokens: int
    concurrency: int | None
    acquire_seconds: float
    #: what is recorded of the screens. Measurements are never removed again
    retention: Retention
    #: engines that live, by index
    engines: Callable[[], Sequence[int]] = tuple
    record: OpenRecording = record_here
    frame_budget: FrameBudget | None = None


def rollout_setup_of(
    run: TrainingRun, slots: SlotSource, agent: Agent, player: Player, engines: Callable[[], Sequence[int]]
) -> RolloutSetup:
    return RolloutSetup(
        slots,
        agent,
        player,
        episode_limits(run),
        group_limits(run),
        run.spec.rollout.response_tokens,
        run.spec.rollout.concurrency,
        run.spec.environment.deadlines.acquire_seconds,
        retention_of(run),
        engines,
        frame_budget=frame_budget(run, training_tasks(run), None),
    )


def retention_of(run: TrainingRun) -> Retention:
    r = run.spec.recording
    max_bytes = None if r.max_gib is None else int(r.max_gib * 2**30)
    return Retention(r.frames, r.share, run.spec.seed, r.encoding, r.quality, max_bytes)


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
    run: TrainingRun, folder: Path, agent: Agent, machine: Machine, device: Device, source: ModelRef | None = None
) -> LearnerSettings:
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
