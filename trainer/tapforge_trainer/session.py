"""A command's whole life: folder and lock, start of the stack, the work, the endings. One function per command.

- A run's folder belongs to one process at a time (a lock file); a second one is told who has it.
- Started again, a run goes on from its last checkpoint, and a complete one says so; a file that says something else
  about what is learned is refused, rather than mixed with what is there.
- Asked to stop (`stop`), a run finishes its update and saves; anything else is given up (`Interrupted`).
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from tapforge_api import TrainingRun

from . import loop
from .assembly import ConfigurationError, SetupError
from .machine import Machine
from .plan import folder_of
from .progress import Progress
from .report import write_report
from .run_folder import (
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
from .shutdown import Interrupted, StopSignal, unless_stopped
from .stack import running
from .summary import summarize, wanted
from .telemetry import Telemetry, View


async def run_session(run: TrainingRun, runs: Path, stop: StopSignal, view: View, uid: str = "") -> int:
    """`uid`: of the run, on a cluster. Raises Interrupted when it was asked to stop."""
    folder = folder_of(run, runs)
    with locked(folder):
        write_spec(folder, run)
        run = _limited(run, stop)
        view.max_updates, view.max_seconds = run.spec.stop.max_updates, run.spec.stop.max_seconds
        with closing(Telemetry(folder, view, Console())) as telemetry:
            if (summary := _complete(folder, run)) is not None:
                telemetry.note(f"{folder} is complete after {summary['ended_after']}; spec.stop says when to end")
            else:
                with telemetry.shown():
                    try:
                        summary = await _trained(run, folder, telemetry, stop, uid)
                    except Interrupted:
                        telemetry.phase("stopped; the same command goes on from the last checkpoint", "Stopped")
                        raise
            results = [path for name in (SUMMARY, CURVE, REPLAY, EXPORT) if (path := folder / name).exists()]
            _say(telemetry, summary, results)
    return 0


async def _trained(run: TrainingRun, folder: Path, telemetry: Telemetry, stop: StopSignal, uid: str) -> dict[str, Any]:
    """Everything that is left to do of a run. Returns its summary."""
    async with running(run, folder, telemetry, stop, uid=uid) as (parts, resumed):
        progress = resumed or Progress()
        progress.run, progress.uid = run.metadata.name, uid
        seconds_start = time.monotonic() - telemetry.started
        progress.seconds_start += seconds_start
        telemetry.event("started", seconds=seconds_start)
        before = await _before(parts, progress, resumed is not None)
        await loop.reinforce(parts, progress)
        if stop.requested.is_set():
            raise Interrupted("stopped")
        run = _limited(run, stop)
        after = await loop.measure(parts, "after", progress)
        telemetry.view.success_after = _shown(after)
        if run.spec.checkpoints.export:
            telemetry.phase("writing the model", "Exporting")
            await parts.policy.export(folder / EXPORT)
        baselines = await loop.measure_baselines(parts) if run.spec.evaluation.baselines else {}
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
        )
        write_atomically(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
        if draw:
            await asyncio.to_thread(write_report, folder)
    telemetry.phase("done", "Done")
    return summary


async def _before(parts: loop.Parts, progress: Progress, resumed: bool) -> dict[str, Any]:
    """Warm start, KL reference and the measurement before reinforcement, as far as no earlier session did them. Returns
    the measurement."""
    spec, events = parts.run.spec, list(read_events(parts.folder))
    if resumed:
        parts.telemetry.note(f"going on after update {progress.update}")
    elif any(e["event"] == "update" for e in events):
        raise ConfigurationError(
            f"{parts.folder} holds updates, but {parts.policy.settings.checkpoints} no checkpoint to go on from: name "
            "one of this run in spec.checkpoints.resumeFrom, or give it another metadata.name"
        )
    elif parts.begun_from:
        parts.telemetry.note(f"beginning with the weights of {parts.begun_from}")
    elif spec.warm_start is not None:
        parts.telemetry.phase("warm start: imitating a demonstrator", "WarmStart")
        await loop.warm_start(parts, progress)
    if spec.algorithm.kl.coefficient > 0:
        await _refer(parts, begun=any(e["event"] == "reinforcement" for e in events))
    if not resumed:
        await loop.save(parts, progress)
    await unless_stopped(parts.stop, parts.policy.sync(progress.version))
    before = {
        e["mode"]: {k: v for k, v in e.items() if k not in ("at", "event", "name", "mode", "update")}
        for e in events
        if e["event"] == "evaluation" and e["name"] == "before"
    }
    modes = {mode for mode in ("sampled", "greedy") if getattr(spec.evaluation, mode)}
    if not resumed or not modes <= set(before):
        before = await loop.measure(parts, "before", progress)
    parts.telemetry.view.success_before = _shown(before)
    return before


async def _refer(parts: loop.Parts, *, begun: bool) -> None:
    """The KL term pulls towards the policy that reinforcement began with; it is kept for later sessions."""
    folder = parts.folder / REFERENCE
    if not (folder / "config.json").is_file():
        if begun:
            raise ConfigurationError(
                f"{folder} is missing: the KL term's reference is the policy that reinforcement began with"
            )
        await parts.policy.export(folder)
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
    with locked(folder), closing(Telemetry(folder, View(run.metadata.name, 0), Console())) as telemetry:
        async with running(run, folder, telemetry, stop, engines=False, resume=False) as (parts, _):
            telemetry.phase("warm start: imitating a demonstrator")
            await loop.warm_start(parts, Progress())
            await parts.policy.export(folder / "sft")
        telemetry.phase(f"the model is in {folder / 'sft'}")
    return 0


async def eval_session(run: TrainingRun, runs: Path, model: Path | None, stop: StopSignal) -> int:
    folder = folder_of(run, runs)
    weights = model or folder / EXPORT
    if not (weights / "config.json").is_file():
        raise SetupError(f"{weights} holds no model; train first (tapforge run), or name a folder with --model")
    place = folder / "evaluations" / time.strftime("%Y%m%d-%H%M%S")
    with closing(Telemetry(place, View(run.metadata.name, 0), Console(stderr=True))) as telemetry:
        async with running(run, place, telemetry, stop, weights=weights, learner=False) as (parts, _):
            results: dict[str, Any] = await loop.measure(parts, "eval", Progress())
            if run.spec.evaluation.baselines:
                results["baselines"] = await loop.measure_baselines(parts)
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
    with locked(folder), closing(Telemetry(folder, View(run.metadata.name, 0), Console(stderr=True))) as telemetry:
        async with running(run, folder, telemetry, stop, engines=False) as (parts, progress):
            if progress is None:
                raise SetupError(f"{folder} has no checkpoint yet; there is nothing to export")
            await parts.policy.export(target)
    Console().print(f"{target} holds the weights after update {progress.update}", highlight=False, soft_wrap=True)
    return 0


def _shown(results: dict[str, dict[str, Any]]) -> str:
    return "  ".join(f"{mode} {100 * r['success']:.1f} %" for mode, r in results.items() if r["success"] is not None)


def _say(telemetry: Telemetry, summary: dict[str, Any], paths: list[Path]) -> None:
    console = telemetry.console
    for mode in summary["success_before"]:
        before, after = summary["success_before"][mode], summary["success_after"].get(mode, {})
        console.print(
            f"held-out success, {mode}: {_rate(before)} before, [bold]{_rate(after)}[/bold] after "
            f"({after.get('episodes')} episodes)",
            highlight=False,
            soft_wrap=True,
        )
    for name, baseline in summary["baselines"].items():
        console.print(f"baseline, {name.replace('_', ' ')}: {_rate(baseline)}", highlight=False, soft_wrap=True)
    seconds = ", ".join(f"{summary[f'seconds_{part}']:.0f} s {part}" for part in ("start", "sft", "rl"))
    console.print(f"{summary['seconds_total']:.0f} s in all ({seconds})", highlight=False, soft_wrap=True)
    for path in paths:
        console.print(f"  {path}", highlight=False, soft_wrap=True)


def _rate(result: dict[str, Any]) -> str:
    rate, interval = result.get("success"), result.get("interval")
    if rate is None:
        return "-"
    return f"{100 * rate:.1f} %" + (f" ({100 * interval[0]:.0f}-{100 * interval[1]:.0f})" if interval else "")
