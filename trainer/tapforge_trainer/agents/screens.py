"""Pictures as phones send them -> pixels, checked to the last row, and pixels of another size.

Promises:
- A frame is decoded to its last pixel and has the announced size. Half a file, a wrong checksum, missing rows or
  another size raise EnvironmentFault: the episode is invalid, there is no placeholder.
- The pixels of a PNG are inflated twice only where Pillow decodes it, which forgives too much; from `LARGE` on libpng
  does, which forgives nothing but surplus bytes.
- Which library resizes depends on the picture's size alone, so the same picture gives the same pixels everywhere in a
  run. Both are antialiased and bicubic. Pillow is right for a tiny model's thumbnails, torch takes 0.4 of its time in
  all for a screen of 1080x2400; it is loaded when the first such screen comes.
- Other decoders of Pillow than those for screens are not let near bytes from a network.
"""

from __future__ import annotations

import hashlib
import io
import struct
import sys
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

import numpy as np
from PIL import Image

from tapforge_envs.protocol import EnvironmentFault, Frame

from ..frames.frame import FittedFrame, Pixels, encode, inflate, name_of

#: pixels from which torch decodes and resizes: Pillow takes about 8 ms for so many
LARGE: Final = 512 * 1024
#: no screen has more; a few bytes that announce more are meant to fill the memory
_MOST_PIXELS: Final = 1 << 26
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
#: samples per pixel by PNG colour type
_PNG_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
#: start and step of the passes of an interlaced PNG
_PNG_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
#: torchvision's `ImageReadMode.RGB`
_READ_RGB = 3
_FORMATS = ("PNG", "JPEG", "WEBP")


def decode_screen(frame: Frame) -> Pixels:
    """Raises EnvironmentFault (see module)."""
    what = f"frame {frame.sha256[:12]} of {len(frame.data)} bytes"
    if hashlib.sha256(frame.data).hexdigest() != frame.sha256:
        raise EnvironmentFault(f"{what} is not what its hash names")
    large = frame.width * frame.height >= LARGE
    if frame.width * frame.height > _MOST_PIXELS:
        raise EnvironmentFault(f"{what}: {frame.width}x{frame.height} pixels are not a screen")
    if frame.data.startswith(_PNG_SIGNATURE):
        header, pixels = _png_parts(frame.data, what)
        width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
        if (width, height) != (frame.width, frame.height):
            raise EnvironmentFault(_another_size(what, (width, height), frame))
        if large and depth == 8 and colour in (2, 6) and not interlaced:
            return _decode_large(frame.data, what)
        _check_rows(width, height, depth * _PNG_SAMPLES.get(colour, 1), bool(interlaced), b"".join(pixels), what)
    return _decode(frame, what)


def as_drawn(frame: Frame, fitted: FittedFrame) -> FittedFrame:
    """A device's frame, named by its pixels; `fitted` itself where that has its size. Raises EnvironmentFault."""
    if (frame.width, frame.height) == (fitted.width, fitted.height):
        return fitted
    pixels = decode_screen(frame)
    data = frame.data if frame.data.startswith(_PNG_SIGNATURE) else encode(pixels)
    return FittedFrame(name_of(pixels), data, frame.width, frame.height)


def resize(pixels: Pixels, width: int, height: int) -> Pixels:
    if pixels.shape[0] * pixels.shape[1] < LARGE:
        return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))
    torch = _torch()
    # Channels-last, the batch's stride included: only then torch takes the faster kernel and gives rows of RGB again.
    planes = torch.from_numpy(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(planes, (height, width), mode="bicubic", antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _decode(frame: Frame, what: str) -> Pixels:
    try:
        image = Image.open(io.BytesIO(frame.data), formats=_FORMATS)
        if image.size != (frame.width, frame.height):
            raise EnvironmentFault(_another_size(what, image.size, frame))
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))
    except EnvironmentFault:
        raise
    except Exception as error:  # whatever a decoder says about broken bytes, the screen was not delivered
        raise EnvironmentFault(f"{what} can't be decoded: {type(error).__name__}: {error}") from error


def _decode_large(png: bytes, what: str) -> Pixels:
    torch = _torch()
    try:
        planes = torch.ops.image.decode_png(torch.frombuffer(bytearray(png), dtype=torch.uint8), _READ_RGB)
    except RuntimeError as error:
        raise EnvironmentFault(f"{what} can't be decoded: {str(error).splitlines()[0]}") from error
    return np.ascontiguousarray(planes.permute(1, 2, 0).numpy())


@cache
def _torch() -> ModuleType:
    """torch, with torchvision's decoders. Of torchvision only their library is loaded: the package would bring its
    models along, another 80 MiB and 2 s. Where nothing else computes with torch, it takes one core: the others are
    there for the frames of other phones."""
    alone = "torch" not in sys.modules
    import torch

    if alone:
        torch.set_num_threads(1)
    found = find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("torchvision is missing; large screens are decoded by it")
    torch.ops.load_library(Path(found.submodule_search_locations[0]) / "image.so")
    return torch


def _another_size(what: str, size: tuple[int, int], frame: Frame) -> str:
    return f"{what} is {size[0]}x{size[1]} pixels, announced was {frame.width}x{frame.height}"


def _png_parts(data: bytes, what: str) -> tuple[bytes, list[memoryview]]:
    """The header and the packed pixels of a PNG that is there to its end, with every checksum right."""
    at, end, view = len(_PNG_SIGNATURE), len(data), memoryview(data)
    header = b""
    pixels: list[memoryview] = []
    while at + 12 <= end:
        length = int.from_bytes(view[at : at + 4], "big")
        after = at + 12 + length
        if after > end:
            break
        kind = bytes(view[at + 4 : at + 8])
        if zlib.crc32(view[at + 4 : after - 4]) != int.from_bytes(view[after - 4 : after], "big"):
            raise EnvironmentFault(f"{what}: the PNG's {kind!r} at byte {at} has a wrong checksum")
        if kind == b"IHDR":
            header = bytes(view[at + 8 : after - 4])
        elif kind == b"IDAT":
            pixels.append(view[at + 8 : after - 4])
        elif kind == b"IEND":
            if len(header) != 13:
                raise EnvironmentFault(f"{what}: the PNG's header has {len(header)} bytes instead of 13")
            return header, pixels
        at = after
    raise EnvironmentFault(f"{what} is cut off: the PNG has no end")


def _check_rows(width: int, height: int, bits: int, interlaced: bool, pixels: bytes, what: str) -> None:
    """What Pillow forgives: missing rows (it would paint them black), and what their checksum says."""
    expected = 0
    for x, y, dx, dy in _PNG_PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - x) // dx), -(-(height - y) // dy)
        if columns > 0 and rows > 0:
            expected += rows * (1 + (columns * bits + 7) // 8)
    try:
        inflate(pixels, expected)
    except ValueError as error:
        raise EnvironmentFault(f"{what}: {error}") from error
