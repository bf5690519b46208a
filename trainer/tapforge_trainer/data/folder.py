"""A data set on disk: episodes as lines, screens in packs, and what was left out when it was made.

    data.json                 what it was made of, how many rows were rejected and why; written last
    episodes.jsonl            an episode per line (`episodes.py`)
    screens/pack-000001.tar   images as they came, named by the sha256 of their bytes (`recording/packs.py`)

Promises:
- A folder without data.json isn't finished: it is refused, and written anew. One writer has it at a time, and what
  else lies there is never removed.
- Reading takes memory for the places of lines and names of screens, 8 and some 200 bytes each, whatever they hold.
- A damaged line or image is an error with its number, never another episode.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..recording.packs import PackReader, PackWriter
from .episodes import VERSION, DataError, Episode, read_line
from .images import kept_image

EPISODES: Final = "episodes.jsonl"
SCREENS: Final = "screens"
ABOUT: Final = "data.json"
#: there while a folder is written, and locked by its writer
UNFINISHED: Final = ".unfinished"


@dataclass
class Rejected:
    """Rows that were left out, by reason."""

    counts: dict[str, int] = field(default_factory=dict)
    #: the first of each: row and what is wrong with it
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, row: str, detail: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, f"{row}: {detail}"[:500])

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """For people, the most frequent first."""
        counts = sorted(self.counts.items(), key=lambda item: -item[1])
        return [f"{count:,} x {reason}, first {self.first[reason]}" for reason, count in counts]

    def as_json(self) -> dict[str, Any]:
        return {reason: {"rows": count, "first": self.first[reason]} for reason, count in self.counts.items()}


class DataWriter:
    """Makes a folder. Use as a context: without `finish` nothing of it counts. Raises DataError, OSError."""

    def __init__(self, folder: Path):
        # Removed is only what an earlier writer left: another folder may have `screens` as well.
        if not (folder / UNFINISHED).exists() and folder.exists() and any(folder.iterdir()):
            finished = (folder / ABOUT).exists()
            what = "has a data set already" if finished else "holds other files"
            raise DataError(f"{folder} {what}; name another folder, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._claim = (folder / UNFINISHED).open("a")
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._claim.close()
            raise DataError(f"another process is writing {folder}; wait for it, or name another folder") from None
        if (folder / ABOUT).exists():  # since we looked
            self._claim.close()
            raise DataError(f"{folder} has a data set already; name another folder, or remove it")
        shutil.rmtree(folder / SCREENS, ignore_errors=True)
        (folder / SCREENS).mkdir()
        self._screens = PackWriter(folder / SCREENS)
        self._lines = (folder / EPISODES).open("wb")
        self.episodes = self.steps = 0

    def __enter__(self) -> DataWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):  # such as a full disk, which names no file
            error.add_note(f"while {self.folder} was written")
        with closing(self._claim), closing(self._screens):
            self._lines.close()

    def screen(self, data: bytes) -> str:
        """Keeps an image as it is, once. Returns its name. Raises DataError for bytes that are not an image."""
        return kept_image(self._screens, data)

    def episode(self, episode: Episode) -> None:
        self._lines.write(episode.line())
        self.episodes += 1
        self.steps += len(episode.steps)

    def finish(self, made_of: Mapping[str, Any], rejected: Rejected) -> None:
        self._screens.sync()
        self._lines.flush()
        os.fsync(self._lines.fileno())
        about = {
            "version": VERSION,
            "episodes": self.episodes,
            "steps": self.steps,
            "made_of": dict(made_of),
            "rejected": rejected.as_json(),
        }
        unfinished = self.folder / f".{ABOUT}.new"
        with unfinished.open("w") as file:
            file.write(json.dumps(about, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(self.folder / ABOUT)
        (self.folder / UNFINISHED).unlink()


class DataFolder:
    """Reads one. Raises DataError."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            about = json.loads((folder / ABOUT).read_text())
        except FileNotFoundError:
            why = f"{folder} has no {ABOUT}: it is not a data set, or wasn't finished; convert it again"
            raise DataError(why) from None
        except (OSError, ValueError) as error:
            raise DataError(f"{folder / ABOUT} can't be read: {error}") from error
        if not isinstance(about, dict) or not isinstance(about.get("rejected"), dict):
            raise DataError(f"{folder / ABOUT} doesn't say what was rejected, so it is not a data set's")
        self.about: dict[str, Any] = about
        if about.get("version") != VERSION:
            raise DataError(f"{folder} has version {about.get('version')} of the format; this release reads {VERSION}")
        self._begins = _begins(folder / EPISODES)
        if len(self._begins) - 1 != self.about.get("episodes"):
            raise DataError(
                f"{folder / EPISODES} has {len(self._begins) - 1} lines and {ABOUT} says {self.about.get('episodes')}: "
                "it was cut off or changed; convert it again"
            )
        self._packs = PackReader(folder / SCREENS)

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __getitem__(self, place: int) -> Episode:
        with (self.folder / EPISODES).open("rb") as file:
            file.seek(self._begins[place])
            return self._read(file.readline(), place)

    def __iter__(self) -> Iterator[Episode]:
        with (self.folder / EPISODES).open("rb") as file:
            for place, line in enumerate(file):
                yield self._read(line, place)

    def _read(self, line: bytes, place: int) -> Episode:
        try:
            return read_line(line)
        except DataError as error:
            raise DataError(f"{self.folder / EPISODES} line {place + 1}: {error}") from error

    def screen(self, name: str) -> bytes:
        """An image as it was put there."""
        if (found := self._packs.read(name)) is None:
            raise DataError(f"{self.folder / SCREENS} has no screen {name[:12]}; convert the data set again")
        data, place = found
        if hashlib.sha256(data).hexdigest() != name:
            raise DataError(f"{self.folder / SCREENS}: screen {name[:12]} in pack {place.pack} is damaged")
        return data


def _begins(path: Path) -> array[int]:
    """Where lines begin, and the last one's end."""
    found, at = array("q", [0]), 0
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                place = block.find(b"\n")
                while place >= 0:
                    found.append(at + place + 1)
                    place = block.find(b"\n", place + 1)
                at += len(block)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}") from error
    if found[-1] != at:
        raise DataError(f"{path} ends in the middle of a line: it was cut off; convert it again")
    return found
