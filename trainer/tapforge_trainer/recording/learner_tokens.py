"""What the learner computed of the tokens that updates trained on, beside the records.

    FOLDER/learner-000001.jsonl, ...     append-only, a line per episode of an update; beside each its index
                                         (`segments.py`)

A line has `episode`, `update`, `steps`: [step, tokens] in the order of the numbers, and two arrays of one number per
token, little-endian float16 in base64:

    gaps         the engine's log-probability with which the token was sampled less the learner's, nats
    entropies    of the learner's distribution at the token, nats

Promises:
1. The learner's log-probability is the recorded one of the engine less the gap. It is the gap that is stored, because
   half precision keeps small numbers best.
2. A line is written after the update, and survives a power failure from the next `sync` on. Of an update that was
   repeated after a crash, the later line counts.
3. Recordings of earlier versions, measurements and episodes that no update trained on have no line.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from .reader import RecordingError
from .segments import Entry, Series, read_lines, read_ranges

_KIND: Final = "learner_tokens"
_NUMBER: Final = np.dtype("<f2")
_LARGEST: Final = float(np.finfo(_NUMBER).max)
#: bytes from a segment's beginning, with some of its first numbers: no other run's segment has the same
_HEAD: Final = 1024


@dataclass(frozen=True, slots=True)
class LearnerTokens:
    """Of the response tokens of an episode, step by step."""

    episode: str
    #: number of a step, and how many of the numbers are its tokens'
    steps: tuple[tuple[int, int], ...]
    #: [tokens], nats: the engine's log-probability less the learner's
    gaps: np.ndarray
    #: [tokens], nats
    entropies: np.ndarray

    def of_step(self, step: int) -> tuple[list[float], list[float]] | None:
        """Gaps and entropies of a step's tokens; None: the update did not train on it."""
        end = 0
        for number, count in self.steps:
            start, end = end, end + count
            if number == step:
                return self.gaps[start:end].tolist(), self.entropies[start:end].tolist()
        return None


def encode(update: int, found: LearnerTokens) -> bytes:
    line = {
        "kind": _KIND,
        "episode": found.episode,
        "update": update,
        "steps": found.steps,
        "gaps": _packed(found.gaps),
        "entropies": _packed(found.entropies),
    }
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def decode(line: dict[str, Any]) -> LearnerTokens:
    """Raises KeyError, TypeError or ValueError for a line that is none."""
    found = LearnerTokens(
        line["episode"],
        tuple((int(step), int(count)) for step, count in line["steps"]),
        _unpacked(line["gaps"]),
        _unpacked(line["entropies"]),
    )
    tokens = sum(count for _, count in found.steps)
    if not tokens == len(found.gaps) == len(found.entropies):
        raise ValueError(f"{tokens} tokens, {len(found.gaps)} gaps and {len(found.entropies)} entropies")
    return found


def _packed(numbers: np.ndarray) -> str:
    return base64.b64encode(np.clip(numbers, -_LARGEST, _LARGEST).astype(_NUMBER).tobytes()).decode()


def _unpacked(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), _NUMBER)


def block(update: int, episodes: Sequence[LearnerTokens]) -> tuple[bytes, list[Entry]]:
    """The lines of an update, and what the index says of each."""
    lines = [encode(update, one) for one in episodes]
    entries, offset = [], 0
    for one, line in zip(episodes, lines, strict=True):
        entries.append(Entry(_KIND, one.episode, offset, len(line), {"update": update}))
        offset += len(line)
    return b"".join(lines), entries


def _scan(path: Path, start: int) -> Iterator[Entry]:
    for raw in read_lines(path, start):
        if not raw.endswith(b"\n") or b"\0" in raw:
            return
        try:
            line = json.loads(raw)
            yield Entry(line["kind"], line["episode"], start, len(raw), {"update": line["update"]})
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{path}: broken line at byte {start}: {error!r}") from error
        start += len(raw)


#: the segments of these lines
LEARNER: Final = Series("learner", ".jsonl", _scan)


@dataclass(frozen=True, slots=True)
class _Line:
    update: int
    segment: int
    offset: int
    length: int


class LearnerTokenReader:
    """Of one recording, which may grow, lose its oldest segments, or make way for another run's meanwhile. For use from
    several threads."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = threading.Lock()
        #: by segment: how far it was read, and its first bytes, by which one that took its place is known
        self._read: dict[int, tuple[int, bytes]] = {}
        self._lines: dict[str, list[_Line]] = {}

    @property
    def exists(self) -> bool:
        """Whether an update has written anything that is still there."""
        return bool(LEARNER.numbers(self._folder))

    def refresh(self) -> None:
        """Reads what was written since. Raises RecordingError, after all else was read."""
        with self._lock:
            try:
                self._refresh()
            except OSError as error:
                raise RecordingError(f"the learner's tokens in {self._folder} can't be read: {error}") from error

    def find(self, episode: str, update: int | None = None) -> tuple[int, LearnerTokens] | None:
        """An update that trained on the episode, and what the learner computed in it: of several (success replay) the
        one that is asked for, else the first. None: there is none. Raises RecordingError."""
        self.refresh()
        with self._lock:
            by_update = {line.update: line for line in self._lines.get(episode, ())}
        if not by_update:
            return None
        line = by_update.get(update) if update is not None else None
        line = line or by_update[min(by_update)]
        path = LEARNER.path(self._folder, line.segment)
        try:
            entry = Entry(_KIND, episode, line.offset, line.length, {})
            ((_, data),) = read_ranges(path, [entry])
            found = decode(json.loads(data))
            if found.episode != episode:
                raise ValueError(f"it is of episode {found.episode}")
        except FileNotFoundError:  # removed just now
            return None
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{path}: no learner's tokens at byte {line.offset}: {error!r}") from error
        return line.update, found

    def _refresh(self) -> None:
        numbers = LEARNER.numbers(self._folder)
        gone = {number for number, known in self._read.items() if not self._is_there(number, *known)}
        if gone:
            for number in gone:
                del self._read[number]
            kept = ((name, [one for one in lines if one.segment not in gone]) for name, lines in self._lines.items())
            self._lines = {name: lines for name, lines in kept if lines}
        broken: RecordingError | None = None
        for number in numbers:
            path = LEARNER.path(self._folder, number)
            start, head = self._read.get(number, (0, b""))
            try:
                if start and path.stat().st_size <= start:
                    continue
                entries = list(LEARNER.scan(path, start)) if start else LEARNER.entries(self._folder, number)
                end = entries[-1].end if entries else start
                head = head or _head(path, min(_HEAD, end))
            except FileNotFoundError:  # removed just now
                continue
            except RecordingError as error:
                broken = broken or error
                continue
            for entry in entries:
                line = _Line(entry.facts["update"], number, entry.offset, entry.length)
                self._lines.setdefault(entry.name, []).append(line)
            if end:
                self._read[number] = end, head
        if broken is not None:
            raise broken

    def _is_there(self, number: int, end: int, head: bytes) -> bool:
        """Whether the segment is the one that was read."""
        path = LEARNER.path(self._folder, number)
        try:
            return path.stat().st_size >= end and _head(path, len(head)) == head
        except FileNotFoundError:
            return False


def _head(path: Path, length: int) -> bytes:
    with path.open("rb") as file:
        return file.read(length)
