"""The life of a command: lock the run's folder, start its context, do the work, close them. One function per command.

- A run's folder belongs to one process at a time; a second one ends with an error that names it (`run/folder.py`).
- Started again, a run resumes from its last checkpoint, and a complete one only prints its summary.
- When a stop is requested, a run finishes its update and saves; anything else is cancelled (`Interrupted`).
- Phones, learner and engines are started side by side, and closed after a failure or in the middle of a start, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from tapforge_api import TrainingRun, dump_set
from tapforge_api.stages import updates_at_most

from .doctor.command import preflight
from .learner.checkpoint_storage import CheckpointBackend, Holder, place_of
from .loggers.session import logged
from .loop import reinforce
from .placement.machine import Machine
from .placement.placement import ray_kept
from .rewards.budget import JudgeBudgetSpent
from .run.assembly import ConfigurationError, SetupError
from .run.context import RunContext
from .run.evaluation import OTHERS, measure, measure_baselines, parts_of_before
from .run.folder import (
    CURVE,
    EXPORT,
    REFERENCE,
    REPLAY,
    SUMMARY,
    check_same,
    locked,
    read_events,
    run_of,
    write_atomically,
    write_spec,
)
from .run.local_files import checkpoint_uri, checkpoints_of, folder_of
from .run.regimes import lines, measure_regimes, page
from .run.report import holds_what_is_wanted, print_summary, summarize, write_report
from .run.restarting import restart
from .run.resuming import checkpoint_written
from .run.saving import save
from .run.shutdown import Interrupted, StopReason, StopSignal, unless_stopped
from .run.software import software
from .run.start import running
from .run.tries import TriedFile, try_tasks
from .run.warm_start import imitated, warm_start
from .tasks.regimes import Regime, tasks_by_regime
from .tasks.source import TaskError
from .tasks.stages import of_stage, stages_of
from .telemetry.progress import Progress, begin_stage, finished, newest_checkpoint, progress_of, stage_ended
from .telemetry.schema import VERSION as SCHEMA
from .telemetry.start_progress import waiting_shown
from .telemetry.telemetry import ProgressView, Telemetry

log = logging.getLogger(__name__)
T = TypeVar("T")


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
        view.max_updates = updates_at_most(run.spec.stop.max_updates, run.spec.stages)
        view.max_seconds = run.spec.stop.max_seconds
        with closing(Telemetry(folder, view, Console())) as telemetry:
            if (summary := _complete(folder, run)) is not None:
                done = summary["ended_after"]
                telemetry.note(f"{folder} is complete after {done}; to continue, raise a limit of spec.stop")
            else:
                with telemetry.shown():
                    try:
                        preflight(run, folder, telemetry)
                        async with logged(run, folder, telemetry), ray_kept() if run.spec.stages else nullcontext():
                            summary = await _trained(run, folder, telemetry, stop, uid, holder)
                    except Interrupted:
                        first = f" once that is done: {stop.remedy}" if stop.remedy else ""
                        telemetry.phase(f"stopped; the same command resumes from the last checkpoint{first}", "Stopped")
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
    await asyncio.to_thread(judges_may_go_on, run, place, stop)
    progress = await asyncio.to_thread(newest_progress, run, place) if run.spec.stages else Progress()
    stage, began, begun = progress.stage, telemetry.started, False
    while True:
        now = of_stage(run, stage)
        async with (
            running(now, folder, telemetry, stop, uid=uid, place=place, whole=run) as (context, resumed),
            checkpoint_written(context.policy),
            _suspended_when_spent(context, progress := progress if begun else resumed or Progress()),
        ):
            if progress.stage != stage:  # of another checkpoint than the newest
                stage = progress.stage
                continue
            progress.run, progress.uid, progress.spec = run.metadata.name, uid, dump_set(run)
            seconds_start = time.monotonic() - began
            progress.seconds_start += seconds_start
            found = await asyncio.to_thread(software)
            telemetry.event("started", schema=SCHEMA, seconds=seconds_start, software=found)
            before = await _before(context, progress, resumed is not None)
            await reinforce(context, progress)
            if stop.requested.is_set():
                raise Interrupted("stopped")
            run = _limited(run, stop)
            if not finished(run.spec.stop, run.spec.stages, progress):
                await _next_stage(context, progress)
                stage, began, begun = progress.stage, time.monotonic(), True
                continue
            after = await measure(context, "after", progress)
            telemetry.view.success_after = _shown(after)
            if run.spec.checkpoints.export:
                telemetry.phase("writing the model", "Exporting")
                await context.policy.export(folder / EXPORT, keep=True)
            baselines = await measure_baselines(context) if run.spec.evaluation.baselines else {}
        break
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
            await _drawn(folder, telemetry)
    telemetry.phase("done", "Done")
    return summary


async def _drawn(folder: Path, telemetry: Telemetry) -> None:
    """Curve and replay. The run is over and its figures are kept: a picture that fails doesn't fail it."""
    try:
        await asyncio.to_thread(write_report, folder)
    except Exception as error:  # noqa: BLE001 - of libraries that draw, of plugins, of the disk; it can be done again
        telemetry.note(
            f"curve and replay were not written: {error}; once that is mended: tapforge view {shlex.quote(str(folder))}"
        )


