"""What the key of a frame sees and what it doesn't: tables of drawn screens, and the same key everywhere."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapforge_envs.phone import catalog
from tapforge_envs.phone.draw import picture
from tapforge_envs.phone.screen import center
from tapforge_envs.protocol import OpenApp, Tap
from tapforge_trainer.states.frame import FrameKey, frame_key

SIZE = (768, 1696)


def pixels(screen):
    return np.asarray(picture(screen, *SIZE))


def a_phone():
    task = catalog.tasks("standard", "train").sample(1, 0)
    phone = catalog.phone_for("standard", *SIZE)
    phone.begin(task.seed, catalog.rules_of(task))
    phone.state["ui"]["pending"] = []
    return phone


def tap(phone, id):
    x, y = center(phone.screen().find(id).box)
    phone.act(Tap(x=x, y=y))


def test_the_clock_of_the_status_bar_is_not_seen():
    phone = a_phone()
    phone.act(OpenApp(name="shop"))
    before = phone.screen()
    phone.state["now"] = "2026-03-05T23:59"
    after = phone.screen()
    assert (pixels(before) != pixels(after)).any()
    assert frame_key(pixels(before)).text() == frame_key(pixels(after)).text()


def test_a_caret_is_seen_but_not_without_bars():
    phone = a_phone()
    phone.act(OpenApp(name="contacts"))
    tap(phone, "add")
    tap(phone, "field:name")
    shown = phone.screen()
    with_caret, without = frame_key(pixels(shown)), frame_key(pixels(replace(shown, caret=False)))
    assert with_caret.barless == without.barless
    assert 0 < (with_caret.tiles != without.tiles).sum() <= 6


def test_a_letter_and_a_switch_are_seen_without_bars_too():
    phone = a_phone()
    phone.act(OpenApp(name="settings"))
    before = phone.screen()
    one = next(w for w in before.widgets if w.kind == "item" and w.text)
    letter = replace(one, text=one.text[:-1] + ("e" if one.text[-1] != "e" else "o"))
    keys = [frame_key(pixels(before))]
    for changed in (letter, replace(one, on=not one.on)):
        widgets = tuple(changed if w is one else w for w in before.widgets)
        keys.append(frame_key(pixels(replace(before, widgets=widgets))))
    assert len({key.barless for key in keys}) == 3
    assert len({key.text() for key in keys}) == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 130), st.integers(1, 130), st.data())
def test_every_pixel_below_the_status_bar_counts(width, height, data):
    image = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    key = frame_key(image)
    assert FrameKey.of_text(key.text()).text() == key.text()
    bar = min(round(height * 0.04), height - 1)
    x, y, c = (
        data.draw(st.integers(0, width - 1)),
        data.draw(st.integers(bar, height - 1)),
        data.draw(st.integers(0, 2)),
    )
    image[y, x, c] ^= data.draw(st.integers(1, 255))
    other = frame_key(image)
    assert (key.tiles != other.tiles).sum() == 1


def test_keys_are_the_same_on_every_machine():
    ramp = (np.arange(300 * 200 * 3, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8).reshape(300, 200, 3)
    assert hashlib.sha256(frame_key(ramp).text().encode()).hexdigest()[:16] == "e92bcdc8062ee582"


@pytest.mark.parametrize("text", ["", "AAAA", "no base64!", "A" * 40])
def test_a_damaged_key_is_an_error(text):
    with pytest.raises(ValueError, match="is not a frame key"):
        FrameKey.of_text(text)
