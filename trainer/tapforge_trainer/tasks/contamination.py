"""What the measured tasks share with those that a run practises: the same task, the same words, the same parameters.

Success on a task that was practised tells nothing of tasks that were not. Pure; `Task` alone decides how alike two
tasks are, so it holds for tasks of any environment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from tapforge_envs.phone.own_check import is_proposed
from tapforge_envs.protocol import Task


@dataclass(frozen=True, slots=True)
class Contamination:
    """Numbers of measured tasks; one that shares several things counts at each."""

    measured: int
    #: different tasks that they were compared with
    practised: int
    #: equal in all that decides a task, the seed included
    same_task: int
    #: equal in the words that the agent reads
    same_goal: int
    #: equal in suite, template and parameters, on other screens
    same_parameters: int
    #: keys of some that share anything
    examples: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not (self.same_task or self.same_goal or self.same_parameters)

    def __str__(self) -> str:
        if self.clean:
            return f"none of {self.measured:,} measured tasks is among {self.practised:,} that are practised"
        parts = {
            "are practised": self.same_task,
            "have the words of a practised one": self.same_goal,
            "have the template and parameters of a practised one": self.same_parameters,
        }
        said = ", ".join(f"{count:,} {what}" for what, count in parts.items() if count)
        return f"of {self.measured:,} measured tasks {said} ({self.practised:,} compared), such as {self.examples[0]}"


def contamination(measured: Sequence[Task], practised: Iterable[Task]) -> Contamination:
    """Goals count where both tasks have one, in whatever case and spacing; parameters where a template has any, or
    where nothing else tells its tasks apart."""
    keys: set[str] = set()
    goals: set[str] = set()
    parameters: set[str] = set()
    for task in practised:
        if task.key not in keys:
            keys.add(task.key)
            goals.add(goal_of(task))
            parameters.add(_parameters(task))
    goals.discard("")
    different = {task.key: task for task in measured}
    same_task = {key for key in different if key in keys}
    same_goal = {key for key, task in different.items() if goal_of(task) in goals}
    same_parameters = {key for key, task in different.items() if _parameters(task) in parameters}
    return Contamination(
        measured=len(different),
        practised=len(keys),
        same_task=len(same_task),
        same_goal=len(same_goal),
        same_parameters=len(same_parameters),
        examples=tuple(sorted(same_task | same_goal | same_parameters)[:5]),
    )


def goal_of(task: Task) -> str:
    """The goal, in one case and spacing."""
    return " ".join(task.goal.casefold().split())


def _parameters(task: Task) -> str:
    """Without the seed. A template without parameters may still ask different things: by its goal, or, where the
    environment makes the goals, by the seed that it makes them from. Those of a proposed task only number it."""
    unnamed = f"goal={goal_of(task)}" if goal_of(task) else f"seed={task.seed}"
    own = task.params and not is_proposed(task.template)
    named = urlencode(sorted(task.params.items())) if own else unnamed
    return f"{task.suite}/{task.template}?{named}"
