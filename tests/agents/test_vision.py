"""Frames are checked to the last pixel and resized once."""

import hashlib
import io
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from tapforge_envs.protocol import EnvironmentFault, Frame, Reason
from tapforge_trainer.agents.screens import LARGE, resize
from tapforge_trainer.agents.vision import FrameFitter, VisionGrid, fit_frame, tokens_per_frame
from tapforge_trainer.frames.frame import FittedFrame, name_of
from tapforge_trainer.learner.frame_store import PixelFormat

GRID = VisionGrid(patch=16, merge=2, min_tokens=4, max_tokens=256)

sides = st.integers(1, 3000)
bounds = st.tuples(st.integers(1, 40), st.integers(0, 400)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(sides, sides, bounds)
@example(96, 160, (15, 15))
@example(10, 2000, (1, 3))
@example(2999, 15, (7, 7))
def test_a_fitted_size_is_whole_within_bounds_and_stays(width: int, height: int, limits: tuple[int, int]) -> None:
    grid = VisionGrid(16, 2, *limits)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ValueError, match="not a size of a screen"):
            grid.fit(width, height)
        return
    w, h = grid.fit(width, height)
    assert w % 32 == h % 32 == 0
    assert limits[0] <= (w // 32) * (h // 32) <= limits[1]
    assert grid.fit(w, h) == (w, h)
    assert grid.visual_tokens(width, height) == grid.visual_tokens(w, h) == (w // 32) * (h // 32)


@pytest.mark.parametrize(
    ("size", "fitted"),
    [((96, 160), (96, 160)), ((1080, 2400), (320, 736)), ((100, 170), (96, 160)), ((20, 20), (64, 64))],
)
def test_sizes(size: tuple[int, int], fitted: tuple[int, int]) -> None:
    assert GRID.fit(*size) == fitted


@pytest.mark.parametrize("limits", [(0, 4), (5, 4)])
def test_impossible_bounds_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="min_tokens"):
        VisionGrid(16, 2, *limits)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "LA", "1"])
@pytest.mark.parametrize("size", [(96, 160), (832, 1696)], ids=["small", "large"])
def test_a_frame_of_the_right_size_keeps_its_pixels(
    png: Callable[..., bytes], mode: str, size: tuple[int, int]
) -> None:
    data = png(*size, 1, mode)
    fitted, pixels = fit_frame(Frame.of(data, *size), VisionGrid(16, 2, 4, 2000))
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(pixels, expected)
    assert np.array_equal(fitted.pixels(), expected)
    assert np.array_equal(Image.open(io.BytesIO(fitted.data)), expected)  # for who doesn't read it with our code


def test_a_name_is_that_of_size_and_pixels(png: Callable[..., bytes]) -> None:
    rgb, plain = (fit_frame(Frame.of(png(96, 160, 1, mode), 96, 160), GRID)[0] for mode in ("RGB", "RGBA"))
    assert rgb == plain  # other bytes, same picture
    pixels = Image.open(io.BytesIO(png(96, 160, 1))).tobytes()
    assert rgb.name == hashlib.sha256(b"96x160:" + pixels).hexdigest()
    turned = rgb.pixels().reshape(96, 160, 3)
    assert FittedFrame.of(turned).name != rgb.name


def test_a_wrong_size_becomes_a_png_of_the_right_size(frame: Callable[..., Frame]) -> None:
    fitted, pixels = fit_frame(frame(101, 333), GRID)
    assert (fitted.width, fitted.height) == GRID.fit(101, 333) == pixels.shape[1::-1]
    image = Image.open(io.BytesIO(fitted.data))
    assert image.format == "PNG" and image.mode == "RGB"
    assert np.array_equal(np.asarray(image), pixels)
    assert fitted.name == name_of(pixels)
    assert fit_frame(frame(101, 333), GRID)[0] == fitted


def test_colours_that_decoders_disagree_about_become_rgb(png: Callable[..., bytes]) -> None:
    source = Frame.of(png(96, 160, 1, "RGBA"), 96, 160)
    fitted, _ = fit_frame(source, GRID)
    plain = Image.open(io.BytesIO(fitted.data))
    assert plain.mode == "RGB"
    assert plain.tobytes() == Image.open(io.BytesIO(png(96, 160, 1))).tobytes()


