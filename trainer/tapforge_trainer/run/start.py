"""Starts what a command works with, and closes it: device, model, phones, their players, learner and engines.

- What can be known without starting anything is known first: GPUs that are missing, a model that does not fit the file.
- Phones that run already answer before anything heavy is started; whatever is left starts side by side.
- All is closed after a failure, too, and when it comes in the middle of the start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tapforge_api import TrainingRun
from tapforge_api.learning import Stop
from tapforge_envs.clients.phones import PhoneAddress
from tapforge_envs.slots.source import SlotSource

from ..agents import Agent
from ..agents.made_up import made_up_episode
from ..judges.journal import VERDICTS, VerdictJournal, written_down
from ..judges.waiting import SaidOnce
from ..learner.checkpoint_storage import CheckpointBackend, place_of
from ..model_source.ref import ModelError, ModelRef, ModelRefused
from ..placement.actor_log import NUMBER, keep_ray_logs, last_lines
from ..placement.machine import Device, rollout_workers
from ..placement.placement import ray_logs
from ..placement.ray_start import in_cluster, object_store_bytes
from ..policy import Policy, PolicySettings
from ..recording.actor import RecorderProcess
from ..rewards.budget import JudgeBudget, episodes_at_once
from ..rollout.actor import Reached, start_rollout_actor
from ..rollout.baselines import baselines
from ..rollout.frame_budget import budget_error, frame_budget
from ..rollout.remote_players import RemotePlayers
from ..rollout.worker import RolloutWorker
from ..rollout.worker_host import LINK_SECONDS
from ..serving.servers import ModelServers
from ..tasks.selection import training_tasks
from ..telemetry.progress import Progress, newest_checkpoint
from ..telemetry.start_progress import waiting_shown
from ..telemetry.telemetry import Telemetry
from . import assembly, policy_settings, proof_prompts
from .assembly import ConfigurationError, RolloutSetup, SetupError
from .context import RunContext
from .devices import device_found
from .fleet import written
from .learning_errors import rewarder_of
from .local_files import checkpoint_uri, checkpoints_of
from .model_errors import model_errors
from .model_pin import model_of, teacher_of
from .resuming import resumed_from
from .served_models import counted, models_placed, models_started, servers_of
from .shutdown import StopSignal, together, unless_stopped
from .teacher_check import teacher_errors

log = logging.getLogger(__name__)
#: in the run's folder: what engines and ranks write where they use GPUs
_LOGS = "logs"


@dataclass(frozen=True, slots=True)
class _Rollouts:
    """Phones and their player. `policies`: by name, of the player in this process; "" is the policy that learns,
    once there is one."""

    agent: Agent
    slots: SlotSource
    player: RolloutWorker | RemotePlayers
    policies: dict[str, Any]


@asynccontextmanager
async def running(
    run: TrainingRun,
    folder: Path,
    telemetry: Telemetry,
    stop: StopSignal,
    *,
    uid: str = "",
    weights: Path | None = None,
    home: Path | None = None,
    learner: bool = True,
    engines: bool = True,
    resume: bool = True,
    place: CheckpointBackend | None = None,
    whole: TrainingRun | None = None,
) -> AsyncIterator[tuple[RunContext, Progress | None]]:
    """Phones, learner and engines, started side by side; with the run's last checkpoint loaded and its progress, None
    where there is none. Closed in any case. `uid`: of the run, on a cluster; `place`: where checkpoints are written,
    None: they are only read; `whole`: the run of which `run` is a stage; `home`: the run's folder, if `folder` is of a
    measurement: what the run was pinned to counts there, too."""
    started = time.monotonic()
    # Only here: a folder that is taken away while a run is under way must not come back (cluster/storage.py).
    checkpoints_of(run, folder).parent.mkdir(parents=True, exist_ok=True)
    report = partial(telemetry.phase, stage="Loading")
    # Of all stages, so that a later one finds room for its own models.
    machine, device = await device_found(counted(whole or run, learner=learner, engines=engines), stop, report)
    source, model = await _model(run, folder, telemetry, weights, keep=place is not None)
    teaches = learner and engines and run.spec.algorithm.distillation is not None
    taught_by = await _teacher(run, folder, model, keep=place is not None) if teaches else (None, None)
    journal = await asyncio.to_thread(VerdictJournal, folder / VERDICTS) if engines and _judged(run) else None
    if journal is not None and journal.dropped is not None:
        telemetry.note(journal.dropped)
    rollouts = _rollouts(run, source, model, device, journal, telemetry.note, engines=engines)
    logs = (folder / _LOGS).absolute()
    own = partial(servers_of, run, home or folder, device, logs, learner=learner, keep=place is not None)
    servers = await own() if engines else None
    size = sum(file.size for file in source.files) / 2**30
    fetch = f"; a node that lacks {source.place} fetches {size:,.1f} GiB" if size else ""
    telemetry.phase(f"starting {'phones, engine and learner' if engines else 'the learner'}{fetch}", "Loading")
    here = run, model, rollouts.agent, machine, device, source
    engine = policy_settings.engine_settings(*here) if engines else None
    ranks = policy_settings.learner_settings(*here, *taught_by) if learner else None
    if device == "cuda":
        logs.mkdir(parents=True, exist_ok=True)
        engine = engine and replace(engine, log=str(logs / f"engine-{NUMBER}.log"))
        ranks = ranks and replace(ranks, log=str(logs / f"rank-{NUMBER}.log"))
    shown = engine.largest_frame if engine is not None else None
    policy = Policy(
        PolicySettings(
            engine=engine,
            learner=ranks,
            replicas=run.spec.engine.replicas,
            mid_episode=run.spec.sync.mid_episode,
            place=place or place_of(checkpoints_of(run, folder), checkpoint_uri(run)),
            keep=run.spec.checkpoints.keep,
            tolerance=run.spec.sync.tolerance,
            gap_alarm=run.spec.sync.gap_alarm,
            sync_seconds=run.spec.deadlines.sync_seconds,
            episode=await asyncio.to_thread(made_up_episode, rollouts.agent, *shown) if shown is not None else (),
            keep_ray=whole is not None and bool(whole.spec.stages),
        )
    )
    try:
        await _start(run, policy, rollouts, servers, source, telemetry, stop, engines=engines)
        progress, warm_started_from = (
            await resumed_from(whole or run, policy, uid) if learner and resume else (None, "")
        )
        if learner and (prompts := await asyncio.to_thread(proof_prompts.kept, folder)):
            policy.prove_with(prompts, proof_prompts.name_of(prompts))
        if progress is not None:
            if progress.proof_prompts == policy.proof_prompts:
                policy.proofs.first = progress.first_proof
            telemetry.view.resume(progress, await asyncio.to_thread(newest_checkpoint, policy.settings.place))
        setup = await _connect(run, policy, rollouts, servers, stop, started, engines=engines)
        writes = written(rollouts.slots, folder) if engines else nullcontext()
        async with writes, written_down(journal) if journal is not None else nullcontext():
            budget = judge_budget_of(run, stop, progress or Progress(), journal)
            yield RunContext(run, folder, policy, setup, telemetry, stop, budget, warm_started_from, whole), progress
    except Exception as error:
        if isinstance(error, policy_errors()) and (lines := last_lines(logs, time.time())):
            error.add_note(lines)
        raise
    finally:
        closed = _closed(rollouts.player, servers, policy, journal)
        closing = _ray_logs_kept(logs), rollouts.slots.close(), closed
        for result in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("closing failed: %s", result)


# --- before anything starts -------------------------------------------------------------------------------------------


async def _model(
    run: TrainingRun, folder: Path, telemetry: Telemetry, weights: Path | None, *, keep: bool
) -> tuple[ModelRef, Path]:
    """Where each node has the model from, and a folder with its description. `weights`: of this folder instead;
    `keep`: the run goes on with this one from now on."""
    telemetry.phase("looking for the model", "Loading")
    pinned = partial(ModelRef.of_folder, weights) if weights else partial(model_of, run, folder, keep=keep)
    source = await asyncio.to_thread(pinned)
    model = await asyncio.to_thread(assembly.described, source)
    if wrong := model_errors(run, model):
        raise ConfigurationError("\n".join(wrong))
    return source, model


async def _teacher(run: TrainingRun, folder: Path, policy: Path, *, keep: bool) -> tuple[Path | None, ModelRef | None]:
    """A folder with the description of a distillation's teacher, and where each node has it from."""
    source = await asyncio.to_thread(teacher_of, run, folder, keep=keep)
    if source is None:
        return None, None
    teacher = await asyncio.to_thread(assembly.described, source)
    if wrong := await asyncio.to_thread(teacher_errors, run, policy, teacher):
        raise ConfigurationError("\n".join(wrong))
    return teacher, source


