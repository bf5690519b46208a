"""What tells a state: the exact key, else the tree, else the frame, whose pixels are asked for only then."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from tapforge_envs.protocol import Frame, Observation
from tapforge_envs.ui_tree import ui_key
from tapforge_trainer.frames.frame import Pixels
from tapforge_trainer.states.frame import frame_key
from tapforge_trainer.states.reading import StateReading, is_free, read_state

FRAME = Frame.of(b"never decoded here", 64, 96)
PIXELS = np.random.default_rng(0).integers(0, 256, (96, 64, 3), np.uint8)
TREE = (
    '<hierarchy><node class="android.widget.TextView" package="mail" text="Inbox"/>'
    '<node class="android.widget.TextView" package="mail" text="Anna"/></hierarchy>'
)


def never() -> Pixels:
    raise AssertionError("no pixels are needed")


def test_an_exact_key_needs_no_pixels_and_no_key_of_the_tree() -> None:
    exact = Observation(FRAME, state_key="s")
    assert is_free(exact) and read_state(exact, never) == StateReading()
    name = hashlib.sha256(TREE.encode()).hexdigest()
    both = Observation(FRAME, state_key="s", ui_tree=TREE)
    assert not is_free(both) and read_state(both, never) == StateReading(name)


def test_a_tree_needs_no_pixels() -> None:
    reading = read_state(Observation(FRAME, ui_tree=TREE), never)
    assert reading.ui_key == ui_key(TREE) is not None and reading.frame_key is None


@pytest.mark.parametrize("tree", [None, "<hierarchy/>"], ids=["none", "empty"])
def test_a_frame_tells_where_nothing_else_does(tree: str | None) -> None:
    asked = []

    def pixels() -> Pixels:
        asked.append(1)
        return PIXELS

    seen: Callable[[], Pixels] = pixels
    reading = read_state(Observation(FRAME, ui_tree=tree), seen)
    assert reading.ui_key is None and reading.frame_key == frame_key(PIXELS).text()
    assert asked == [1]


def test_pixels_that_are_a_view_of_a_png_give_the_same_key() -> None:
    rows = np.zeros((96, 1 + 3 * 64), np.uint8)
    rows[:, 1:] = PIXELS.reshape(96, -1)
    assert frame_key(rows[:, 1:].reshape(96, 64, 3)).text() == frame_key(PIXELS).text()
