"""What tasks came to, in figures: of an update for its event, and of a whole run for summary.json. Rates are shares
from 0 to 1, ages are updates, intervals are Wilson's at 95 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..statistics import wilson
from .memory import DifficultyMemory, TaskRecord

#: tasks in a summary, those with most attempts; of a suite without an end there may be thousands
_LISTED = 200


def figures_of_update(templates: Mapping[str, tuple[int, int]], memory: DifficultyMemory) -> dict[str, Any]:
    """Fields of an update's event. `templates`: (successes, valid episodes) of each that had any."""
    found = {}
    for name, (successes, episodes) in templates.items():
        if interval := wilson(successes, episodes):
            rate = successes / episodes
            found[name] = {"success": rate, "low": interval.low, "high": interval.high, "episodes": episodes}
    counts = {"known": len(memory.tasks), "pausing": memory.pausing}
    return {"templates": found, "tasks": {**counts, "paused": memory.paused, "retried": memory.retried}}


def task_table(practice: Mapping[str, Any]) -> dict[str, Any]:
    """Of `TaskSource.practice`: every template, and the tasks with most attempts. `recent` is the decayed rate, `age`
    the updates since the last result."""
    memory = DifficultyMemory()
    memory.restore(practice.get("memory", {}))
    most = sorted(memory.tasks.items(), key=lambda item: (-item[1].attempts_total, item[0]))[:_LISTED]
    return {
        "templates": {name: _row(record, memory.update) for name, record in sorted(memory.templates.items())},
        "tasks": {key: _row(record, memory.update) for key, record in sorted(most)},
        "tasks_known": len(memory.tasks),
        "pausing": memory.pausing,
        "paused": memory.paused,
        "retried": memory.retried,
    }


def _row(record: TaskRecord, update: int) -> dict[str, Any]:
    interval = wilson(record.successes_total, record.attempts_total)
    row: dict[str, Any] = {
        "success": round(record.successes_total / record.attempts_total, 4),
        "interval": None if interval is None else [round(interval.low, 4), round(interval.high, 4)],
        "attempts": record.attempts_total,
        "recent": round(record.successes / record.attempts, 4) if record.attempts else None,
        "age": update - record.update,
    }
    return row | ({"pauses_until": record.pauses_until} if record.pauses_until > update else {})
