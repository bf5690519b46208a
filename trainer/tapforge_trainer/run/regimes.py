"""`tapforge eval --regimes`: success on tasks that are held out in three ways, over several interleaved passes.

- A pass plays every task of every regime once, in the order of the regimes; then comes the next pass. So what changes
  in the meantime (other load, warmer phones) is in all regimes alike.
- Success is over valid episodes, its interval resamples whole templates. `half_range` is half of the largest difference
  between two passes: what of a difference is the measurement's own.
- pass@k and all-pass@k are of the tasks that have k valid episodes, k being the passes (`compare.py`, unbiased).
- At the step limit: episodes without an end. At the answer limit: answers that were cut off at `responseTokens`.
- Seconds are those of episodes, from reset to verdict, tokens those that the model read and wrote, over the number of
  successes. `judge` has what judges used, where they were asked.
- A demonstrator's steps are those of the suite's plans on the same tasks; None where there are none. Answers are
  compared with it up to the first difference (`references.py`); of recorded steps, with the recorded answer.
- Money is what judges cost by their prices, over the number of successes; None where no price is given.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from tapforge_envs.protocol import Outcome

from ..records import EpisodeRecord
from ..statistics import success_of
from ..tasks.regimes import Regime, tasks_by_regime
from .columns import columns
from .compare import all_pass_at, pass_at
from .context import RunContext
from .evaluation import measured, play
from .folder import EVALUATION
from .references import Reference, agreement, references_of
from .shutdown import unless_stopped


async def measure_regimes(context: RunContext, regimes: Sequence[Regime], passes: int) -> dict[str, Any]:
    """The figures of each regime, as in result.json. Raises TaskError for a regime without tasks."""
    evaluation = context.run.spec.evaluation
    tasks = await asyncio.to_thread(tasks_by_regime, context.run, regimes)
    temperature = evaluation.sampled_temperature if evaluation.sampled else 0.0
    played: dict[Regime, list[list[EpisodeRecord]]] = {regime: [] for regime in regimes}
    for number in range(passes):
        for regime in regimes:
            listed = tasks[regime].tasks
            context.telemetry.phase(
                f"pass {number + 1} of {passes}, held out {_BY[regime]}: {len(listed)} tasks", "Evaluating"
            )
            playing = play(
                context.rollout_setup,
                listed,
                repeats=1,
                temperature=temperature,
                seed=evaluation.seed + number,
                folder=context.folder / EVALUATION / f"{regime}-{number + 1}",
                judged=evaluation.judged,
                budget=context.judge_budget,
            )
            played[regime].append(await unless_stopped(context.stop, playing))
    found = {
        regime: figures(played[regime], references_of(tasks[regime].tasks), seed=evaluation.seed) for regime in regimes
    }
    return {"passes": passes, "temperature": temperature, "seed": evaluation.seed, "regimes": found}


_BY: Mapping[str, str] = {"instances": "by instance", "templates": "by template", "apps": "by app"}


def figures(
    passes: Sequence[Sequence[EpisodeRecord]], demonstrated: Mapping[str, Sequence[Reference]], *, seed: int
) -> dict[str, Any]:
    """Of the same tasks, played once in each pass. Shares and means are None over nothing."""
    episodes = [one for played in passes for one in played]
    base = measured(episodes, seed=seed)
    rates = [success_of([(e.task.template, e.outcome) for e in played], seed=seed).rate for played in passes]
    known = [rate for rate in rates if rate is not None]
    by_task: dict[str, list[bool]] = defaultdict(list)
    for one in episodes:
        if one.valid:
            by_task[one.task.key].append(one.outcome is Outcome.SUCCESS)
    k = len(passes)
    full = [won for won in by_task.values() if len(won) >= k]
    valid = [one for one in episodes if one.valid]
    won = [one for one in valid if one.outcome is Outcome.SUCCESS]
    answers = [step.generation for one in valid for step in one.steps]
    read, written = sum(a.prompt_length for a in answers), sum(len(a.ids) for a in answers)
    shown = [one for one in won if one.task.key in demonstrated]
    judged = Counter[str]()
    for one in episodes:
        if one.rewards is not None:
            judged.update(one.rewards.usage)
    agreed = agreement(valid, demonstrated)
    money = _per(judged["money"], len(won)) if judged["money"] else None
    return {
        "type_accuracy": agreed.type_accuracy,
        "parameter_accuracy": agreed.parameter_accuracy,
        **base,
        "tasks": len({one.task.key for one in episodes}),
        "templates": len({one.task.template for one in valid}),
        "passes": rates,
        "half_range": (max(known) - min(known)) / 2 if known else None,
        "k": k,
        "tasks_with_k": len(full),
        "pass_at_k": _mean([pass_at(k, len(one), sum(one)) for one in full]),
        "all_pass_at_k": _mean([all_pass_at(k, len(one), sum(one)) for one in full]),
        "step_limit": _mean([one.out_of_steps for one in valid]),
        "answer_limit": _mean([answer.finish_reason == "length" for answer in answers]),
        "steps": _mean([len(one.steps) for one in valid]),
        "steps_of_successes": _mean([len(one.steps) for one in shown]),
        "steps_of_demonstrator": _mean([len(demonstrated[one.task.key]) for one in shown]),
        "seconds_per_success": _per(sum(one.ended - one.started for one in valid), len(won)),
        "tokens_read_per_success": _per(read, len(won)),
        "tokens_written_per_success": _per(written, len(won)),
        "money_per_success": money,
        "judge_per_success": {name: _per(value, len(won)) for name, value in sorted(judged.items())} or None,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _per(total: float, count: int) -> float | None:
    return total / count if count else None


# --- for a person -----------------------------------------------------------------------------------------------------


def rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    found: Mapping[str, Mapping[str, Any]] = result["regimes"]
    k = result["passes"]
    lines = [("held out", *(_BY[name] for name in found))]

    def row(title: str, *cells: str) -> None:
        lines.append((title, *cells))

    row("tasks, templates", *(f"{one['tasks']:,}, {one['templates']:,}" for one in found.values()))
    row("success", *(_share(one["success"]) for one in found.values()))
    row("95 %, by template", *(_interval(one["interval_by_template"]) for one in found.values()))
    row("half range of passes", *(_points(one["half_range"]) for one in found.values()))
    if k > 1:
        row(f"pass@{k}", *(_share(one["pass_at_k"]) for one in found.values()))
        row(f"all-pass@{k}", *(_share(one["all_pass_at_k"]) for one in found.values()))
    row("at the step limit", *(_share(one["step_limit"]) for one in found.values()))
    row("answers cut off", *(_share(one["answer_limit"]) for one in found.values()))
    row("steps of successes", *(_number(one["steps_of_successes"]) for one in found.values()))
    row("  of a demonstrator", *(_number(one["steps_of_demonstrator"]) for one in found.values()))
    if any(one["type_accuracy"] is not None for one in found.values()):
        row("right type of action", *(_share(one["type_accuracy"]) for one in found.values()))
        row("  and right parameters", *(_share(one["parameter_accuracy"]) for one in found.values()))
    row("seconds per success", *(_number(one["seconds_per_success"]) for one in found.values()))
    row("tokens read per success", *(_number(one["tokens_read_per_success"], 0) for one in found.values()))
    row("  written", *(_number(one["tokens_written_per_success"], 0) for one in found.values()))
    if any(one["money_per_success"] is not None for one in found.values()):
        row("money per success", *(_number(one["money_per_success"], 4) for one in found.values()))
    row("invalid episodes", *(f"{one['invalid']:,}" for one in found.values()))
    return lines


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield from columns(rows(result))


def page(title: str, result: Mapping[str, Any]) -> str:
    """All of it on one page of HTML, which loads nothing."""
    head, *body = rows(result)
    table = "".join(
        f"<tr><th>{escape(row[0])}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in body
    )
    parts = []
    for name, one in result["regimes"].items():
        cells = "".join(
            f"<tr><th>{escape(template)}</th><td>{_share(share)}</td></tr>"
            for template, share in one["by_template"].items()
        )
        parts.append(f"<section><h2>{escape(_BY[name])}</h2><table>{cells}</table></section>")
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    about = f"{result['passes']} interleaved passes, temperature {result['temperature']:g}, seed {result['seed']}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>'
        "body{font:15px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;color:#1c2430}"
        "table{border-collapse:collapse;margin:1rem 0}th{text-align:left;font-weight:500}"
        "td,th{padding:.3rem .9rem .3rem 0;border-bottom:1px solid #dde2e8}td{text-align:right}"
        "section{display:inline-block;vertical-align:top;margin-right:2.5rem}h2{font-size:1rem}"
        f"</style><h1>{escape(title)}</h1><p>{escape(about)}</p><table><tr>{heads}</tr>{table}</table>"
        f"{''.join(parts)}</html>\n"
    )


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _points(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} points"


def _interval(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{100 * interval[0]:.0f} to {100 * interval[1]:.0f}"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
