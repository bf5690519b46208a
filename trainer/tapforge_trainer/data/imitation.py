"""A data set's steps as samples to imitate, made when they are asked for: memory doesn't grow with the data set.

What a model is shown and asked is what a rollout would show and ask it, by its adapter; the answer is the adapter's own
for the step's action. A step that the model can't be asked, or has no word for, is counted by reason and left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapforge_api import TrainingRun
from tapforge_envs.protocol import EnvironmentFault, Observation, Task

from ..agents.agent import Agent, ContextLimit, Turn
from ..frames.frame import FittedFrame
from ..records import ResponseSpan, Sample
from .episodes import DataError, Episode, Outcome, Step
from .folder import DataFolder, Rejected
from .recorded import frame_of, observation_of

#: steps that are tried before anything is learned, and the share of them that may fail
TRIED, _MAX_BAD = 200, 0.1


@dataclass(frozen=True, slots=True)
class Imitated:
    samples: list[Sample]
    #: by episode, by name
    frames: dict[str, dict[str, FittedFrame]]


class ImitationData:
    """Steps of episodes with these outcomes. `left_out` counts what was asked for and could not be made."""

    def __init__(
        self, agent: Agent, data: DataFolder, outcomes: Collection[Outcome], weights: Mapping[str, float] = {}
    ):
        """`weights`: of answers in the loss, by their episode's outcome; 1 where there is none. Raises DataError where
        nothing is left."""
        self._agent, self._data, self._weights = agent, data, weights
        self.episodes, self.left_out = 0, Rejected()
        #: steps that could not be made: not tried again, and counted once
        self._failed = set[int]()
        #: of each step, its episode and its number there; 8 bytes a step
        self._episode, self._step = array("I"), array("I")
        for number, episode in enumerate(data):
            if episode.outcome in outcomes:
                steps = [place for place, step in enumerate(episode.steps) if step.action is not None]
                self._episode.extend([number] * len(steps))
                self._step.extend(steps)
                self.episodes += bool(steps)
        if not self._step:
            raise DataError(
                f"{data.folder} has nothing to imitate: no episode that ended as {' or '.join(sorted(outcomes))} has "
                "an action; see tapforge data inspect"
            )

    def __len__(self) -> int:
        return len(self._step)

    @property
    def places(self) -> Iterator[tuple[int, int]]:
        """Of each step, its episode and its number there."""
        return zip(self._episode, self._step, strict=True)

    def check(self, places: Sequence[int]) -> None:
        """Tries some of these. Raises DataError where too many can't be made."""
        tried = places[:TRIED]
        made = sum(len(self.batch([place]).samples) for place in tried)  # of screens, one step's at a time
        if made < (1 - _MAX_BAD) * len(tried):
            raise DataError(
                f"{len(tried) - made} of {len(tried)} steps of {self._data.folder} can't be imitated by this model:\n  "
                + "\n  ".join(self.left_out.lines())
            )

    def batch(self, places: Sequence[int]) -> Imitated:
        """Samples of these steps, by number; fewer where some can't be made."""
        samples, frames = list[Sample](), dict[str, dict[str, FittedFrame]]()
        for number in places:
            if number in self._failed:
                continue
            place = self._step[number]
            episode = self._data[self._episode[number]]
            try:
                sample, shown = self._sample(episode, place)
            except (EnvironmentFault, DataError) as error:
                self._leave_out(number, "screen", episode, str(error))
            except ValueError as error:
                self._leave_out(number, "action", episode, str(error))
            else:
                if isinstance(sample, ContextLimit):
                    self._leave_out(number, "context", episode, f"{sample}; raise model.contextTokens")
                    continue
                samples.append(sample)
                frames.setdefault(episode.id, {}).update((frame.name, frame) for frame in shown)
        return Imitated(samples, frames)

    def _leave_out(self, number: int, reason: str, episode: Episode, why: str) -> None:
        self._failed.add(number)
        self.left_out.add(reason, f"{episode.id} step {self._step[number]}", why)

    def _sample(self, episode: Episode, place: int) -> tuple[Sample | ContextLimit, Sequence[FittedFrame]]:
        agent, steps = self._agent, episode.steps
        history = [self._turn(step) for step in steps[:place]]
        seen = self._agent.prepare(observation_of(self._data, steps[place]))[0]
        prompt = agent.prompt(episode.asked, history, seen)
        if isinstance(prompt, ContextLimit):
            return prompt, ()
        action = steps[place].action
        assert action is not None
        answer = agent.answer_ids(action, seen.frame)
        weight = self._weights.get(episode.outcome, 1.0)
        start, end = len(prompt.ids), len(prompt.ids) + len(answer)
        span = ResponseSpan(place, start, end, (0.0,) * len(answer), (0,) * len(answer), 1.0, weight)
        frames = [self._shown(frame) for frame in prompt.frames]
        names = tuple(frame.name for frame in frames)
        length = prompt.expanded_length + len(answer)
        return Sample(episode.id, episode.id, (*prompt.ids, *answer), length, names, (span,)), frames

    def _turn(self, step: Step) -> Turn:
        seen = self._agent.outline(observation_of(self._data, step))
        if step.action is None:
            return Turn(seen, step.answer or "", None)
        try:
            said = self._agent.decode(self._agent.answer_ids(step.action, seen.frame))
        except ValueError:  # what came after an action that the model has no word for can be learned all the same
            said = step.answer or step.action.type
        return Turn(seen, said, step.action)

    def _shown(self, frame: FittedFrame) -> FittedFrame:
        """An outlined one is prepared: few of a long history are shown."""
        return frame if frame.data else self._agent.prepare(Observation(frame_of(self._data, frame.name)))[0].frame


def imitated_tasks(run: TrainingRun) -> Iterator[Task]:
    """Of the data set that a run imitates, if it does. Raises DataError."""
    warm = run.spec.warm_start
    if warm is not None and warm.data is not None:
        wanted = frozenset(warm.data.outcomes)
        yield from (e.task for e in DataFolder(Path(warm.data.path)) if e.outcome in wanted)
