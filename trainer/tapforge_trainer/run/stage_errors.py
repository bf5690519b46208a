"""What is wrong with the stages of a run that is right without them, before anything is started."""

from __future__ import annotations

from pathlib import Path

from tapforge_api import TrainingRun
from tapforge_envs.phone.catalog import UnknownTask

from ..rollout.frame_budget import budget_error, frame_budget
from ..tasks.selection import sampler_errors, task_errors, training_tasks
from ..tasks.source import TaskError
from ..tasks.stages import stages_of
from .feasibility import judge
from .learning_errors import algorithm_errors, reward_errors
from .local_files import inspect_files


def stage_errors(run: TrainingRun, runs: Path) -> list[str]:
    if not run.spec.stages:
        return []
    rewards = [stage.spec.rewards for stage in stages_of(run)]
    of_file = judge(run, None).errors
    return [
        f"spec.stages[{number}]: {why}"
        for number, stage in enumerate(stages_of(run))
        for why in (
            *rule_errors(stage),
            *inspect_files(stage, runs).errors,
            *task_errors(stage),
            *sampler_errors(stage),
            *reward_errors(stage, rewards),
            *algorithm_errors(stage),
            *tasks_budget_errors(stage),
            *(why for why in judge(stage, None).errors if why not in of_file),
        )
    ]


def rule_errors(stage: TrainingRun) -> list[str]:
    """Rules between fields, of which the API checks those of the file alone, and not those that a stage sets."""
    return [f"spec.{rule.message}" for rule in stage.spec.rules if not rule.holds(stage.spec)]


def tasks_budget_errors(run: TrainingRun) -> list[str]:
    """Of the frames that its tasks show at once."""
    try:
        error = budget_error(run, frame_budget(run, training_tasks(run), None))
    except (TaskError, UnknownTask):  # reported as what is wrong with the tasks
        return []
    return [error] if error else []
