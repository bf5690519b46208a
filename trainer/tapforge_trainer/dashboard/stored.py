"""An episode, read by its place: one read of its own bytes, whatever the recording's size. Raises RecordingError."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..recording.lines import decode_episode, decode_rewards, decode_step
from ..recording.reader import RECORDS, RecordingError
from ..records import EpisodeRecord
from .index import Index, Place, recordings_of


class NotThere(Exception):
    """The index, or the recording, has nothing of that name. The message says what was asked for."""


def read_episodes(index: Index, recording: str, names: list[str]) -> list[EpisodeRecord]:
    """In the order of the names. Raises NotThere."""
    places = index.places(recording, names)
    if missing := [name for name in names if name not in places]:
        raise NotThere(f"{recording} has no episode {missing[0]!r}")
    folder = recordings_of(index.run).get(recording)
    if folder is None:
        raise NotThere(f"{index.run} has no recording {recording!r} any more")
    return [_read(folder, places[name]) for name in names]


def _read(folder: Path, place: Place) -> EpisodeRecord:
    path = RECORDS.path(folder, place.segment)
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            data = os.pread(file, place.length, place.offset)
        finally:
            os.close(file)
    except FileNotFoundError as error:
        raise NotThere(f"{path} was removed: recording.maxGiB keeps the newest records") from error
    except OSError as error:
        raise RecordingError(f"{path} can't be read: {error}") from error
    try:
        lines: list[dict[str, Any]] = [json.loads(line) for line in data.splitlines()]
        steps = tuple(decode_step(line) for line in lines if line["kind"] == "step")
        episode = decode_episode(lines[-1], steps)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RecordingError(f"{path}: no episode at byte {place.offset}: {error!r}") from error
    if episode.awaits_rewards and place.rewards is not None:
        return episode.rewarded(decode_rewards({"rewards": place.rewards}))
    return episode
