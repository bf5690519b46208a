"""An episode as one still picture: a cell per step with its gesture, small enough for a tracker."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
from PIL import Image
from test_animation import MARK
from test_replay import FRAMES, episode, get

from tapforge_envs.protocol import Outcome
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.viewer.strip import MOST_BYTES, strip

#: screens of 12 x 20 pixels are enlarged 18 times
WIDTH, HEIGHT, EDGE = 216, 360, 8
WON = episode("won", Outcome.SUCCESS, "green blue green")


def picture(data: bytes | None) -> np.ndarray:
    assert data is not None
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.format == "JPEG"
        return np.asarray(opened.convert("RGB")).astype(int)


def cell(shown: np.ndarray, number: int) -> np.ndarray:
    left = EDGE + number * (WIDTH + EDGE)
    return shown[EDGE : EDGE + HEIGHT, left : left + WIDTH]


def marked(screen: np.ndarray) -> np.ndarray:
    return np.argwhere(np.abs(screen - MARK).sum(axis=2) < 90)


def test_the_screens_stand_in_order_with_their_gestures_and_the_end_follows():
    shown = picture(strip(replace(WON, last_frame=FRAMES["blue"].name), get))
    assert shown.shape[1] == 4 * (WIDTH + EDGE) + EDGE
    corners = [cell(shown, number)[20, 20].argmax() for number in range(4)]
    assert corners == [1, 2, 1, 2], "green is the second colour, blue the third"
    for number in range(3):  # the phone was touched in the middle of each
        assert np.abs(marked(cell(shown, number)).mean(axis=0) - (HEIGHT / 2, WIDTH / 2)).max() < 12
    assert len(marked(cell(shown, 3))) == 0


def test_a_screen_that_is_missing_is_its_reason_and_without_any_there_is_no_picture():
    lost = replace(WON.steps[1], frames=("lost",))
    shown = picture(strip(replace(WON, steps=(WON.steps[0], lost)), get))
    assert tuple(cell(shown, 1)[-20, 20]) > (240, 240, 240) and len(marked(cell(shown, 1))) == 0
    assert cell(shown, 1).min() < 140, "words"
    assert strip(replace(WON, steps=(lost,)), get) is None
    assert strip(episode("none", Outcome.FAILURE, ""), get) is None


def test_a_long_episode_of_screens_that_pack_badly_is_small_enough_and_keeps_both_ends():
    noise = np.random.default_rng(0).integers(0, 256, (400, 180, 3), dtype=np.uint8)
    frame = FittedFrame.of(noise)
    steps = tuple(replace(WON.steps[0], index=n, frames=(frame.name,)) for n in range(100))
    data = strip(replace(WON, steps=steps), lambda _: frame.data)
    assert data is not None and len(data) <= MOST_BYTES
    height, width, _ = picture(data).shape
    assert 0.5 < width / height < 0.6, "six rows of eight: twenty steps of each end, and how many are left out"
