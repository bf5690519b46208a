"""What a run came to: `summary.json`, and two pictures made from what is on disk, `curve.png` and `replay.html`.

- Rates are shares from 0 to 1. Times are seconds and count all sessions of a run that was stopped and resumed.
- Nothing is kept for the pictures alone: credits are computed anew from the recorded groups by the same pure function
  that the update used, so they are the ones it used. `tapforge view` draws them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from tapforge_api import TrainingRun

from ..batch import BatchRules
from ..data.episodes import DataError
from ..data.imitation import imitated_tasks
from ..placement.machine import Machine
from ..statistics import Interval
from ..tasks.contamination import Contamination
from ..tasks.figures import task_table
from ..tasks.selection import contamination_of, shared_on_purpose
from ..tasks.stages import stages_of
from ..telemetry.progress import Progress, finished
from ..telemetry.schema import VERSION
from ..telemetry.throughput import throughput_of
from ..viewer.curve import EvaluationPoint, UpdatePoint, draw_curve
from ..viewer.recorded import replay_of
from ..viewer.replay import write_replay
from .folder import CURVE, EVALUATION, REPLAY, ROLLOUT, SUMMARY, read_events, run_of
from .plan_algorithm import algorithm_line


class ReportError(Exception):
    """The folder is not a run, or has nothing to show yet."""


# --- summary.json -----------------------------------------------------------------------------------------------------


def summarize(
    run: TrainingRun,
    progress: Progress,
    *,
    before: dict[str, Any],
    after: dict[str, Any],
    baselines: dict[str, Any],
    seconds_total: float,
    machine: Machine,
    events: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    steps_per_second = progress.env_steps / progress.seconds_rl if progress.seconds_rl else None
    return {
        "schema": VERSION,
        "run": run.metadata.name,
        "seed": run.spec.seed,
        "algorithm": algorithm_line(run),
        "success_before": before,
        "success_after": after,
        "baselines": baselines,
        "seconds_total": round(seconds_total, 1),
        "seconds_start": round(progress.seconds_start, 1),
        "seconds_sft": round(progress.seconds_sft, 1),
        "seconds_rl": round(progress.seconds_rl, 1),
        "updates": progress.update,
        "ended_after": finished(run.spec.stop, run.spec.stages, progress),
        "episodes": progress.episodes,
        "invalid_episodes": progress.invalid,
        "members": progress.members,
        "env_steps": progress.env_steps,
        "env_steps_per_second": None if steps_per_second is None else round(steps_per_second, 1),
        "slot_busy_share": round(progress.busy_seconds / progress.slot_seconds, 4) if progress.slot_seconds else None,
        "throughput": throughput_of(events),
        "base_model": next((_plain(event) for event in events if event["event"] == "base_model"), None),
        "held_out": _held_out(run, [*progress.stages_drawn, progress.tasks]),
        "practised": task_table(progress.practice),
        "machine": {"cores": machine.cores, "gpus": machine.gpus},
        **wanted(run),
    }


def wanted(run: TrainingRun) -> dict[str, Any]:
    """The parts of the spec that say when a run is complete, whatever judges may use."""
    return {"stop": _dumped(run.spec.stop), "evaluation": _dumped(run.spec.evaluation)}


def holds_what_is_wanted(summary: Mapping[str, Any], run: TrainingRun) -> bool:
    """Whether a run with this summary needs no further work. A field that the release which wrote it didn't have counts
    as its default."""
    try:
        stop = type(run.spec.stop).model_validate(summary["stop"])
        evaluation = type(run.spec.evaluation).model_validate(summary["evaluation"])
    except (KeyError, ValueError):
        return False
    return {"stop": _dumped(stop), "evaluation": _dumped(evaluation)} == wanted(run)


def _dumped(part: BaseModel) -> dict[str, Any]:
    return part.model_dump(mode="json", by_alias=True, exclude={"judge_tokens", "judge_money"})


def _held_out(run: TrainingRun, by_stage: Sequence[int]) -> dict[str, Any]:
    """What the measured tasks share with all that were demonstrated and practised, and what not. `by_stage`: tasks that
    were drawn."""
    drawn = [*by_stage, *[0] * (len(run.spec.stages) - len(by_stage))]
    try:
        found = contamination_of(run, drawn, imitated=imitated_tasks(run))
    except DataError as error:  # hours after it was read; what the run came to counts more
        return {"held_out": f"not known: {error}"}
    figures = {name: getattr(found, name) for name in ("practised", "same_task", "same_goal", "same_parameters")}
    shared = _shared(run, found)
    if (on_purpose := shared_on_purpose(run, drawn)) is not None:
        words = "the stages that practised them read neither their verifiers nor their labels"
        shared["held_out"] = f"not all, on purpose: {on_purpose}; {words}"
        if not found.clean:
            shared["held_out"] += f"; and not on purpose: {found}"
    return {"tasks": found.measured, **figures, **shared}


def _shared(run: TrainingRun, found: Contamination) -> dict[str, str]:
    practised, measured = run.spec.tasks, run.spec.evaluation.tasks
    if not found.clean:
        known = max(found.same_task, found.same_goal, found.same_parameters) == found.measured
        return {"held_out": f"{'nothing' if known else 'not all'}: {found}", "shared": ", ".join(found.examples)}
    if practised.file or measured.file or measured.suite not in (None, practised.suite):
        return {"held_out": str(found), "shared": "not known: the tasks are of different sources"}
    return {
        "held_out": (
            f"parameter combinations and layouts of the {measured.split} split: no combination of a template's "
            "parameters that is measured was practised or demonstrated, and cells are dealt from another part of all "
            "arrangements"
        ),
        "shared": "templates, wording, icons, colours and wallpapers, and each parameter value on its own",
    }


def print_summary(console: Console, summary: dict[str, Any], paths: list[Path]) -> None:
    """For a person; `paths`: the files that the run wrote."""
    for mode in summary["success_before"]:
        before, after = summary["success_before"][mode], summary["success_after"].get(mode, {})
        console.print(
            f"held-out success, {mode.replace('_', ' ')}: {_rate(before)} before, [bold]{_rate(after)}[/bold] after "
            f"({after.get('episodes')} episodes)",
            highlight=False,
            soft_wrap=True,
        )
        if (typed := after.get("type_accuracy")) is not None:
            right = after["parameter_accuracy"]
            said = "" if right is None else f"; of these {right:.1%} say the right thing"
            console.print(f"  of the recorded type: {typed:.1%}{said}", highlight=False, soft_wrap=True)
    for name, baseline in summary["baselines"].items():
        console.print(f"baseline, {name.replace('_', ' ')}: {_rate(baseline)}", highlight=False, soft_wrap=True)
    seconds = ", ".join(f"{summary[f'seconds_{part}']:.0f} s {part}" for part in ("start", "sft", "rl"))
    console.print(f"{summary['seconds_total']:.0f} s in all ({seconds})", highlight=False, soft_wrap=True)
    if found := summary.get("throughput"):
        console.print(f"learner: {found['tokens_per_second']:,.0f} tokens/s{_use(found['mfu'])}", highlight=False)
    for path in paths:
        console.print(f"  {path}", highlight=False, soft_wrap=True, markup=False)


def _plain(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("at", "event")}


def _use(mfu: float | None) -> str:
    return "" if mfu is None else f", {100 * mfu:.0f} % of what its GPUs can do"


def _rate(result: dict[str, Any]) -> str:
    rate, interval = result.get("success"), result.get("interval")
    if rate is None:
        return "-"
    return f"{100 * rate:.1f} %" + (f" ({100 * interval[0]:.0f}-{100 * interval[1]:.0f})" if interval else "")


# --- pictures ---------------------------------------------------------------------------------------------------------


def write_report(folder: Path) -> list[Path]:
    """Writes both files and returns their paths."""
    run = run_of(folder)
    events = list(read_events(folder))
    # What was done again after a crash counts as it was done last.
    measurements = {(e["update"], e["mode"]): e for e in events if e["event"] == "evaluation"}.values()
    updates = {e["update"]: e for e in events if e["event"] == "update"}
    if not measurements and not updates:
        raise ReportError(f"{folder} has neither an update nor a measurement yet; there is nothing to show")
    baselines = {e["policy"]: e["success"] for e in events if e["event"] == "baseline" and e["success"] is not None}
    draw_curve(
        folder / CURVE,
        title=f"{run.metadata.name}: success over updates",
        updates=[_point(e) for _, e in sorted(updates.items())],
        evaluations=[_evaluation(e) for e in measurements if e["success"] is not None],
        baselines=baselines,
    )
    _write_replay(folder, run)
    return [folder / CURVE, folder / REPLAY]


def _point(event: dict[str, Any]) -> UpdatePoint:
    found: dict[str, Any] = {field.name: event.get(field.name) for field in fields(UpdatePoint)}
    return UpdatePoint(**found)


def _evaluation(event: dict[str, Any]) -> EvaluationPoint:
    interval = Interval(*event["interval"]) if event["interval"] else None
    return EvaluationPoint(event["update"], event["mode"], event["success"], interval)


def _write_replay(folder: Path, run: TrainingRun) -> None:
    summary = json.loads((folder / SUMMARY).read_text()) if (folder / SUMMARY).is_file() else {}
    # Not seconds_total: the time that this page takes is part of it.
    facts = {name: str(summary[name]) for name in ("updates", "episodes", "seconds_rl") if name in summary}
    training = folder / ROLLOUT if (folder / ROLLOUT).is_dir() else None
    before, after = _before_and_after(folder / EVALUATION)
    begins = stage_orders(read_events(folder))
    try:
        rules, *others = (
            BatchRules.of(one.spec.algorithm, one.spec.rewards, min_valid=one.spec.rollout.min_valid)
            for one in stages_of(run)
        )
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        what = "this machine can't compute its advantages (spec.algorithm.advantage.plugin)"
        raise ReportError(f"{folder} has no replay here: {what}: {error}") from error
    title = run.metadata.name
    replay = replay_of(
        title=title,
        rules=rules,
        per_update=run.spec.rollout.groups_per_update,
        later=[(begins[number], one) for number, one in enumerate(others, start=2) if number in begins],
        training=training,
        before=before,
        after=after,
        facts=facts,
        practised=summary.get("practised"),
    )
    write_replay(folder / REPLAY, replay)


def stage_orders(events: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """By number of each later stage that was begun: the order of its first group. A stage that began after the
    checkpoint to which the run went back did not. Pure."""
    found: dict[int, tuple[int, int]] = {}
    for event in events:
        if event["event"] == "stage":
            found[event["stage"]] = event["order"], event["update"]
        elif event["event"] == "reinforcement":
            found = {stage: begun for stage, begun in found.items() if begun[1] <= event["update"]}
    return {stage: order for stage, (order, _) in found.items()}


def _before_and_after(measured: Path) -> tuple[Path | None, Path | None]:
    """The recordings of the first and the last measurement, of one mode: sampled as in training, else greedy."""
    for mode in ("sampled", "greedy"):
        before, after = measured / f"before-{mode}", measured / f"after-{mode}"
        if before.is_dir() and after.is_dir():
            return before, after
    return None, None
