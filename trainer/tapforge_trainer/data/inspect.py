"""What a data set holds, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .folder import DataFolder


@dataclass(frozen=True, slots=True)
class Contents:
    episodes: int
    steps: int
    #: by name, the most frequent first
    actions: dict[str, int]
    outcomes: dict[str, int]
    templates: dict[str, int]
    screens: int
    #: steps without an action, which can't be learned from
    silent: int
    rejected: dict[str, Any]


def inspect(folder: Path) -> Contents:
    """Reads every line and no image. Raises DataError."""
    data = DataFolder(folder)
    actions, outcomes, templates = Counter[str](), Counter[str](), Counter[str]()
    screens, steps = set[str](), 0
    for episode in data:
        outcomes[episode.outcome] += 1
        templates[f"{episode.task.suite}/{episode.task.template}"] += 1
        screens.update(episode.screens)
        steps += len(episode.steps)
        actions.update("none" if step.action is None else step.action.type for step in episode.steps)
    silent = actions.pop("none", 0)
    return Contents(
        len(data),
        steps,
        dict(actions.most_common()),
        dict(outcomes.most_common()),
        dict(templates.most_common()),
        len(screens),
        silent,
        data.about["rejected"],
    )


def lines(found: Contents, most: int = 10) -> list[str]:
    def listed(counts: dict[str, int]) -> str:
        shown = ", ".join(f"{name} {count:,}" for name, count in list(counts.items())[:most])
        return shown + (f", {len(counts) - most} more" if len(counts) > most else "")

    said = [
        f"{found.episodes:,} episodes, {found.steps:,} steps, {found.screens:,} screens",
        f"outcomes   {listed(found.outcomes)}",
        f"templates  {listed(found.templates)}",
        f"actions    {listed(found.actions)}",
    ]
    if found.silent:
        said.append(f"without an action, and not learned from: {found.silent:,} steps")
    said += [f"left out   {one['rows']:,} x {reason}, first {one['first']}" for reason, one in found.rejected.items()]
    return said
