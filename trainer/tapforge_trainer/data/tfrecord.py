"""TensorFlow's record files, without TensorFlow: `tf.train.Example`s one at a time.

A record is its length (8 bytes, little-endian), a checksum, the bytes and another checksum, which isn't compared; files
may be gzip, whose own checksum is. An example is a message of protocol buffers: a map from names to lists of bytes,
floats or integers (tensorflow/core/example/feature.proto). One record is held at a time, of 1 GiB at most.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from .episodes import DataError

_LONGEST: Final = 1 << 30
#: types of fields on the wire
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

#: lists of bytes, floats or integers
Example = dict[str, list[Any]]


def examples(path: Path) -> Iterator[tuple[str, Example | DataError]]:
    """(place, example), where one that is damaged comes as a DataError. Raises DataError for a file that can't be read
    or breaks off."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else path.open("rb") as file:
            for number, record in enumerate(_records(cast(BinaryIO, file), path), start=1):
                name = f"{path.name} record {number}"
                try:
                    yield name, example(record)
                except (ValueError, struct.error) as error:
                    yield name, DataError(f"no tf.train.Example: {error}")
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path} can't be read to its end: {error}") from error


def _records(file: BinaryIO, path: Path) -> Iterator[bytes]:
    while head := file.read(12):
        length = int.from_bytes(head[:8], "little")
        if len(head) < 12 or length > _LONGEST:
            raise DataError(f"{path} is not a TFRecord file, or is cut off")
        data = file.read(length + 4)
        if len(data) < length + 4:
            raise DataError(f"{path} is cut off in the middle of a record")
        yield data[:length]


def example(record: bytes) -> Example:
    """Raises ValueError, struct.error."""
    found: Example = {}
    for _, features in _fields(record):
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            for kind, values in _fields(parts.get(2, b"")):
                found[parts[1].decode()] = _values(kind, values)
    return found


def _values(kind: int, data: bytes) -> list[Any]:
    """Of a list of bytes (1), floats (2) or integers (3), packed or one by one."""
    if kind == 1:
        return [value for _, value in _fields(data)]
    joined = b"".join(value for _, value in _fields(data))
    if kind == 2:
        return [one for (one,) in struct.iter_unpack("<f", joined)]
    values, at = [], 0
    while at < len(joined):
        value, at = _varint(joined, at)
        values.append(value - (1 << 64) if value >= 1 << 63 else value)
    return values


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, value) of a message's fields; numbers as they are on the wire."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == _BYTES:
            size, at = _varint(data, at)
            end = at + size
        elif wire == _VARINT:
            end = _varint(data, at)[1]
        elif wire in (_FIXED64, _FIXED32):
            end = at + (8 if wire == _FIXED64 else 4)
        else:
            raise ValueError(f"a field of the unknown type {wire}")
        if end > len(data):
            raise ValueError("a field that is longer than its message")
        yield tag >> 3, data[at:end]
        at = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends)."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a number that doesn't end")
