"""An estimate as JSON and for people, and what follows from measured figures. Pure but for `measured`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapforge_api import TrainingRun
from tapforge_api.gpus import cluster_gpus_error

from .estimate import RESERVE, Estimate
from .known import GIB
from .learner import CATEGORIES, Moment, peak
from .served import ServedEstimate


@dataclass(frozen=True, slots=True)
class Figures:
    """What a person measured or gave; None: nothing, and nothing is concluded."""

    #: MB/s at which checkpoints are written, all ranks together
    disk_rate: float | None = None
    #: tokens per second of the learner, all ranks together
    tokens_per_second: float | None = None
    #: of a recorded run: (name, updates per hour, steps of phones per hour)
    measured: tuple[str, float, float] | None = None
    #: the fullest moment of a learner rank alone, as traced
    traced: Moment | None = None
    #: what would be faster and fits as well
    faster: tuple[str, ...] = ()
    #: of spec.models
    served: tuple[ServedEstimate, ...] = ()

    @property
    def served_fit(self) -> bool:
        return all(one.problem is None for one in self.served if one.started)

    @property
    def served_gpus(self) -> int:
        return sum(one.gpus for one in self.served if one.started)


def measured(folder: Path) -> tuple[str, float, float]:
    """Of a run's summary, or of what it has recorded so far. Raises ValueError that says what is missing."""
    name = folder.name
    try:
        if (path := folder / "summary.json").is_file():
            found = json.loads(path.read_text())
            updates, steps, seconds = found["updates"], found["env_steps"], found["seconds_rl"]
        else:
            lines = (folder / "events.jsonl").read_text().splitlines()
            events = [json.loads(line) for line in lines if '"update"' in line]
            last = [event for event in events if event.get("event") == "update"][-1]
            updates, steps, seconds = last["update"], 0, last["seconds"]
        return name, updates / seconds * 3600, steps / seconds * 3600
    except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"--measured {folder}: it records no update yet, or is not a folder of a run ({error})"
        ) from error


def as_json(run: TrainingRun, e: Estimate, advice: tuple[str, ...], figures: Figures) -> dict[str, Any]:
    seconds, lacking = checkpoint_seconds(e, figures), cluster_gpus_error(run.spec)
    return {
        "gpus": e.gpus + figures.served_gpus,
        "gpus_problem": lacking,
        "fits": e.fits and figures.served_fit and lacking is None,
        "gpu_bytes": e.card.bytes,
        "gpu_source": e.card.source,
        "peak_bytes": e.peak,
        "reserve_bytes": e.card.reserve,
        "per_gpu_bytes": {role.role: {name: role.peak.bytes.get(name, 0) for name in CATEGORIES} for role in e.roles},
        "roles": {
            role.role: {
                "gpus": role.count,
                "peak_bytes": role.peak.total,
                "when": role.peak.name,
                "problem": role.problem,
            }
            for role in e.roles
        },
        "models": {one.name: _served(one) for one in figures.served},
        "parameters": e.shape.parameters,
        "trained_parameters": e.learner.trained,
        "answers_at_full_context": e.answers_at_once,
        "checkpoint_bytes": e.checkpoint,
        "checkpoint_seconds": seconds,
        "suspend_grace_seconds": _grace(run),
        "host_bytes": sum(e.host.values()),
        "host": dict(e.host),
        "updates_per_hour": figures.measured[1] if figures.measured else None,
        "learner_tokens_per_hour": figures.tokens_per_second * 3600 if figures.tokens_per_second else None,
        "traced": None if figures.traced is None else _traced(e, figures.traced),
        "advice": list(advice),
        "faster": list(figures.faster),
    }


def _served(one: ServedEstimate) -> dict[str, Any]:
    return {
        "gpus": one.gpus,
        "started": one.started,
        "weights_bytes": one.weights,
        "kv_cache_bytes": one.kv_cache,
        "questions_at_full_context": one.at_once,
        "problem": one.problem,
    }


def _traced(e: Estimate, moment: Moment) -> dict[str, Any]:
    """Of a learner rank alone: what the trace found beside what the closed form says."""
    found = {name: moment.bytes.get(name, 0) for name in CATEGORIES}
    return {"peak_bytes": moment.total, "closed_form_bytes": peak(e.learner).total, "per_gpu_bytes": found}


def checkpoint_seconds(e: Estimate, figures: Figures) -> float | None:
    return e.checkpoint / (figures.disk_rate * 1e6) if figures.disk_rate else None


def _grace(run: TrainingRun) -> float | None:
    return run.spec.cluster.suspend_grace_seconds if run.spec.cluster is not None else None


