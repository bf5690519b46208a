"""A run's stages (`spec.stages`), each as the run that it is by itself. Pure.

What a stage doesn't say is the run's. What is measured, and what a warm start shows, is the run's in every stage.
"""

from __future__ import annotations

from tapforge_api import TrainingRun


def stages_of(run: TrainingRun) -> tuple[TrainingRun, ...]:
    """In order; the run alone where it has none."""
    return tuple(of_stage(run, number) for number in range(len(run.spec.stages))) or (run,)


def of_stage(run: TrainingRun, number: int) -> TrainingRun:
    """`number`: from 0. A run without stages is its only one."""
    spec = run.spec
    if not spec.stages:
        return run
    stage = spec.stages[number]
    temperature, rate = stage.temperature, stage.learning_rate
    rollout, learner = spec.rollout, spec.learner
    if temperature is not None:
        rollout = rollout.model_copy(update={"temperature": temperature})
    if rate is not None:
        learner = learner.model_copy(update={"learning_rate": rate})
    changed = {
        "stages": (),
        "warm_start": None,
        "tasks": stage.tasks or spec.tasks,
        "rewards": stage.rewards or spec.rewards,
        "rollout": rollout,
        "learner": learner,
    }
    return run.model_copy(update={"spec": spec.model_copy(update=changed)})
