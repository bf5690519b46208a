"""A task from a walk: some operations, played one after another on a fresh phone, and what they changed.

So the task can be done, by the walk itself: `Walk.actions` is a solution, `Task.max_steps` leaves room beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from tapforge_envs.protocol import Action, Home, Task

from .. import catalog
from ..demonstrator import carried_out
from ..device import HOME, Phone, Trial, fresh_state
from ..difference import canonical, changes, written
from ..own_check import CHECK, PREFIX, content_of
from ..tasks import Do
from .operations import Operation, operations
from .words import WordError, sentence

#: pixels of the phone that is walked on: nothing is drawn
_SIZE: Final = (128, 224)
#: answers beside the walk's own
_ROOM: Final = 3


class WalkError(ValueError):
    """A walk that makes no task; says why in a few words that many walks share."""


@dataclass(frozen=True, slots=True)
class Walk:
    task: Task
    operations: tuple[Operation, ...]
    #: without the end
    actions: tuple[Action, ...]
    #: `difference.canonical` of the content at the end
    final: str


def walk(suite: str, seed: int, rng: Random, *, most: int, apps: Sequence[str] = ()) -> Walk:
    """Up to `most` operations that `rng` chooses, on the phone of this seed. `apps`: none other is used; all for none.
    Raises WalkError."""
    image = catalog.suite(suite).image
    there = [one for one in operations(suite, fresh_state(image, seed)) if not apps or one.app in apps]
    if not there:
        raise WalkError("none of the apps is on the phone")
    chosen: list[Operation] = []
    for _ in range(rng.randint(1, most)):
        free = [one for one in there if all((one.app, one.about) != (other.app, other.about) for other in chosen)]
        if not free:
            break
        kind = rng.choice(sorted({one.kind for one in free}))
        chosen.append(rng.choice([one for one in free if one.kind == kind]))
    phone = Phone(image, *_SIZE)
    phone.state = fresh_state(image, seed)
    before = copy.deepcopy(content_of(phone.state))
    actions = tuple(played(phone, (do for one in chosen for do in one.steps)))
    after = content_of(phone.state)
    made = tuple(changes(before, after))
    if not made:
        raise WalkError("it changes nothing")
    try:
        goal = sentence(suite, made)
    except WordError as error:
        raise WalkError(str(error)) from error
    task = Task(
        suite=suite,
        template=PREFIX + "-".join(sorted(one.kind for one in chosen)),
        params={CHECK: written(made)},
        seed=seed,
        goal=goal,
        max_steps=len(actions) + 1 + _ROOM,
    )
    return Walk(task, tuple(chosen), actions, canonical(after))


def played(phone: Phone, steps: Iterable[Do]) -> Iterator[Action]:
    """Carries out steps of a plan. Raises WalkError where the phone doesn't have what they name."""
    for do in steps:
        try:
            for action in carried_out(phone, do):
                if isinstance(action, Home) and _is_home(phone):
                    continue
                phone.act(action)
                yield action
        except LookupError as error:
            raise WalkError("an operation names what isn't on the phone") from error


def _is_home(phone: Phone) -> bool:
    return phone.state["nav"]["app"] == HOME and not phone.state["nav"]["page"]


def begun(task: Task) -> Phone:
    """A phone with this task, as a server of phones makes it. Raises catalog.UnknownTask."""
    phone = Phone(catalog.suite(task.suite).image, *_SIZE)
    phone.begin(task.seed, catalog.rules_of(task))
    return phone


def ended(phone: Phone, status: str | None = "success") -> float:
    """The score if the phone's task were ended now, with this status; None: it isn't ended."""
    assert phone.rules is not None, "the phone was begun with a task"
    return phone.rules.judge(Trial(phone.before, phone.state, None, status)).value
