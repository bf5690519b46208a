"""Append-only files of bounded size, each with an index beside it: what a recording is made of.

    rollout-000001.jsonl   rollout-000001.index     whole: not written into any more
    rollout-000002.jsonl   rollout-000002.index     the newest one: appended to

Promises:
1. A block of entries lies in one segment, without gaps: an entry begins where the one before ends.
2. A segment is whole and would survive a power failure before the next one is made. `sync` says the same of the newest
   one, by a single fsync however much was written.
3. The index is a copy. Its lines are written after the fsync of what they name, and never flushed themselves: torn,
   behind, ahead of its segment or missing, its reader gets what the segment itself would have said (`entries`),
   and reads of the segment only what the index lacks.
4. What an interrupted writer left at the end, half an entry, is cut off when the next one opens the folder. A write
   that fails leaves nothing behind that readers see.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

INDEX = ".index"
#: of the files that are read piece by piece
_CHUNK = 1 << 20
#: bytes in which the last line of an index lies
_LAST = 1 << 12


@dataclass(frozen=True, slots=True)
class Entry:
    """Bytes [offset, offset + length) of a segment that belong together."""

    kind: str
    name: str
    offset: int
    length: int
    #: what else the index says of it, as JSON holds it
    facts: dict[str, Any]

    @property
    def end(self) -> int:
        return self.offset + self.length


#: The complete entries of a segment from an offset on, read from the segment itself. Stops before what is cut off.
Scan = Callable[[Path, int], Iterator[Entry]]


@dataclass(frozen=True, slots=True)
class Series:
    """How the segments of one kind are named and read."""

    stem: str
    ending: str
    scan: Scan

    def path(self, folder: Path, number: int) -> Path:
        """Number 0 is the only file of recordings of earlier versions."""
        return folder / (f"{self.stem}-{number:06d}{self.ending}" if number else f"{self.stem}{self.ending}")

    def index(self, folder: Path, number: int) -> Path:
        return self.path(folder, number).with_suffix(INDEX)

    def numbers(self, folder: Path) -> list[int]:
        """Of the segments that are there, in order."""
        pattern = re.compile(rf"{re.escape(self.stem)}(?:-(\d{{6,}}))?{re.escape(self.ending)}")
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
        return sorted(int(match[1] or 0) for name in names if (match := pattern.fullmatch(name)))

    def entries(self, folder: Path, number: int) -> list[Entry]:
        """Of one segment, in order: from the index, and from the segment what the index lacks."""
        return self._known(folder, number)[0]

    def drop(self, folder: Path, number: int) -> None:
        """Removes a segment and its index."""
        self.index(folder, number).unlink(missing_ok=True)
        self.path(folder, number).unlink()

    def size(self, folder: Path, number: int) -> int:
        """Bytes of a segment and its index."""
        return max(0, _size(self.path(folder, number))) + max(0, _size(self.index(folder, number)))

    def _known(self, folder: Path, number: int) -> tuple[list[Entry], int]:
        """The entries, and how many of them are in the index."""
        path = self.path(folder, number)
        found = list(_indexed(self.index(folder, number), path.stat().st_size))
        indexed = len(found)
        end = found[-1].end if found else 0
        if end < path.stat().st_size:
            found.extend(self.scan(path, end))
        return found, indexed

    def ends_right(self, folder: Path, number: int) -> bool:
        """Whether the last line of the index names the end of its segment: what is wrong before it, readers find."""
        try:
            with self.index(folder, number).open("rb") as index:
                index.seek(max(0, index.seek(0, os.SEEK_END) - _LAST))
                lines = index.read().split(b"\n")
                last = json.loads(lines[-2])
                at_end = last["offset"] + last["length"] == self.path(folder, number).stat().st_size
                return not lines[-1] and bool(at_end)
        except (OSError, LookupError, TypeError, ValueError):
            return False

    def mend(self, folder: Path, number: int) -> int:
        """Makes the index complete and returns the length of the segment's complete entries."""
        found, indexed = self._known(folder, number)
        index = self.index(folder, number)
        lines = [_line(entry) for entry in found]
        if indexed != len(found) or _size(index) > sum(map(len, lines)):
            unfinished = index.with_name(f".{index.name}.new")
            unfinished.write_bytes(b"".join(lines))
            unfinished.rename(index)
        return found[-1].end if found else 0


