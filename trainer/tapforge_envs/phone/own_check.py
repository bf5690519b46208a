"""A task that says its check itself: `params["check"]` is the difference that the phone is to have in the end.

- Its suite is the phone's, its template begins with `walk-` and names the kinds of what is to be done, its seed is the
  phone's: a fresh phone of that seed is where it begins. So it needs nothing that a server of phones doesn't have.
- It is done where the content is as the check says and everything else as it was; ended otherwise than by saying so,
  it has failed. What an app holds only until it is left (the quickstart panels' drafts) is not content.
- A task `proposed-...` has a goal alone, and nothing that judges it.
- A check that can't be read, or names what this phone doesn't have, is an unknown task: there is no default verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from tapforge_envs.protocol import EnvironmentFault, Score, Task

from .device import PhoneImage, State, Trial, fresh_state
from .difference import Change, apply, read
from .judge import judge_change
from .tasks import Do, Errs, Params, Template

PREFIX: Final = "walk-"
#: templates of tasks without a check begin with it: a goal on the phone of a seed
PROPOSED: Final = "proposed"
#: the only parameter
CHECK: Final = "check"


def is_walk(template: str) -> bool:
    return template.startswith(PREFIX)


def content_of(state: State) -> dict[str, Any]:
    """App -> what it keeps: without drafts."""
    return {name: {k: v for k, v in own.items() if k != "draft"} for name, own in state["apps"].items()}


def is_proposed(template: str) -> bool:
    return template == PROPOSED or template.startswith(f"{PROPOSED}-")


def template_of_goal(task: Task) -> Template:
    """Of a task that is nothing but a goal: to ask its judge is a fault, for it has none."""

    def refuse(params: Params, trial: Trial) -> Score:
        raise EnvironmentFault(f"the task {task.template} has a goal and no check: only a judge can say how it ended")

    return Template(
        task.template,
        (task.params,),
        lambda params: task.goal,
        _no_plan,
        refuse,
        lambda params, state: content_of(state),
        max_steps=lambda params: task.max_steps,
    )


def template_of_walk(task: Task, image: PhoneImage) -> Template:
    """Raises ValueError, which says what is wrong with the task's check."""
    if set(task.params) != {CHECK}:
        raise ValueError(f"a task {PREFIX}... has the parameter {CHECK} and no other, found {sorted(task.params)}")
    wanted = read(task.params[CHECK])
    content = content_of(fresh_state(image, task.seed))
    for change in wanted:  # what an app keeps has names of its own, below which keys may come and go
        if len(change.at) < 2 or change.at[1] not in content.get(change.at[0], {}):
            raise ValueError(f"the check doesn't fit the phone: none keeps {'.'.join(change.at[:2])}")
    try:
        apply(content, wanted)
    except LookupError as error:
        raise ValueError(f"the check doesn't fit the phone of seed {task.seed}: {error.args[0]}") from error
    return Template(
        task.template,
        (task.params,),
        lambda params: task.goal,
        _no_plan,
        lambda params, trial: judge(wanted, trial),
        lambda params, state: content_of(state),
        max_steps=lambda params: task.max_steps,
    )


def judge(wanted: tuple[Change, ...], trial: Trial) -> Score:
    kept = replace(trial, before={"apps": content_of(trial.before)}, after={"apps": content_of(trial.after)})
    return judge_change(kept, lambda apps: apply(apps, wanted))


def _no_plan(params: Params, errs: Errs) -> Iterator[Do]:
    raise LookupError("a task that says its check has no demonstration")
