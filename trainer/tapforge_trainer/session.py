"""The life of a command: lock the run's folder, start its parts, do the work, close them. One function per command.

- A run's folder belongs to one process at a time; a second one is told which process has it (`run/folder.py`).
- Started again, a run resumes from its last checkpoint, and a complete one only prints its summary.
- When a stop is requested, a run finishes its update and saves; anything else is cancelled (`Interrupted`).
- Phones, learner and engines are started side by side, and closed after a failure or in the middle of a start, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tapforge_api import TrainingRun, dump_set
from tapforge_api.gpus import gpus_needed
from tapforge_envs.clients.phones import PhoneAddress

from .doctor.command import preflight
from .learner.checkpoint_storage import CheckpointBackend, Holder, place_of
from .loggers.session import logged
from .loop import reinforce, save
from .model_source.ref import ModelError, ModelRef, ModelRefused
from .placement.machine import Machine, NoDevice, device_of, rollout_workers
from .policy import Policy, PolicySettings, gpus_in_ray, in_cluster, object_store_bytes, wait_for_gpus
from .recording.actor import RecorderProcess
from .rollout.actor import start_rollout_actor
from .rollout.baselines import baselines
from .rollout.frame_budget import budget_error, frame_budget
from .rollout.remote_players import RemotePlayers
from .rollout.worker import RolloutWorker
from .rollout.worker_host import LINK_SECONDS
from .run import assembly
from .run.assembly import ConfigurationError, SetupError
from .run.context import RunContext
from .run.evaluation import measure, measure_baselines
from .run.fleet import written
from .run.folder import (
    CURVE,
    EXPORT,
    REFERENCE,
    REPLAY,
    SPEC,
    SUMMARY,
    locked,
    read_events,
    read_spec,
    write_atomically,
    write_spec,
)
from .run.local_files import checkpoint_uri, checkpoints_of, folder_of
from .run.model_errors import model_errors
from .run.model_pin import model_of
from .run.report import print_summary, summarize, wanted, write_report
from .run.resuming import checkpoint_written, resumed_from
from .run.shutdown import Interrupted, StopSignal, together, unless_stopped
from .run.warm_start import warm_start
from .tasks.selection import training_tasks
from .telemetry.progress import Progress, newest_checkpoint
from .telemetry.start_progress import waiting_shown
from .telemetry.telemetry import ProgressView, Telemetry

log = logging.getLogger(__name__)


async def run_session(
    run: TrainingRun, runs: Path, stop: StopSignal, view: ProgressView, uid: str = "", holder: Holder | None = None
) -> int:
    """`uid`: of the run, on a cluster; `holder`: as which this process writes checkpoints to a store, None: as the
    latest one. Raises Interrupted when a stop was requested."""
    folder = folder_of(run, runs)
    holder = holder or Holder(0, int(time.time() * 1000))
    with locked(folder):
        write_spec(folder, run)
        run = _limited(run, stop)
        view.max_updates, view.max_seconds = run.spec.stop.max_updates, run.spec.stop.max_seconds
        with closing(Telemetry(folder, view, Console())) as telemetry:
            if (summary := _complete(folder, run)) is not None:
                done = summary["ended_after"]
                telemetry.note(f"{folder} is complete after {done}; to continue, raise a limit of spec.stop")
            else:
                with telemetry.shown():
                    try:
                        preflight(run, folder, telemetry)
                        async with logged(run, folder, telemetry):
                            summary = await _trained(run, folder, telemetry, stop, uid, holder)
                    except Interrupted:
                        telemetry.phase("stopped; the same command resumes from the last checkpoint", "Stopped")
                        raise
            results = [path for name in (SUMMARY, CURVE, REPLAY, EXPORT) if (path := folder / name).exists()]
            print_summary(telemetry.console, summary, results)
    return 0


async def _trained(
    run: TrainingRun, folder: Path, telemetry: Telemetry, stop: StopSignal, uid: str, holder: Holder
) -> dict[str, Any]:
    """Everything that is left to do of a run. Returns its summary."""
    place = place_of(checkpoints_of(run, folder), checkpoint_uri(run), holder)
    await asyncio.to_thread(place.take_over)
    async with (
        running(run, folder, telemetry, stop, uid=uid, place=place) as (parts, resumed),
        checkpoint_written(parts.policy),
    ):
        progress = resumed or Progress()
        progress.run, progress.uid, progress.spec = run.metadata.name, uid, dump_set(run)
        seconds_start = time.monotonic() - telemetry.started
        progress.seconds_start += seconds_start
        telemetry.event("started", seconds=seconds_start)
        before = await _before(parts, progress, resumed is not None)
        await reinforce(parts, progress)
        if stop.requested.is_set():
            raise Interrupted("stopped")
        run = _limited(run, stop)
        after = await measure(parts, "after", progress)
        telemetry.view.success_after = _shown(after)
        if run.spec.checkpoints.export:
            telemetry.phase("writing the model", "Exporting")
            await parts.policy.export(folder / EXPORT, keep=True)
        baselines = await measure_baselines(parts) if run.spec.evaluation.baselines else {}
    telemetry.phase("writing curve, replay and summary", "Reporting")
    # Twice: what was measured is safe before pictures are drawn, and the time they take counts.
    for draw in (True, False):
        seconds_total = progress.seconds_earlier + time.monotonic() - telemetry.started
        summary = summarize(
            run,
            progress,
            before=before,
            after=after,
            baselines=baselines,
            seconds_total=seconds_total,
            machine=Machine.local(),
            events=list(read_events(folder)),
        )
        write_atomically(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
        if draw:
            await asyncio.to_thread(write_report, folder)
    telemetry.phase("done", "Done")
    return summary


async def _before(parts: RunContext, progress: Progress, resumed: bool) -> dict[str, Any]:
    """Warm start, KL reference and the measurement before reinforcement, as far as no earlier session did them. Returns
    the measurement."""
    spec, events = parts.run.spec, list(read_events(parts.folder))
    if resumed:
        parts.telemetry.note(f"resuming after update {progress.update}")
    elif any(e["event"] == "update" for e in events):
        raise ConfigurationError(
            f"{parts.folder} holds updates, but {parts.policy.settings.place.root} no checkpoint to resume from: name "
            "one of this run in spec.checkpoints.resumeFrom, or give it another metadata.name"
        )
    elif parts.warm_started_from:
        parts.telemetry.note(f"warm-started from {parts.warm_started_from}")
    elif spec.warm_start is not None:
        parts.telemetry.phase("warm start: imitating a demonstrator", "WarmStart")
        await warm_start(parts, progress)
    if spec.algorithm.kl.coefficient > 0:
        await _refer(parts, started=progress.update > 0 or any(e["event"] == "reinforcement" for e in events))
    if not resumed:
        await save(parts, progress)
    async with waiting_shown(parts.telemetry, parts.policy.waiting):
        await unless_stopped(parts.stop, parts.policy.sync(progress.version))
    before = progress.before or {
        e["mode"]: {k: v for k, v in e.items() if k not in ("at", "event", "name", "mode", "update")}
        for e in events
        if e["event"] == "evaluation" and e["name"] == "before"
    }
    modes = {mode for mode in ("sampled", "greedy") if getattr(spec.evaluation, mode)}
    if not resumed or not modes <= set(before):
        before = await measure(parts, "before", progress)
    progress.before = before  # the run's folder may be lost, and with it what was measured
    parts.telemetry.view.success_before = _shown(before)
    return before


async def _refer(parts: RunContext, *, started: bool) -> None:
    """The KL term pulls towards the policy that reinforcement started with; it is kept for later sessions."""
    folder = parts.folder / REFERENCE
    if not folder.is_dir() and not await parts.policy.fetch(folder):
        if started:
            raise ConfigurationError(
                f"{folder} is missing: the KL term's reference is the policy that reinforcement started with"
            )
        await parts.policy.export(folder, keep=True, adapter=True)
    await parts.policy.refer_to(folder)


def _limited(run: TrainingRun, stop: StopSignal) -> TrainingRun:
    """The run as it is to end by now."""
    if stop.limits is None:
        return run
    return run.model_copy(update={"spec": run.spec.model_copy(update={"stop": stop.limits})})


def _complete(folder: Path, run: TrainingRun) -> dict[str, Any] | None:
    """The summary of a run that needs no further work."""
    exported = not run.spec.checkpoints.export or (folder / EXPORT / "config.json").is_file()
    if not exported or not (folder / SUMMARY).is_file():
        return None
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except ValueError:
        return None
    return summary if all(summary.get(name) == value for name, value in wanted(run).items()) else None


async def sft_session(run: TrainingRun, runs: Path, stop: StopSignal) -> int:
    if run.spec.warm_start is None:
        raise SetupError(
            "spec.warmStart is not set: there is nothing to imitate; write `warmStart: {}` for the defaults"
        )
    folder = folder_of(run, runs)
    with locked(folder), closing(Telemetry(folder, ProgressView(run.metadata.name, 0), Console())) as telemetry:
        async with running(run, folder, telemetry, stop, engines=False, resume=False) as (parts, _):
            telemetry.phase("warm start: imitating a demonstrator")
            await warm_start(parts, Progress())
            await parts.policy.export(folder / "sft")
        telemetry.phase(f"the model is in {folder / 'sft'}")
    return 0


async def eval_session(run: TrainingRun, runs: Path, model: Path | None, stop: StopSignal) -> int:
    folder = folder_of(run, runs)
    weights = model or folder / EXPORT
    if not (weights / "config.json").is_file():
        raise SetupError(f"{weights} holds no model; train first (tapforge run), or name a folder with --model")
    place = folder / "evaluations" / time.strftime("%Y%m%d-%H%M%S")
    with closing(Telemetry(place, ProgressView(run.metadata.name, 0), Console(stderr=True))) as telemetry:
        async with running(run, place, telemetry, stop, weights=weights, learner=False) as (parts, _):
            results: dict[str, Any] = await measure(parts, "eval", Progress())
            if run.spec.evaluation.baselines:
                results["baselines"] = await measure_baselines(parts)
    text = json.dumps(results, indent=2)
    write_atomically(place / "result.json", text + "\n")
    Console().print_json(text)
    return 0


async def export_session(folder: Path, target: Path, stop: StopSignal) -> int:
    if not (folder / SPEC).is_file():
        raise SetupError(f"{folder} is not a run's folder: it has no {SPEC}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SetupError(f"{target} is {'not empty' if target.is_dir() else 'a file'}; name a new folder")
    run = read_spec(folder)
    with (
        locked(folder),
        closing(Telemetry(folder, ProgressView(run.metadata.name, 0), Console(stderr=True))) as telemetry,
    ):
        async with running(run, folder, telemetry, stop, engines=False) as (parts, progress):
            if progress is None:
                raise SetupError(f"{folder} has no checkpoint yet; there is nothing to export")
            await parts.policy.export(target)
    Console().print(f"{target} holds the weights after update {progress.update}", highlight=False, soft_wrap=True)
    return 0


# --- the parts --------------------------------------------------------------------------------------------------------


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
    place: CheckpointBackend | None = None,
) -> AsyncIterator[tuple[RunContext, Progress | None]]:
    """Phones, learner and engines, started side by side; with the run's last checkpoint loaded and its progress, None
    where there is none. Closed in any case. `uid`: of the run, on a cluster; `place`: where checkpoints are written,
    None: they are only read."""
    started = time.monotonic()
    checkpoints = checkpoints_of(run, folder)
    # Only here: a folder that is taken away while a run is under way must not come back (cluster/storage.py).
    checkpoints.parent.mkdir(parents=True, exist_ok=True)
    machine = Machine.local()
    try:
        in_ray = await gpus_in_ray() if in_cluster() and run.spec.cluster is None else None
        device = device_of(run, machine, in_cluster=in_cluster(), in_ray=in_ray)
    except NoDevice as error:
        raise ConfigurationError(str(error)) from error
    if device == "cuda" and in_cluster():
        report = partial(telemetry.phase, stage="Loading")
        try:
            await unless_stopped(stop, wait_for_gpus(gpus_needed(run.spec), report, run.spec.deadlines.start_seconds))
        except TimeoutError as late:
            raise SetupError(str(late)) from late
    telemetry.phase("looking for the model", "Loading")
    pinned = partial(ModelRef.of_folder, weights) if weights else partial(model_of, run, folder, keep=place is not None)
    source = await asyncio.to_thread(pinned)
    model = await asyncio.to_thread(assembly.described, source)
    if wrong := model_errors(run, model):
        raise ConfigurationError("\n".join(wrong))
    agent, workers = assembly.agent_of(run, model), 0
    player: RolloutWorker | RemotePlayers = RolloutWorker(agent, policies := baselines(agent))

    async def health(phone: PhoneAddress) -> str:
        return await player.health(phone)

    slots = assembly.slots_of(run, health)
    if engines:
        workers = rollout_workers(run, assembly.slots_wanted(run) or slots.size, in_cluster=in_cluster())
    if workers:
        make_agent, seconds = partial(assembly.agent_on_node, run, source), run.spec.deadlines.start_seconds
        cpus = 0 if device == "cpu" else 1
        player = RemotePlayers(lambda _: start_rollout_actor(make_agent, seconds, cpus=cpus), workers)
    size = sum(file.size for file in source.files) / 2**30
    fetch = f"; a node that lacks {source.place} fetches {size:,.1f} GiB" if size else ""
    telemetry.phase(f"starting {'phones, engine and learner' if engines else 'the learner'}{fetch}", "Loading")
    policy = Policy(
        PolicySettings(
            engine=assembly.engine_settings(run, model, agent, machine, device, source) if engines else None,
            learner=assembly.learner_settings(run, model, agent, machine, device, source) if learner else None,
            replicas=run.spec.engine.replicas,
            mid_episode=run.spec.sync.mid_episode,
            place=place or place_of(checkpoints, checkpoint_uri(run)),
            keep=run.spec.checkpoints.keep,
            tolerance=run.spec.sync.tolerance,
            sync_seconds=run.spec.deadlines.sync_seconds,
        )
    )
    try:
        # Phones that are already running answer at once or not at all: that is known before anything heavy is started.
        if isinstance(player, RemotePlayers):
            await unless_stopped(stop, _workers_started(policy, player))
        served = run.spec.environment.source.processes is None
        if engines and served:
            await unless_stopped(stop, slots.start())
        phones = [slots.start()] if engines and not served else []
        async with waiting_shown(telemetry, policy.waiting):
            await unless_stopped(stop, together(_started(policy, source, telemetry), *phones))
        if engines:
            telemetry.view.slots, telemetry.view.slots_wanted = slots, assembly.slots_wanted(run)
        progress, warm_started_from = await resumed_from(run, policy, uid) if learner and resume else (None, "")
        if progress is not None:
            telemetry.view.resume(progress, await asyncio.to_thread(newest_checkpoint, policy.settings.place))
        if isinstance(player, RemotePlayers):
            player.use_engines(policy.engine_connection)
            policy.follow_engines(lambda _: player.use_engines(policy.engine_connection))
            if run.spec.environment.source.urls is not None:
                # Workers of an earlier driver use these phones no longer than this, and no broker fences them.
                await unless_stopped(stop, asyncio.sleep(started + LINK_SECONDS - time.monotonic()))
        elif engines:
            policies[""] = policy.generator
        rollout_setup = assembly.rollout_setup_of(run, slots, agent, player, policy.live_engines)
        if isinstance(player, RemotePlayers):  # what they play never comes here: it is recorded by reference
            record = await unless_stopped(stop, RecorderProcess.start())
            budget = frame_budget(run, training_tasks(run), object_store_bytes())
            if why := budget_error(run, budget):
                raise ConfigurationError(why)
            rollout_setup = replace(rollout_setup, record=record, frame_budget=budget)
        async with written(slots, folder) if engines else nullcontext():
            yield RunContext(run, folder, policy, rollout_setup, telemetry, stop, warm_started_from), progress
    finally:
        for result in await asyncio.gather(slots.close(), _closed(player, policy), return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("closing failed: %s", result)


async def _closed(player: RolloutWorker | RemotePlayers, policy: Policy) -> None:
    try:
        await player.close()
    finally:
        await policy.close()  # and Ray with it


async def _workers_started(policy: Policy, player: RemotePlayers) -> None:
    await policy.start_ray()
    await player.start()


async def _started(policy: Policy, model: ModelRef, telemetry: Telemetry) -> None:
    from .engine.client import EngineError
    from .learner.client import LearnerError
    from .placement.placement import PlacementError

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


def _shown(results: dict[str, dict[str, Any]]) -> str:
    return "  ".join(f"{mode} {100 * r['success']:.1f} %" for mode, r in results.items() if r["success"] is not None)
