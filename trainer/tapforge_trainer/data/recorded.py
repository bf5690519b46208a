"""Recorded steps in place of phones: a task is a step, its reset the screen that was recorded, its end the answer.

- The history is the recorded one: what the adapter would have answered for each earlier action, and the screens that
  it still shows. The answer is compared with the recorded action (`comparison.py`), and nothing is executed.
- Members of a group share what was read of their step; of the steps that were played last some are kept.
- A screen or line that is damaged is an `EnvironmentFault` of its task, which is played no more.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from PIL import Image

from tapforge_api.dataset import StepReward
from tapforge_envs.clients.phones import PhoneAddress
from tapforge_envs.protocol import (
    Action,
    EnvironmentFault,
    Frame,
    Observation,
    Score,
    StepResult,
    Task,
    UnknownTask,
)

from ..agents.agent import Agent, Turn
from .comparison import Compared, compare
from .episodes import DataError, Step
from .folder import DataFolder
from .recorded_tasks import step_of

#: steps that are kept; groups under way are less than twice as many
_KEPT: Final = 64
#: how a kind of image is called where observations come from
MEDIA: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


@dataclass(frozen=True, slots=True)
class _Recorded:
    step: Step
    observation: Observation
    history: tuple[Turn, ...]


class RecordedSteps:
    """In place of connections to phones (`PhoneClients`), and of histories."""

    def __init__(self, agent: Agent, folders: Mapping[str, DataFolder], reward: StepReward, history_images: int):
        """`folders`: by suite of their tasks; `history_images`: screens that a prompt shows at most."""
        self._agent, self._folders, self.reward, self._images = agent, folders, reward, history_images
        self._read = lru_cache(maxsize=_KEPT)(self._read_step)

    def open(self, phone: PhoneAddress) -> RecordedStep:
        return RecordedStep(self, phone.slot)

    async def health(self, phone: PhoneAddress) -> str:
        return ""

    async def close(self) -> None: ...

    def recorded(self, task: Task) -> _Recorded:
        """Raises EnvironmentFault."""
        if task.suite not in self._folders:
            raise UnknownTask(f"{task.key} is not a step of a data set")
        try:
            return self._read(task.suite, *step_of(task))
        except DataError as error:
            raise UnknownTask(str(error)) from error

    def earlier(self, task: Task) -> tuple[Turn, ...]:
        """What was seen, answered and done before. Raises EnvironmentFault."""
        return self.recorded(task).history

    def _read_step(self, suite: str, episode: int, place: int) -> _Recorded:
        data = self._folders[suite]
        found = data[episode]
        if place >= len(found.steps):
            raise DataError(f"{data.folder} episode {found.id} has no step {place + 1}: it was changed")
        steps, shown = found.steps, place - (self._images - 1)
        turns = tuple(self._turn(data, step, number >= shown) for number, step in enumerate(steps[:place]))
        return _Recorded(steps[place], observation_of(data, steps[place]), turns)

    def _turn(self, data: DataFolder, step: Step, shown: bool) -> Turn:
        seen = observation_of(data, step)
        prepared = self._agent.prepare(seen)[0] if shown else self._agent.outline(seen)
        if step.action is None:
            return Turn(prepared, step.answer or "", None)
        try:
            said = self._agent.decode(self._agent.answer_ids(step.action, prepared.frame))
        except ValueError:  # the model has no word for it
            said = step.answer or step.action.type
        return Turn(prepared, said, step.action)


class RecordedStep:
    """An `Environment` of one answer."""

    def __init__(self, steps: RecordedSteps, slot: str):
        self._steps, self._slot = steps, slot
        self._task: Task | None = None
        self._compared: Compared | None = None

    async def reset(self, task: Task) -> Observation:
        self._task, self._compared = task, None
        return self._steps.recorded(task).observation

    async def step(self, action: Action, index: int) -> StepResult:
        """The same screen: what another action would have led to is unknown."""
        if self._task is None:
            raise EnvironmentFault(f"{self._slot}: a step came before a reset")
        found = self._steps.recorded(self._task)
        assert found.step.action is not None, "steps without an action are not tasks"
        frame = found.observation.frame
        size = frame.width, frame.height
        self._compared = compare(action, found.step.action, size, self._steps.reward, found.step.target)
        worth = self._compared.worth(self._steps.reward)
        return StepResult(found.observation, done=True, reward=worth, note=self._compared.words())

    async def evaluate(self) -> Score:
        """1 where type and parameters are right."""
        found = self._compared or Compared(False, 0.0)
        return Score(found.parameters if found.type else 0.0, found.words())

    async def close(self) -> None: ...


def observation_of(data: DataFolder, step: Step) -> Observation:
    """Raises DataError."""
    return Observation(frame_of(data, step.screen), app=step.app, ui_tree=step.ui_tree or None)


def frame_of(data: DataFolder, name: str) -> Frame:
    """Raises DataError."""
    image = data.screen(name)
    with Image.open(io.BytesIO(image), formats=tuple(MEDIA)) as opened:
        return Frame(image, name, *opened.size, MEDIA[opened.format or "PNG"])
