"""By what a task of a walk is tried before it is taken.

- **Probes**: states whose verdict is known, judged by the task as its line of a file says it. The truth is the content
  of the whole phone, compared with that at the end of the walk, not the check: each moment of the walk, the walk
  without one of its operations (nearly), with another one more and with one done twice (overdone), with one taken back
  (undone) and done again, with another operation in its place, in another order, and with a look into another app; and
  the end that isn't said, or is said otherwise.
- **Rollouts**: empty ones, which end at once, and random ones. A task that one of them solves is too easy, or its
  check is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from tapforge_envs.protocol import Action, Answer, Back, Home, Scroll, Tap, Task, Terminate, Type

from .. import catalog
from ..device import Phone, Trial, fresh_state
from ..difference import canonical
from ..own_check import content_of
from ..screen import center
from ..tasks import Do
from .operations import Operation, operations
from .walk import Walk, WalkError, begun, ended, played

ROLLOUTS: Final = 64
#: actions of a random rollout, at most
_LONGEST: Final = 16
_DONE: Final = Terminate(status="success")
_EMPTY: Final[tuple[tuple[Action, ...], ...]] = (
    (_DONE,), (Home(), _DONE), (Back(), _DONE), (Answer(text="done"),),
)  # fmt: skip
#: ends that say something else, or nothing
_ENDS: Final = ("failure", "infeasible", None)
#: other operations that are tried beside a walk
_OTHERS: Final = 2


@dataclass(frozen=True, slots=True)
class Probe:
    """A state by how it came about, whether the task is done in it, and what the task's judge says."""

    what: str
    done: bool
    judged: bool


@dataclass(frozen=True, slots=True)
class Tried:
    probes: int = 0
    #: verdicts that are not as they should be
    wrong: tuple[Probe, ...] = ()
    #: whether the walk solves the task
    solved: bool = False
    #: rollouts that solve it
    lucky: int = 0


def try_walk(found: Walk, rollouts: Sequence[Trial], rng: Random) -> Tried:
    """`rollouts`: of `rollouts_of` the phone. Raises catalog.UnknownTask for a task that can't be begun."""
    task = Task.model_validate_json(found.task.model_dump_json())
    probes = list(_probes(found, task, rng))
    judge = catalog.rules_of(task).judge
    return Tried(
        probes=len(probes),
        wrong=tuple(one for one in probes if one.done != one.judged),
        solved=any(one.what == "walk" and one.judged for one in probes),
        lucky=sum(judge(trial).value >= task.threshold for trial in rollouts),
    )


def _probes(found: Walk, task: Task, rng: Random) -> Iterator[Probe]:
    phone = begun(task)

    def probe(what: str, at: Phone, status: str | None = "success") -> Probe:
        done = status == "success" and canonical(content_of(at.state)) == found.final
        return Probe(what, done, ended(at, status) >= task.threshold)

    yield probe("begun", phone)
    for action in found.actions[:-1]:
        phone.act(action)
        yield probe("on the way", phone)
    phone.act(found.actions[-1])
    yield probe("walk", phone)
    for status in _ENDS:
        yield probe(f"ended as {status}", phone, status)

    own = found.operations
    taken = {(one.app, one.about) for one in own}
    free = [
        one for one in operations(task.suite, fresh_state(phone.image, task.seed)) if (one.app, one.about) not in taken
    ]
    others = rng.sample(free, min(_OTHERS, len(free)))
    ways: list[tuple[str, list[tuple[Do, ...]]]] = [
        *((f"without {i}", [one.steps for j, one in enumerate(own) if j != i]) for i in range(len(own))),
        *(("and another", [*(one.steps for one in own), other.steps]) for other in others),
        ("twice", [*(one.steps for one in own), own[-1].steps]),
        ("backwards", [one.steps for one in reversed(own)]),
        ("a look elsewhere", [*(one.steps for one in own), _look(others)]),
    ]  # fmt: skip
    for i, one in enumerate(own):
        rest = [other.steps for other in own]
        if one.undo:
            ways += [("undone", [*rest, one.undo]), ("done again", [*rest, one.undo, one.steps])]
        alike = [other for other in free if other.kind == one.kind]
        if alike:
            ways.append(("in its place", [*rest[:i], rng.choice(alike).steps, *rest[i + 1 :]]))
    for what, parts in ways:
        there = begun(task)
        try:
            for _ in played(there, (do for steps in parts for do in steps)):
                pass
        except WalkError:  # there is no such way: what was removed can't be removed again
            continue
        yield probe(what, there)


def _look(others: Sequence[Operation]) -> tuple[Do, ...]:
    return () if not others else (Do(action=Home()), Do(app=others[0].app), Do(action=Home()))


@dataclass(frozen=True)
class Rollouts:
    """Of phones by their seed; the last one's are kept, because several walks begin there."""

    suite: str
    count: int = ROLLOUTS
    _kept: dict[int, tuple[Trial, ...]] = field(default_factory=dict)

    def of(self, seed: int) -> tuple[Trial, ...]:
        if seed not in self._kept:
            self._kept.clear()
            self._kept[seed] = tuple(_rollouts(self.suite, seed, self.count))
        return self._kept[seed]


def _rollouts(suite: str, seed: int, count: int) -> Iterator[Trial]:
    image = catalog.suite(suite).image
    for number in range(count):
        phone, rng = Phone(image, 128, 224), Random(f"rollout:{seed}:{number}")
        phone.state = fresh_state(image, seed)
        before: dict[str, Any] = {"apps": copy.deepcopy(phone.state["apps"])}
        for action in _EMPTY[number] if number < len(_EMPTY) else _random(phone, rng):
            phone.act(action)
        state = phone.state
        yield Trial(before, {"apps": state["apps"]}, state["answer"], state["ended"])


def _random(phone: Phone, rng: Random) -> Iterator[Action]:
    """Mostly taps on what can be tapped, which finds more than taps anywhere; the rest are those."""
    for _ in range(rng.randint(1, _LONGEST)):
        draw = rng.random()
        widgets = [widget for widget in phone.screen().widgets if widget.tap]
        if draw < 0.7 and widgets:
            x, y = center(rng.choice(widgets).box)
            yield Tap(x=x, y=y)
        elif draw < 0.85:
            yield Tap(x=rng.random(), y=rng.random())
        else:
            yield rng.choice((Home(), Back(), Scroll(direction="down"), Type(text="milk")))
    yield _DONE
