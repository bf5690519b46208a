"""Episodes as an animated picture: one picture per step, marked where it was touched, and nothing made up."""

from __future__ import annotations

import io
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from fontTools import subset
from PIL import Image, ImageChops
from test_replay import FRAMES, episode, get, screen

from tapforge_envs.protocol import Outcome
from tapforge_trainer.viewer.animation import FORMATS, Style, animate
from tapforge_trainer.viewer.text_writer import FontUnreadable

MARK = np.array([0xFF, 0x2D, 0x6F])
WON = episode("won", Outcome.SUCCESS, "red green blue")


def pictures(data: bytes) -> list[Image.Image]:
    with Image.open(io.BytesIO(data)) as opened:
        found = []
        for place in range(getattr(opened, "n_frames", 1)):
            opened.seek(place)
            found.append(opened.convert("RGB"))
    return found


def milliseconds(data: bytes) -> list[int]:
    with Image.open(io.BytesIO(data)) as opened:
        found = []
        for place in range(opened.n_frames):
            opened.seek(place)
            opened.load()
            found.append(opened.info["duration"])
    return found


def marks(picture: Image.Image) -> np.ndarray:
    """Rows and columns of the gesture's colour on the screen, which ends where the panel begins."""
    found = np.argwhere(np.abs(np.asarray(picture).astype(int) - MARK).sum(axis=2) < 60)
    return found[found[:, 1] < picture.width - 340]


@pytest.mark.parametrize("kind", FORMATS.values())
def test_a_picture_per_step_and_the_end_for_twice_as_long(kind):
    made = animate([replace(WON, last_frame=FRAMES["red"].name)], get, Style(kind, 0.5))
    shown = pictures(made.data)
    assert len(shown) == 4 and made.lacks == ""
    assert milliseconds(made.data) == [500, 500, 500, 1000]
    # Of 12 x 20 pixels, enlarged 24 times; the phone was touched in the middle of each.
    assert shown[0].size == (16 + 12 * 24 + 16 + 320 + 16, 16 + 480 + 16)
    corners = [one.getpixel((20, 20)) for one in shown]
    for corner, color in zip(corners, ["red", "green", "blue", "red"], strict=True):
        assert corner == pytest.approx(Image.new("RGB", (1, 1), color).getpixel((0, 0)), abs=12)
    for one in shown[1:3]:  # on red the colour is hard to tell
        row, column = marks(one).mean(axis=0)
        assert (column, row) == pytest.approx((16 + 144, 16 + 240), abs=16)
    last = Image.new("RGB", (12 * 24 - 8, 480 - 8), corners[3])
    assert max(high for _, high in ImageChops.difference(shown[3].crop((20, 20, 300, 492)), last).getextrema()) < 12


def test_the_end_is_on_the_last_step_where_no_screen_follows():
    two = [WON, episode("lost", Outcome.FAILURE, "red")]
    assert milliseconds(animate(two, get, Style("GIF", 1)).data) == [1000, 1000, 2000, 2000]
    ended = animate([episode("none", None, "")], get, Style("GIF"))
    assert len(pictures(ended.data)) == 1


def test_goal_action_and_answer_are_beside_the_screen():
    def panel(goal: str = "open the clock", **other) -> bytes:
        step = replace(WON.steps[0], **other)
        made = animate(
            [replace(WON, task=WON.task.model_copy(update={"goal": goal}), steps=(step,))], get, Style("GIF")
        )
        return pictures(made.data)[0].crop((330, 0, 650, 512)).tobytes()

    tap = {"type": "tap", "x": 0.1, "y": 0.5}
    unread = {"action": None, "parse_error": "no tool call"}
    kinds = [{}, {"goal": "open the mail"}, {"action": tap}, unread, {"text": "I tap it"}]
    typed = [{"action": {"type": "type", "text": text}} for text in ("wifi", "alarm")]
    assert len({panel(**other) for other in (*kinds, *typed)}) == 7
    assert panel(text="word " * 2000) == panel(text="word " * 3000), "what has no room is left out"


def test_a_screen_that_cannot_be_shown_is_its_reason():
    def broken(sha256: str) -> bytes:
        return b"no picture" if sha256 == FRAMES["blue"].name else get(sha256)

    lost = replace(WON.steps[0], frames=("lost",))
    made = animate([replace(WON, steps=(lost, *WON.steps[1:]))], broken, Style("GIF"))
    first, second, third = pictures(made.data)
    assert first.getpixel((160, 400)) == third.getpixel((160, 400)) == (255, 255, 255)
    assert np.asarray(first.crop((20, 20, 300, 492))).min() < 100 and len(marks(first)) == len(marks(third)) == 0
    assert len(marks(second)) > 0


def test_a_large_screen_fits_into_a_slide():
    large = screen("white", 1080, 2400)
    steps = tuple(replace(WON.steps[0], index=n, frames=(large.name,)) for n in range(15))
    for kind in FORMATS.values():
        made = animate([replace(WON, steps=steps)], lambda _: large.data, Style(kind))
        assert len(made.data) < 300_000
        assert [one.size for one in pictures(made.data)] == [(16 + 216 + 16 + 320 + 16, 512)] * 15


def test_characters_that_the_font_lacks_are_said(tmp_path):
    chinese = replace(WON, task=WON.task.model_copy(update={"goal": "打开 the clock"}))
    assert set(animate([chinese], get, Style("GIF")).lacks) == {"打", "开"}
    # A font may draw nothing for a character that it lacks.
    usual = Path(find_spec("matplotlib").submodule_search_locations[0], "mpl-data/fonts/ttf/DejaVuSans.ttf")
    subset.main([str(usual), "--unicodes=20-7E", "--no-notdef-outline", f"--output-file={tmp_path / 'ascii.ttf'}"])
    assert set(animate([chinese], get, Style("GIF", font=tmp_path / "ascii.ttf")).lacks) == {"打", "开"}
    (tmp_path / "font.ttf").write_text("none")
    with pytest.raises(FontUnreadable, match=r"font\.ttf can't be read as a font"):
        animate([chinese], get, Style("GIF", font=tmp_path / "font.ttf"))
