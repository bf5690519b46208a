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

from tapforge_api import TrainingRun
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
from ..attempt import EpisodeLimits, Player
from ..data.episodes import DataError
from ..data.folder import DataFolder
from ..data.imitation import imitated_tasks
from ..data.recorded import RecordedSteps
from ..data.recorded_tasks import HELD_OUT, PRACTISED
from ..learner.families.check import check_folder
from ..model_source.ref import ModelError, ModelRef, ModelRefused
from ..model_source.resolve import resolve
from ..recording.queue import OpenRecording, record_here
from ..recording.retention import Retention
from ..rollout.frame_budget import frame_budget
from ..rollout.groups import GroupLimits
from ..rollout.held_frames import FrameBudget
from ..tasks.selection import contamination_of, sampler_errors, shared_on_purpose, task_errors, training_tasks
from ..tasks.stages import stages_of
from .adapters import adapter_errors, adapter_options
from .feasibility import judge
from .learning_errors import algorithm_errors, reward_errors
from .local_files import COMPARED, LocalFiles, inspect_files
from .model_errors import model_errors
from .model_facts import facts_of
from .named_paths import where_relative
from .plan_notes import longest_member
from .served_model_errors import images_sent, served_model_errors
from .stage_errors import stage_errors, tasks_budget_errors
from .teacher_check import teacher_errors

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
        *served_model_errors(run, images_sent(stage.spec.rewards for stage in stages_of(run))),
    ]
    if not files.errors:
        wrong += adapter_errors(run, None if local is None else Path(local.folder))
        wrong += [] if wrong else teacher_errors(run)
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
    return RecordedSteps(agent, folders, source.reward, run.spec.model.adapter.images)


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
    # A recorded step takes one answer: what is not an action ended it, and no limit of steps did.
    once = run.spec.environment.source.dataset is not None
    return EpisodeLimits(
        max_parse_failures=1 if once else run.spec.model.adapter.max_parse_failures,
        episode_seconds=run.spec.environment.call_seconds.episode,
        device_screens=run.spec.recording.screens == "device",
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
    """Where episodes are played, and by which player."""

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