def render(run: TrainingRun, e: Estimate, advice: tuple[str, ...], figures: Figures) -> str:
    """For people."""
    lacking = cluster_gpus_error(run.spec)
    names = {"learner": "learner rank", "engine": "engine", "colocated": "learner rank and engine"}
    width = max(len(name) for name in CATEGORIES)
    head = f"{'GiB per GPU':<{width}}" + "".join(f"  {names[role.role]:>24}" for role in e.roles)
    table = [head, f"{'GPUs':<{width}}" + "".join(f"  {role.count:>24}" for role in e.roles)]
    for category in CATEGORIES:
        row = [role.peak.bytes.get(category, 0) for role in e.roles]
        if any(row):
            table.append(f"{category.replace('_', ' '):<{width}}" + "".join(f"  {n / GIB:>24.1f}" for n in row))
    table.append(f"{'peak':<{width}}" + "".join(f"  {role.peak.total / GIB:>24.1f}" for role in e.roles))
    table.append(f"{'at':<{width}}" + "".join(f"  {role.peak.name:>24}" for role in e.roles))
    usable = f"{e.card.usable / GIB:.1f} of {e.card.bytes / GIB:.1f} GiB"
    lines = {
        "model": f"{e.shape.parameters / 1e9:.2f} B parameters, {e.learner.trained / 1e9:.3g} B of them trained",
        "GPUs": f"{e.gpus + figures.served_gpus} of {e.card.bytes / GIB:.1f} GiB ({e.card.source})",
        "usable": f"{usable}: {RESERVE:.0%} is for the CUDA context, NCCL and fragmentation, not measured",
        "micro-batch": f"{e.learner.tokens:,} tokens, {_frames(e)} patches of frames at most",
        "cache": _cache(e),
        "checkpoint": _checkpoint(run, e, figures),
        "host memory": f"{sum(e.host.values()) / GIB:.0f} GiB on all nodes together: " + _parts(e.host),
        **{f"model {one.name}": one.words for one in figures.served},
        **_speed(figures),
        **({} if figures.traced is None else {"traced": _compared(e, figures.traced)}),
        "fits": "yes" if e.fits and figures.served_fit and lacking is None else "no",
    }
    width = max(map(len, lines))
    missing = [] if lacking is None else [f"too few: {lacking}"]
    problems = [f"{names[role.role]}: {role.problem}" for role in e.roles if role.problem]
    text = [f"{name:<{width}}  {value}" for name, value in lines.items()]
    said = [*(f"advice: {one}" for one in advice), *(f"faster: {one}" for one in figures.faster)]
    return "\n".join([*table, "", *text, *missing, *(f"too much: {problem}" for problem in problems), *said])


def _frames(e: Estimate) -> str:
    return f"{e.learner.patches:,}"


def _cache(e: Estimate) -> str:
    wanted, engine = e.engine.sequences, e.engine
    held = f"holds {e.answers_at_once:,} answers of {engine.context:,} tokens at once"
    size = f"{engine.kv_bytes_per_token / 1024:.0f} KiB per token and GPU"
    if e.answers_at_once >= wanted:
        return f"{held}, and an engine samples {wanted:,}; {size}"
    return f"{held}; of the {wanted:,} that an engine samples some wait, or are shorter; {size}"


def _checkpoint(run: TrainingRun, e: Estimate, figures: Figures) -> str:
    text = f"{e.checkpoint / GIB:.1f} GiB: masters and both moments of what is trained"
    seconds, grace = checkpoint_seconds(e, figures), _grace(run)
    if seconds is None:
        return text
    text += f"; {seconds:.0f} s at {figures.disk_rate:g} MB/s"
    if grace is None:
        return text
    field = "cluster.suspendGraceSeconds"
    if seconds <= grace:
        return f"{text}, within {field} ({grace:g})"
    return f"{text}, longer than {field} ({grace:g}): a suspended run would lose it; give at least {seconds:.0f}"


def _parts(host: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.0f}" for name, size in host.items() if size >= GIB / 2) or "little"


def _compared(e: Estimate, traced: Moment) -> str:
    closed = peak(e.learner).total
    return (
        f"a learner rank alone {traced.total / GIB:.1f} GiB, by its own code on fake tensors; {closed / GIB:.1f} in "
        f"closed form ({closed / traced.total - 1:+.1%})"
    )


def _speed(figures: Figures) -> dict[str, str]:
    found = {}
    if figures.measured is not None:
        name, updates, steps = figures.measured
        phones = f", {steps:,.0f} steps of phones" if steps else ""
        found["measured"] = f"{name}: {updates:,.1f} updates per hour{phones}"
    if figures.tokens_per_second is not None:
        found["learner"] = (
            f"{figures.tokens_per_second * 3600:,.0f} tokens per hour, at the {figures.tokens_per_second:g} "
        )
        found["learner"] += "tokens/s that were given"
    return found
