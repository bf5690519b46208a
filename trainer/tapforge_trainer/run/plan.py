"""What a TrainingRun would do, before it does it: `tapforge plan`.

- `plan(run, files)` is pure: the numbers of a run. `None` means: not known before the run. `files` is what
  `run/local_files.py` found.
- `render(plan)` and `as_json(plan)` are pure: the same for people and for programs.

Sizes are tokens, MiB or counts as their names say; times are seconds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tapforge_api import TrainingRun
from tapforge_api.environment import EnvironmentSource
from tapforge_api.gpus import gpus_needed
from tapforge_api.learning import Rollout
from tapforge_api.stages import Stage, updates_at_most
from tapforge_api.training_run import TrainingRunSpec

from ..placement.settings import ENGINE_RANKS
from ..tasks.stages import stages_of
from .feasibility import judge
from .local_files import COMPARED, NO_FILES, RUNS, LocalFiles, checkpoint_uri, checkpoints_of, folder_of, number_of
from .plan_algorithm import algorithm_line, old_logprobs_recomputed, statistics_line
from .plan_notes import joined_of, notes_on_imitation, notes_on_run, notes_on_stages
from .plan_rewards import judge_budget, models_line, rewards_line, shown_source, verdicts_per_update
from .plan_tasks import sampler_line

# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """The numbers of a run."""

    name: str
    seed: int
    policy: str
    dtype: str
    #: a frozen copy of the initial policy, for the KL term
    reference: bool
    #: of a distillation, and what it costs; "": there is none
    teacher: str
    #: how engines get adapters, and why; empty: all weights are trained
    adapters: str
    #: whose log-probabilities stand for the policy that acted
    old_logprobs: Literal["engine", "learner"]

    phones: str
    slots: int | None
    #: episodes at once; None: as many as there are slots
    concurrency: int | None
    practised: str
    tasks: int | None
    #: which tasks are practised more often than others
    sampler: str

    #: 0: as many as the epochs have
    warm_start_answers: int
    warm_start_epochs: int | None
    #: whose answers these are
    warm_start_of: str
    groups_per_update: int
    group_size: int
    episodes_per_update: int
    #: what is learned from again
    replay: str | None
    #: groups accepted or running at any moment: what the staleness bound allows
    groups_in_flight: int
    #: which steps the learner computes at once
    joined: str
    optimizer_steps_per_update: int
    max_staleness: int
    sync_mid_episode: bool
    updates: int
    episodes: int
    optimizer_steps: int

    algorithm: str
    #: what decides over whole optimizer steps, with the passes that it takes; empty: nothing does
    statistics: str
    rewards: str
    #: of judges, per update; empty: there is none
    verdicts: str
    #: what judges may use; empty: there is no limit
    judge_budget: str
    #: served beside the policy, for judges; empty: there are none
    models: str
    #: of everything, where the run computes on GPUs
    gpus: int
    ranks: int
    engines: int
    #: of an engine's device; None: what its share of a GPU leaves
    kv_cache_mib: int | None
    sequences_at_once: int
    context_tokens: int
    prompt_tokens: int
    screens: str
    response_tokens: int

    #: tasks x repeats x modes, of one evaluation
    evaluation_episodes: int
    evaluations: int
    evaluated: str
    #: what is different in each; empty: there is one
    stages: tuple[str, ...]
    #: what the measured tasks share with those that would be practised
    held_out: str | None
    ends: str

    folder: str
    checkpoints: str
    checkpoint_updates: int
    checkpoint_seconds: float
    #: within an hour, of learner and engines beside phones that stay
    restarts: int
    #: what is allowed and probably not meant
    notes: tuple[str, ...]


def plan(run: TrainingRun, files: LocalFiles = NO_FILES, runs: Path = RUNS) -> Plan:
    """Pure. `files` adds what only the named files know."""
    from ..rollout.frame_budget import screens_shown  # pays for Pillow

    spec = run.spec
    rollout, learner, engine, evaluation, stop = spec.rollout, spec.learner, spec.engine, spec.evaluation, spec.stop
    per_update = rollout.groups_per_update * rollout.group_size
    updates = updates_at_most(stop.max_updates, spec.stages)
    between = (updates - 1) // evaluation.every_updates if evaluation.every_updates else 0
    own = old_logprobs_recomputed(spec)
    slots = known_slots(spec.environment.source, files)
    if spec.environment.source.dataset is not None:
        slots = engine.replicas * engine.max_concurrent_sequences
    shared = files.contamination
    # Of more than that only the first ones were drawn.
    measured = evaluation.episodes if shared is None or shared.measured == COMPARED else shared.measured
    return Plan(
        name=run.metadata.name,
        seed=spec.seed,
        policy=shown_source(spec.model.source),
        dtype=spec.model.dtype or "bfloat16 on GPUs, float32 on CPUs",
        reference=spec.algorithm.kl.coefficient > 0,
        teacher=_teacher(spec),
        adapters=_adapters(spec),
        old_logprobs="learner" if own else "engine",
        phones=_phones(run),
        slots=slots,
        concurrency=rollout.concurrency if slots is None else min(slots, rollout.concurrency or slots),
        practised=_practised(run),
        tasks=files.tasks if spec.tasks.file else spec.tasks.max_tasks,
        sampler=sampler_line(spec.tasks),
        warm_start_answers=_imitated_answers(spec),
        warm_start_epochs=None if spec.warm_start is None else spec.warm_start.epochs,
        warm_start_of=_imitated(spec),
        groups_per_update=rollout.groups_per_update,
        group_size=rollout.group_size,
        episodes_per_update=per_update,
        replay=_replay(rollout),
        groups_in_flight=(rollout.max_staleness + 1) * rollout.groups_per_update,
        joined=joined_of(run, files),
        optimizer_steps_per_update=learner.mini_batches,
        max_staleness=rollout.max_staleness,
        sync_mid_episode=spec.sync.mid_episode,
        updates=updates,
        episodes=updates * per_update,
        optimizer_steps=updates * learner.mini_batches,
        algorithm=algorithm_line(run),
        statistics=statistics_line(spec),
        rewards=rewards_line(spec),
        verdicts=verdicts_per_update(spec),
        judge_budget=judge_budget(spec),
        models=models_line(spec),
        gpus=gpus_needed(spec),
        ranks=learner.ranks,
        engines=engine.replicas,
        kv_cache_mib=engine.kv_cache_mib,
        sequences_at_once=engine.replicas * engine.max_concurrent_sequences,
        context_tokens=spec.model.context_tokens,
        prompt_tokens=spec.model.context_tokens - rollout.response_tokens,
        screens=screens_shown(run, None if files.model is None else files.model.cell),
        response_tokens=rollout.response_tokens,
        evaluation_episodes=measured * (evaluation.repeats * evaluation.sampled + evaluation.greedy),
        evaluations=2 + between,
        evaluated=_evaluated(run, measured),
        stages=tuple(map(_stage, stages_of(run), spec.stages)) if spec.stages else (),
        held_out=str(shared) if shared is not None and shared.clean and files.on_purpose is None else None,
        ends=_ends(run),
        folder=str(folder_of(run, runs)),
        checkpoints=checkpoint_uri(run) or str(checkpoints_of(run, folder_of(run, runs))),
        checkpoint_updates=spec.checkpoints.every_updates,
        checkpoint_seconds=spec.checkpoints.every_seconds,
        restarts=spec.engine.max_restarts_per_hour,
        notes=(
            *notes_on_run(run, slots, shared),
            *notes_on_stages(run, files),
            *notes_on_imitation(files),
            *judge(run, files.model).notes,
        ),
    )


def known_slots(source: EnvironmentSource, files: LocalFiles = NO_FILES) -> int | None:
    """Slots, as far as the file and the files it names tell; a pool's are the operator's to grant."""
    if source.processes is not None:
        return source.processes.count
    if source.urls is not None:
        return number_of(source.urls.list) if source.urls.list is not None else files.urls
    return None


def _teacher(spec: TrainingRunSpec) -> str:
    if spec.algorithm.distillation is None:
        return ""
    source = shown_source(spec.algorithm.distillation.teacher)
    return (
        f"{source}, frozen beside the policy on each rank; a forward pass of it, without gradients, over every update"
    )


def _adapters(spec: TrainingRunSpec) -> str:
    lora = spec.model.lora
    if lora is None:
        return ""
    if spec.sync.lora == "adapter":
        room = next((rank for rank in ENGINE_RANKS if rank >= lora.rank), lora.rank)
        rounded = f", as rank {room}" if room != lora.rank else ""
        return (
            f"of rank {lora.rank}; engines get them alone{rounded}, and round as the learner does (sync.lora adapter)"
        )
    exact = "which is exact in float32"
    if spec.model.dtype != "float32":
        exact += " and rounds small changes away in bfloat16, where sync.lora adapter is closer to the learner"
    return f"of rank {lora.rank}; engines get whole weights with them merged, {exact}"


def _phones(run: TrainingRun) -> str:
    source, screen = run.spec.environment.source, run.spec.environment.screen
    if source.processes is not None:
        slow = source.processes.latency
        late = f", steps of {slow.median_seconds:g} s (log-normal, sigma {slow.sigma:g})" if slow else ""
        what = "simulated phone" if source.processes.environment == "phone" else "MiniWoB++ page"
        phones = f"{_count(source.processes.count, what)} in {_count(source.processes.servers, 'server')}"
        return f"{phones}, {screen.width}x{screen.height} pixels{late}"
    if source.pool is not None:
        pool = source.pool
        urgency = f", priority {pool.priority}" if pool.priority else ""
        return f"up to {pool.slots:,} of the pool {pool.name}, claimed from the operator{urgency}"
    if source.own_pool is not None:
        return f"up to {source.own_pool.slots:,} of a pool of its own, which the operator makes"
    if source.dataset is not None:
        return f"none: each episode is an answer to a recorded step of {source.dataset.path}"
    assert source.urls is not None
    if run.spec.environment.protocol == "adb":
        return f"the phones that {source.urls.file or ', '.join(source.urls.list or ())} names to adb"
    return f"the servers in {source.urls.file}" if source.urls.file else f"{len(source.urls.list or ())} servers by URL"


def _practised(run: TrainingRun) -> str:
    tasks, recorded = run.spec.tasks, run.spec.environment.source.dataset
    if recorded is not None:
        most = f", at most {tasks.max_tasks}" if tasks.max_tasks else ""
        return f"steps of {recorded.path}, of episodes that ended as {' or '.join(recorded.outcomes)}{most}"
    which = f", templates {', '.join(tasks.templates)}" if tasks.templates else ""
    most = f", at most {tasks.max_tasks} tasks" if tasks.max_tasks else ""
    return (f"the tasks in {tasks.file}" if tasks.file else f"suite {tasks.suite}, split {tasks.split}") + which + most


def _stage(run: TrainingRun, stage: Stage) -> str:
    """`run`: as it is in this stage."""
    stop, spec = stage.stop, run.spec
    ends = [_count(stop.max_updates, "update")] if stop.max_updates is not None else []
    if stop.target_success is not None:
        ends.append(f"{stop.target_success:.0%} success in an update")
    tasks = f"{_practised(run)}, {sampler_line(spec.tasks)}"
    verdicts = f"; verdicts: {found}" if (found := verdicts_per_update(spec)) else ""
    rates = f"sampled at {spec.rollout.temperature:g}, learning rate {spec.learner.learning_rate:g}"
    return f"{tasks}; {rewards_line(spec)}{verdicts}; {rates}; ends after {' or at '.join(ends)}"


def _replay(rollout: Rollout) -> str | None:
    rule = rollout.replay
    if rule is None:
        return None
    most = int(rule.share * rollout.groups_per_update * rollout.group_size)
    return (
        f"up to {most:,} successful episodes per update come again, of groups in which at most {rule.max_success:.0%} "
        f"succeeded, up to {_count(rule.max_age, 'version')} old; {rule.groups:,} groups are kept"
    )


def _evaluated(run: TrainingRun, tasks: int) -> str:
    e = run.spec.evaluation
    modes = [f"sampled at {e.sampled_temperature:g}"] * e.sampled + ["greedy"] * e.greedy
    repeats = f" x {e.repeats}" if e.repeats > 1 else ""
    baselines = "; baselines: a random and an always-infeasible policy" if e.baselines else ""
    where = f"suite {e.tasks.suite}, split {e.tasks.split}" if e.tasks.suite else f"split {e.tasks.split}"
    if file := e.tasks.file or (run.spec.tasks.file if e.tasks.suite is None else None):
        where = f"the tasks in {file}"
    if (recorded := run.spec.environment.source.dataset) is not None:
        where = f"steps of {recorded.held_out or recorded.path}"
    others = f"; {e.other_templates:,} of templates that aren't practised" if e.other_templates else ""
    return f"{where}, {tasks:,} tasks{repeats}, {' and '.join(modes)}{others}{baselines}"


def _ends(run: TrainingRun) -> str:
    stop = run.spec.stop
    parts = ["after its last stage"] if run.spec.stages else []
    parts.append(f"after {_count(stop.max_updates, 'update')}")
    if stop.max_seconds is not None:
        parts.append(f"after {stop.max_seconds:g} s")
    if stop.target_success is not None:
        parts.append(f"when {stop.target_success:.0%} of all attempts of an update succeed")
    return ", or ".join(parts)


# --- for people and programs ------------------------------------------------------------------------------------------


def as_json(p: Plan) -> str:
    """The plan for programs: its fields under their names, with their units as `Plan` says them."""
    return json.dumps(asdict(p), indent=2)


def _warm_start(p: Plan) -> str:
    if p.warm_start_epochs is not None:
        return f"{_count(p.warm_start_epochs, 'pass', 'passes')} over {p.warm_start_of}"
    return f"{p.warm_start_answers:,} {p.warm_start_of}" if p.warm_start_answers else "none"


def _imitated_answers(spec: TrainingRunSpec) -> int:
    warm = spec.warm_start
    return 0 if warm is None or warm.epochs is not None else warm.steps * warm.batch_size


def _imitated(spec: TrainingRunSpec) -> str:
    if spec.warm_start is None or spec.warm_start.data is None:
        return "demonstrated answers"
    data = spec.warm_start.data
    measured = "" if data.held_out is None else f", measured on {data.held_out} after each pass"
    weights = {name: weight for name, weight in data.weights.model_dump().items() if name in data.outcomes}
    weighted = "".join(f", {name} x {weight:g}" for name, weight in weights.items() if len({*weights.values()}) > 1)
    return f"answers of the data set {data.path}{weighted}{measured}"


def _count(number: int, what: str, several: str = "") -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {several or what + 's'}"


def _minutes(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:,.3g} minutes" if minutes < 100 else f"{minutes:,.0f} minutes"


def render(p: Plan) -> str:
    """The plan as text, one line per fact."""
    slots = "as many as the source has" if p.slots is None else f"{p.slots:,}"
    at_once = "one per slot" if p.concurrency is None else f"{p.concurrency:,}"
    reference = "a frozen reference for the KL term" if p.reference else "no reference model"
    cache = "vLLM's key-value cache" if p.kv_cache_mib is None else f"{p.kv_cache_mib:,} MiB of key-value cache"
    arrive = "mid-episode" if p.sync_mid_episode else "between episodes"
    lines = {
        "run": f"{p.name}, seed {p.seed}",
        "policy": f"{p.policy}, {p.dtype}",
        "loaded": f"{_count(p.ranks, 'learner rank')}, {_count(p.engines, 'engine')} with {cache}, {reference}",
        **({"models": f"{p.models}; {_count(p.gpus, 'GPU')} with the policy's"} if p.models else {}),
        **({"adapters": p.adapters} if p.adapters else {}),
        **({"teacher": p.teacher} if p.teacher else {}),
        "phones": p.phones,
        "slots": f"{slots}; episodes at once: {at_once}; answers sampled at once: {p.sequences_at_once:,}",
        **{f"stage {number}": words for number, words in enumerate(p.stages, start=1)},
        **({} if p.stages else {"tasks": p.practised + (f" ({p.tasks:,} tasks)" if p.tasks is not None else "")}),
        **({} if p.stages else {"sampler": p.sampler}),
        "warm start": _warm_start(p),
        "update": f"{p.groups_per_update:,} groups x {p.group_size:,} = {p.episodes_per_update:,} episodes, "
        f"{p.joined}, {_count(p.optimizer_steps_per_update, 'optimizer step')}",
        **({"replay": p.replay} if p.replay else {}),
        "staleness": f"at most {_count(p.max_staleness, 'version')}: up to {p.groups_in_flight:,} groups in flight; "
        f"old log-probabilities from the {p.old_logprobs}; new weights arrive {arrive}",
        **({} if p.stages else {"rewards": p.rewards}),
        **({"verdicts": p.verdicts} if p.verdicts and not p.stages else {}),
        **({"judge budget": p.judge_budget} if p.judge_budget else {}),
        "algorithm": p.algorithm,
        **({"statistics": p.statistics} if p.statistics else {}),
        "context": f"{p.context_tokens:,} tokens: prompt up to {p.prompt_tokens:,}, answer up to {p.response_tokens:,}",
        "screens": p.screens,
        "evaluation": f"{p.evaluated}; {p.evaluation_episodes:,} episodes, {p.evaluations:,} times",
        **({"held out": p.held_out} if p.held_out else {}),
        "ends": f"{p.ends}; {p.episodes:,} episodes and {_count(p.optimizer_steps, 'optimizer step')} at most",
        "written to": f"{p.folder}; checkpoints in {p.checkpoints}",
        "a crash": f"costs {_count(p.checkpoint_updates, 'update')} at most, or {_minutes(p.checkpoint_seconds)} and "
        "the update then under way, whichever is less; more where a checkpoint takes long to write; and the start: of "
        "the learner and the engines alone where these died, up to "
        f"{p.restarts} times an hour, with the same driver and phones",
    }
    width = max(map(len, lines))
    return "\n".join([*(f"{k:<{width}}  {v}" for k, v in lines.items()), *(f"note: {n}" for n in p.notes)])
