"""The frames of a recording, by name: written into packs (`packs.py`), read from packs and earlier versions' files.

    frames/pack-000001.tar, pack-000001.index, ...
    frames/retention.json         what the last writer recorded of the frames: why one may not be there
    frames/ab/abcdef....png       of earlier versions, also jpg and webp

What is read is what was recorded: a frame's name is checked against its content, so a damaged file is an error and
never a picture. In a pack, a frame that isn't PNG was recorded lossily: it can be looked at (`get`) and not learned
from (`frame`).
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..frames.frame import FittedFrame, FrameError, checked
from .packs import PACK_BYTES, PACKS, PackReader, PackWriter
from .retention import Retention

_RETENTION: Final = "retention.json"
_LOSSLESS: Final = "png"
#: of frames in files of their own
_ENDINGS: Final = ("png", "jpg", "webp")


class FrameMissing(FrameError):
    """A frame that isn't there."""


class NotRecorded(FrameMissing):
    """One that isn't there because the spec says so; the message says what of the spec."""


class FrameWriter:
    """One writer per folder, in one thread. Raises OSError."""

    def __init__(self, folder: Path, retention: Retention, pack_bytes: int = PACK_BYTES):
        self._folder, self._retention = folder, retention
        self._pack_bytes = retention.segment_bytes(pack_bytes)
        self._packs: PackWriter | None = None
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{_RETENTION}.new"
        unfinished.write_text(retention.as_json())
        unfinished.rename(folder / _RETENTION)

    def put(self, frame: FittedFrame) -> None:
        packs = self._writer()
        if not packs.knows(frame.name):
            packs.put(frame.name, *self._encoded(frame))

    def sync(self) -> None:
        """Waits until every frame put so far would survive a power failure."""
        if self._packs is not None:
            self._packs.sync()

    def close(self) -> None:
        if self._packs is not None:
            self._packs.close()

    # --- what is removed ---

    def size(self) -> int:
        """Bytes of all packs."""
        return sum(PACKS.size(self._folder, number) for number in PACKS.numbers(self._folder))

    def full_packs(self) -> list[int]:
        """Those that are not written into any more, the oldest first."""
        newest = None if self._packs is None else self._packs.number
        return [number for number in PACKS.numbers(self._folder) if number != newest]

    def drop(self, number: int, spared: Collection[str]) -> bool:
        """Removes a pack; frames of these names are kept. False: they are most of it, and it stays."""
        entries = PACKS.entries(self._folder, number)
        if 2 * sum(entry.length for entry in entries if entry.name in spared) > sum(entry.length for entry in entries):
            return False
        self._writer().drop(number, spared)
        return True

    def _writer(self) -> PackWriter:
        if self._packs is None:
            self._packs = PackWriter(self._folder, self._pack_bytes)
        return self._packs

    def _encoded(self, frame: FittedFrame) -> tuple[bytes, str]:
        kind = self._retention.encoding
        if kind == _LOSSLESS:
            return frame.data, _LOSSLESS
        from PIL import Image

        out = io.BytesIO()
        Image.fromarray(frame.pixels()).save(out, kind, quality=self._retention.quality)
        return out.getvalue(), "jpg" if kind == "jpeg" else kind


class RecordedFrames(Mapping[str, FittedFrame]):
    """Some frames of a recording, each read when it is asked for. Raises FrameError then."""

    def __init__(self, folder: Path, names: Collection[str]):
        self._store, self._names = FrameStore(folder), tuple(names)

    def __getitem__(self, name: str) -> FittedFrame:
        return self._store.frame(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class FrameStore:
    """Reads, also what is written meanwhile."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._packs = PackReader(folder)

    def frame(self, name: str) -> FittedFrame:
        """As the model saw it. Raises FrameError for one that is missing, damaged or recorded lossily."""
        found = self._read(name)
        if found.lossy:
            raise FrameError(
                f"frame {name[:12]} of {found.where} was recorded as {found.lossy}, lossily, for viewing only: what is "
                "to be learned from is recorded with recording.encoding: png"
            )
        return found.checked(name)

    def get(self, name: str) -> bytes:
        """The encoded image, to be looked at. Raises FrameError for one that is missing or damaged."""
        found = self._read(name)
        return found.data if found.lossy else found.checked(name).data

    def has(self, name: str) -> bool:
        """Whether the frame is there as the model saw it; a removed one may still be, to one that found it before."""
        if (place := self._packs.find(name)) is not None:
            return place.ending == _LOSSLESS
        return any(path.exists() for path in self._loose(name))

    def shows(self, name: str) -> bool:
        """Whether the frame is there to be looked at."""
        return self._packs.find(name) is not None or any(path.exists() for path in self._loose(name))

    @property
    def lacks(self) -> str:
        """Why a frame may not be there, as the spec wanted it, in words; "" if all should be."""
        retention = self._retention()
        numbers = PACKS.numbers(self._folder)
        removed = retention.removes if numbers and numbers[0] > 1 else ""
        return "; ".join(filter(None, (retention.lacks, removed)))

    @property
    def lossy(self) -> str:
        """How frames were recorded if they can only be looked at."""
        encoding = self._retention().encoding
        return "" if encoding == _LOSSLESS else encoding

    def _retention(self) -> Retention:
        try:
            return Retention.of_json((self._folder / _RETENTION).read_text())
        except (OSError, ValueError, TypeError):  # of earlier versions, or a disk that was full
            return Retention()

    def _read(self, name: str) -> _Found:
        if (packed := self._packs.read(name)) is not None:
            data, place = packed
            return _Found(data, PACKS.path(self._folder, place.pack), "" if place.ending == _LOSSLESS else place.ending)
        for path in self._loose(name):
            try:
                return _Found(path.read_bytes(), path)
            except FileNotFoundError:
                continue
        if lacks := self.lacks:
            raise NotRecorded(f"{lacks[0].upper()}{lacks[1:]}.")
        raise FrameMissing(f"frame {name} is not in {self._folder}")

    def _loose(self, name: str) -> list[Path]:
        return [self._folder / name[:2] / f"{name}.{ending}" for ending in _ENDINGS]


@dataclass(frozen=True, slots=True)
class _Found:
    data: bytes
    where: Path
    #: how it was recorded, if that was lossily
    lossy: str = ""

    def checked(self, name: str) -> FittedFrame:
        try:
            return checked(name, self.data)
        except FrameError as error:
            raise FrameError(f"{self.where}: {error}") from error
