"""What a plan notes: what is odd of a run and does nothing, waits, or selects, with what to set instead."""

from __future__ import annotations

from tapforge_api import TrainingRun
from tapforge_api.training_run import TrainingRunSpec

from ..tasks.contamination import Contamination
from ..tasks.stages import stages_of
from .local_files import LocalFiles
from .plan_algorithm import notes_on_algorithm
from .plan_rewards import judging, notes_on_rewards
from .plan_tasks import notes_on_tasks
from .served_model_errors import notes_on_models


def longest_member(spec: TrainingRunSpec) -> float:
    """Seconds that calls to phones may take for a member of a group, all its re-runs included."""
    return (1 + spec.rollout.max_reruns) * spec.environment.call_seconds.episode


def notes_on_run(run: TrainingRun, slots: int | None, shared: Contamination | None) -> tuple[str, ...]:
    spec, notes = run.spec, []
    rollout, learner, engine, calls = spec.rollout, spec.learner, spec.engine, spec.environment.call_seconds
    wanted = rollout.concurrency
    if slots is not None and wanted is not None and wanted > slots:
        notes.append(f"rollout.concurrency is {wanted}, but only {slots} slots exist: {slots} episodes run at once")
    at_once = wanted if slots is None else min(slots, wanted or slots)
    capacity = engine.replicas * engine.max_concurrent_sequences
    if at_once is not None and at_once > capacity:
        notes.append(f"{at_once} episodes at once, but the engines sample {capacity} answers at once: the rest waits")
    bound = (rollout.max_staleness + 1) * rollout.groups_per_update * rollout.group_size
    if at_once is not None and at_once > bound:
        notes.append(f"{at_once} episodes at once, but rollout.maxStaleness admits {bound}: slots will idle")
    if rollout.groups_per_update % learner.mini_batches:
        notes.append(f"{rollout.groups_per_update} groups don't divide into {learner.mini_batches} equal minibatches")
    notes += [*([] if spec.stages else notes_on_rewards(spec)), *notes_on_algorithm(spec), *notes_on_tasks(spec.tasks)]
    notes += notes_on_models(run, [stage.spec.rewards for stage in stages_of(run)])
    if learner.tokens_per_micro_batch < spec.model.context_tokens:
        notes.append(
            f"a sample may have {spec.model.context_tokens} tokens, more than learner.tokensPerMicroBatch "
            f"({learner.tokens_per_micro_batch}): it is computed alone and may need more memory"
        )
    if calls.step > calls.episode:
        notes.append("environment.deadlines.stepSeconds is longer than episodeSeconds: the latter decides")
    group_deadline, needed = rollout.group_deadline_seconds, longest_member(spec)
    if group_deadline is not None and group_deadline < needed:
        notes.append(
            f"rollout.groupDeadlineSeconds ({group_deadline:g}) is shorter than what 1 + rollout.maxReruns episodes of "
            f"environment.deadlines.episodeSeconds may take ({needed:g}): slow members are left out, which selects "
            "short episodes"
        )
    if shared is not None and not shared.clean:
        recorded = spec.environment.source.dataset
        remedy = "evaluation.tasks should name others" if recorded is None else "name another data set in heldOut"
        notes.append(f"{shared}: {remedy}")
    elif spec.environment.source.dataset is not None:
        pass  # what is shared says it
    elif shared is None and spec.evaluation.tasks.split == spec.tasks.split and spec.tasks.file is None:
        notes.append(f"practised and evaluated on the same split ({spec.tasks.split}): nothing is held out")
    if spec.tasks.file is not None and {"suite", "split"} & spec.tasks.model_fields_set:
        notes.append("tasks.file is set: tasks.suite and tasks.split choose no tasks for training")
    if spec.environment.source.pool is not None or spec.environment.source.own_pool is not None:
        notes.append(
            "the phones come from a pool: the run needs a cluster with the operator, and ends when no phone is there "
            f"for environment.deadlines.acquireSeconds ({spec.environment.deadlines.acquire_seconds:g}) seconds; they "
            "may have to boot"
        )
    return tuple(notes)


def notes_on_stages(run: TrainingRun, files: LocalFiles) -> list[str]:
    if not run.spec.stages:
        return []
    judged = bool(judging(run.spec))
    notes = [note for stage in stages_of(run) for note in notes_on_rewards(stage.spec, judged=judged)]
    if files.on_purpose is not None:
        notes.append(f"{files.on_purpose}: on purpose, for those stages read neither their verifiers nor their labels")
    warmup = run.spec.learner.warmup_updates
    notes += [
        f"stage {number} ends after {stage.stop.max_updates} updates, before learner.warmupUpdates ({warmup}) are "
        "over: the optimizer begins afresh with each stage, so the rate never reaches its peak in it"
        for number, stage in enumerate(run.spec.stages, start=1)
        if stage.stop.max_updates is not None and stage.stop.max_updates < warmup
    ]
    own_ends = [stage.stop.max_updates for stage in run.spec.stages]
    if None not in own_ends and run.spec.stop.max_updates < sum(number or 0 for number in own_ends):
        notes.append(f"stop.maxUpdates ({run.spec.stop.max_updates}) ends the run before its last stage does")
    return list(dict.fromkeys(notes))


def notes_on_imitation(files: LocalFiles) -> list[str]:
    """Held-out steps that are imitated measure nothing."""
    return [f"{files.repeated}: divide the data with `tapforge data split`"] if files.repeated else []


def joined_of(run: TrainingRun, files: LocalFiles) -> str:
    """What a sequence of the learner is. Recorded prompts decide it; here is what the adapter promises of them."""
    adapter = run.spec.model.adapter
    if adapter.prompt == "compact":
        return "a sequence per step"
    if adapter.history.blocks is None or (files.model is not None and files.model.broken):
        return "a sequence per step, joined where prompts extend each other"
    return f"a sequence for up to {adapter.images} steps, each with its own advantage"
