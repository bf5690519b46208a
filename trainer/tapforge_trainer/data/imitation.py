"""A data set's steps as samples to imitate, made when they are asked for: memory doesn't grow with the data set.

What a model is shown and asked is what a rollout would show and ask it, by its adapter; the answer is the adapter's own
for the step's action. A step that the model can't be asked, or has no word for, is counted by reason and left out.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tapforge_api import TrainingRun
from tapforge_envs.protocol import EnvironmentFault, Frame, Observation, Task

from ..agents.agent import Agent, ContextLimit, Prepared, Turn
from ..frames.frame import FittedFrame
from ..records import ResponseSpan, Sample
from .episodes import DataError, Episode, Outcome, Step
from .folder import DataFolder, Rejected

#: steps that are tried before anything is learned, and the share of them that may fail
_TRIED, _MAX_BAD = 200, 0.1
#: how a kind of image is called where observations come from
_MEDIA = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


@dataclass(frozen=True, slots=True)
class Imitated:
    samples: list[Sample]
    #: by episode, by name
    frames: dict[str, dict[str, FittedFrame]]


class ImitationData:
    """Steps of episodes with these outcomes. `left_out` counts what was asked for and could not be made."""

    def __init__(self, agent: Agent, data: DataFolder, outcomes: Collection[Outcome]):
        """Raises DataError where nothing is left."""
        self._agent, self._data = agent, data
        self.episodes, self.left_out = 0, Rejected()
        #: (episode, step)
        self.places: list[tuple[int, int]] = []
        for number, episode in enumerate(data):
            if episode.outcome in outcomes:
                steps = [place for place, step in enumerate(episode.steps) if step.action is not None]
                self.places += [(number, place) for place in steps]
                self.episodes += bool(steps)
        if not self.places:
            raise DataError(
                f"{data.folder} has nothing to imitate: no episode that ended as {' or '.join(sorted(outcomes))} has "
                "an action; see tapforge data inspect"
            )

    def __len__(self) -> int:
        return len(self.places)

    def check(self, places: Sequence[int]) -> None:
        """Tries some of these. Raises DataError where too many can't be made."""
        tried = places[:_TRIED]
        made = len(self.batch(tried).samples)
        if made < (1 - _MAX_BAD) * len(tried):
            raise DataError(
                f"{len(tried) - made} of {len(tried)} steps of {self._data.folder} can't be imitated by this model:\n  "
                + "\n  ".join(self.left_out.lines())
            )

    def batch(self, places: Sequence[int]) -> Imitated:
        """Samples of these steps, by number; fewer where some can't be made."""
        samples, frames = list[Sample](), dict[str, dict[str, FittedFrame]]()
        for number in places:
            episode_number, place = self.places[number]
            episode = self._data[episode_number]
            try:
                sample, shown = self._sample(episode, place)
            except (EnvironmentFault, DataError) as error:
                self.left_out.add("screen", f"{episode.id} step {place}", str(error))
            except ValueError as error:
                self.left_out.add("action", f"{episode.id} step {place}", str(error))
            else:
                if sample is None:
                    continue
                samples.append(sample)
                frames.setdefault(episode.id, {}).update((frame.name, frame) for frame in shown)
        return Imitated(samples, frames)

    def _sample(self, episode: Episode, place: int) -> tuple[Sample | None, Sequence[FittedFrame]]:
        agent, steps = self._agent, episode.steps
        history = [self._turn(step) for step in steps[:place]]
        seen = self._seen(steps[place])
        prompt = agent.prompt(asked(episode), history, seen)
        if isinstance(prompt, ContextLimit):
            self.left_out.add("context", f"{episode.id} step {place}", f"{prompt}; raise model.contextTokens")
            return None, ()
        action = steps[place].action
        assert action is not None
        answer = agent.answer_ids(action, seen.frame)
        start, end = len(prompt.ids), len(prompt.ids) + len(answer)
        span = ResponseSpan(place, start, end, (0.0,) * len(answer), (0,) * len(answer), 1.0)
        names = tuple(frame.name for frame in prompt.frames)
        length = prompt.expanded_length + len(answer)
        return Sample(episode.id, episode.id, (*prompt.ids, *answer), length, names, (span,)), prompt.frames

    def _turn(self, step: Step) -> Turn:
        seen = self._seen(step)
        if step.action is None:
            return Turn(seen, step.answer or "", None)
        return Turn(seen, self._agent.decode(self._agent.answer_ids(step.action, seen.frame)), step.action)

    def _seen(self, step: Step) -> Prepared:
        data = self._data.screen(step.screen)
        with Image.open(io.BytesIO(data)) as image:
            frame = Frame(data, step.screen, *image.size, _MEDIA[image.format or "PNG"])
        return self._agent.prepare(Observation(frame, app=step.app, ui_tree=step.ui_tree or None))[0]


def imitated_tasks(run: TrainingRun) -> Iterator[Task]:
    """Of the data set that a run imitates, if it does. Raises DataError."""
    warm = run.spec.warm_start
    if warm is not None and warm.data is not None:
        wanted = frozenset(warm.data.outcomes)
        yield from (e.task for e in DataFolder(Path(warm.data.path)) if e.outcome in wanted)


def asked(episode: Episode) -> str:
    """The goal, with what had been done before the first screen that there is."""
    return "\n".join([episode.task.goal, *(f"Before: {words}" for words in episode.before)])
