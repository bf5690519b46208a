"""A file of tasks that a model proposes, round by round.

A round is a screen, one question for some goals, and for each goal that is new a rewriting and a check. A goal is taken
if it can be read, is neither in the file (by words or meaning, `alike.py`) nor in an evaluation set, and the model,
asked again, says of it what it was proposed as. Rounds for tasks that can't be done come where their share is short.

- Everything about a round follows from the seed and its number, and from answers, which are in a journal: a call that
  was stopped anywhere goes on, and asks for nothing that was answered.
- No label is made up: `feasible` is unknown (null) of every task, `about.claimed` has what the model said.
- It ends: at the number of tasks, at the bounds on requests and tokens, at an endpoint that fails, at `patience` rounds
  in a row that brought nothing new, and at `UNREADABLE` answers in a row that can't be read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from random import Random
from typing import Any, Final

from tapforge_envs.phone.own_check import PROPOSED
from tapforge_envs.protocol import Task

from ..tasks.lines import kept, line_of, written
from ..tasks.source import TaskError
from .alike import Goals
from .asking import Asker, SpentError
from .looking import Screen
from .prompts import Kind, Prompts, answer_of

BY: Final = "model"
UNREADABLE: Final = 3
#: characters of a goal
_SHORTEST, _LONGEST = 4, 300
#: goals that are shown as being there already
_SHOWN: Final = 12


class GenerationError(Exception):
    """It ended before all tasks were there; says why and what to do. What was found is in the file."""


@dataclass
class Generated:
    tasks: int = 0
    infeasible: int = 0
    rounds: int = 0
    proposed: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        return {
            "tasks": self.tasks,
            "claimed_infeasible": self.infeasible,
            "rounds": self.rounds,
            "proposed": self.proposed,
            "refused": dict(self.refused.most_common()),
        }


@dataclass(frozen=True, slots=True)
class Wanted:
    count: int
    #: of the tasks, that can't be done
    infeasible: float
    #: goals of a question
    per_question: int
    patience: int
    seed: int
    max_steps: int
    #: how each task is asked about once more
    rewrite: bool = True
    check: bool = True

    @property
    def infeasible_count(self) -> int:
        return floor(self.count * self.infeasible + 0.5)


@dataclass(frozen=True, slots=True)
class _Taken:
    goal: str
    proposed: str
    checked: bool


class _Unreadable(Exception):
    """An answer that isn't what was asked for."""


class _NotTaken(Exception):
    """Why a goal isn't taken, in words that many share."""