def newest_progress(run: TrainingRun, place: CheckpointBackend) -> Progress:
    """Of the newest checkpoint, whose stage is one of the run's. Raises ConfigurationError where it is of another
    file."""
    saved = newest_checkpoint(place)
    progress = Progress() if saved is None else progress_of(saved)
    check_same(progress.spec, run, place.root)
    return progress


async def _next_stage(context: RunContext, progress: Progress) -> None:
    """The run is in its next stage as soon as this is saved. What it needs is started anew: other rewards ask other
    judges."""
    begin_stage(progress)
    context.telemetry.event("stage", stage=progress.stage + 1, update=progress.update, order=progress.next_order)
    await context.policy.forget_optimizer()
    await save(context, progress, wait=True)


def judges_may_go_on(run: TrainingRun, place: CheckpointBackend, stop: StopSignal) -> None:
    """Raises Interrupted before anything is started, where what judges may use was spent when the run stopped last."""
    if (run.spec.stop.judge_tokens, run.spec.stop.judge_money) == (None, None):
        return
    if run.spec.checkpoints.resume_from is not None or (saved := newest_checkpoint(place)) is None:
        return
    progress = progress_of(saved)
    spent = run.spec.stop.spent_on_judges(progress.judge_tokens, progress.judge_money)
    goes_on = not finished(run.spec.stop, run.spec.stages, progress)
    if spent and (run.spec.evaluation.judged or (goes_on and _asks_judges(run, progress))):
        stop.request(StopReason.JUDGE_BUDGET, remedy=spent)
        raise Interrupted("stopped")


def _asks_judges(run: TrainingRun, progress: Progress) -> bool:
    """In the stage with which the run goes on."""
    stage = stages_of(run)[progress.stage + bool(stage_ended(run.spec.stages, progress))]
    return any(stream.judge is not None for stream in stage.spec.rewards.streams)


@asynccontextmanager
async def _suspended_when_spent(context: RunContext, progress: Progress) -> AsyncIterator[None]:
    """A measurement whose judges may not go on is made again by the next session, which knows what this one used."""
    try:
        yield
    except JudgeBudgetSpent as spent:
        await save(context, progress, wait=True)
        context.stop.request(StopReason.JUDGE_BUDGET, remedy=str(spent))
        raise Interrupted("stopped") from spent


async def _before(context: RunContext, progress: Progress, resumed: bool) -> dict[str, Any]:
    """Warm start, KL reference and the measurement before reinforcement, as far as no earlier session did them. Returns
    the measurement."""
    spec, events = context.of_file.spec, list(read_events(context.folder))
    if progress.stage and progress.update == progress.stage_began:
        context.telemetry.note(f"stage {progress.stage + 1} begins after update {progress.update}")
    elif resumed:
        context.telemetry.note(f"resuming after update {progress.update}")
    elif any(e["event"] == "update" for e in events):
        raise ConfigurationError(
            f"{context.folder} holds updates, but {context.policy.settings.place.root} no checkpoint to resume from: "
            "name one of this run in spec.checkpoints.resumeFrom, or give it another metadata.name"
        )
    elif context.warm_started_from:
        context.telemetry.note(f"warm-started from {context.warm_started_from}")
    elif spec.warm_start is not None:
        context.telemetry.phase(f"warm start: imitating {imitated(spec.warm_start)}", "WarmStart")
        await warm_start(replace(context, run=context.of_file), progress)
    if spec.algorithm.kl.coefficient > 0:
        first = progress.stage == 0 and any(e["event"] == "reinforcement" for e in events)
        name = f"{REFERENCE}-{progress.stage + 1}" if progress.stage else REFERENCE
        # A later stage's may be of a stage that was begun before the run went back to an earlier checkpoint.
        anew = progress.stage > 0 and progress.update == progress.stage_began
        await _refer(context, name, started=progress.update > progress.stage_began or first, anew=anew)
    if not resumed:
        await save(context, progress)
    async with waiting_shown(partial(context.telemetry.phase, stage="Loading"), context.policy.waiting):
        try:
            await unless_stopped(context.stop, context.policy.sync(progress.version))
        except Exception as error:  # noqa: BLE001 - raised again unless the learner is lost, whatever that led to
            await restart(context, progress, error)
    before = progress.before or {
        e["mode"]: {k: v for k, v in e.items() if k not in ("at", "event", "name", "mode", "update")}
        for e in events
        if e["event"] == "evaluation" and e["name"] == "before"
    }
    parts = await asyncio.to_thread(parts_of_before, context.of_file)
    if progress.update:  # it would be of another policy
        parts.discard(OTHERS)
    if not resumed or not parts <= set(before):
        before = await measure(context, "before", progress)
    progress.before = before  # the run's folder may be lost, and with it what was measured
    context.telemetry.view.success_before = _shown(before)
    return before


