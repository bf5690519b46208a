"""How far a measured task is from what is practised: three regimes that don't overlap.

- `apps`: it uses an app that no practised task uses.
- `templates`: its template is not practised, and every app of it is.
- `instances`: its template is practised, and it isn't. What else is held out (parameters, layouts) is the split's own.

A task of the list that is practised, or that is asked for in the same words, is in no regime.

The apps of a task are those that its template's plan opens, those that its check names, or, of a task file, what its
line says under `about.apps` or `about.app`. A task of which no app is known is never held out by app.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, get_args

from tapforge_api import TrainingRun
from tapforge_envs.phone import catalog
from tapforge_envs.phone.difference import read
from tapforge_envs.phone.own_check import CHECK, is_proposed, is_walk
from tapforge_envs.phone.tasks import TaskSet as PhoneTasks
from tapforge_envs.protocol import Task

from .contamination import goal_of
from .files import read_abouts
from .selection import as_named, training_tasks
from .source import FixedTasks, TaskError, shortened
from .stages import stages_of

Regime = Literal["instances", "templates", "apps"]
REGIMES: Final[tuple[Regime, ...]] = get_args(Regime)
#: tasks of an endless set that say what is practised, and among which measured ones are looked for
_PRACTISED, _LOOKED_AT = 4000, 40_000


@dataclass(frozen=True, slots=True)
class Practised:
    templates: frozenset[str]
    apps: frozenset[str]
    #: keys and goals of a file's; what a suite holds out is its split's
    tasks: frozenset[str] = frozenset()
    goals: frozenset[str] = frozenset()

    def has(self, task: Task) -> bool:
        return task.key in self.tasks or goal_of(task) in self.goals


def regime_of(task: Task, apps: Iterable[str], practised: Practised) -> Regime:
    if not practised.apps.issuperset(apps):
        return "apps"
    return "instances" if task.template in practised.templates else "templates"


def apps_of(task: Task, about: Mapping[str, Any]) -> tuple[str, ...]:
    """() where none is known. Raises TaskError."""
    said = about.get("apps", about.get("app"))
    if said is not None:
        names = [said] if isinstance(said, str) else said
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TaskError(f"{task.key}: about.apps is {said!r:.60}; it names an app, or a list of them")
        return tuple(names)
    if is_walk(task.template) and CHECK in task.params:
        try:
            return tuple(dict.fromkeys(change.at[0] for change in read(task.params[CHECK])))
        except ValueError:
            return ()
    if task.suite not in catalog.SUITES or is_proposed(task.template):
        return ()
    try:
        template = catalog.template_of(task)
    except catalog.UnknownTask:
        return ()
    steps = list(template.plan(task.params, lambda: False))
    named = (do.app or do.tap.removeprefix("app:") for do in steps if do.app or do.tap.startswith("app:"))
    return tuple(dict.fromkeys(named))


def tasks_by_regime(run: TrainingRun, regimes: Sequence[Regime]) -> dict[Regime, FixedTasks]:
    """Up to `spec.evaluation.episodes` different tasks of each, by `spec.evaluation.seed` alone. Raises TaskError for a
    regime that has none, and UnknownTask."""
    spec = run.spec
    practises = [stage.spec.tasks.file for stage in stages_of(run)]
    files = [name for name in (*practises, spec.tasks.file, spec.evaluation.tasks.file) if name is not None]
    known = {key: about for name in files for key, about in read_abouts(Path(name), spec.environment.protocol).items()}

    def used(task: Task) -> tuple[str, ...]:
        return apps_of(task, known.get(task.key, {}))

    practised = _practised(run, used)
    found: dict[Regime, dict[str, Task]] = {regime: {} for regime in regimes}
    measured = shortened(as_named(run, all_templates=True), spec.rollout.max_steps)
    every = len(measured.tasks) if isinstance(measured, FixedTasks) else _LOOKED_AT
    kinds: dict[tuple[str, str], Regime] = {}
    for index in range(every):
        task = measured.sample(spec.evaluation.seed, index)
        if practised.has(task):
            continue
        kind = (task.template, str(sorted(task.params.items()))) if task.key not in known else (task.key, "")
        if kind not in kinds:
            kinds[kind] = regime_of(task, used(task), practised)
        place = found.get(kinds[kind])
        if place is not None and len(place) < spec.evaluation.episodes:
            place.setdefault(task.key, task)
        if all(len(place) == spec.evaluation.episodes for place in found.values()):
            break
    for regime, tasks in found.items():
        if not tasks:
            raise TaskError(_none(regime, practised))
    return {regime: FixedTasks(tuple(tasks.values())) for regime, tasks in found.items()}


def other_templates(run: TrainingRun, count: int) -> FixedTasks | None:
    """Up to `count` tasks of what is measured whose templates are not practised; None where there are none."""
    practised = _practised(run, lambda task: ())
    measured = shortened(as_named(run, all_templates=True), run.spec.rollout.max_steps)
    if isinstance(measured, PhoneTasks):
        left = tuple(template for template in measured.templates if template.name not in practised.templates)
        if not left:
            return None
        measured = shortened(PhoneTasks(measured.suite, measured.split, left), run.spec.rollout.max_steps)
    every = len(measured.tasks) if isinstance(measured, FixedTasks) else 50 * count
    drawn = (measured.sample(run.spec.evaluation.seed, index) for index in range(every))
    different = {task.key: task for task in drawn if task.template not in practised.templates}
    return FixedTasks(tuple(islice(different.values(), count))) if different else None


def _practised(run: TrainingRun, used: Callable[[Task], tuple[str, ...]]) -> Practised:
    drawn, listed = list[Task](), list[Task]()
    for stage in stages_of(run):
        tasks = training_tasks(stage)
        count = len(tasks.tasks) if isinstance(tasks, FixedTasks) else _PRACTISED
        some = [tasks.sample(run.spec.seed, index) for index in range(count)]
        drawn += some
        listed += some if stage.spec.tasks.file is not None else []
    kinds = {(task.template, str(task.params)): task for task in drawn}.values()
    return Practised(
        frozenset(task.template for task in drawn),
        frozenset(app for task in kinds for app in used(task)),
        frozenset(task.key for task in listed),
        frozenset(goal_of(task) for task in listed) - {""},
    )


def _none(regime: Regime, practised: Practised) -> str:
    if regime == "apps":
        some = ", ".join(sorted(practised.apps)[:8]) or "no app is known of any"
        return (
            f"no measured task is held out by app: each uses practised ones alone ({some}); leave apps out of "
            "--regimes, or practise fewer of them (spec.tasks.templates, or a file of `tapforge tasks walk --app`)"
        )
    if regime == "templates":
        return (
            "no measured task is held out by template: every template is practised; leave templates out of --regimes, "
            "or practise fewer of them (spec.tasks.templates)"
        )
    return (
        "no measured task has a practised template without being practised itself: leave instances out of --regimes, "
        "or measure on other tasks of the practised templates (spec.evaluation.tasks)"
    )