class SegmentWriter:
    """Appends to the newest segment of a folder. One writer per folder; not for use from several threads at once.
    Raises OSError."""

    def __init__(self, folder: Path, series: Series, most: int, *, fresh: bool = False):
        """`most`: bytes from which on the next segment is begun. `fresh`: what an earlier writer left, which may live,
        is not appended to. `folder` has to be there."""
        self._folder, self._series, self._most = folder, series, most
        self._file = -1
        self._pending: list[Entry] = []
        numbers = series.numbers(folder)
        for number in numbers:
            if not series.ends_right(folder, number):
                series.mend(folder, number)
        self._new = False
        self.number = numbers[-1] + fresh if numbers else 1
        self._open()
        #: complete bytes of the newest segment
        self.end = self._synced = series.mend(folder, self.number)
        lost = os.fstat(self._file).st_size - self.end
        if lost:
            log.warning("%s ends in the middle of an entry: its last %d bytes are dropped", self.path, lost)
            os.ftruncate(self._file, self.end)

    @property
    def path(self) -> Path:
        return self._series.path(self._folder, self.number)

    @property
    def closed(self) -> bool:
        return self._file < 0

    def room(self) -> bool:
        """Begins the next segment if the newest one is full. True: it is a new one, with nothing in it."""
        if self.end >= self._most:
            self.sync()
            os.close(self._file)
            self._file = -1
            self.number += 1
            self.end = self._synced = 0
            self._open()
        return self.end == 0

    def append(self, block: bytes, entries: Iterable[Entry]) -> None:
        """`entries` cover the block; their offsets count from its beginning."""
        try:
            written = 0
            while written < len(block):
                written += os.pwrite(self._file, memoryview(block)[written:], self.end + written)
        except OSError:
            # Half a block would make the next one unreadable. Where cutting it off fails too, the next opening does it.
            with suppress(OSError):
                os.ftruncate(self._file, self.end)
            os.close(self._file)
            self._file = -1
            raise
        self._pending.extend(replace(entry, offset=self.end + entry.offset) for entry in entries)
        self.end += len(block)

    def sync(self) -> None:
        """Waits until all that was appended would survive a power failure."""
        if self._file < 0 or self._synced == self.end:
            return
        os.fsync(self._file)
        if self._new:
            flush_folder(self._folder)
            self._new = False
        self._synced = self.end
        lines = b"".join(map(_line, self._pending))
        self._pending.clear()
        with self._series.index(self._folder, self.number).open("ab") as index:
            index.write(lines)

    def close(self) -> None:
        """Without `sync`: what came after the last one may be lost."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        self._new = not self.path.exists()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)


def read_ranges(path: Path, entries: Sequence[Entry]) -> Iterator[tuple[Entry, bytes]]:
    """The bytes of entries of one segment, in one read each."""
    file = os.open(path, os.O_RDONLY)
    try:
        for entry in entries:
            yield entry, os.pread(file, entry.length, entry.offset)
    finally:
        os.close(file)


def read_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """Lines with their newline; the last one may lack it."""
    file = os.open(path, os.O_RDONLY)
    try:
        rest = b""
        while chunk := os.pread(file, _CHUNK, start):
            start += len(chunk)
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            for line in lines:
                yield line + b"\n"
        if rest:
            yield rest
    finally:
        os.close(file)


def open_for_appending(names: Iterable[str]) -> set[str]:
    """Which of the files of a folder a writer may hold open: the newest segment of each kind, and its index."""
    pattern = re.compile(r"(.+?)(?:-(\d{6,}))?(\.[a-z]+)")
    newest: dict[tuple[str, str], tuple[int, str]] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            kind = (match[1], match[3])
            newest[kind] = max(newest.get(kind, (-1, "")), (int(match[2] or 0), name))
    return {name for _, name in newest.values()}


def flush_folder(folder: Path) -> None:
    """New names in it survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _line(entry: Entry) -> bytes:
    known = {"kind": entry.kind, "name": entry.name, "offset": entry.offset, "length": entry.length, **entry.facts}
    return json.dumps(known, separators=(",", ":")).encode() + b"\n"


def _indexed(index: Path, size: int) -> Iterator[Entry]:
    """The entries of an index as far as they can be believed: whole lines that follow on each other inside a segment of
    this size."""
    end = 0
    try:
        lines = index.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    for line in lines:
        try:
            facts = json.loads(line)
            entry = Entry(facts.pop("kind"), facts.pop("name"), facts.pop("offset"), facts.pop("length"), facts)
            fits = entry.offset == end and 0 < entry.length <= size - end
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        if not fits:
            return
        end = entry.end
        yield entry


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
