"""Every action of the protocol has words; those with a place are drawn there."""

from __future__ import annotations

from typing import get_args

import pytest

from tapforge_envs.protocol import ACTION, Action
from tapforge_trainer.viewer.gesture import gesture_of

PLACE = {"x": 0.25, "y": 0.5}
EXAMPLES = {
    "tap": PLACE,
    "long_press": PLACE,
    "double_tap": PLACE,
    "swipe": PLACE | {"x2": 0.75, "y2": 0.5},
    "drag": PLACE | {"x2": 0.25, "y2": 1.0},
    "scroll": {"direction": "down"} | PLACE,
    "type": {"text": "milk"},
    "key": {"name": "DEL"},
    "open_app": {"name": "Clock"},
    "home": {},
    "back": {},
    "app_switch": {},
    "enter": {},
    "wait": {"seconds": 2},
    "answer": {"text": "42"},
    "ask_user": {"text": "which?"},
    "terminate": {"status": "infeasible"},
    "move": PLACE,
    "right_click": PLACE,
    "middle_click": PLACE,
    "triple_click": PLACE,
    "hotkey": {"keys": ["ctrl", "c"]},
}


def test_examples_cover_the_protocol():
    assert {a.model_fields["type"].default for a in get_args(Action)} == set(EXAMPLES)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_words_and_shapes(kind):
    action = ACTION.dump_python(ACTION.validate_python({"type": kind} | EXAMPLES[kind]), mode="json")
    gesture = gesture_of(action, 100, 200)
    assert gesture.words
    assert gesture.words == kind or bool(gesture.shapes) or bool(gesture.label)
    # what isn't drawn is written on the screen, with what was typed, pressed or said
    assert bool(gesture.shapes) is not bool(gesture.label)
    for value in EXAMPLES[kind].values():
        if isinstance(value, str) and kind not in ("scroll", "terminate"):
            assert value in gesture.label
    if "x" in EXAMPLES[kind]:
        assert gesture.shapes[0].points[0] == (25.5, 100.5)


@pytest.mark.parametrize(("end", "tip"), [((0.75, 0.5), (75.5, 100.5)), ((0.25, 0.0), (25.5, 0.5))])
def test_an_arrow_points_at_where_the_stroke_ends(end, tip):
    gesture = gesture_of({"type": "swipe", "x": 0.25, "y": 0.5, "x2": end[0], "y2": end[1]}, 100, 200)
    (head,) = [shape for shape in gesture.shapes if shape.kind == "head"]
    assert head.points[0] == tip


def test_the_notches_of_a_wheel_are_said():
    assert gesture_of({"type": "scroll", "direction": "up", "notches": 3} | PLACE, 100, 200).words == (
        "scroll up by 3 notches"
    )


def test_a_stroke_without_length_and_an_unknown_action_are_no_crash():
    assert gesture_of({"type": "swipe"} | PLACE | {"x2": 0.25, "y2": 0.5}, 100, 200).shapes
    assert gesture_of({"type": "teleport"}, 100, 200).label == "teleport"


def test_words_count_in_pixels_of_the_frame_and_shapes_in_those_of_the_picture():
    tap = {"type": "tap", "x": 0.859, "y": 0.66}
    gesture = gesture_of(tap, 324, 720, frame=(1080, 2400))
    assert gesture.words == "tap (927, 1584)"
    assert gesture.shapes[0].points[0] == (278.5, 475.5)
    drag = gesture_of({"type": "drag", "x": 0, "y": 0, "x2": 1, "y2": 1}, 324, 720, frame=(1080, 2400))
    assert drag.words == "drag (0, 0) to (1079, 2399)"
