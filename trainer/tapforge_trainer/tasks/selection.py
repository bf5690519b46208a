"""Which tasks a run practises, shows and measures on, as its spec names them. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tapforge_api import TrainingRun
from tapforge_api.dataset import DataSet
from tapforge_api.environment import Tasks
from tapforge_envs.phone import catalog
from tapforge_envs.phone.own_check import is_proposed
from tapforge_envs.phone.tasks import TaskSet as PhoneTasks
from tapforge_envs.protocol import Task, UnknownTask
from tapforge_envs.web import catalog as web

from ..data.episodes import DataError
from ..data.recorded_tasks import HELD_OUT, PRACTISED, RecordedTasks, recorded_tasks
from .contamination import Contamination, contamination
from .files import read_tasks
from .memory import CooldownRule, DifficultyMemory
from .samplers.registry import make_sampler
from .samplers.sampler import Sampler
from .samplers.stages import Stages
from .source import FixedTasks, TaskError, TaskSet, TaskSource, at_most, shortened, weight_of
from .stages import stages_of

#: tasks by which it is found out whether a mix has any
_LOOKED_AT = 1000


def task_errors(run: TrainingRun) -> list[str]:
    """What is wrong with the tasks that a run names, before anything is started. A phone by its address has suites of
    its own, but only in a task file."""
    spec, tasks, measured = run.spec, run.spec.tasks, run.spec.evaluation.tasks
    if spec.environment.source.dataset is not None:
        return _recorded_errors(run)
    protocol = spec.environment.protocol
    if protocol != "tapforge":
        what = f"with protocol {protocol} tasks come from a file: which suites its servers have is not known here"
        if tasks.file is None:
            return [f"spec.tasks.file: {what}; give a file with one task per line"]
        if measured.suite is not None:
            return [
                f"spec.evaluation.tasks.suite: {what}; give evaluation.tasks.file, or neither to measure on tasks.file"
            ]
    errors = []
    if tasks.file is not None and spec.warm_start is not None and spec.warm_start.data is None:
        errors.append(
            "spec.warmStart: a task file has no demonstrations; name a data set (warmStart.data) or a suite, or leave "
            "warmStart out"
        )
    unknown: list[tuple[str, str]] = []
    own = bool(measured.suite or measured.templates)  # otherwise what is measured is what is practised: said once
    for field, tasks_of in (("spec.tasks", training_tasks), ("spec.evaluation.tasks", _measured)):
        try:
            tasks_of(run)
        except catalog.UnknownTask as error:
            unknown.append((field, str(error.args[0])))
        except TaskError:  # reported by `inspect_files`
            pass
    if len({why for _, why in unknown}) == 1 and not own:
        unknown = unknown[:1]
    errors += [f"{field}: {why}" for field, why in unknown] + _goals_alone(run)
    if (processes := spec.environment.source.processes) is not None:
        pages = processes.environment == "miniwob"
        errors += _unknown_tasks("spec.tasks.file", tasks.file, pages)
        errors += _unknown_tasks("spec.evaluation.tasks.file", measured.file, pages)
        if not errors:
            named = {
                "spec.tasks.suite": None if tasks.file is not None else tasks.suite,
                "spec.evaluation.tasks.suite": measured.suite,
            }
            errors += [
                _elsewhere(field, suite) for field, suite in named.items() if suite and _on_pages(suite) != pages
            ]
    return list(dict.fromkeys(errors))


def _recorded_errors(run: TrainingRun) -> list[str]:
    """Of a run on recorded steps."""
    if run.spec.warm_start is not None and run.spec.warm_start.data is None:
        return ["spec.warmStart: a data set has no demonstrator; name a data set (warmStart.data), or leave it out"]
    return []


def _on_pages(suite: str) -> bool:
    return suite == web.SUITE


def _elsewhere(field: str, suite: str) -> str:
    needed = "miniwob" if _on_pages(suite) else "phone"
    return f"{field}: suite {suite} runs with spec.environment.source.processes.environment {needed}; set that"


def _goals_alone(run: TrainingRun) -> list[str]:
    """Tasks of a file that nothing judges."""
    spec, own = run.spec, run.spec.evaluation.tasks.file
    measured = own or (spec.tasks.file if spec.evaluation.tasks.suite is None else None)
    judged = "set spec.evaluation.judged: true, or measure on tasks that have checks (spec.evaluation.tasks)"
    errors = []
    for field, file, ignored, remedy in (
        ("spec.tasks.file", spec.tasks.file, spec.rewards.verifier == "ignored", "set spec.rewards.verifier: ignored"),
        ("spec.evaluation.tasks.file" if own else "spec.evaluation", measured, spec.evaluation.judged, judged),
    ):
        try:
            goals = [task for task in _listed(file) if is_proposed(task.template)]
        except TaskError:  # reported by `inspect_files`
            continue
        if goals and not ignored:
            errors.append(
                f"{field}: {file}: {len(goals):,} tasks have a goal and no check, such as {goals[0].goal!r}: name a "
                f"judge in spec.rewards and {remedy}"
            )
    return errors


def _listed(file: str | None) -> tuple[Task, ...]:
    """Raises TaskError."""
    return read_tasks(Path(file)).tasks if file is not None else ()


def _unknown_tasks(field: str, file: str | None, pages: bool) -> list[str]:
    """Tasks of a file that the environment of this machine doesn't know."""
    errors: list[str] = []
    try:
        listed = _listed(file)
    except TaskError:  # reported by `inspect_files`
        return errors
    for task in listed:
        try:
            web.page_of(task) if pages else catalog.template_of(task)
        except (catalog.UnknownTask, UnknownTask) as error:
            errors.append(f"{field}: {file}: {task.key}: {error.args[0]}")
    return errors


