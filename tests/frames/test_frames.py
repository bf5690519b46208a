"""The record of a fitted frame: its name, its bytes, and what is said of bytes that are damaged."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tapforge_trainer.frames.frame import FittedFrame, FrameError, Pixels, checked, decode, name_of


def noise(width: int, height: int, seed: int = 0) -> Pixels:
    return np.random.default_rng((seed, width, height)).integers(0, 256, (height, width, 3), np.uint8)


def photograph(width: int, height: int) -> Pixels:
    """Smooth, but no row like another."""
    small = noise(2 + width // 16, 2 + height // 16)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def screen(width: int, height: int) -> Pixels:
    """Areas of one colour."""
    small = noise(1 + width // 16, 1 + height // 16)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST))


@given(st.sampled_from([noise, photograph, screen]), st.integers(1, 70), st.integers(1, 70))
def test_the_bytes_are_a_png_of_exactly_the_pixels(draw: Callable[[int, int], Pixels], width: int, height: int) -> None:
    pixels = draw(width, height)
    frame = FittedFrame.of(pixels)
    image = Image.open(io.BytesIO(frame.data))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (width, height))
    assert np.array_equal(np.asarray(image), pixels)
    assert np.array_equal(frame.pixels(), pixels)
    assert frame.name == name_of(pixels) == name_of(frame.pixels())
    assert frame.name == hashlib.sha256(f"{width}x{height}:".encode() + pixels.tobytes()).hexdigest()


def test_photographs_take_little_more_than_with_the_best_filters() -> None:
    out = io.BytesIO()
    Image.fromarray(photograph(640, 960)).save(out, "PNG", compress_level=1)
    assert len(FittedFrame.of(photograph(640, 960)).data) < 1.1 * out.tell() < 0.6 * 640 * 960 * 3


def test_a_view_of_other_pixels_has_the_name_and_bytes_of_a_copy() -> None:
    part = noise(64, 64)[3:40, 5:50]
    assert FittedFrame.of(part) == FittedFrame.of(part.copy())


def test_another_size_or_another_pixel_is_another_name() -> None:
    pixels = noise(12, 20)
    other = pixels.copy()
    other[7, 3, 1] ^= 1
    assert len({name_of(pixels), name_of(pixels.reshape(12, 20, 3)), name_of(other)}) == 3


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_pngs_of_others_are_read_too(mode: str) -> None:
    out = io.BytesIO()
    Image.fromarray(noise(33, 17)).convert(mode).save(out, "PNG")
    expected = np.asarray(Image.open(io.BytesIO(out.getvalue())).convert("RGB"))
    assert np.array_equal(decode(out.getvalue(), "name"), expected)


def test_damaged_bytes_are_an_error_or_still_the_same_pixels() -> None:
    frame = FittedFrame.of(noise(24, 16))
    damaged = [frame.data[:length] for length in range(len(frame.data))]
    for at in range(len(frame.data)):
        flipped = bytearray(frame.data)
        flipped[at] ^= 1 << at % 8
        damaged.append(bytes(flipped))
    for data in damaged:
        try:
            found = checked(frame.name, data)
        except FrameError as error:
            assert frame.name[:12] in str(error)
        else:
            assert np.array_equal(found.pixels(), frame.pixels())


def test_a_frame_of_another_size_than_announced_is_an_error() -> None:
    frame = FittedFrame.of(noise(24, 16))
    with pytest.raises(FrameError, match="24x16 pixels, announced was 16x24"):
        replace(frame, width=16, height=24).pixels()


def test_another_frames_bytes_are_an_error() -> None:
    frame, other = FittedFrame.of(noise(24, 16)), FittedFrame.of(noise(24, 16, seed=1))
    assert checked(frame.name, frame.data) == frame
    with pytest.raises(FrameError, match="another content"):
        checked(frame.name, other.data)


def test_recordings_of_earlier_versions_named_a_frame_by_its_file() -> None:
    out = io.BytesIO()
    Image.fromarray(noise(24, 16)).save(out, "JPEG")
    name = hashlib.sha256(out.getvalue()).hexdigest()
    assert checked(name, out.getvalue()) == FittedFrame(name, out.getvalue(), 24, 16)
