"""The stack of a command: phones, learner and engines, started side by side.

Whatever was started is closed, also after a failure or in the middle of a start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tapforge_api import TrainingRun

from . import assembly, loop, resting
from .assembly import ConfigurationError, SetupError
from .evaluation import baselines
from .machine import Machine, NoDevice, device_of, gpus_needed
from .policy.driver import Policy, PolicySettings, in_cluster, wait_for_gpus
from .progress import Progress, belongs
from .rollout.worker import RolloutWorker
from .shutdown import StopSignal, unless_stopped
from .telemetry import Telemetry

log = logging.getLogger(__name__)


@asynccontextmanager
async def running(
    run: TrainingRun,
    folder: Path,
    telemetry: Telemetry,
    stop: StopSignal,
    *,
    uid: str = "",
    weights: Path | None = None,
    learner: bool = True,
    engines: bool = True,
    resume: bool = True,
) -> AsyncIterator[tuple[loop.Parts, Progress | None]]:
    """Phones, learner and engines, started side by side; with the run's last checkpoint loaded and its progress, None
    where there is none. Closed in any case. `uid`: of the run, on a cluster."""
    checkpoints = run.spec.checkpoints.directory or str(folder / "checkpoints")
    # Only here: a folder that is taken away while a run is under way must not come back (cluster/storage.py).
    Path(checkpoints).parent.mkdir(parents=True, exist_ok=True)
    machine = Machine.local()
    try:
        device = device_of(run, machine, in_cluster=in_cluster())
    except NoDevice as error:
        raise ConfigurationError(str(error)) from error
    if device == "cuda" and in_cluster():
        say = partial(telemetry.phase, stage="Loading")
        try:
            await unless_stopped(stop, wait_for_gpus(gpus_needed(run), say, run.spec.deadlines.start_seconds))
        except TimeoutError as late:
            raise SetupError(str(late)) from late
    model = weights or assembly.model_folder(run.spec.model)
    if why := assembly.context_error(run, model):
        raise ConfigurationError(why)
    agent = assembly.agent_of(run, model)
    policies = baselines(agent)
    worker = RolloutWorker(agent, policies)
    slots = assembly.slots_of(run, worker.health)
    telemetry.phase("starting phones, engine and learner" if engines else "starting the learner", "Loading")
    policy = Policy(
        PolicySettings(
            engine=assembly.engine_settings(run, model, agent, machine, device) if engines else None,
            learner=assembly.learner_settings(run, model, agent, machine, device) if learner else None,
            replicas=run.spec.engine.replicas,
            mid_episode=run.spec.sync.mid_episode,
            checkpoints=Path(checkpoints),
            keep=run.spec.checkpoints.keep,
            tolerance=run.spec.sync.tolerance,
            sync_seconds=run.spec.deadlines.sync_seconds,
        )
    )
    try:
        # What somebody else runs answers in a moment, or not at all: that is known before the heavy part.
        served = run.spec.environment.source.processes is None
        if engines and served:
            await unless_stopped(stop, slots.start())
        phones = [slots.start()] if engines and not served else []
        await unless_stopped(stop, _together(_started(policy, model), *phones))
        if engines:
            telemetry.view.slots, telemetry.view.slots_wanted = slots, assembly.slots_wanted(run)
        progress, begun_from = await _resumed(run, policy, uid) if learner and resume else (None, "")
        if progress is not None:
            resting.show(telemetry.view, progress, resting.newest(policy.settings.checkpoints))
        if engines:
            policies[""] = policy.generator
        arena = assembly.arena_of(run, slots, agent, worker)
        yield loop.Parts(run, folder, policy, arena, telemetry, stop, begun_from), progress
    finally:
        for result in await asyncio.gather(slots.close(), policy.close(), return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("closing failed: %s", result)
        await worker.close()


async def _started(policy: Policy, model: Path) -> None:
    from .policy.engine_client import EngineError
    from .policy.learner import LearnerError

    try:
        await policy.start()
    except (EngineError, LearnerError) as error:
        error.add_note(f"the model folder is {model}")
        raise


async def _resumed(run: TrainingRun, policy: Policy, uid: str) -> tuple[Progress | None, str]:
    """Loads the checkpoint to go on from, and returns its progress. One of another run is only what this run begins
    with, as long as there are no own ones: then there is no progress, but words for where the weights are from."""
    given = run.spec.checkpoints.resume_from
    inside = given is not None and Path(given).resolve().is_relative_to(policy.settings.checkpoints.resolve())
    state = None if inside else await policy.resume()
    if state is not None or given is None:
        return (None if state is None else Progress(**state)), ""
    state = await policy.resume(Path(given))
    assert state is not None, "a folder that is named is read or refused"
    if inside or belongs(state, run.metadata.name, uid):
        return Progress(**state), ""
    await policy.forget_optimizer()  # its memory is of what the other run learned, and at whose rate
    return None, f"{given} (update {state['update']} of {state.get('run') or 'another run'})"


async def _together(*works: Coroutine[Any, Any, None]) -> None:
    """All of them; when one fails or this is cancelled, the others are cancelled first."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
