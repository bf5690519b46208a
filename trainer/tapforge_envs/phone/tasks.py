"""Task templates: parameters, goal, set-up, judge, and a plan that solves the task.

- A template has a list of parameter combinations. Each combination belongs to exactly one split (train, validation,
  test), by a stable hash of its values; layouts of the three splits never coincide either (`layout` in an image).
- A judge compares the phone before and after: what was asked must be so, and nothing else may have changed.
- `plan` writes the steps of a demonstrator; `errs()` is asked at each decision where a careless person goes wrong, and
  never erring solves the task.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, Literal

from tapforge_envs.protocol import Action, Answer, Home, Score, Tap, Task, Terminate

from .device import Phone, Rules, State, Trial
from .screen import center

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
Params = dict[str, str]
Errs = Callable[[], bool]

#: seeds of a split: [index * SEEDS, (index + 1) * SEEDS)
SEEDS = 1_000_000_000
#: shares of validation and test among the parameter combinations of a template
_VALIDATION, _TEST = 0.10, 0.25


@dataclass(frozen=True, slots=True)
class Do:
    """A step of a plan: a tap on a widget by id, an action as it is, or one of the longer things that
    `demonstrator` knows to do."""

    tap: str = ""
    action: Action | None = None
    #: a long press instead of a tap
    hold: bool = False
    #: from wherever the phone is to the first page of this app, through the launcher
    app: str = ""
    #: (field, text): the field holds just this text
    fill: tuple[str, str] | None = None
    #: decided when it is due, from the phone's state
    late: Callable[[State], Do] | None = None

    def resolve(self, phone: Phone) -> Action:
        """The action of a tap or an action. Raises LookupError when the widget isn't on the screen."""
        if self.action is not None:
            return self.action
        widget = phone.screen().find(self.tap)
        if widget is None:
            raise LookupError(f"no widget {self.tap!r} on the screen of {phone.state['nav']['app']!r}")
        x, y = center(widget.box)
        return Tap(x=x, y=y)


HOME_KEY = Do(action=Home())
DONE = Do(action=Terminate(status="success"))
INFEASIBLE = Do(action=Terminate(status="infeasible"))


def say(text: str) -> Do:
    return Do(action=Answer(text=text))


def no_change(state: State, params: Params, rng: Random) -> None:
    """A set-up that leaves the fresh phone as it is."""


@dataclass(frozen=True)
class Template:
    name: str
    combinations: tuple[Params, ...]
    goal: Callable[[Params], str]
    plan: Callable[[Params, Errs], Iterator[Do]]
    judge: Callable[[Params, Trial], Score]
    #: the part of the state that the judge looks at
    judged: Callable[[Params, State], Any]
    setup: Callable[[State, Params, Random], None] = no_change
    max_steps: Callable[[Params], int] = lambda params: 10
    feasible: bool = True
    #: the one split that this template belongs to; None: its combinations are spread over all
    only: Split | None = None

    def rules(self, params: Params) -> Rules:
        return Rules(
            setup=lambda state, rng: self.setup(state, params, rng),
            judge=lambda trial: self.judge(params, trial),
            judged=lambda state: self.judged(params, state),
        )

    def split(self, split: Split) -> tuple[Params, ...]:
        """The combinations of a split; every template of four or more combinations has some in each."""
        if self.only is not None:
            return self.combinations if split == self.only else ()
        return self._parts[split]

    @cached_property
    def _parts(self) -> dict[Split, tuple[Params, ...]]:
        """Held out is spread evenly: the next combination is one whose values are held out least so far, so that no
        value is missing in training. Ties go by a hash of the goal's words, so that templates that say the same (one of
        them infeasible, say) hold out the same: else the words alone would tell which of the two it is."""
        left = sorted(self.combinations, key=lambda c: _digest([self.goal(c), sorted(c.items())]))
        count = len(left)
        held: Counter[tuple[str, str]] = Counter()
        parts: dict[Split, tuple[Params, ...]] = {}
        shares: tuple[tuple[Split, float], ...] = (("test", _TEST), ("validation", _VALIDATION))
        for split, share in shares:
            chosen = []
            for _ in range(max(1, round(count * share)) if count >= 4 else 0):
                best = min(left, key=lambda c: (max(held[pair] for pair in c.items()), sum(held[p] for p in c.items())))
                left.remove(best)
                held.update(best.items())
                chosen.append(best)
            parts[split] = tuple(chosen)
        parts["train"] = tuple(left)
        return parts


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def split_of_seed(seed: int) -> Split:
    return SPLITS[min(seed // SEEDS, 2)]


@dataclass(frozen=True)
class TaskSet:
    """Tasks of some templates and one split, drawn by a seed: every template equally often, in rounds."""

    suite: str
    split: Split
    templates: tuple[Template, ...]

    def sample(self, seed: int, index: int) -> Task:
        """The task at a place of the endless order that `seed` fixes."""
        round_, place = divmod(index, len(self.templates))
        order = list(self.templates)
        Random(f"order:{seed}:{round_}").shuffle(order)
        template = order[place]
        rng = Random(f"task:{self.split}:{seed}:{index}")
        params = rng.choice(template.split(self.split))
        return make_task(self.suite, template, params, SPLITS.index(self.split) * SEEDS + rng.randrange(SEEDS))


def make_task(suite: str, template: Template, params: Params, seed: int) -> Task:
    return Task(
        suite=suite,
        template=template.name,
        params=params,
        seed=seed,
        goal=template.goal(params),
        max_steps=template.max_steps(params),
        feasible=template.feasible,
    )


def pick(templates: Sequence[Template], names: Sequence[str]) -> tuple[Template, ...]:
    """The named templates, all for no name. Raises KeyError with the unknown name."""
    by_name = {t.name: t for t in templates}
    return tuple(by_name[name] for name in names) if names else tuple(templates)
