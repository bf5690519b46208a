"""summary.json: what a run did and how sure that is. Pure.

Rates are shares from 0 to 1. Times are seconds and count all sessions of a run that was stopped and started again.
"""

from __future__ import annotations

from typing import Any

from tapforge_api import TrainingRun

from .assembly import Machine, evaluation_tasks
from .progress import Progress, ended
from .tasks.source import different


def summarize(
    run: TrainingRun,
    progress: Progress,
    *,
    before: dict[str, Any],
    after: dict[str, Any],
    floors: dict[str, Any],
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
        "floors": floors,
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
        "held_out": _held_out(run),
        "machine": {"cores": machine.cores, "gpus": machine.gpus},
        **wanted(run),
    }


def wanted(run: TrainingRun) -> dict[str, Any]:
    """The parts of the spec that say when a run is complete. A summary with the same ones needs no further work."""
    spec = run.spec.model_dump(mode="json", by_alias=True)
    return {"stop": spec["stop"], "evaluation": spec["evaluation"]}


def _held_out(run: TrainingRun) -> dict[str, Any]:
    """What the measured tasks share with training and what not."""
    tasks = run.spec.tasks
    if tasks.file is not None:
        return {"held_out": "nothing: a task file has no splits", "shared": "all tasks"}
    split = run.spec.evaluation.split
    if split == tasks.split:
        return {"held_out": "nothing: measured on the split that is practised", "shared": "all tasks"}
    measured = evaluation_tasks(run).tasks
    return {
        "tasks": different(measured),
        "held_out": (
            f"parameter combinations and layouts of the {split} split: no combination of a template's parameters that "
            "is measured was practised or demonstrated, and cells are dealt from another part of all arrangements"
        ),
        "shared": "templates, wording, icons, colours and wallpapers, and each parameter value on its own",
    }
