"""Which suites the phone has, and how a task becomes a running phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from tapforge_envs.protocol import Task

from . import quickstart, standard
from .device import Phone, PhoneImage, Rules
from .own_check import is_proposed, is_walk, template_of_goal, template_of_walk
from .tasks import SPLITS, Split, TaskSet, Template, pick


@dataclass(frozen=True)
class Suite:
    name: str
    image: PhoneImage
    templates: tuple[Template, ...]


SUITES: dict[str, Suite] = {
    "quickstart": Suite("quickstart", quickstart.IMAGE, quickstart.TEMPLATES),
    "standard": Suite("standard", standard.IMAGE, standard.TEMPLATES),
}


class UnknownTask(LookupError):
    """A suite, template, split or parameter that doesn't exist; the message names the nearest that does."""


def suite(name: str) -> Suite:
    if name not in SUITES:
        raise UnknownTask(unknown("suite", name, list(SUITES)))
    return SUITES[name]


def tasks(suite_name: str, split: str, templates: Sequence[str] = ()) -> TaskSet:
    found = suite(suite_name)
    known = [t.name for t in found.templates]
    for name in templates:
        if name not in known:
            raise UnknownTask(unknown(f"template of suite {suite_name!r}", name, known))
    if split not in SPLITS:
        raise UnknownTask(unknown("split", split, list(SPLITS)))
    chosen: Split = SPLITS[SPLITS.index(split)]
    with_tasks = tuple(t for t in pick(found.templates, templates) if t.split(chosen))
    if not with_tasks:
        raise UnknownTask(f"no task in split {split!r} of suite {suite_name!r} with templates {list(templates)}")
    return TaskSet(suite_name, chosen, with_tasks)


def template_of(task: Task) -> Template:
    """One of the suite's, or, for a task that says its check itself, one of its own. Raises UnknownTask."""
    found = suite(task.suite)
    if is_walk(task.template):
        try:
            return template_of_walk(task, found.image)
        except ValueError as error:
            raise UnknownTask(f"template {task.template!r}: {error}") from error
    if is_proposed(task.template):
        return template_of_goal(task)
    known = {t.name: t for t in found.templates}
    if task.template not in known:
        raise UnknownTask(unknown(f"template of suite {task.suite!r}", task.template, list(known)))
    template = known[task.template]
    if task.params not in template.combinations:
        raise UnknownTask(f"template {task.template!r} has no parameters {task.params}")
    return template


def rules_of(task: Task) -> Rules:
    return template_of(task).rules(task.params)


def phone_for(suite_name: str, width: int, height: int) -> Phone:
    return Phone(suite(suite_name).image, width, height)


def unknown(what: str, name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"unknown {what}: {name!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}")
