"""Frames as bytes: what is not a whole picture, or another one than announced, is refused before anything decodes it.

Only the head and the end of a picture are looked at here, which costs nothing; the decoder checks the rest.
"""

from __future__ import annotations

import struct
from typing import Final

from ..protocol import EnvironmentFault, Frame

#: of a screen: pixels per side, and in all. A picture of a few bytes can name more than a machine has memory
MAX_SIDE: Final = 8192
MAX_PIXELS: Final = 40_000_000

_PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_PNG_HEAD: Final = _PNG_SIGNATURE + b"\x00\x00\x00\rIHDR"
_PNG_TAIL: Final = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_JPEG_HEAD, _JPEG_TAIL = b"\xff\xd8\xff", b"\xff\xd9"
#: markers of JPEG that say the size: start of frame, but for tables (C4, C8, CC)
_JPEG_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def frame_of(data: bytes) -> Frame:
    """A frame with the size that its picture has. Raises ValueError for what is not a whole PNG or JPEG of a screen."""
    if data.startswith(_PNG_SIGNATURE):
        kind, size = "image/png", png_size(data)
    elif data.startswith(_JPEG_HEAD):
        kind, size = "image/jpeg", _jpeg_size(data)
    else:
        raise ValueError(f"{len(data)} bytes that begin with {data[:8]!r} are neither PNG nor JPEG")
    width, height = size
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE and width * height <= MAX_PIXELS):
        raise ValueError(
            f"a picture of {width}x{height} pixels is not a screen: at most {MAX_SIDE} a side, {MAX_PIXELS} in all"
        )
    return Frame.of(data, width, height, kind)


def png_size(data: bytes) -> tuple[int, int]:
    """(width, height) in pixels of a PNG from its first to its last byte. Raises ValueError for anything else."""
    if not data.startswith(_PNG_HEAD) or len(data) < 24:
        raise ValueError(f"{len(data)} bytes do not begin like a PNG")
    if not data.endswith(_PNG_TAIL):
        raise ValueError(f"{len(data)} bytes have no end (IEND): half a PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def _jpeg_size(data: bytes) -> tuple[int, int]:
    if not data.endswith(_JPEG_TAIL):
        raise ValueError(f"{len(data)} bytes have no end (EOI): half a JPEG")
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], struct.unpack(">H", data[at + 2 : at + 4])[0]
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return width, height
        at += 2 + max(2, length)
    raise ValueError(f"a JPEG of {len(data)} bytes says no size")


def check_frame(frame: Frame) -> None:
    """Raises EnvironmentFault when a PNG is incomplete or of another size than announced. Other media types are
    checked where they are decoded."""
    if frame.media_type != "image/png":
        return
    try:
        width, height = png_size(frame.data)
    except ValueError as error:
        raise EnvironmentFault(f"frame is announced as image/png: {error}") from error
    if (width, height) != (frame.width, frame.height):
        raise EnvironmentFault(
            f"frame is {width}x{height} pixels, announced was {frame.width}x{frame.height}: taps would land elsewhere"
        )