class Generator:
    def __init__(
        self, asker: Asker, prompts: Prompts, screens: Sequence[Screen], wanted: Wanted, model: str, others: Goals
    ):
        """`others`: goals of evaluation sets, with the set's name."""
        self._asker, self._prompts, self._screens, self._wanted = asker, prompts, screens, wanted
        self._origin = {"by": BY, "model": model, "prompts": prompts.digest[:12], "seed": wanted.seed}
        self._others, self._there = others, Goals()
        self._goals: list[str] = []
        self.found = Generated()
        self._unreadable = 0

    async def write(self, path: Path, report: Callable[[Generated], None] = lambda found: None) -> None:
        """Raises GenerationError, EndpointError and TaskError."""
        round_ = self._resumed(path)
        idle = 0
        with path.open("a", encoding="utf-8") as file:
            while self.found.tasks < self._wanted.count:
                lines: list[str] = []
                try:
                    async for line in self._round(round_):
                        lines.append(line)  # noqa: PERF401 - what came before an error stays
                except SpentError as error:
                    raise GenerationError(f"{error}: {path} has {self._has()}; raise it to go on") from error
                finally:  # of a round that ended early too: it is gone through again
                    written(file, lines)
                self.found.rounds += 1
                report(self.found)
                idle = 0 if lines else idle + 1
                if idle >= self._wanted.patience and self.found.tasks < self._wanted.count:
                    why, times = (self.found.refused.most_common(1) or [("nothing was proposed", 0)])[0]
                    raise GenerationError(
                        f"the model repeats itself: its last {idle} rounds brought no new task (most often: {why}, "
                        f"{times:,} times); {path} has {self._has()}. Give it more screens (--app, --phones), a higher "
                        "--temperature, or another model"
                    )
                round_ += 1

    def _has(self) -> str:
        return f"{self.found.tasks:,} of {self._wanted.count:,} tasks"

    def _resumed(self, path: Path) -> int:
        """The round to go on with. The last one of the file may have been cut off: it is gone through again, by answers
        that are in the journal."""
        there = kept(path)
        last = there[-1][1].get("round", 0) if there else 0
        whole = [(task, about) for task, about in there if about.get("round") != last]
        for _, about in there:
            other = next((name for name, value in self._origin.items() if about.get(name) != value), None)
            if other is not None:
                raise TaskError(
                    f"{path} was begun with {other} {about.get(other)}; go on with that, or name another file"
                )
        if there:
            lines = path.read_bytes().split(b"\n")[: len(whole)]
            os.truncate(path, sum(len(line) + 1 for line in lines))
        for task, about in whole:
            self._take(task.goal, about.get("claimed") == "infeasible")
        return int(last)

    def _take(self, goal: str, infeasible: bool) -> None:
        self._there.add(goal, "the file")
        self._goals.append(goal)
        self.found.tasks += 1
        self.found.infeasible += infeasible

    def _room(self, infeasible: bool) -> int:
        """Tasks of this kind that are still wanted."""
        wanted, found = self._wanted, self.found
        if infeasible:
            return wanted.infeasible_count - found.infeasible
        return wanted.count - wanted.infeasible_count - (found.tasks - found.infeasible)

    async def _round(self, round_: int) -> AsyncIterator[str]:
        """The lines of its tasks."""
        wanted = self._wanted
        rng = Random(f"generate:{wanted.seed}:{round_}")
        screen = rng.choice(self._screens)
        infeasible = rng.random() < wanted.infeasible
        if self._room(infeasible) <= 0:
            infeasible = not infeasible
        there = self._goals[-_SHOWN:]
        question = {"count": wanted.per_question, "infeasible": infeasible, "there": there, **_of(screen)}
        try:
            goals = self._list(await self._asked("propose", question, screen.picture, round_))
        except _Unreadable as error:
            self._missed(str(error))
            return
        self._unreadable = 0
        for place, proposed in enumerate(goals[: wanted.per_question]):
            self.found.proposed += 1
            if self._room(infeasible) <= 0:
                return
            taken = await self._tried(proposed, infeasible, screen, round_)
            if taken is None:
                continue
            self._take(taken.goal, infeasible)
            about = {
                **self._origin,
                "round": round_,
                "place": place,
                "claimed": "infeasible" if infeasible else "feasible",
                "checked": taken.checked,
                "proposed": taken.proposed,
                "apps": [screen.app] if screen.app else [],
                "screen": screen.sha256,
            }
            yield line_of(self._task(taken.goal, screen, round_, place), about)

    def _task(self, goal: str, screen: Screen, round_: int, place: int) -> Task:
        name = f"{PROPOSED}-{round_:04d}-{place:02d}"
        return Task(
            suite=screen.suite,
            template=f"{PROPOSED}-{screen.app or 'home'}" if screen.suite != "adb" else name,
            params={"number": f"{round_}-{place}"} if screen.suite != "adb" else {},
            seed=screen.seed,
            goal=goal,
            max_steps=self._wanted.max_steps,
            feasible=None,
        )

    async def _tried(self, proposed: str, infeasible: bool, screen: Screen, round_: int) -> _Taken | None:
        """None, and counted why, for a goal that isn't taken."""
        try:
            return await self._once_more(proposed, infeasible, screen, round_)
        except _NotTaken as why:
            self.found.refused[str(why)] += 1
            return None

    async def _once_more(self, proposed: str, infeasible: bool, screen: Screen, round_: int) -> _Taken:
        """A goal that is new, rewritten and checked. Raises _NotTaken."""
        goal = self._new(proposed)
        if self._wanted.rewrite:
            try:
                again = answer_of(await self._asked("rewrite", {"goal": goal}, None, round_), "task")
            except (_Unreadable, ValueError) as error:
                raise _NotTaken("its rewriting can't be read") from error
            goal = self._new(again if isinstance(again, str) else "")
        if self._wanted.check:
            try:
                text = await self._asked("check", {"goal": goal, **_of(screen)}, screen.picture, round_)
                possible = answer_of(text, "possible")
            except (_Unreadable, ValueError) as error:
                raise _NotTaken("its check can't be read") from error
            if possible is not (not infeasible):
                raise _NotTaken("asked again, the model says the opposite of it")
        return _Taken(goal, proposed, self._wanted.check)

    def _new(self, words: str) -> str:
        """The goal in one line. Raises _NotTaken for one that can't be read, or that is there."""
        goal = " ".join(words.split())
        if not _SHORTEST <= len(goal) <= _LONGEST or not goal.isprintable():
            raise _NotTaken(f"its goal is not a text of {_SHORTEST} to {_LONGEST} characters")
        if (found := self._others.same(goal)) is not None:
            raise _NotTaken(f"it is in an evaluation set, by {found[0]} ({found[1]})")
        if (found := self._there.same(goal)) is not None:
            raise _NotTaken(f"it is there already, by {found[0]}")
        return goal

    def _missed(self, why: str) -> None:
        self._unreadable += 1
        self.found.refused["the answer can't be read"] += 1
        if self._unreadable >= UNREADABLE:
            raise GenerationError(
                f"{self._unreadable} answers in a row can't be read ({why}): the model doesn't keep to the form; raise "
                "maxTokens, or say the form more plainly in propose.jinja"
            )

    async def _asked(self, kind: Kind, variables: dict[str, Any], picture: bytes | None, round_: int) -> str:
        text = await self._asker.ask(self._prompts.render(kind, variables), picture, round_)
        if text is None:
            raise _Unreadable("it was cut off or refused")
        return text

    @staticmethod
    def _list(text: str) -> list[str]:
        try:
            goals = answer_of(text, "tasks")
        except ValueError as error:
            raise _Unreadable(str(error)) from error
        if not isinstance(goals, list) or not all(isinstance(goal, str) for goal in goals):
            raise _Unreadable("'tasks' isn't a list of texts")
        return goals


def _of(screen: Screen) -> dict[str, Any]:
    return {"app": screen.app, "apps": list(screen.apps), "suite": screen.suite, "seed": screen.seed}


def summary(found: Generated, requests: int, tokens: int, kept_answers: int) -> Iterator[str]:
    yield (
        f"{found.tasks:,} tasks, of which {found.infeasible:,} are claimed to be impossible; {found.proposed:,} goals "
        f"were proposed in {found.rounds:,} rounds"
    )
    yield f"{requests:,} requests, {tokens:,} tokens in all; {kept_answers:,} answers were there already"
    for why, times in found.refused.most_common():
        yield f"{times:6,}  not taken: {why}"
