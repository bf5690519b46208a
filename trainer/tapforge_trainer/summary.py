"""summary.json: what a run did and how sure that is. Pure.

Rates are shares from 0 to 1. Times are seconds and count all sessions of a run that was stopped and started again.
"""

from __future__ import annotations

from typing import Any

from tapforge_api import TrainingRun

from .assembly import contamination_of
from .machine import Machine
from .progress import Progress, ended
from .tasks.contamination import Contamination


def summarize(
    run: TrainingRun,
    progress: Progress,
    *,
    before: dict[str, Any],
    after: dict[str, Any],
    baselines: dict[str, Any],
    seconds_total: float,
    machine: Machine,
) -> dict[str, Any]:
    steps_per_second = progress.env_steps / progress.seconds_rl if progress.seconds_rl else None
    return {
        "run": run.metadata.name,
        "seed": run.spec.seed,
        "algorithm": run.spec.algorithm.advantage.kind,
        "success_before": before,
        "success_after": after,
        "baselines": baselines,
        "seconds_total": round(seconds_total, 1),
        "seconds_start": round(progress.seconds_start, 1),
        "seconds_sft": round(progress.seconds_sft, 1),
        "seconds_rl": round(progress.seconds_rl, 1),
        "updates": progress.update,
        "ended_after": ended(run.spec.stop, progress),
        "episodes": progress.episodes,
        "invalid_episodes": progress.invalid,
        "members": progress.members,
        "env_steps": progress.env_steps,
        "env_steps_per_second": None if steps_per_second is None else round(steps_per_second, 1),
        "slot_busy_share": round(progress.busy_seconds / progress.slot_seconds, 4) if progress.slot_seconds else None,
        "held_out": _held_out(run, progress.tasks),
        "machine": {"cores": machine.cores, "gpus": machine.gpus},
        **wanted(run),
    }


def wanted(run: TrainingRun) -> dict[str, Any]:
    """The parts of the spec that say when a run is complete. A summary with the same ones needs no further work."""
    spec = run.spec.model_dump(mode="json", by_alias=True)
    return {"stop": spec["stop"], "evaluation": spec["evaluation"]}


def _held_out(run: TrainingRun, drawn: int) -> dict[str, Any]:
    """What the measured tasks share with all that were demonstrated and practised, and what not."""
    found = contamination_of(run, drawn)
    figures = {name: getattr(found, name) for name in ("practised", "same_task", "same_goal", "same_parameters")}
    return {"tasks": found.measured, **figures, **_in_words(run, found)}


def _in_words(run: TrainingRun, found: Contamination) -> dict[str, str]:
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
