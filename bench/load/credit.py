"""A small policy on chains of phone tasks, in this process: what `bench/study.py` trains. No pixels, no vLLM."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from random import Random
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.device import Phone
from tapforge_envs.phone.screen import Screen, center
from tapforge_envs.protocol import Action, Home, Tap, Task, Terminate

TEMPLATES = ("open_two", "switch_two", "switch_then_open", "two_panels", "missing_switch")
#: tasks of an episode, its steps at most, and episodes of a group
CHAIN, MAX_STEPS, SIZE = 4, 30, 8
#: held-out chains of a measurement
MEASURED = 300
#: features of an action; hashed into so many weights
WIDE, WEIGHTS = 6, 1 << 14
DEMONSTRATIONS, EPOCHS, ERROR_RATE = 200, 4, 0.4

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


@dataclass(slots=True)
class Seen:
    """A step: the features of what could be done [actions, WIDE], what was done, with which probabilities."""

    features: Ints
    chosen: int
    probabilities: Floats
    state: str


@dataclass(slots=True)
class Played:
    steps: list[Seen] = field(default_factory=list)
    final: str = ""
    won: bool = False


class Policy:
    def __init__(self, weights: Floats):
        self.weights = weights
        self._first, self._second, self._time = np.zeros_like(weights), np.zeros_like(weights), 0

    def probabilities(self, features: Ints) -> Floats:
        logits = self.weights[features].sum(axis=1)
        shifted = np.exp(logits - logits.max())
        return shifted / shifted.sum()

    def learn(self, steps: Sequence[Seen], advantages: Floats, rate: float) -> None:
        """One step of Adam along the policy gradient, a mean over steps."""
        self.move(gradient(steps, advantages), rate)

    def move(self, gradient: Floats, rate: float) -> None:
        """One step of Adam."""
        self._time += 1
        self._first += 0.1 * (gradient - self._first)
        self._second += 0.001 * (gradient**2 - self._second)
        first, second = self._first / (1 - 0.9**self._time), self._second / (1 - 0.999**self._time)
        self.weights += rate * first / (np.sqrt(second) + 1e-8)


def gradient(steps: Sequence[Seen], advantages: Floats) -> Floats:
    """[WEIGHTS]: the mean over steps of advantage times the derivative of the log-probability."""
    indices = np.concatenate([step.features.ravel() for step in steps])
    values = []
    for step, advantage in zip(steps, advantages, strict=True):
        each = -advantage * step.probabilities
        each[step.chosen] += advantage
        values.append(np.repeat(each, WIDE))
    return np.bincount(indices, np.concatenate(values), WEIGHTS) / len(steps)


# --- the phone as the policy sees it ----------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 18)
def _hashed(text: str) -> int:
    return zlib.crc32(text.encode()) % WEIGHTS


class Game:
    """An episode."""

    def __init__(self, tasks: Sequence[Task]):
        self._left = list(tasks)
        #: whether the tasks before were solved
        self._solved: list[bool] = []
        self._next()

    def _next(self) -> None:
        self.task = self._left.pop(0)
        self.template = catalog.template_of(self.task)
        self.phone: Phone = catalog.phone_for(self.task.suite, 96, 160)
        self.phone.begin(self.task.seed, self.template.rules(self.task.params))
        #: what was done so far, in the goal's words
        self._done: list[str] = []

    @property
    def over(self) -> bool:
        return not self._left and self.phone.state["ended"] is not None

    @property
    def won(self) -> bool:
        return self.over and all(self._solved)

    @property
    def state(self) -> str:
        return f"{self._solved} {self.phone.state_key()}"

    def fork(self) -> Game:
        """A second episode at the same moment."""
        other = copy(self)
        other._left, other._solved, other._done = list(self._left), list(self._solved), list(self._done)
        other.phone = copy(self.phone)
        other.phone.state = json.loads(json.dumps(self.phone.state))
        return other

    def options(self) -> tuple[list[Action], list[str], Ints]:
        """Actions, their names, and their features."""
        screen, here = self.phone.screen(), self._named(self.phone.state["nav"]["app"])
        names = [_name(screen, widget.id) for widget in screen.widgets if widget.tap]
        actions: list[Action] = [_tap(screen, widget.id) for widget in screen.widgets if widget.tap]
        actions += [Home(), Terminate(status="success"), Terminate(status="infeasible")]
        words = [self._named(name) for name in names] + ["home", "done", "infeasible"]
        shown = "".join(sorted(key for key, value in self.task.params.items() if any(value in n for n in names)))
        kind, last, set_ = self.template.name, self._done[-1:], ",".join(sorted(set(self._done)))
        rows = [
            [
                _hashed(f"a {word}"),
                _hashed(f"b {kind} {here} {word}"),
                _hashed(f"c {kind} {here} {word} {last}"),
                _hashed(f"d {kind} {here} {word} {set_}"),
                _hashed(f"e {kind} {here} {word} {shown}"),
                _hashed(f"f {kind} {here} {word} {last} {set_}"),
            ]
            for word in words
        ]
        return actions, words, np.array(rows, dtype=np.int64)

    def act(self, action: Action, word: str) -> None:
        self._done.append(word)
        self.phone.act(action)
        if (ended := self.phone.state["ended"]) is None:
            return
        solved = self.phone.evaluate().value >= self.task.threshold
        self._solved.append(not self.task.feasible if ended == "infeasible" else solved)
        if self._left:
            self._next()

    def _named(self, name: str) -> str:
        """By the part that it plays in the goal: `switch:wifi` of a task about wifi is `switch:<switch>`."""
        for key, value in self.task.params.items():
            if value in name.split(":")[-1].split("+")[0]:
                return name.replace(value, f"<{key}>")
        return name if ":" not in name else f"{name.split(':')[0]}:other"


def _name(screen: Screen, widget: str) -> str:
    found = screen.find(widget)
    assert found is not None
    return widget if found.on is None else f"{widget}{'+on' if found.on else '+off'}"


def _tap(screen: Screen, widget: str) -> Tap:
    found = screen.find(widget)
    assert found is not None
    x, y = center(found.box)
    return Tap(x=x, y=y)


def play(policy: Policy, tasks: Sequence[Task], rng: np.random.Generator, *, forks: list[Game] | None = None) -> Played:
    """`forks` gets the episode as it was before each step."""
    game, played = Game(tasks), Played()
    while not game.over and len(played.steps) < MAX_STEPS:
        if forks is not None:
            forks.append(game.fork())
        played.steps.append(step(policy, game, rng))
    played.final, played.won = game.state, game.won
    return played


def step(policy: Policy, game: Game, rng: np.random.Generator) -> Seen:
    actions, words, features = game.options()
    probabilities = policy.probabilities(features)
    picked = int(rng.choice(len(actions), p=probabilities))
    seen = Seen(features, picked, probabilities, game.state)
    game.act(actions[picked], words[picked])
    return seen


def played(
    policy: Policy,
    seed: int,
    first: int,
    steps: int,
    rng: np.random.Generator,
    *,
    forks: list[list[Game]] | None = None,
) -> list[list[Played]]:
    """Groups of one update, of at least so many environment steps; tasks depend on `seed` and `first` alone. `forks`
    gets those of each episode."""
    groups: list[list[Played]] = []
    while sum(len(one.steps) for group in groups for one in group) < steps or len(groups) < 2:
        tasks, group = chain("train", seed, first + len(groups)), list[Played]()
        for _ in range(SIZE):
            of = None if forks is None else list[Game]()
            group.append(play(policy, tasks, rng, forks=of))
            if forks is not None and of is not None:
                forks.append(of)
        groups.append(group)
    return groups


def flat(groups: Sequence[Sequence[Played]]) -> list[Seen]:
    return [seen for group in groups for one in group for seen in one.steps]


def measured(policy: Policy, seed: int) -> float:
    """Success on held-out chains, the same for all seeds."""
    rng = np.random.default_rng((seed, 2))
    return float(np.mean([play(policy, chain("test", 5, number), rng).won for number in range(MEASURED)]))


def chain(split: Literal["train", "test"], seed: int, number: int) -> list[Task]:
    tasks = catalog.tasks("quickstart", split, TEMPLATES)
    return [tasks.sample(seed, CHAIN * number + place) for place in range(CHAIN)]


def imitation(seed: int) -> Floats:
    """Weights of a policy that imitates a demonstrator that errs."""
    tasks, policy = catalog.tasks("quickstart", "train", TEMPLATES), Policy(np.zeros(WEIGHTS))
    steps: list[Seen] = []
    for number in range(DEMONSTRATIONS):
        game, rng = Game([tasks.sample(seed + 77, number)]), Random(f"{seed}/{number}")
        errs = partial(_below, rng, ERROR_RATE)
        for action in demonstration(game.phone, game.template, game.task.params, errs):
            actions, words, features = game.options()
            picked = next((place for place, one in enumerate(actions) if one == action), None)
            if picked is None:
                break
            steps.append(Seen(features, picked, np.empty(0), ""))
            game.act(action, words[picked])
    order = np.random.default_rng(seed)
    for _ in range(EPOCHS):
        for batch in np.array_split(order.permutation(len(steps)), max(1, len(steps) // 64)):
            some = [steps[place] for place in batch]
            for step in some:
                step.probabilities = policy.probabilities(step.features)
            policy.learn(some, np.ones(len(some)), 0.02)
    return policy.weights


def _below(rng: Random, share: float) -> bool:
    return rng.random() < share