def test_jpeg_is_a_frame_too_and_becomes_a_png(png: Callable[..., bytes]) -> None:
    out = io.BytesIO()
    Image.open(io.BytesIO(png(96, 160))).save(out, "JPEG")
    fitted, pixels = fit_frame(Frame.of(out.getvalue(), 96, 160, "image/jpeg"), GRID)
    assert Image.open(io.BytesIO(fitted.data)).format == "PNG"
    assert np.array_equal(pixels, np.asarray(Image.open(out).convert("RGB")))


def test_every_cut_off_png_is_a_fault(png: Callable[..., bytes]) -> None:
    data = png(96, 160)
    for length in range(len(data)):
        with pytest.raises(EnvironmentFault) as fault:
            fit_frame(Frame.of(data[:length], 96, 160), GRID)
        assert fault.value.reason is Reason.ENV_ERROR


def test_every_flipped_bit_is_a_fault(png: Callable[..., bytes]) -> None:
    data = png(96, 160)
    for at in range(0, len(data), 3):
        broken = bytearray(data)
        broken[at] ^= 1 << (at % 8)
        with pytest.raises(EnvironmentFault):
            fit_frame(Frame.of(bytes(broken), 96, 160), GRID)


def test_a_large_png_that_is_cut_off_or_damaged_is_a_fault(png: Callable[..., bytes]) -> None:
    data = png(*BIG)
    assert fit_frame(Frame.of(data, *BIG), GRID)[1].size
    for length in {*range(0, len(data), 97), *range(len(data) - 30, len(data))}:
        with pytest.raises(EnvironmentFault):
            fit_frame(Frame.of(data[:length], *BIG), GRID)
    for at in range(0, len(data), 61):
        broken = bytearray(data)
        broken[at] ^= 1 << (at % 8)
        with pytest.raises(EnvironmentFault):
            fit_frame(Frame.of(bytes(broken), *BIG), GRID)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


SMALL_SIZE, BIG = (96, 160), (480, 1120)
assert BIG[0] * BIG[1] > LARGE


def _png_of(size: tuple[int, int], pixels: bytes) -> Frame:
    """A PNG whose every checksum is right."""
    header = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", pixels), _chunk(b"IEND", b""))
    return Frame.of(b"\x89PNG\r\n\x1a\n" + b"".join(chunks), *size)


def _row(width: int) -> bytes:
    return b"\0" + b"\x55" * width * 3


sizes = pytest.mark.parametrize("size", [SMALL_SIZE, BIG], ids=["small", "large"])


@sizes
@pytest.mark.parametrize("missing", [160, 159, 80, 1])
def test_a_well_formed_png_that_lacks_rows_is_a_fault(size: tuple[int, int], missing: int) -> None:
    width, height = size
    assert set(fit_frame(_png_of(size, zlib.compress(_row(width) * height)), GRID)[1].flat) == {0x55}
    with pytest.raises(EnvironmentFault, match=r"unpacks to|can't be decoded"):
        fit_frame(_png_of(size, zlib.compress(_row(width) * (height - missing))), GRID)


@sizes
def test_pixels_that_do_not_unpack_are_a_fault(size: tuple[int, int]) -> None:
    width, height = size
    row = _row(width)
    pixels = zlib.compress(row * height)
    for broken in (
        pixels[:-1],
        pixels[:-4] + b"\0\0\0\0",
        b"\0" + pixels[1:],
        zlib.compress(b"\x09" + row[1:] + row * (height - 1)),
    ):
        with pytest.raises(EnvironmentFault):
            fit_frame(_png_of(size, broken), GRID)


def test_a_few_bytes_that_announce_a_huge_picture_are_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="not a screen"):
        fit_frame(_png_of((60_000, 60_000), zlib.compress(b"")), GRID)


