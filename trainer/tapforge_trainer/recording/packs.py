"""Many images to a file: `pack-000001.tar`, `pack-000002.tar`, ..., each with an index from names to bytes.

Why not a file for each: 10,000 images of 160 KB, synced after every 1,000, took 12,512 fsyncs, 10,000 files in 256
folders and 21 s one by one, and 32 fsyncs, 22 files and 2 s in packs (two cores at load 3 to 5, ext4). A pack is a tar
archive, so that `tar xf` gets every image out of it, and what the index says can be read from the pack again.

Promises:
1. An image is there under its name or not at all: one that was cut off, or that a power failure left without its bytes,
   is not found, as far as its format has checksums (PNG).
2. A writer begins a pack of its own: an earlier one that lives on (cluster/storage.py) can't write into it.
3. A name is written once per `WINDOW` of the newest packs. So names in memory are bounded, and dropping an old pack
   loses no image that was put again since.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from PIL import Image

from .segments import Entry, SegmentWriter, Series, read_ranges

#: packs in which a name is looked for before an image is written again
WINDOW: Final = 8
#: bytes from which on a pack is full
PACK_BYTES: Final = 128 << 20
_BLOCK: Final = tarfile.BLOCKSIZE


class PackLocation(NamedTuple):
    """Where an image is."""

    pack: int
    offset: int
    size: int
    #: of its name in the pack, such as png
    ending: str


def _scan(path: Path, start: int) -> Iterator[Entry]:
    """An entry is an image with its header and padding."""
    end = path.stat().st_size
    with path.open("rb") as file:
        while start + _BLOCK <= end:
            file.seek(start)
            try:
                header = tarfile.TarInfo.frombuf(file.read(_BLOCK), "ascii", "strict")
            except tarfile.HeaderError:
                return
            length = _BLOCK + header.size + _padding(header.size)
            if start + length > end:
                return
            name, _, ending = header.name.partition(".")
            kind = "image" if _sound(file.read(header.size)) else "damaged"
            yield Entry(kind, name, start, length, {"size": header.size, "ending": ending})
            start += length


PACKS: Final = Series("pack", ".tar", _scan)


class PackWriter:
    """One writer per folder, in one thread. Raises OSError."""

    def __init__(self, folder: Path, pack_bytes: int = PACK_BYTES):
        """`folder` has to be there."""
        self._folder = folder
        self._known = {number: _names(folder, number) for number in PACKS.numbers(folder)[-WINDOW:]}
        self._segments = SegmentWriter(folder, PACKS, pack_bytes, fresh=True)

    @property
    def number(self) -> int:
        """Of the pack that is written."""
        return self._segments.number

    def knows(self, name: str) -> bool:
        return any(name in names for names in self._known.values())

    def put(self, name: str, data: bytes, ending: str) -> None:
        """Writes an image that isn't known."""
        self._segments.room()
        header = tarfile.TarInfo(f"{name}.{ending}")
        header.size = len(data)
        block = header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(_padding(len(data)))
        facts = {"size": len(data), "ending": ending}
        self._segments.append(block, [Entry("image", name, 0, len(block), facts)])
        self._known.setdefault(self.number, set()).add(name)
        for old in list(self._known)[:-WINDOW]:
            del self._known[old]

    def sync(self) -> None:
        """Waits until every image put so far would survive a power failure."""
        self._segments.sync()

    def drop(self, number: int, spared: Collection[str]) -> None:
        """Removes a pack, but for the images of these names, which are put again and synced before."""
        self._known.pop(number, None)
        path = PACKS.path(self._folder, number)
        entries = [e for e in PACKS.entries(self._folder, number) if e.kind == "image" and e.name in spared]
        for entry, block in read_ranges(path, entries):
            if not self.knows(entry.name):
                self.put(entry.name, block[_BLOCK : _BLOCK + entry.facts["size"]], entry.facts["ending"])
        self.sync()
        PACKS.drop(self._folder, number)

    def close(self) -> None:
        self._segments.close()


class PackReader:
    """Finds images, also those that are written meanwhile, by another process too. Raises OSError."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._names: dict[int, dict[str, PackLocation]] = {}
        self._sizes: dict[int, int] = {}

    def find(self, name: str) -> PackLocation | None:
        """Of an image that is there several times, the newest."""
        place = self._look(name)
        if place is None and self._refresh():
            place = self._look(name)
        return place

    def read(self, name: str) -> tuple[bytes, PackLocation] | None:
        """An image, and where it was."""
        for _ in range(2):
            if (place := self.find(name)) is None:
                return None
            try:
                with PACKS.path(self._folder, place.pack).open("rb") as file:
                    file.seek(place.offset)
                    return file.read(place.size), place
            except FileNotFoundError:  # dropped since; the image may have been put again
                self._refresh()
        return None

    def _look(self, name: str) -> PackLocation | None:
        return next((names[name] for names in self._names.values() if name in names), None)

    def _refresh(self) -> bool:
        """Whether there is anything new."""
        numbers = PACKS.numbers(self._folder)
        sizes = {}
        for number in reversed(numbers):
            try:
                sizes[number] = os.stat(PACKS.path(self._folder, number)).st_size
            except FileNotFoundError:
                continue
        if sizes == self._sizes:
            return False
        names = {}
        for number, size in sizes.items():
            old = self._names.get(number)
            names[number] = old if old is not None and self._sizes[number] == size else self._places(number)
        self._names, self._sizes = names, sizes
        return True

    def _places(self, number: int) -> dict[str, PackLocation]:
        try:
            entries = PACKS.entries(self._folder, number)
        except FileNotFoundError:
            return {}
        return {
            e.name: PackLocation(number, e.offset + _BLOCK, e.facts["size"], e.facts["ending"])
            for e in entries
            if e.kind == "image"
        }


def _names(folder: Path, number: int) -> set[str]:
    return {entry.name for entry in PACKS.entries(folder, number) if entry.kind == "image"}


def _padding(size: int) -> int:
    return -size % _BLOCK


def _sound(data: bytes) -> bool:
    """Whether checksums fit, where the format has some."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.verify()
    except Exception:  # noqa: BLE001 - Pillow raises whatever its decoders do, SyntaxError among others
        return False
    return True
