"""A frame as the model sees it: fitted once, where the phone's answer arrives, and from then on this record.

Promises:
- `name` is the sha256 of size and pixels, whatever the encoding: equal names are equal pictures.
- `data` is a lossless PNG of exactly these pixels. A phone's screen takes about 0.1 MB, packed in 1 ms and read in 2.
- A reader of a frame from outside (a disk, another process that may have failed) can check it by its name.

Recordings of earlier versions named a frame by the sha256 of its file, which may also be JPEG or WebP; `checked` knows
both.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # records are read by many who never see a pixel
    import numpy as np
    from numpy.typing import NDArray

#: RGB bytes [height, width, 3]
Pixels: TypeAlias = "NDArray[np.uint8]"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
#: depth, colour type, compression, filter method, interlacing of a PNG of RGB bytes
_RGB = bytes((8, 2, 0, 0, 0))
#: PNG's filter by which a row is the difference from the one above
_UP = 2
#: of the bytes of all pixels: screens take less
_SMALL = 1 / 6
#: where the packed pixels begin in a PNG of three chunks: after the signature, a header and the head of their chunk
_PACKED = 8 + 25 + 8


class FrameError(ValueError):
    """A frame that is missing, broken or not what its name says; the message has the name."""


@dataclass(frozen=True, slots=True)
class FittedFrame:
    name: str
    data: bytes
    width: int
    height: int

    @staticmethod
    def of(pixels: Pixels) -> FittedFrame:
        """A frame of RGB bytes [height, width, 3]."""
        height, width, _ = pixels.shape
        return FittedFrame(name_of(pixels), encode(pixels), width, height)

    def pixels(self) -> Pixels:
        """Decoded. Raises FrameError for bytes that are not an image or of another size than announced."""
        pixels = decode(self.data, self.name)
        if pixels.shape[:2] != (self.height, self.width):
            raise FrameError(
                f"frame {self.name[:12]} is {pixels.shape[1]}x{pixels.shape[0]} pixels, announced was "
                f"{self.width}x{self.height}"
            )
        return pixels


def name_of(pixels: Pixels) -> str:
    """sha256 hex of "{width}x{height}:" and the RGB bytes, row by row."""
    height, width, _ = pixels.shape
    digest = hashlib.sha256(b"%dx%d:" % (width, height))
    digest.update(pixels.data if pixels.flags.c_contiguous else pixels.tobytes())
    return digest.hexdigest()


def encode(pixels: Pixels) -> bytes:
    """A lossless PNG. Its rows are unfiltered where that is small, as on screens, and can be read without arithmetic;
    photographs take half the bytes as differences from the row above."""
    import numpy as np
    from isal import isal_zlib

    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    packed = isal_zlib.compress(rows.data, 1)
    if len(packed) > _SMALL * rows.size:
        rows[1:, 1:] -= rows[:-1, 1:].copy()
        rows[:, 0] = _UP
        packed = min(packed, isal_zlib.compress(rows.data, 1), key=len)
    header = struct.pack(">IIBBBBB", width, height, *_RGB)
    chunks = ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, body) for kind, body in chunks)


def decode(data: bytes, name: str) -> Pixels:
    """The pixels of a frame of this name, read only. Raises FrameError for bytes that are not an image."""
    import numpy as np

    try:
        found = _unfiltered(data)
        if found is not None:
            return found
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise FrameError(f"frame {name[:12]} of {len(data)} bytes can't be decoded: {error}") from error


def _unfiltered(data: bytes) -> Pixels | None:
    """The pixels of a PNG that `encode` made, None for another. Raises ValueError for one that is broken."""
    import numpy as np

    if len(data) < _PACKED + 16 or data[:16] != _SIGNATURE + b"\0\0\0\rIHDR" or data[24:29] != _RGB:
        return None
    width, height, size = struct.unpack(">II", data[16:24]) + struct.unpack(">I", data[33:37])
    if data[37:41] != b"IDAT" or len(data) != _PACKED + size + 16:
        return None
    raw = inflate(memoryview(data)[_PACKED : _PACKED + size], height * (1 + 3 * width))
    rows = np.frombuffer(raw, np.uint8).reshape(height, 1 + 3 * width)
    filters, values = rows[:, 0], rows[:, 1:]
    if (filters == _UP).all():
        values = values.copy()
        for above, row in itertools.pairwise(values):
            row += above
    elif filters.any():
        return None
    return values.reshape(height, width, 3)


def inflate(packed: bytes | memoryview, size: int) -> bytes:
    """Exactly `size` bytes, to the end of their checksum. Raises ValueError."""
    from isal import isal_zlib

    inflater = isal_zlib.decompressobj()
    try:
        found = inflater.decompress(packed, size + 1)
    except isal_zlib.error as error:  # type: ignore[misc]  # its stub takes the class for an instance
        raise ValueError(f"the PNG's pixels can't be unpacked: {error}") from error
    if len(found) != size or not inflater.eof:
        raise ValueError(f"the PNG unpacks to {len(found)} bytes of pixels instead of {size}")
    return found


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(body, zlib.crc32(kind)))


def checked(name: str, data: bytes) -> FittedFrame:
    """The frame that these bytes hold. Raises FrameError if they are not an image or not the one of this name."""
    pixels = decode(data, name)
    height, width, _ = pixels.shape
    if name != name_of(pixels) and name != hashlib.sha256(data).hexdigest():
        raise FrameError(f"frame {name[:12]} of {len(data)} bytes is damaged: its name is of another content")
    return FittedFrame(name, data, width, height)