@pytest.mark.parametrize(("size", "loaded"), [(SMALL_SIZE, []), (BIG, ["torch"])], ids=["small", "large"])
def test_torch_is_loaded_for_large_screens_only_and_torchvision_never(size: tuple[int, int], loaded: list[str]) -> None:
    code = f"""if True:
        import io, sys
        from PIL import Image
        from tapforge_envs.protocol import Frame
        from tapforge_trainer.agents.vision import VisionGrid, fit_frame
        out = io.BytesIO()
        Image.new("RGB", {size}).save(out, "PNG")
        fit_frame(Frame.of(out.getvalue(), *{size}), VisionGrid(16, 2, 4, 12))
        print(sorted({{"torch", "torchvision"}} & set(sys.modules)))
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert found.stdout.strip() == str(loaded)


def test_both_ways_to_resize_agree_but_for_rounding(png: Callable[..., bytes]) -> None:
    pixels = np.array(Image.open(io.BytesIO(png(*BIG))))
    large = resize(pixels, 224, 512)
    small = np.asarray(Image.fromarray(pixels).resize((224, 512), Image.Resampling.BICUBIC))
    assert large.shape == small.shape and large.flags.c_contiguous
    gap = np.abs(large.astype(int) - small)
    assert gap.max() <= 16 and (gap > 1).mean() < 0.01


@pytest.mark.parametrize("size", [(96, 160), (97, 1), (3, 3), (5, 66)])
def test_interlaced_pngs_count_their_rows_right(size: tuple[int, int]) -> None:
    # Pillow writes none, so the passes are laid out here: each row of a pass is a filter byte and its grey pixels
    width, height = size
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    pixels = b""
    for x, y, dx, dy in passes:
        columns, rows = len(range(x, width, dx)), len(range(y, height, dy))
        pixels += (b"\0" + b"\x80" * columns) * rows if columns else b""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 1)
    for body, whole in ((pixels, True), (pixels[:-1], False)):
        chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(body)), _chunk(b"IEND", b""))
        frame = Frame.of(b"\x89PNG\r\n\x1a\n" + b"".join(chunks), width, height)
        if whole:
            fitted = Image.open(io.BytesIO(fit_frame(frame, GRID)[0].data)).convert("L")
            assert set(fitted.tobytes()) == {0x80}
        else:
            with pytest.raises(EnvironmentFault, match="unpacks"):
                fit_frame(frame, GRID)


@pytest.mark.parametrize("announced", [(160, 96), (96, 161), (95, 160), (1080, 2400)])
def test_another_size_than_announced_is_a_fault(png: Callable[..., bytes], announced: tuple[int, int]) -> None:
    with pytest.raises(EnvironmentFault, match="96x160"):
        fit_frame(Frame.of(png(96, 160), *announced), GRID)


@pytest.mark.parametrize(
    "data", [b"", b"<html>no screen today</html>", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"GIF89a" + b"\0" * 50]
)
def test_what_is_no_picture_is_a_fault(data: bytes) -> None:
    with pytest.raises(EnvironmentFault):
        fit_frame(Frame.of(data, 96, 160), GRID)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_fault(data: bytes) -> None:
    for whole in (data, b"\x89PNG\r\n\x1a\n" + data):
        with pytest.raises(EnvironmentFault):
            fit_frame(Frame.of(whole, 96, 160), GRID)


def test_a_frame_under_another_frames_hash_is_a_fault(frame: Callable[..., Frame]) -> None:
    lie = Frame(frame(seed=1).data, frame(seed=2).sha256, 96, 160)
    with pytest.raises(EnvironmentFault, match="hash"):
        fit_frame(lie, GRID)


def test_the_shape_of_a_ribbon_is_a_fault(frame: Callable[..., Frame]) -> None:
    with pytest.raises(EnvironmentFault, match="not a size of a screen"):
        fit_frame(frame(1, 500), GRID)


def test_bounds_on_pixels_are_bounds_on_visual_tokens() -> None:
    grid = VisionGrid(16, 2, 4, 16_384)
    assert grid.at_most(1_000_000) == VisionGrid(16, 2, 4, 976)
    assert grid.at_most(1 << 26) == grid  # the image processor would shrink it
    assert grid.at_most(4 * 32 * 32).max_tokens == 4
    with pytest.raises(ValueError, match=r"4,095 is less than the 4,096 pixels"):
        grid.at_most(4095)
    assert grid.within(1) == VisionGrid(16, 2, 4, 4)


@given(st.integers(64, 100_000), st.integers(1, 63), st.integers(1, 64))
def test_all_frames_of_a_prompt_leave_a_quarter_to_its_texts(context: int, response: int, images: int) -> None:
    share = tokens_per_frame(context, response, images)
    assert share == 1 or 4 * images * share <= 3 * (context - response) < 4 * images * (share + 1)


def test_a_fitter_remembers_what_came_and_forgets_the_oldest(frame: Callable[..., Frame]) -> None:
    one = len(fit_frame(frame(100, 100), GRID)[0].data) + 1024
    fitter = FrameFitter(GRID, max_bytes=4 * one)
    first, pixels = fitter.fit(frame(100, 100, seed=0))
    again, decoded = fitter.fit(frame(100, 100, seed=0))
    assert again is first and np.array_equal(pixels(), decoded())
    for seed in range(1, 12):
        fitter.fit(frame(100, 100, seed=seed))
        assert fitter._bytes == sum(len(kept.data) + 1024 for kept in fitter._seen.values()) <= 4 * one
    again, _ = fitter.fit(frame(100, 100, seed=0))
    assert again is not first and again == first


def test_threads_share_a_fitter(frame: Callable[..., Frame]) -> None:
    screens = [frame(100, 100, seed=seed) for seed in range(8)]
    alone = [fit_frame(screen, GRID)[0] for screen in screens]
    fitter = FrameFitter(GRID, max_bytes=4000)
    with ThreadPoolExecutor(4) as pool:
        fitted = [one for one, _ in pool.map(fitter.fit, screens * 20)]
    assert fitted == alone * 20
    assert fitter._bytes == sum(len(kept.data) + 1024 for kept in fitter._seen.values())


def test_a_remembered_hash_does_not_excuse_another_announced_size(frame: Callable[..., Frame]) -> None:
    fitter = FrameFitter(GRID)
    good = frame()
    fitter.fit(good)
    with pytest.raises(EnvironmentFault):
        fitter.fit(Frame(good.data, good.sha256, 160, 96))


COLOURS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.25] * 3}
LARGE = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}} | COLOURS
SMALL = {"patch_size": 14, "merge_size": 2, "min_pixels": 56 * 56 + 1, "max_pixels": 28 * 28 * 1280 - 1} | COLOURS


@pytest.mark.parametrize(
    "files",
    [
        {"preprocessor_config.json": LARGE},
        {"processor_config.json": {"image_processor": LARGE}},
        {"processor_config.json": {"image_processor": LARGE}, "preprocessor_config.json": SMALL},
        {"processor_config.json": {"processor_class": "Qwen3VLProcessor"}, "preprocessor_config.json": LARGE},
        {
            "preprocessor_config.json": LARGE
            | {"min_pixels": 65536, "size": {"shortest_edge": 1, "longest_edge": 16777216}}
        },
    ],
)
def test_adapter_and_policy_read_the_same_processor(tmp_path: Path, files: dict[str, dict]) -> None:
    for name, settings in files.items():
        (tmp_path / name).write_text(json.dumps(settings))
    assert VisionGrid.load(tmp_path) == VisionGrid(16, 2, 64, 16384)
    assert PixelFormat.of_folder(tmp_path) == PixelFormat(16, 2, (0.5, 0.4, 0.3), (0.25,) * 3, least_tokens=64)


def test_bounds_that_are_no_whole_tokens_are_rounded_inwards(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SMALL))
    assert VisionGrid.load(tmp_path) == VisionGrid(14, 2, 5, 1279)


def test_missing_and_broken_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config\.json"):
        VisionGrid.load(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"preprocessor_config\.json is not JSON"):
        VisionGrid.load(tmp_path)
    for missing in ("shortest_edge", "image_mean"):
        settings = {k: v for k, v in LARGE.items() if k != missing and (k != "size" or missing != "shortest_edge")}
        path.write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=missing):
            VisionGrid.load(tmp_path)