def _rollouts(
    run: TrainingRun,
    source: ModelRef,
    model: Path,
    device: Device,
    journal: VerdictJournal | None,
    say: Callable[[str], None],
    *,
    engines: bool,
) -> _Rollouts:
    """Nothing of it runs yet. Without `engines` nothing will be played. `say`: which judge is waited for."""
    agent = assembly.agent_of(run, model)
    policies: dict[str, Any] = baselines(agent)
    rewarder = rewarder_of(run, journal=journal, say=say) if engines else None
    recorded = assembly.recorded_steps(run, agent) if engines else None
    player: RolloutWorker | RemotePlayers = RolloutWorker(
        agent, policies, recorded, rewarder, journal, None if recorded is None else recorded.earlier
    )

    async def health(phone: PhoneAddress) -> str:
        return await player.health(phone)

    slots = assembly.slots_of(run, health)
    workers = 0
    if engines and recorded is None:  # a recorded step costs no more than its screen
        workers = rollout_workers(run, assembly.slots_wanted(run) or slots.size, device, in_cluster=in_cluster())
    if workers:
        make_agent, seconds = partial(assembly.agent_on_node, run, source), run.spec.deadlines.start_seconds
        # Counted by Ray where Pods are made for it; on one machine engines and ranks would wait for what workers hold.
        cpus = 1 if device != "cpu" and in_cluster() else 0
        asks = partial(rewarder_of, run, workers)
        player = RemotePlayers(
            lambda _: start_rollout_actor(make_agent, seconds, cpus=cpus, make_rewarder=asks),
            workers,
            journal=journal,
            say=SaidOnce(say),
        )
    return _Rollouts(agent, slots, player, policies)


