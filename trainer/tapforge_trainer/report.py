"""A run's pictures, made from what is on disk: `curve.png` and `replay.html`. `tapforge view` makes them again.

Nothing is kept for the report alone: credits are computed anew from the recorded groups by the same pure function that
the update used, so they are the ones it used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from tapforge_api import SpecError, TrainingRun, load

from .batch import BatchRules
from .statistics import Interval
from .telemetry import EVENTS
from .viewer.curve import EvaluationPoint, UpdatePoint, draw_curve
from .viewer.recorded import replay_of
from .viewer.replay import write_replay

SPEC, ROLLOUT, EVALUATION, SUMMARY = "spec.yaml", "rollout", "evaluation", "summary.json"
CURVE, REPLAY = "curve.png", "replay.html"


class ReportError(Exception):
    """The folder is not a run, or has nothing to show yet."""


def write_report(folder: Path) -> list[Path]:
    """Writes both files and returns their paths."""
    try:
        run = load(folder / SPEC)
    except (OSError, SpecError) as error:
        raise ReportError(f"{folder} is not a run's folder: {error}") from error
    events = list(read_events(folder))
    # What was done again after a crash counts as it was done last.
    measurements = {(e["update"], e["mode"]): e for e in events if e["event"] == "evaluation"}.values()
    updates = {e["update"]: e for e in events if e["event"] == "update"}
    if not measurements and not updates:
        raise ReportError(f"{folder} has neither an update nor a measurement yet; there is nothing to show")
    floors = {e["policy"]: e["success"] for e in events if e["event"] == "floor" and e["success"] is not None}
    draw_curve(
        folder / CURVE,
        title=f"{run.metadata.name}: success over updates",
        updates=[_point(e) for _, e in sorted(updates.items())],
        evaluations=[_evaluation(e) for e in measurements if e["success"] is not None],
        floors=floors,
    )
    _write_replay(folder, run)
    return [folder / CURVE, folder / REPLAY]


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """The run's events in order; a line that was cut off by a crash is left out."""
    path = folder / EVENTS
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


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
