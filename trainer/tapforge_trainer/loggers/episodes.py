"""The episodes of an update that loggers show: which, read from the recording, and as rows with pictures.

Of the update's groups, in its order, the first valid episode that failed and the first that succeeded, until there are
as many as the run's file asks for: the same ones whenever they are read. What was removed from the recording is left
out; where it has no screens, rows have no picture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from tapforge_envs.protocol import Outcome

from ..recording import ROLLOUT
from ..recording.reader import Recording
from ..records import EpisodeRecord
from .logger import EpisodeRow

#: characters of one answer, and of all of an episode
_ANSWER, _ANSWERS = 2000, 20_000


class EpisodeReader:
    """Of a run that is recorded meanwhile. For one thread at a time (`lock`): what it has read of the recording's index
    serves all updates."""

    def __init__(self, folder: Path, most: int):
        """`folder`: the run's; `most`: rows of an update."""
        self.lock = threading.Lock()
        self._recording, self._most = Recording(folder / ROLLOUT), most

    def rows(self, groups: Sequence[str]) -> list[EpisodeRow]:
        """Raises RecordingError."""
        picked = islice(picked_of(_read(self._recording, groups)), self._most)
        return [row_of(episode, self._recording) for episode in picked]


class UpdateEpisodes:
    """Read and drawn once, by whichever thread asks first."""

    def __init__(self, reader: EpisodeReader, step: int, groups: Sequence[str]):
        """`step`: the update; `groups`: names, in its order."""
        self.step = step
        self._reader, self._groups = reader, groups
        self._rows: list[EpisodeRow] | None = None

    def rows(self) -> list[EpisodeRow]:
        """Raises RecordingError."""
        with self._reader.lock:
            if self._rows is None:
                self._rows = self._reader.rows(self._groups)
            return self._rows


def picked_of(groups: Iterable[Sequence[EpisodeRecord]]) -> Iterator[EpisodeRecord]:
    for group in groups:
        for outcome in (Outcome.FAILURE, Outcome.SUCCESS):
            yield from islice((one for one in group if one.valid and one.outcome is outcome), 1)


def _read(recording: Recording, groups: Sequence[str]) -> Iterator[list[EpisodeRecord]]:
    members = recording.members(groups)
    for group in groups:
        names = members.get(group, ())
        found = recording.find(names)
        yield [found[name] for name in names if name in found]


def row_of(episode: EpisodeRecord, recording: Recording) -> EpisodeRow:
    from ..viewer.strip import strip

    streams = episode.rewards.streams if episode.rewards else {}
    sums = {name: sum(value for value in values if value is not None) for name, values in streams.items()}
    answers = (f"{step.index + 1}. {step.text.strip()[:_ANSWER]}" for step in episode.steps)
    return EpisodeRow(
        episode=episode.id,
        group=episode.group,
        task=episode.task.key,
        template=episode.task.template,
        goal=episode.task.goal,
        outcome=episode.outcome.value if episode.outcome else "",
        reason=episode.reason.value,
        reward=sum(step.reward for step in episode.steps),
        streams=", ".join(f"{name} {value:g}" for name, value in sums.items()),
        steps=len(episode.steps),
        answers="\n".join(answers)[:_ANSWERS],
        picture=strip(episode, recording.frames.get),
    )