# --- the start --------------------------------------------------------------------------------------------------------


async def _start(
    run: TrainingRun,
    policy: Policy,
    rollouts: _Rollouts,
    servers: ModelServers | None,
    source: ModelRef,
    telemetry: Telemetry,
    stop: StopSignal,
    *,
    engines: bool,
) -> None:
    """Rollout workers, phones, models for judges, learner and engines."""
    slots = rollouts.slots
    # Phones that are already running answer at once or not at all: that is known before anything heavy is started.
    if isinstance(rollouts.player, RemotePlayers):
        await unless_stopped(stop, _workers_started(policy, rollouts.player))
    served = run.spec.environment.source.processes is None
    if engines and served:
        await unless_stopped(stop, slots.start())
    phones = [slots.start()] if engines and not served else []

    async def waiting() -> list[str]:
        return [*await policy.waiting(), *(await servers.waiting() if servers is not None else [])]

    report = partial(telemetry.phase, stage="Loading")
    async with waiting_shown(report, waiting):
        await unless_stopped(stop, models_placed(servers, policy.start_ray, report))
        started = policy_started(policy, source, telemetry), models_started(servers)
        await unless_stopped(stop, together(*started, *phones))
    if engines:
        telemetry.view.slots, telemetry.view.slots_wanted = slots, assembly.slots_wanted(run)


async def _workers_started(policy: Policy, player: RemotePlayers) -> None:
    await policy.start_ray()
    await player.start()


