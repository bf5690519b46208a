"""`screencap -p` through `exec:`: a PNG with other bytes before and after it. Pure.

Warnings of the phone's linker and graphics drivers stand in the same stream, so the picture is found by its signature
and followed chunk by chunk to its end; every checksum has to be right. Nothing is decoded, but for a frame that may be
black.
"""

from __future__ import annotations

import io
import zlib
from typing import Final

from PIL import Image

from ...protocol import Frame
from ..pictures import frame_of

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
#: text before a picture is no longer than this, bytes
_MAX_PREAMBLE: Final = 64 * 1024
#: a picture with more bytes per pixel than this shows something
_BLACK_BYTES: Final = 1 / 32
#: of the height, above and below: bars of the system are drawn over what is secure
_BARS: Final = 0.08
#: of 255
_BLACK_LEVEL: Final = 2


def frame_in(output: bytes) -> Frame:
    """The frame in what `screencap -p` wrote. Raises ValueError when there is no whole PNG of a screen in it."""
    start = output.find(_SIGNATURE, 0, _MAX_PREAMBLE)
    if start < 0:
        said = " ".join(output[:200].decode("utf-8", "replace").split())
        raise ValueError(f"no PNG in the {len(output)} bytes of screencap: {said or 'it wrote nothing'}")
    return frame_of(output[start : _end_of_png(output, start)])


def _end_of_png(data: bytes, start: int) -> int:
    at = start + len(_SIGNATURE)
    while len(data) - at >= 12:
        length = int.from_bytes(data[at : at + 4])
        end = at + 12 + length
        if end > len(data):
            break
        body = memoryview(data)[at + 4 : end - 4]
        if zlib.crc32(body) != int.from_bytes(data[end - 4 : end]):
            raise ValueError(f"the screenshot is garbled: a part of {length} bytes has the wrong checksum")
        if data[at + 4 : at + 8] == b"IEND":
            return end
        at = end
    raise ValueError(f"the screenshot ends in the middle, after {len(data) - start} bytes")


def may_be_black(frame: Frame) -> bool:
    """Cheap: whether it is worth decoding."""
    return len(frame.data) <= 2000 + frame.width * frame.height * _BLACK_BYTES


def is_black(frame: Frame) -> bool:
    """Whether all is black but for the bars of the system. Decodes it. Raises ValueError for what can't be decoded."""
    bar = int(frame.height * _BARS)
    try:
        with Image.open(io.BytesIO(frame.data)) as image:
            middle = image.convert("RGB").crop((0, bar, frame.width, frame.height - bar))
    except Exception as error:
        raise ValueError(f"the screenshot can't be decoded: {error!r:.200}") from error
    bands = middle.split()
    return all(max(i for i, count in enumerate(band.histogram()) if count) <= _BLACK_LEVEL for band in bands)
