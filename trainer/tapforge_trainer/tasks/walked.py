"""A file of tasks that are made by playing forward on the simulated phone (`tapforge_envs/phone/walks`).

- Candidates are numbered; what each is follows from the suite, the seed and its number. Several begin on one phone.
- One is taken that the walk solves, that no empty or random rollout solves, whose judge is right about every state that
  is tried, and whose goal isn't there yet, neither in the file nor among those that the suite holds out.
- The file is written phone by phone and gone on with: cut off anywhere, the same call ends with the same file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from tapforge_envs.phone import catalog
from tapforge_envs.phone.tasks import SEEDS
from tapforge_envs.phone.walks import operations
from tapforge_envs.phone.walks.trials import ROLLOUTS, Rollouts, Tried, try_walk
from tapforge_envs.phone.walks.walk import Walk, WalkError, walk

from .contamination import goal_of
from .lines import kept, line_of, written
from .source import TaskError

#: candidates that begin on one phone
_PER_PHONE: Final = 8
#: candidates in a row without a new task, after which there seems to be none left
_PATIENCE: Final = 2000
BY: Final = "walk"


@dataclass
class Walked:
    """What became of the candidates. `wrong`: words of the first verdicts that were wrong."""

    tasks: int = 0
    candidates: int = 0
    probes: int = 0
    false_verdicts: int = 0
    rollouts: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "tasks": self.tasks,
            "candidates": self.candidates,
            "probes": self.probes,
            "false_verdicts": self.false_verdicts,
            "rollouts_judged": self.rollouts,
            "refused": dict(self.refused.most_common()),
        }


def write_walked(
    path: Path,
    *,
    suite: str,
    count: int,
    seed: int,
    most: int,
    apps: Sequence[str] = (),
    rollouts: int = ROLLOUTS,
    report: Callable[[Walked], None] = lambda found: None,
) -> Walked:
    """Has `count` tasks in the file at the end. Counted is what this call tried. Raises TaskError."""
    if unknown := sorted(set(apps) - set(operations.apps(suite))):
        raise TaskError(
            f"no walk uses the app {unknown[0]!r} of suite {suite}; known are {', '.join(operations.apps(suite))}"
        )
    origin = {"by": BY, "seed": seed, "operations_at_most": most, "apps_allowed": list(apps), "rollouts": rollouts}
    earlier = kept(path)
    for task, about in earlier:
        other = next((name for name, value in origin.items() if about.get(name) != value), None)
        if task.suite != suite or other is not None:
            what = f"suite {task.suite}" if other is None else f"{other} {about.get(other)}"
            raise TaskError(f"{path} was begun with {what}; go on with that, or name another file")
    goals = {goal_of(task) for task, _ in earlier} | held_out(suite)
    found, tried = Walked(tasks=len(earlier)), Rollouts(suite, rollouts)
    number, last = (earlier[-1][1]["number"] + 1 if earlier else 0), 0
    with path.open("a", encoding="utf-8") as file:
        while found.tasks < count:
            lines: list[str] = []
            phone = number // _PER_PHONE
            while number // _PER_PHONE == phone and found.tasks < count:
                made = _candidate(suite, seed, number, most, apps, tried, goals, found)
                if made is not None:
                    goals.add(goal_of(made.task))
                    lines.append(line_of(made.task, {**origin, "number": number, **_about(made)}))
                    found.tasks += 1
                last = 0 if made is not None else last + 1
                number += 1
            written(file, lines)
            report(found)
            if last >= _PATIENCE:
                raise TaskError(
                    f"the last {last:,} walks made no task that {path} lacks: it has {found.tasks:,}; allow more apps, "
                    "or more operations with --operations"
                )
    return found


def held_out(suite: str) -> set[str]:
    """Goals of the splits that are measured on."""
    templates = catalog.suite(suite).templates
    return {
        " ".join(template.goal(params).casefold().split())
        for template in templates
        for split in ("validation", "test")
        for params in template.split(split)
    }


def _candidate(
    suite: str,
    seed: int,
    number: int,
    most: int,
    apps: Sequence[str],
    rollouts: Rollouts,
    goals: set[str],
    found: Walked,
) -> Walk | None:
    """The task of a candidate; None, and counted why, where it makes none."""
    found.candidates += 1
    rng = Random(f"walk:{suite}:{seed}:{number}")
    phone = Random(f"walk phone:{suite}:{seed}:{number // _PER_PHONE}").randrange(SEEDS)
    try:
        made = walk(suite, phone, rng, most=most, apps=apps)
    except WalkError as error:
        found.refused[str(error)] += 1
        return None
    if goal_of(made.task) in goals:
        found.refused["its goal is there already, or held out"] += 1
        return None
    tried = try_walk(made, rollouts.of(phone), rng)
    found.probes += tried.probes
    found.rollouts += rollouts.count
    found.false_verdicts += len(tried.wrong)
    if (why := _why_not(tried)) is None:
        return made
    found.refused[why] += 1
    found.wrong += [f"{made.task.goal!r}: {one.what}" for one in tried.wrong][: max(0, 5 - len(found.wrong))]
    return None


def _why_not(tried: Tried) -> str | None:
    if tried.wrong:
        return "its judge is wrong about a state"
    if not tried.solved:
        return "the walk, played again, doesn't solve it"
    return "an empty or random rollout solves it" if tried.lucky else None


def _about(made: Walk) -> dict[str, Any]:
    return {
        "apps": sorted({one.app for one in made.operations}),
        "operations": [f"{one.kind} {one.about}" for one in made.operations],
        "walk_steps": len(made.actions) + 1,
    }


def summary(found: Walked) -> Iterator[str]:
    yield f"{found.tasks:,} tasks; {found.candidates:,} walks were tried"
    yield (
        f"{found.false_verdicts:,} false verdicts about {found.probes:,} states; "
        f"{found.rollouts:,} empty and random rollouts were judged"
    )
    for why, times in found.refused.most_common():
        yield f"{times:6,}  not taken: {why}"
    yield from (f"        false verdict: {words}" for words in found.wrong)