async def _ray_logs_kept(folder: Path) -> None:
    if folder.is_dir():
        await asyncio.to_thread(keep_ray_logs, ray_logs(), folder)


def policy_errors() -> tuple[type[Exception], ...]:
    """Of engines and learner."""
    from ..engine.client import EngineError
    from ..learner.client import LearnerError
    from ..sync.sync import SyncMismatch

    return EngineError, LearnerError, SyncMismatch


async def policy_started(policy: Policy, model: ModelRef, telemetry: Telemetry) -> None:
    """Raises SetupError or ConfigurationError in the words of what a node lacks."""
    from ..engine.client import EngineError
    from ..learner.client import LearnerError
    from ..placement.placement import PlacementError

    try:
        await policy.start(partial(telemetry.phase, stage="Loading"))
    except PlacementError as late:
        raise SetupError(str(late)) from late
    except (EngineError, LearnerError) as error:
        causes = getattr(error.__cause__, "cause", None), error.__cause__
        if refused := next((cause for cause in causes if isinstance(cause, ModelError)), None):
            kind = ConfigurationError if isinstance(refused, ModelRefused) else SetupError
            raise kind(str(refused)) from error
        error.add_note(f"the model is {model.shown}")
        raise


async def _connect(
    run: TrainingRun,
    policy: Policy,
    rollouts: _Rollouts,
    servers: ModelServers | None,
    stop: StopSignal,
    started: float,
    *,
    engines: bool,
) -> RolloutSetup:
    """The player gets the engines, and what it plays is recorded. `started`: when this driver began, monotonic."""
    player = rollouts.player
    setup = assembly.rollout_setup_of(run, rollouts.slots, rollouts.agent, player, policy.live_engines)
    if not isinstance(player, RemotePlayers):
        if engines:
            rollouts.policies[""] = policy.generator
        if servers is not None:
            servers.follow(player.use_models)
        return setup

    def use(_: Any = None) -> None:
        models = servers.served if servers is not None else {}
        player.use_engines(Reached(policy.engine_connection, models))

    use()
    policy.follow_engines(use)
    if servers is not None:
        servers.follow(use)
    if run.spec.environment.source.urls is not None:
        # Workers of an earlier driver use these phones no longer than this, and no broker fences them.
        await unless_stopped(stop, asyncio.sleep(started + LINK_SECONDS - time.monotonic()))
    # What they play never comes here: it is recorded by reference.
    record = await unless_stopped(stop, RecorderProcess.start())
    budget = frame_budget(run, training_tasks(run), object_store_bytes())
    if why := budget_error(run, budget):
        raise ConfigurationError(why)
    return replace(setup, record=record, frame_budget=budget)


def _judged(run: TrainingRun) -> bool:
    return any(stream.judge is not None for stream in run.spec.rewards.streams)


def judge_budget_of(
    run: TrainingRun, stop: StopSignal, progress: Progress, journal: VerdictJournal | None = None
) -> JudgeBudget:
    """With what earlier sessions used: the journal has what came after the last checkpoint before a crash as well."""

    def limits() -> Stop:
        return stop.limits or run.spec.stop

    at_once = episodes_at_once(run.spec.rewards, limits())
    tokens, money = (journal.tokens, journal.money) if journal is not None else (0, 0.0)
    return JudgeBudget(limits, at_once, max(tokens, progress.judge_tokens), max(money, progress.judge_money))


# --- the end ----------------------------------------------------------------------------------------------------------


async def _closed(
    player: RolloutWorker | RemotePlayers,
    servers: ModelServers | None,
    policy: Policy,
    journal: VerdictJournal | None = None,
) -> None:
    """One after another, each whatever became of those before."""
    async with AsyncExitStack() as last_first:
        if journal is not None:
            last_first.push_async_callback(asyncio.to_thread, journal.close)
        last_first.push_async_callback(policy.close)  # and Ray with it
        if servers is not None:
            last_first.push_async_callback(servers.close)
        last_first.push_async_callback(player.close)
