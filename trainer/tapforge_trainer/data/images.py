"""Images that rows name or hold. Rows come from other people.

Promises:
- A file is read only where it lies in the folder of the data set's images, links followed.
- No other decoders than those of screens come near the bytes, and no more of a picture is unpacked than a screen has.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from pathlib import Path
from typing import Final

from PIL import ExifTags, Image, UnidentifiedImageError

from tapforge_envs.clients.pictures import MAX_PIXELS, MAX_SIDE

from ..agents.coordinates import Coordinates, Plane, short
from ..recording.packs import PackWriter
from .episodes import DataError

#: a screen as raw pixels has fewer
MAX_BYTES: Final = 64 << 20
_ENDINGS: Final = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}


def image_at(folder: Path, name: str) -> bytes:
    """The bytes of an image by its name in `folder`. Raises DataError."""
    try:
        path = (folder / name).resolve()
        inside = path.is_relative_to(folder.resolve())
        if inside and path.is_file():
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero or half a character is none
        raise DataError(f"the image {short(name)} can't be read: {error}") from error
    if not inside:
        raise DataError(
            f"the image {short(name)} is outside {folder}, which rows may not name; give --option images=DIR"
        )
    if not path.is_file():
        raise DataError(f"{path} can't be read: it is missing, or no file")
    return data


def ending_of(data: bytes) -> str:
    """png, jpg or webp. Raises DataError for what is not a whole image, or none that a screen can be."""
    with _opened(data) as image:
        try:
            image.load()
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        except Exception as error:  # whatever a decoder says about broken bytes
            raise DataError(f"{len(data)} bytes are not a whole image: {str(error)[:120]}") from error
        if turned:
            raise DataError("an image that its EXIF data turns, so its coordinates have two readings; turn its pixels")
        return _ENDINGS[image.format or ""]


def plane_of(data: bytes, coordinates: Coordinates) -> Plane:
    """Raises DataError for bytes that are not an image."""
    with _opened(data) as image:
        return Plane(coordinates, *image.size)


def _opened(data: bytes) -> Image.Image:
    if len(data) > MAX_BYTES:
        raise DataError(f"an image of more than {MAX_BYTES >> 20} MiB is not a screen")
    try:
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
            image = Image.open(io.BytesIO(data), formats=tuple(_ENDINGS))
    except UnidentifiedImageError:
        raise DataError(f"{len(data)} bytes are not an image; PNG, JPEG and WebP are read") from None
    except Exception as error:  # whatever a decoder says about broken bytes
        raise DataError(f"{len(data)} bytes are not an image: {str(error)[:120]}") from error
    width, height = image.size
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise DataError(
            f"an image of {width}x{height} pixels is not a screen: at most {MAX_SIDE} a side, {MAX_PIXELS:,} in all"
        )
    return image


def kept_image(screens: PackWriter, data: bytes) -> str:
    """Keeps an image as it is, once. Returns its name. Raises DataError for bytes that are not an image."""
    name = hashlib.sha256(data).hexdigest()
    if not screens.knows(name):
        screens.put(name, data, ending_of(data))
    return name