def _suite(name: str, split: str, templates: Sequence[str]) -> PhoneTasks | web.TaskSet:
    """Raises catalog.UnknownTask."""
    if _on_pages(name):
        try:
            return web.tasks(split, templates)
        except UnknownTask as error:
            raise catalog.UnknownTask(str(error)) from error
    if name not in catalog.SUITES:
        raise catalog.UnknownTask(catalog.unknown("suite", name, [*catalog.SUITES, web.SUITE]))
    return catalog.tasks(name, split, templates)


def training_tasks(run: TrainingRun) -> TaskSet:
    tasks, recorded = run.spec.tasks, run.spec.environment.source.dataset
    if recorded is not None:
        found: TaskSet = _recorded(Path(recorded.path), recorded, PRACTISED)
        return found if tasks.max_tasks is None else at_most(found, run.spec.seed, tasks.max_tasks)
    if tasks.file is not None:
        judged = run.spec.rewards.verifier == "ignored"
        found = read_tasks(Path(tasks.file), run.spec.environment.protocol, judged=judged)
    else:
        found = _suite(tasks.suite, tasks.split, tasks.templates)
    found = shortened(found, run.spec.rollout.max_steps)
    return found if tasks.max_tasks is None else at_most(found, run.spec.seed, tasks.max_tasks)


def _recorded(folder: Path, recorded: DataSet, suite: str) -> RecordedTasks:
    """Raises TaskError."""
    try:
        return recorded_tasks(folder, recorded.outcomes, suite)
    except DataError as error:
        raise TaskError(str(error)) from error


def sampler_of(tasks: Tasks) -> Sampler | None:
    """None: uniform. Raises ValueError and TypeError as `make_sampler`, and imports another package's."""
    made = make_sampler(tasks.sampler.name, {one.name: one.value for one in tasks.sampler.options})
    return None if tasks.sampler.name == "uniform" else made


def sampler_errors(run: TrainingRun) -> list[str]:
    """What is wrong with the sampler, before anything is started."""
    tasks = run.spec.tasks
    try:
        sampler = sampler_of(tasks)
        if sampler is None:
            return []
        try:
            first = training_tasks(run)
            found = [first.sample(run.spec.seed, number) for number in range(_LOOKED_AT)]
        except (TaskError, catalog.UnknownTask):  # reported as what is wrong with the tasks
            return []
        weight_of(sampler, found[0], DifficultyMemory())
    except Exception as error:  # noqa: BLE001 - another package's code, which may break in any way
        return [f"spec.tasks.sampler: {str(error) or type(error).__name__}"]
    templates = sorted({task.template for task in found})
    empty = (
        [stage.since for stage in sampler.stages if not any(map(stage.weight, templates))]
        if (isinstance(sampler, Stages))
        else []
    )
    some = ", ".join(templates[:5]) + (", ..." if len(templates) > 5 else "")
    return [f"spec.tasks.sampler: plan's stage {since} gives none of the templates a weight: {some}" for since in empty]


