"""Files of rows, one at a time: JSON Lines, a JSON list, parquet. Bounded memory whatever the file's size."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from tapforge_trainer.agents.coordinates import Coordinates, Fraction, Grid, ImagePixels

from .episodes import DataError

_CHUNK: Final = 1 << 20
#: a row is none if it is longer
_LONGEST: Final = 64 << 20
#: of rows of a parquet file that are decoded at once: they hold images
_PARQUET_ROWS: Final = 16
_BETWEEN: Final = frozenset(" \t\r\n,")
#: bytes that "surrogateescape" has let in
_NO_UTF8: Final = re.compile("[\udc80-\udcff]")

#: how numbers of a place are meant, by name
CONVENTIONS: Final[dict[str, Coordinates]] = {
    "fraction": Fraction(),
    "grid": Grid(999),
    "grid1000": Grid(1000),
    "pixels": ImagePixels(),
}


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, value) of JSON Lines, or of one JSON list; what is not JSON, not UTF-8 or too long comes as a DataError.
    Raises DataError for a file that can't be read, or a list that breaks off."""
    try:
        with path.open("rb") as file:
            start = file.read(3)
            if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(f"{path} is UTF-16; write it as UTF-8 (iconv -f UTF-16 -t UTF-8)")
            begin = len(start) if start == codecs.BOM_UTF8 else 0
            file.seek(begin)
            first = file.read(1)
            while first.isspace():
                first = file.read(1)
            if first == b"[":
                yield from _listed(file, path)
                return
            file.seek(begin)
            yield from _lines(file, path)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}") from error


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    while line := file.readline(_LONGEST):
        number += 1
        long = len(line) == _LONGEST
        while len(line) == _LONGEST and not line.endswith(b"\n"):
            line = file.readline(_LONGEST)
        if long:
            yield f"{path.name} line {number}", DataError(f"longer than {_LONGEST >> 20} MiB")
        elif line.strip():
            yield f"{path.name} line {number}", _decoded(line)


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        return DataError(f"no JSON: {error}")


def _listed(file: BinaryIO, path: Path) -> Iterator[tuple[str, Any]]:
    """The items of a JSON list whose bracket was read."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text, at, number, size = "", 0, 0, _CHUNK
    while True:
        while text[at : at + 1] in _BETWEEN:
            at += 1
        if text.startswith("]", at):
            return
        try:
            value, end = decoder.raw_decode(text, at)
            # A number may go on in the next chunk; objects and texts end with a mark of their own.
            whole = end < len(text) or text[-1:] in '}]"'
        except ValueError:
            whole = False
        except RecursionError as error:
            raise DataError(f"{path} item {number + 1}: nested too deeply") from error
        if whole:
            number += 1
            broken = _NO_UTF8.search(text, at, end)
            yield f"{path.name} item {number}", DataError("no UTF-8") if broken else value
            at, size = end, _CHUNK
            continue
        chunk = file.read(size)
        if not chunk or len(text) - at > _LONGEST:
            raise DataError(f"{path} item {number + 1}: the list breaks off, or isn't JSON: {text[at : at + 60]!r}")
        # Twice as much each time: a long item is tried seven times, not sixty.
        text, at, size = text[at:] + utf8.decode(chunk), 0, 2 * size


def parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, row); a row with a text that is not UTF-8 comes as a DataError. Raises DataError for a file that can't be
    read."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for place in range(batch.num_rows):
                    number += 1
                    try:
                        [row] = batch.slice(place, 1).to_pylist()
                    except UnicodeDecodeError as error:
                        row = DataError(f"no UTF-8: {error}")
                    yield f"{path.name} row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} can't be read as parquet: {error}") from error


def convention(name: str) -> Coordinates:
    """Raises DataError for a name that isn't known."""
    if name not in CONVENTIONS:
        raise DataError(f"coordinates={name}; known are {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]
