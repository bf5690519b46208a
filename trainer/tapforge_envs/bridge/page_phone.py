"""A phone of the bridge on the page: one of its clients beside programs, with the same rules (`slot.py`).

- A task starts with a reset and ends with its verdict; then the phone is given back. Between two actions the phone is
  not looked at: what is shown is the screen that a model would see. `wait` looks again.
- A program's episode is not ended unless the person takes the phone; a program's reset ends the person's.
- A call that fails ends the episode, which can't be kept then. An action that the phone doesn't have is a note.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from uuid import uuid4

from .. import protocol as p
from ..people.episode import HumanAttempt, HumanStep, reason_of
from ..people.phone import StartRequest
from ..protocol import EnvironmentFault, Task
from ..serving.claims import Refused
from ..wire import UNSUPPORTED_ACTION, decode_step
from .slot import BridgeSlot

#: seconds that a list of tasks is waited for
_LISTING: Final = 60.0
#: of a verdict that failed: the person decides
_UNJUDGED: Final = (p.Reason.JUDGE_ERROR, p.Reason.ENV_ERROR)
#: steps of a goal that a person has made up
_OWN_STEPS: Final = 50


class BridgedPhone:
    """A `people.phone.PagePhone`. `listing`: tasks that can be started. `own_goals`: whether a person may type one,
    which nothing judges."""

    def __init__(self, slot: BridgeSlot, listing: Callable[[], Awaitable[Sequence[Task]]], *, own_goals: bool):
        self.name = slot.name
        self.attempt: HumanAttempt | None = None
        self._slot, self._listing, self._own_goals = slot, listing, own_goals
        self._listed: dict[str, Task] = {}
        self._episode = ""
        #: of the next step
        self._index = 0
        #: what the phone is doing; "" for nothing
        self._doing = ""
        self._note = ""

    async def catalog(self) -> dict[str, Any]:
        note = ""
        try:
            async with asyncio.timeout(_LISTING):
                self._listed = {task.key: task for task in await self._listing()}
        except (EnvironmentFault, TimeoutError) as error:
            note = f"the phone's server lists no tasks: {error}"
        if not self._listed and not note:
            note = "" if self._own_goals else "no tasks are listed here: name a file of them (--tasks)"
        tasks = [{"key": t.key, "template": t.template, "goal": t.goal} for t in self._listed.values()]
        return {"tasks": tasks, "goals": self._own_goals, "note": note}

    def state(self) -> dict[str, Any]:
        attempt, frame = self.attempt, self.frame()
        ended = None if attempt is None or attempt.reason is None else attempt.reason.value
        task = None if attempt is None else attempt.task
        return {
            "width": 0 if frame is None else frame.width,
            "height": 0 if frame is None else frame.height,
            "app": None if attempt is None or attempt.last is None else attempt.last.app,
            "frame": None if frame is None else frame.sha256,
            "phase": self._doing or ("idle" if attempt is None else "ended" if ended or attempt.invalid else "playing"),
            "task": None if task is None else {
                "suite": task.suite, "template": task.template, "goal": task.goal, "max_steps": task.max_steps
            },
            "steps": 0 if attempt is None else len(attempt.steps),
            "note": self._note,
            "ended": ended,
            "verdict": None if attempt is None or self._doing else attempt.verdict(),
            "addresses": {},
        }  # fmt: skip

    def frame(self) -> p.Frame | None:
        return None if self.attempt is None or self.attempt.last is None else self.attempt.last.frame

    async def start(self, request: StartRequest) -> None:
        task = self._task(request)
        playing = self._slot.episode
        if playing is not None and playing != self._episode and not request.take:
            raise Refused(
                409, f"a program plays episode {playing[:80]!r} on this phone; wait for its end, or take the phone",
                "held",
            )  # fmt: skip
        with self._does("preparing the phone"):
            self._slot.claims.admit(None)
            self.attempt = None
            self._episode, self._index, self._note = f"person-{uuid4().hex}", 0, ""
            result, _ = decode_step(await self._slot.reset(self._episode, task))
        seen = result.observation
        feasible = task.feasible if seen.feasible is None else seen.feasible
        task = task.model_copy(update={"goal": task.goal or seen.goal, "feasible": feasible})
        self.attempt = HumanAttempt(self.name, task, last=seen)

    async def act(self, action: p.Action) -> None:
        attempt = self._playing()
        if isinstance(action, p.FINAL_ACTIONS):
            await self.finish(action)
            return
        if await self._step(attempt, action):
            await self._ended(attempt, p.Reason.DONE)

    async def finish(self, action: p.Terminate | p.Answer) -> None:
        attempt = self._playing()
        await self._step(attempt, action)
        await self._ended(attempt, reason_of(action))

    async def leave(self) -> None:
        episode, self._episode, self.attempt, self._note = self._episode, "", None, ""
        if episode and self._slot.episode == episode:
            try:
                await self._slot.close(episode)
            except Refused as refused:  # whether the phone is well shows at its next reset
                self._note = f"the phone could not be given back: {refused}"

    # --- what the phone does ---

    async def _step(self, attempt: HumanAttempt, action: p.Action) -> bool:
        """Whether the phone ended the episode."""
        assert attempt.last is not None
        before = attempt.last
        with self._does(action.type), self._broken(attempt):
            try:
                result, _ = decode_step(await self._slot.step(self._episode, self._index, action))
            except Refused as refused:
                if refused.reason == UNSUPPORTED_ACTION:
                    raise _Unsupported(422, str(refused), refused.reason) from refused
                raise
        self._index, self._note = self._index + 1, result.note
        attempt.did(HumanStep(before, action, result.note, result.reward), result.observation)
        return result.done

    async def _ended(self, attempt: HumanAttempt, reason: p.Reason) -> None:
        """Asks for the verdict and gives the phone back."""
        with self._does("judging"), self._broken(attempt):
            if attempt.ends(reason):
                try:
                    attempt.judged(await self._slot.evaluate(self._episode))
                except Refused as refused:
                    if refused.reason not in _UNJUDGED:
                        raise
                    attempt.unjudged = str(refused)
        with self._does("giving the phone back"), self._broken(attempt):
            if self._slot.episode == self._episode:
                await self._slot.close(self._episode)

    @contextmanager
    def _does(self, what: str) -> Iterator[None]:
        if self._doing:
            raise Refused(409, f"the phone is busy ({self._doing}); wait for it")
        self._doing = what
        try:
            yield
        finally:
            self._doing = ""

    @contextmanager
    def _broken(self, attempt: HumanAttempt) -> Iterator[None]:
        """What goes wrong ends the episode."""
        try:
            yield
        except _Unsupported as refused:
            self._note = str(refused)
            raise
        except (Refused, EnvironmentFault) as error:
            attempt.invalidate(f"the phone failed: {error}")
            raise error if isinstance(error, Refused) else Refused(502, str(error)) from error

    def _playing(self) -> HumanAttempt:
        if self.attempt is None:
            raise Refused(409, "no task is running; start one")
        if self.attempt.reason is not None or self.attempt.invalid:
            raise Refused(409, "the task has ended; start one")
        return self.attempt

    def _task(self, request: StartRequest) -> Task:
        if goal := request.goal.strip():
            if not self._own_goals:
                raise Refused(400, "this environment plays its own tasks alone: choose one of the list")
            return Task(suite="adb", template=_name_of(goal), goal=goal, max_steps=_OWN_STEPS, feasible=None)
        if request.key not in self._listed:
            raise Refused(404, f"no task {request.key[:200]!r} is listed here; load the page again")
        return self._listed[request.key]


class _Unsupported(Refused):
    """Nothing was done, and the episode goes on."""


def _name_of(goal: str) -> str:
    """Of the template: equal for equal goals, whatever script they are in."""
    said = "".join(c if c.isalnum() else " " for c in goal.lower()).split()
    return f"{'-'.join(said)[:40].rstrip('-')}-{hashlib.sha256(goal.encode()).hexdigest()[:6]}"
