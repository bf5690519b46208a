"""How success is measured: fixed tasks, fixed policy version, intervals, and two baselines beside it.

- The tasks depend on `spec.evaluation.seed` alone, not on the run's seed, so that runs are compared on the same tasks.
- Every answer of a measurement comes from one policy version; a mixture is an error, not a figure.
- An invalid episode is in no rate; it is counted, and the rate over attempted episodes is given beside the other.
- The baselines play the same tasks through the same code (`rollout/baselines.py`).
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tapforge_api import TrainingRun
from tapforge_envs.protocol import Outcome, Task

from ..data.recorded_tasks import SUITES
from ..records import EpisodeRecord, Sampling
from ..rewards.budget import JudgeBudget
from ..rollout.baselines import baselines
from ..rollout.scheduler import Scheduler
from ..statistics import success_of
from ..tasks.regimes import other_templates
from ..tasks.selection import evaluation_tasks
from ..telemetry.progress import Progress
from .assembly import RolloutSetup
from .base_check import check_base
from .context import RunContext
from .folder import EVALUATION
from .local_files import COMPARED
from .shutdown import unless_stopped

#: of the measurement on templates that are not practised, where others have their mode
OTHERS: Final = "other_templates"


async def play(
    rollout_setup: RolloutSetup,
    tasks: Sequence[Task],
    *,
    policy: str = "",
    repeats: int,
    temperature: float,
    seed: int,
    folder: Path,
    judged: bool = False,
    budget: JudgeBudget | None = None,
) -> list[EpisodeRecord]:
    """Plays every task `repeats` times and records it in `folder`, in place of an earlier measurement. `policy`: one of
    `baselines`; "": the one that learns. `judged`: rewards say how episodes ended; `budget`: what that may take."""
    if folder.exists():
        await asyncio.to_thread(shutil.rmtree, folder)
    recorder = await rollout_setup.record(folder, replace(rollout_setup.retention, max_bytes=None))
    scheduler = Scheduler(
        rollout_setup.slots,
        rollout_setup.player,
        Sampling(max_tokens=rollout_setup.response_tokens, temperature=temperature),
        groups=rollout_setup.groups,
        episodes=rollout_setup.episodes,
        recorder=recorder,
        concurrency=rollout_setup.concurrency,
        acquire_seconds=rollout_setup.acquire_seconds,
        seed=seed,
        prefix=f"{folder.name}-",
        engines=rollout_setup.engines,
        budget=budget,
    )
    try:
        return await scheduler.run_fixed(tasks, repeats, policy=policy, judged=judged)
    finally:
        await scheduler.close()
        await recorder.close()


async def measure(context: RunContext, name: str, progress: Progress) -> dict[str, dict[str, Any]]:
    """Success of the present policy on the held-out tasks, sampled and greedy as the spec says. `name` is the folder's
    prefix."""
    evaluation = context.run.spec.evaluation
    if evaluation.episodes > COMPARED:  # which takes more than a second
        context.telemetry.phase(f"measuring {name}: choosing {evaluation.episodes:,} held-out tasks", "Evaluating")
    tasks = (await asyncio.to_thread(evaluation_tasks, context.of_file)).tasks
    modes = {"sampled": evaluation.sampled_temperature} if evaluation.sampled else {}
    modes |= {"greedy": 0.0} if evaluation.greedy else {}
    results = {}
    played: list[EpisodeRecord] = []
    for mode, temperature in modes.items():
        context.telemetry.phase(f"measuring {name}, {mode}: {len(tasks)} held-out tasks", "Evaluating")
        playing = play(
            context.rollout_setup,
            tasks,
            repeats=evaluation.repeats if temperature else 1,
            temperature=temperature,
            seed=evaluation.seed,
            folder=context.folder / EVALUATION / f"{name}-{mode}",
            judged=evaluation.judged,
            budget=context.judge_budget,
        )
        episodes = await unless_stopped(context.stop, playing)
        played += episodes
        results[mode] = measured(episodes, seed=evaluation.seed, version=progress.version)
        context.telemetry.event("evaluation", name=name, mode=mode, update=progress.update, **results[mode])
    if evaluation.other_templates and name in ("before", "after"):
        others = await asyncio.to_thread(other_templates, context.of_file, evaluation.other_templates)
        if others is not None:
            results[OTHERS] = await _of_others(context, name, others.tasks, progress)
    if name == "before" and played:
        _report_base(context, played)
    return results


def parts_of_before(run: TrainingRun) -> set[str]:
    """Names of what is measured before reinforcement."""
    evaluation = run.spec.evaluation
    modes = {mode for mode in ("sampled", "greedy") if getattr(evaluation, mode)}
    others = evaluation.other_templates and other_templates(run, evaluation.other_templates) is not None
    return modes | {OTHERS} if others else modes


async def _of_others(context: RunContext, name: str, tasks: Sequence[Task], progress: Progress) -> dict[str, Any]:
    """Success on templates that are not practised, sampled."""
    evaluation = context.run.spec.evaluation
    context.telemetry.phase(
        f"measuring {name}, sampled: {len(tasks)} tasks of templates that aren't practised", "Evaluating"
    )
    playing = play(
        context.rollout_setup,
        tasks,
        repeats=1,
        temperature=evaluation.sampled_temperature,
        seed=evaluation.seed,
        folder=context.folder / EVALUATION / f"{name}-other-templates",
        judged=evaluation.judged,
        budget=context.judge_budget,
    )
    found = measured(await unless_stopped(context.stop, playing), seed=evaluation.seed, version=progress.version)
    context.telemetry.event("evaluation", name=name, mode=OTHERS, update=progress.update, **found)
    return found


def _report_base(context: RunContext, episodes: Sequence[EpisodeRecord]) -> None:
    """What the answers of the model that reinforcement starts with say about prompt, adapter and limits."""
    found = check_base(episodes, context.run.spec.model.adapter.name)
    context.telemetry.event("base_model", **found.plain())
    for finding in found.findings:
        context.telemetry.note(f"base model: {finding.text}")


async def measure_baselines(context: RunContext) -> dict[str, dict[str, Any]]:
    """The same tasks, played by policies that have learned nothing."""
    evaluation = context.run.spec.evaluation
    results = {}
    for name in baselines(context.rollout_setup.agent):
        folder = context.folder / EVALUATION / f"baseline-{name}"
        tasks = (await asyncio.to_thread(evaluation_tasks, context.of_file)).tasks
        playing = play(
            context.rollout_setup,
            tasks,
            policy=name,
            repeats=1,
            temperature=1.0,
            seed=evaluation.seed,
            folder=folder,
            judged=evaluation.judged,
            budget=context.judge_budget,
        )
        episodes = await unless_stopped(context.stop, playing)
        results[name] = measured(episodes, seed=evaluation.seed)
        context.telemetry.event("baseline", policy=name, **results[name])
    return results


def measured(episodes: Sequence[EpisodeRecord], *, seed: int = 0, version: int | None = None) -> dict[str, Any]:
    """The figures of a measurement, as in summary.json. Rates and intervals are None over nothing. An answer
    of another policy version than `version` is an error."""
    versions = {v for e in episodes for s in e.steps for v in s.generation.versions}
    if len(versions) > 1:
        raise ValueError(f"one measurement mixed the policy versions {sorted(versions)}; pause training meanwhile")
    if version is not None and versions - {version}:
        raise ValueError(
            f"policy version {version} was to be measured, and version {min(versions)} answered; sync first"
        )
    success = success_of([(e.task.template, e.outcome) for e in episodes], seed=seed)
    templates: dict[str, list[bool]] = defaultdict(list)
    for e in episodes:
        if e.valid:
            templates[e.task.template].append(e.outcome is Outcome.SUCCESS)
    interval, clustered = success.interval, success.interval_by_template
    return {
        "success": success.rate,
        "interval": [interval.low, interval.high] if interval else None,
        "interval_by_template": [clustered.low, clustered.high] if clustered else None,
        "episodes": success.valid,
        "invalid": success.invalid,
        "success_attempted": success.rate_attempted,
        "policy_version": versions.pop() if versions else None,
        "by_template": {name: round(sum(won) / len(won), 4) for name, won in sorted(templates.items())},
        "reasons": dict(Counter(e.reason.value for e in episodes)),
        **_of_recorded(episodes),
    }


def _of_recorded(episodes: Sequence[EpisodeRecord]) -> dict[str, float | None]:
    """Of answers to recorded steps, also where no reward was asked for: the share with the recorded type, which is the
    task's template, and of those the share that says the right thing. Joint, they are the success."""
    answers = [e for e in episodes if e.valid and e.task.suite in SUITES]
    if not answers:
        return {}
    typed = [e for e in answers if any(s.action is not None and s.action["type"] == e.task.template for s in e.steps)]
    right = sum(e.outcome is Outcome.SUCCESS for e in typed)
    understood = sum(s.parse_error is None for e in answers for s in e.steps)
    return {
        "type_accuracy": len(typed) / len(answers),
        "parameter_accuracy": right / len(typed) if typed else None,
        "understood": understood / sum(len(e.steps) for e in answers),
    }
