"""Files of rows, one at a time: JSON Lines, a JSON list, parquet. Bounded memory whatever the file's size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tapforge_trainer.agents.coordinates import Coordinates, Fraction, Grid, ImagePixels, Plane

from .episodes import DataError

_CHUNK: Final = 1 << 20
#: a row of a JSON list is none if it is longer
_LONGEST: Final = 64 << 20
#: of rows of a parquet file that are decoded at once: they hold images
_PARQUET_ROWS: Final = 16

#: how numbers of a place are meant, by name
CONVENTIONS: Final[dict[str, Coordinates]] = {
    "fraction": Fraction(),
    "grid": Grid(999),
    "grid1000": Grid(1000),
    "pixels": ImagePixels(),
}


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, value) of JSON Lines, or of one JSON list; a line that is no JSON comes as an exception. Raises
    DataError for a file that can't be read, or a list that breaks off."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.read(1)
            while first.isspace():
                first = file.read(1)
            if first == "[":
                yield from _listed(file, path)
                return
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path.name} line {number}", _decoded(line)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}") from error


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return DataError(f"no JSON: {error}")


def _listed(file: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """The items of a JSON list whose bracket was read."""
    decoder, text, number = json.JSONDecoder(), "", 0
    while True:
        text = text.lstrip(" \t\r\n,")
        if text.startswith("]"):
            return
        try:
            value, end = decoder.raw_decode(text)
            # A number may go on in the next chunk; objects and texts end with a mark of their own.
            whole = end < len(text) or text[-1:] in '}]"'
        except ValueError:
            whole = False
        except RecursionError as error:
            raise DataError(f"{path} item {number + 1}: nested too deeply") from error
        if whole:
            number += 1
            yield f"{path.name} item {number}", value
            text = text[end:]
            continue
        chunk = file.read(_CHUNK)
        if not chunk or len(text) > _LONGEST:
            raise DataError(f"{path} item {number + 1}: the list breaks off, or isn't JSON: {text[:60]!r}")
        text += chunk


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row). Raises DataError."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path.name} row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} can't be read as parquet: {error}") from error


def convention(name: str) -> Coordinates:
    """Raises DataError for a name that isn't known."""
    if name not in CONVENTIONS:
        raise DataError(f"coordinates={name}; known are {', '.join(CONVENTIONS)}")
    return CONVENTIONS[name]


def plane_of(image: bytes, coordinates: Coordinates) -> Plane:
    """Raises DataError for bytes that are no image."""
    import io

    from PIL import Image

    try:
        with Image.open(io.BytesIO(image)) as found:
            return Plane(coordinates, *found.size)
    except Exception as error:
        raise DataError(f"{len(image)} bytes are no image: {str(error)[:120]}") from error


def image_at(path: Path) -> bytes:
    """Raises DataError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error
