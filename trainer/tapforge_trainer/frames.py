"""A frame as the model sees it: fitted once, where the phone's answer arrives, and from then on this record.

Promises:
- `name` is the sha256 of size and pixels, whatever the encoding: equal names are equal pictures.
- `data` is a lossless PNG of exactly these pixels.
- Who reads a frame back from outside (a disk, another process that may have failed) can check it by its name.

Recordings of earlier versions named a frame by the sha256 of its file, which may also be JPEG or WebP; `checked` knows
both.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # records are read by many who never see a pixel
    import numpy as np
    from numpy.typing import NDArray

#: RGB bytes [height, width, 3]
Pixels: TypeAlias = "NDArray[np.uint8]"


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
        """Decoded. Raises FrameError for bytes that are no image or of another size than announced."""
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
    """A lossless PNG."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


def decode(data: bytes, name: str) -> Pixels:
    """The pixels of a frame of this name. Raises FrameError for bytes that are no image."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise FrameError(f"frame {name[:12]} of {len(data)} bytes can't be decoded: {error}") from error


def checked(name: str, data: bytes) -> FittedFrame:
    """The frame that these bytes hold. Raises FrameError if they are no image or not the one of this name."""
    pixels = decode(data, name)
    height, width, _ = pixels.shape
    if name not in (name_of(pixels), hashlib.sha256(data).hexdigest()):
        raise FrameError(f"frame {name[:12]} of {len(data)} bytes is damaged: its name is of another content")
    return FittedFrame(name, data, width, height)
