"""A run's pictures, made from what is on disk: `curve.png` and `replay.html`. `tapforge view` makes them again.

Nothing is kept for the report alone: credits are computed anew from the recorded groups by the same pure function that
the update used, so they are the ones it used.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from tapforge_api import SpecError, TrainingRun

from .batch import BatchRules
from .run_folder import CURVE, EVALUATION, REPLAY, ROLLOUT, SUMMARY, read_events, read_spec
from .statistics import Interval
from .viewer.curve import EvaluationPoint, UpdatePoint, draw_curve
from .viewer.recorded import replay_of
from .viewer.replay import write_replay


class ReportError(Exception):
    """The folder is not a run, or has nothing to show yet."""


def write_report(folder: Path) -> list[Path]:
    """Writes both files and returns their paths."""
    try:
        run = read_spec(folder)
    except (OSError, SpecError) as error:
        raise ReportError(f"{folder} is not a run's folder: {error}") from error
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
    facts = {name: str(summary[name]) for name in ("updates", "episodes", "seconds_total") if name in summary}
    places = [folder / ROLLOUT, folder / EVALUATION / "before-sampled", folder / EVALUATION / "after-sampled"]
    training, before, after = (place if place.is_dir() else None for place in places)
    rules = BatchRules.of(run.spec.algorithm, min_valid=run.spec.rollout.min_valid)
    title = run.metadata.name
    replay = replay_of(title=title, rules=rules, training=training, before=before, after=after, facts=facts)
    write_replay(folder / REPLAY, replay)