def task_source(run: TrainingRun, state: int, practice: Mapping[str, Any], under_way: int) -> TaskSource:
    """From where a checkpoint left it, with so many groups under way."""
    spec, cooldown = run.spec, run.spec.tasks.cooldown
    rule = None if cooldown is None else CooldownRule(**cooldown.model_dump(by_alias=False))
    capacity = (spec.rollout.max_staleness + 1) * spec.rollout.groups_per_update
    return TaskSource(
        training_tasks(run),
        spec.seed,
        state,
        sampler=sampler_of(spec.tasks),
        memory=DifficultyMemory(spec.tasks.half_life, rule),
        ahead=max(0, capacity - under_way),
        practice=practice,
    )


def demonstrated_tasks(run: TrainingRun) -> PhoneTasks | web.TaskSet:
    """Only suites have demonstrations: a task file has none."""
    tasks = run.spec.tasks
    return _suite(tasks.suite, tasks.split, tasks.templates)


def evaluation_tasks(run: TrainingRun, most: int | None = None) -> FixedTasks:
    """`spec.evaluation.episodes` different tasks, chosen by `spec.evaluation.seed` alone; the first `most` of them."""
    wanted = run.spec.evaluation.episodes
    return at_most(_measured(run), run.spec.evaluation.seed, wanted if most is None else min(wanted, most))


def _measured(run: TrainingRun) -> TaskSet:
    return shortened(as_named(run), run.spec.rollout.max_steps)


def as_named(run: TrainingRun, *, all_templates: bool = False) -> TaskSet:
    """What is measured on. `all_templates`: where the file names none, those of the suite that aren't practised too.
    Raises TaskError and UnknownTask."""
    practised, measured, recorded = run.spec.tasks, run.spec.evaluation.tasks, run.spec.environment.source.dataset
    if recorded is not None:
        held_out = recorded.held_out is not None
        return _recorded(Path(recorded.held_out or recorded.path), recorded, HELD_OUT if held_out else PRACTISED)
    file = measured.file or (practised.file if measured.suite is None else None)
    if file is not None:
        return read_tasks(Path(file), run.spec.environment.protocol, judged=run.spec.evaluation.judged)
    suite = measured.suite or practised.suite
    same = suite == practised.suite and not all_templates
    templates = measured.templates or (practised.templates if same else ())
    return _suite(suite, measured.split, templates)


def contamination_of(
    run: TrainingRun, drawn: int | Sequence[int], most: int | None = None, imitated: Iterable[Task] = ()
) -> Contamination:
    """What the measured tasks share with the demonstrated ones, or those of a data set (`imitated`), and the first
    `drawn` that are practised; of each no more than `most` are compared. Stages that read no verifier and no label may
    practise what is measured: `shared_on_purpose` says what they do."""
    spec = run.spec
    warm = spec.warm_start if spec.tasks.file is None else None
    shown = warm.demonstrations if warm is not None and warm.data is None else 0
    shown = shown if most is None else min(shown, most)
    demonstrated = chain(
        (demonstrated_tasks(run).sample(spec.seed, number) for number in range(shown)), islice(imitated, most)
    )
    return contamination(evaluation_tasks(run, most).tasks, chain(demonstrated, _drawn(run, drawn, most, False)))


def shared_on_purpose(run: TrainingRun, drawn: int | Sequence[int], most: int | None = None) -> Contamination | None:
    """What the measured tasks share with those of stages that read neither verifier nor label; None: nothing."""
    if not any(_blind(run, stage) for stage in stages_of(run)):
        return None
    found = contamination(evaluation_tasks(run, most).tasks, _drawn(run, drawn, most, True))
    return None if found.clean else found


def _blind(run: TrainingRun, stage: TrainingRun) -> bool:
    return bool(run.spec.stages) and stage.spec.rewards.verifier == "ignored"


def _drawn(run: TrainingRun, drawn: int | Sequence[int], most: int | None, blind: bool) -> Iterator[Task]:
    """Of stages that are blind, or of the others; `drawn`: of each."""
    for number, stage in enumerate(stages_of(run)):
        if _blind(run, stage) is blind:
            practised, count = training_tasks(stage), drawn if isinstance(drawn, int) else drawn[number]
            if isinstance(practised, FixedTasks):  # one pass has all of them
                count = min(count, len(practised.tasks))
            for index in range(count if most is None else min(count, most)):
                yield practised.sample(run.spec.seed, index)
