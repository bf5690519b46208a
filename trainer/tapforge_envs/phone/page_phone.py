"""The simulated phone on the page: shared with the protocols that serve it, whose doings the page shows.

- Without a task of the page's the phone can be used as it lies, also in the middle of another client's episode.
- An episode in whose middle another client used the phone can't be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from .. import protocol as p
from ..people.episode import HumanAttempt, HumanStep, reason_of
from ..people.phone import StartRequest
from ..serving.claims import Refused
from . import catalog
from .slot import Slot
from .tasks import SPLITS, Split


class SharedPhone:
    """A `people.phone.PagePhone`. `addresses`: protocol -> what a client of it is given."""

    def __init__(self, slot: Slot, addresses: Mapping[str, str], number: int = 0):
        self.slot, self.name, self._addresses = slot, f"phone {number}", dict(addresses)
        self._attempt: HumanAttempt | None = None
        #: actions of the page since the task was started, and what the last one came to
        self._steps = 0
        self._note = ""
        #: the task that they belong to
        self._task: p.Task | None = None

    @property
    def attempt(self) -> HumanAttempt | None:
        self._follow()
        return self._attempt

    async def catalog(self) -> dict[str, Any]:
        suites = {
            name: {split: [t.name for t in catalog.suite(name).templates if t.split(split)] for split in SPLITS}
            for name in self.slot.suites
        }
        return {"suites": suites}

    def state(self) -> dict[str, Any]:
        self._follow()
        slot, phone = self.slot, self.slot.phone
        frame, ended, task = phone.observe().frame, phone.state["ended"], slot.task
        return {
            "width": frame.width,
            "height": frame.height,
            "app": phone.state["nav"]["app"],
            "frame": frame.sha256,
            "phase": "ended" if ended is not None else "playing",
            "task": _told(task) if task is not None else None,
            "steps": self._steps,
            "note": self._note,
            "ended": ended,
            "verdict": self._verdict() if ended is not None and task is not None else None,
            "addresses": self._addresses,
        }

    def frame(self) -> p.Frame:
        return self.slot.phone.observe().frame

    async def start(self, request: StartRequest) -> None:
        suites = list(self.slot.suites)
        if request.suite not in suites:
            raise Refused(404, catalog.unknown("suite", request.suite, suites))
        if request.split not in get_args(Split):
            raise Refused(400, f"split is {request.split[:40]!r}, must be one of {', '.join(get_args(Split))}")
        try:
            tasks = catalog.tasks(request.suite, request.split, [request.template])
        except catalog.UnknownTask as error:
            raise Refused(404, str(error)) from error
        task = tasks.sample(0, request.number)
        self.slot.begin(task)
        self._task = None
        self._follow()
        self._attempt = HumanAttempt(self.name, task, last=self.slot.phone.observe())

    async def act(self, action: p.Action) -> None:
        self._follow()
        phone = self.slot.phone
        if phone.state["ended"] is not None:
            raise Refused(409, "the task has ended; start one")
        before = self._seen()
        self._note = phone.act(action)
        self._steps += 1
        self._did(before, action)
        if phone.state["ended"] is not None:
            self._judge(reason_of(action))

    async def finish(self, action: p.Terminate | p.Answer) -> None:
        if self.slot.task is None or self.slot.phone.state["ended"] is not None:
            raise Refused(409, "no task is running; start one")
        self._follow()
        before = self._seen()
        self.slot.phone.act(action)
        self._did(before, action)
        self._judge(reason_of(action))

    async def leave(self) -> None:
        """The phone stays as it lies: it is shared."""
        self._attempt = None

    # --- what is written down ---

    def _follow(self) -> None:
        """Another client may have started another task."""
        if self.slot.task is not self._task:
            self._steps, self._note, self._task, self._attempt = 0, "", self.slot.task, None

    def _seen(self) -> p.Observation:
        seen, attempt = self.slot.phone.observe(), self.attempt
        if attempt is not None and attempt.last is not None and attempt.last.frame.sha256 != seen.frame.sha256:
            attempt.invalidate("another client has used the phone in its middle; start the task again")
        return seen

    def _did(self, before: p.Observation, action: p.Action) -> None:
        if self.attempt is not None:
            self.attempt.did(HumanStep(before, action, self._note), self.slot.phone.observe())

    def _judge(self, reason: p.Reason) -> None:
        if self.attempt is not None and self.attempt.ends(reason):
            self.attempt.judged(self.slot.phone.evaluate())

    def _verdict(self) -> dict[str, Any]:
        """As an episode of a run would end, whichever client played it."""
        phone, task = self.slot.phone, self.slot.task
        assert task is not None
        score = phone.evaluate()
        infeasible = phone.state["ended"] == "infeasible"
        reason = p.Reason.DECLARED_INFEASIBLE if infeasible else p.Reason.DONE
        outcome = p.outcome_of(reason, feasible=task.feasible, threshold=task.threshold, score=score.value)
        return {
            "score": score.value,
            "reason": score.reason,
            "side_effects": list(score.side_effects),
            "outcome": outcome,
            "feasible": task.feasible,
        }


def _told(task: p.Task) -> dict[str, Any]:
    """What a person is shown of a task; whether it can be done is theirs to find out."""
    return {"suite": task.suite, "template": task.template, "goal": task.goal, "max_steps": task.max_steps}
