"""A data set that grows, an episode at a time.

- An episode is there once `commit` has returned, whole, and would survive a power failure then; what a writer that was
  killed, or failed, left behind is cut off by the next one. After an error only `close` is of use.
- What is there already is never written anew: it may have been redacted since.

One writer per folder, which its owner has to see to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError

from ..recording.packs import PackWriter
from ..recording.segments import flush_folder
from .episodes import VERSION, DataError, Episode
from .folder import ABOUT, EPISODES, SCREENS, DataFolder
from .images import kept_image


class DataAppender:
    """Goes on with a folder, or begins one; what else lies there is left alone. Raises DataError, OSError."""

    def __init__(self, folder: Path, made_of: Mapping[str, Any]):
        """`made_of`: of a new one."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / ABOUT).exists():
            self._about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
        else:
            self._about = {"version": VERSION, "episodes": 0, "steps": 0, "made_of": dict(made_of), "rejected": {}}
            self._say()
        (folder / SCREENS).mkdir(exist_ok=True)
        (folder / EPISODES).touch()
        _cut(folder / EPISODES, self._about["episodes"])
        DataFolder(folder)  # raises for one that can't be gone on with
        self._screens = PackWriter(folder / SCREENS)

    def screen(self, data: bytes) -> str:
        """Keeps an image as it is, once. Returns its name. Raises DataError for bytes that are not an image."""
        return kept_image(self._screens, data)

    def episode(self, episode: Episode) -> None:
        """Its screens first. `commit` makes it part of the set."""
        try:
            line = episode.line()
        except PydanticSerializationError as error:
            raise DataError(f"{episode.id} holds a text with half a character (a lone surrogate)") from error
        self._screens.sync()
        with (self.folder / EPISODES).open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._about["episodes"] += 1
        self._about["steps"] += len(episode.steps)

    def commit(self) -> None:
        """What was written counts from now on."""
        self._say()

    def close(self) -> None:
        self._screens.close()

    def _say(self) -> None:
        unfinished = self.folder / f".{ABOUT}.new"
        with unfinished.open("w") as about:
            about.write(json.dumps(self._about, indent=2) + "\n")
            about.flush()
            os.fsync(about.fileno())
        unfinished.rename(self.folder / ABOUT)
        flush_folder(self.folder)


def _cut(path: Path, lines: int) -> None:
    """What comes after so many lines was not finished."""
    end = 0
    with path.open("r+b") as file:
        for _ in range(lines):
            end += len(file.readline())
        file.truncate(end)
