"""One slot of the phone server: a phone, the claim and the episode that hold it, and every answer that was given to it.

- Its claims (`serving/claims.py`) decide whose requests it serves.
- A reset starts an episode and ends the one before. Re-sent with the same id and task, it is answered from the store.
- A step that was answered is answered again with the stored bytes and never executed twice.
- A call of another episode, or a step from the future, is refused; nothing changes by a refused call.
- The phone is built anew when a task asks for another image than the one that is running.
- Other protocols may share the phone (`begin`): a task that starts ends the episode that ran.

No I/O and no clock here: the server adds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from tapforge_envs.protocol import Action, EnvironmentFault, Score, StepResult, Task
from tapforge_envs.serving.claims import Claims, Refused
from tapforge_envs.wire import encode_step

from . import catalog
from .device import Offers, Phone


@dataclass
class Episode:
    id: str
    task: Task
    phone: Phone
    first: StepResult
    #: one per answered step, in order
    results: list[StepResult] = field(default_factory=list)


class Slot:
    def __init__(self, width: int, height: int, suites: Sequence[str], uid: str = "", offers: Offers = "exact"):
        """`uid`: of the slot that it is; "" where it is not known. `offers`: what tells the state."""
        self.width = width
        self.height = height
        self.suites = tuple(suites)
        self.claims = Claims(uid)
        self.offers = offers
        self.episode: Episode | None = None
        self._closed: str | None = None
        self._phone: Phone | None = None
        self.restart()

    def restart(self) -> None:
        """As if the server had been started anew: another instance, and no episode."""
        self.instance = uuid4().hex
        self.episode = None
        self._closed = None
        self._phone = None
        #: of the phone as it lies there, whichever client started it
        self.task: Task | None = None

    @property
    def phone(self) -> Phone:
        """The phone as it lies there: with the task that was started last, or fresh."""
        if self._phone is None:
            self._phone = Phone(catalog.suite(self.suites[0]).image, self.width, self.height, self.offers)
        return self._phone

    def reset(self, episode: str, task: Task) -> StepResult:
        running = self.episode
        if running is not None and running.id == episode:
            if running.task == task:
                return running.first
            raise Refused(
                409, f"episode {episode!r} runs task {running.task.key!r} already; a new task needs a new episode id"
            )
        phone = self.begin(task)
        self.episode = Episode(episode, task, phone, StepResult(phone.observe()))
        return self.episode.first

    def begin(self, task: Task) -> Phone:
        """A fresh phone with this task; an episode that ran is over. Raises Refused for a task that it doesn't have."""
        try:
            if task.suite not in self.suites:
                raise catalog.UnknownTask(catalog.unknown("suite", task.suite, list(self.suites)))
            rules = catalog.rules_of(task)
        except catalog.UnknownTask as error:
            raise Refused(404, str(error)) from error
        image = catalog.suite(task.suite).image
        if self._phone is None or self._phone.image is not image:
            self._phone = Phone(image, self.width, self.height, self.offers)
        # A client that shares the phone over adb may have turned it.
        self._phone.width, self._phone.height = self.width, self.height
        self._phone.begin(task.seed, rules)
        self.task, self.episode = task, None
        return self._phone

    def step(self, episode: str, index: int, action: Action) -> StepResult:
        running = self._running(episode)
        if index < len(running.results):
            return running.results[index]
        if index > len(running.results):
            raise Refused(
                409, f"step {index} of episode {episode!r} is from the future; the next one is {len(running.results)}"
            )
        result = running.phone.step(action)
        running.results.append(result)
        return result

    def evaluate(self, episode: str) -> Score:
        try:
            return self._running(episode).phone.evaluate()
        except EnvironmentFault as fault:
            raise Refused(500, str(fault)) from fault

    def close(self, episode: str) -> None:
        if episode == self._closed:
            return
        self._running(episode)
        self.episode = None
        self._closed = episode

    def encode(self, result: StepResult) -> bytes:
        return encode_step(result, self.instance)

    def stranger(self) -> StepResult:
        """What a phone shows that knows of no task (lost it in a restart)."""
        image = catalog.suite(self.suites[0]).image
        return StepResult(Phone(image, self.width, self.height).observe())

    def _running(self, episode: str) -> Episode:
        if self.episode is None:
            raise Refused(409, f"no episode is running here, so {episode!r} isn't; start one with /reset")
        if self.episode.id != episode:
            raise Refused(
                409, f"episode {episode!r} doesn't hold this slot, {self.episode.id!r} does; start one with /reset"
            )
        return self.episode