async def _refer(context: RunContext, name: str, *, started: bool, anew: bool) -> None:
    """The KL term pulls towards the policy that reinforcement, or a later stage, started with; it is kept for later
    sessions in the run's folder `name`."""
    folder = context.folder / name
    if anew or (not folder.is_dir() and not await context.policy.fetch(folder)):
        if started:
            raise ConfigurationError(
                f"{folder} is missing: the KL term's reference is the policy that reinforcement started with"
            )
        await context.policy.export(folder, keep=True, adapter=True)
    await context.policy.refer_to(folder)


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
    return summary if holds_what_is_wanted(summary, run) else None


async def eval_session(
    run: TrainingRun,
    runs: Path,
    model: Path | None,
    stop: StopSignal,
    regimes: Sequence[Regime] = (),
    passes: int = 1,
) -> int:
    """`regimes`: instead of the measurement that the spec names. Raises ConfigurationError for one without tasks."""
    folder = folder_of(run, runs)
    weights = model or folder / EXPORT
    if not (weights / "config.json").is_file():
        raise ConfigurationError(f"{weights} holds no model; train first (tapforge run), or name a folder with --model")
    place = folder / "evaluations" / time.strftime("%Y%m%d-%H%M%S")
    if regimes:
        _named(lambda: tasks_by_regime(run, regimes))  # before anything is started
    with closing(Telemetry(place, ProgressView(run.metadata.name, 0), Console(stderr=True))) as telemetry:
        async with running(run, place, telemetry, stop, weights=weights, home=folder, learner=False) as (context, _):
            if regimes:
                results: dict[str, Any] = await measure_regimes(context, regimes, passes)
            else:
                results = await measure(context, "eval", Progress())
                if run.spec.evaluation.baselines:
                    results["baselines"] = await measure_baselines(context)
    text = json.dumps(results, indent=2)
    write_atomically(place / "result.json", text + "\n")
    Console().print_json(text)
    if regimes:
        write_atomically(place / "result.html", page(f"{run.metadata.name}: held out in {len(regimes)} ways", results))
        for line in (*lines(results), str(place / "result.html")):
            Console(stderr=True).print(line, highlight=False, soft_wrap=True)
    return 0


async def try_session(
    run: TrainingRun, runs: Path, model: Path | None, stop: StopSignal, path: Path, tries: int
) -> int:
    """Tries the tasks of the run's file; `path`: of the file that is written."""
    folder = folder_of(run, runs)
    weights = model or folder / EXPORT
    tried = _named(lambda: TriedFile(run, path, tries, weights))
    if not (weights / "config.json").is_file():
        raise ConfigurationError(f"{weights} holds no model; train first (tapforge run), or name a folder with --model")
    place = folder / "evaluations" / time.strftime("%Y%m%d-%H%M%S")
    with closing(Telemetry(place, ProgressView(run.metadata.name, 0), Console(stderr=True))) as telemetry:
        async with running(run, place, telemetry, stop, weights=weights, home=folder, learner=False) as (context, _):
            result = await try_tasks(context, tried)
    Console().print_json(json.dumps(result))
    return 0


async def export_session(folder: Path, target: Path, stop: StopSignal) -> int:
    run = run_of(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError(f"{target} is {'not empty' if target.is_dir() else 'a file'}; name a new folder")
    with (
        locked(folder),
        closing(Telemetry(folder, ProgressView(run.metadata.name, 0), Console(stderr=True))) as telemetry,
    ):
        async with running(run, folder, telemetry, stop, engines=False) as (context, progress):
            if progress is None:
                raise SetupError(f"{folder} has no checkpoint yet; there is nothing to export")
            await context.policy.export(target)
    Console().print(f"{target} holds the weights after update {progress.update}", highlight=False, soft_wrap=True)
    return 0


def _named(make: Callable[[], T]) -> T:
    """What is wrong with tasks before anything is started is the caller's."""
    try:
        return make()
    except TaskError as error:
        raise ConfigurationError(str(error)) from error


def _shown(results: dict[str, dict[str, Any]]) -> str:
    return "  ".join(
        f"{mode.replace('_', ' ')} {100 * r['success']:.1f} %"
        for mode, r in results.items()
        if r["success"] is not None
    )
