"""Two measurements beside each other, paired by task: what was gained, what was lost. Pure, but for two indices.

A side is a recording of a run: a measurement before training and one after it, or those of two runs. The gain and its
interval are those of `statistics.gain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..statistics import gain
from .index import Index

_SQL = (
    "select e.task, e.template, e.goal, e.outcome, e.name from episodes e join recordings r on r.id = e.recording "
    "where r.name = ? and e.outcome in ('success', 'failure') order by e.name"
)


@dataclass(frozen=True, slots=True)
class TaskResult:
    template: str
    goal: str
    successes: tuple[bool, ...]
    #: name of its first episode
    episode: str


def results(index: Index, recording: str) -> dict[str, TaskResult]:
    """By task, of valid episodes."""
    found: dict[str, TaskResult] = {}
    for row in index.select(_SQL, (recording,)):
        before = found.get(row["task"])
        earlier = before.successes if before else ()
        first = before.episode if before else row["name"]
        won = (*earlier, row["outcome"] == "success")
        found[row["task"]] = TaskResult(row["template"], row["goal"], won, first)
    return found


def compared(a: Mapping[str, TaskResult], b: Mapping[str, TaskResult]) -> dict[str, Any]:
    """Of the tasks that both played; a task's rate is the share of its episodes that succeeded."""
    rows = []
    for task in sorted(a.keys() & b.keys()):
        one, other = a[task], b[task]
        before, after = sum(one.successes) / len(one.successes), sum(other.successes) / len(other.successes)
        kind = _kind(before, after)
        row = {"task": task, "template": one.template, "goal": one.goal, "a": before, "b": after, "kind": kind}
        rows.append({**row, "episode_a": one.episode, "episode_b": other.episode})
    kinds = {kind: sum(row["kind"] == kind for row in rows) for kind in ("gained", "lost", "kept", "never", "same")}
    whole = gain(_paired(a), _paired(b))
    return {
        "tasks": len(rows),
        "only_a": len(a.keys() - b.keys()),
        "only_b": len(b.keys() - a.keys()),
        "kinds": kinds,
        "rows": rows,
        "gain": None if whole is None else whole.difference,
        "interval": None if whole is None or whole.interval is None else [whole.interval.low, whole.interval.high],
    }


def _kind(before: float, after: float) -> str:
    if before == after:
        return {1.0: "kept", 0.0: "never"}.get(after, "same")
    return "gained" if after > before else "lost"


def _paired(side: Mapping[str, TaskResult]) -> dict[tuple[str, str], tuple[bool, ...]]:
    return {(one.template, task): one.successes for task, one in side.items()}
