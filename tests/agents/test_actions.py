"""Coordinates and the canonical writer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_envs.protocol import (
    Action,
    Answer,
    AppSwitch,
    AskUser,
    Back,
    DoubleTap,
    Drag,
    Enter,
    Home,
    Hotkey,
    Key,
    LongPress,
    MiddleClick,
    Move,
    OpenApp,
    RightClick,
    Scroll,
    Swipe,
    Tap,
    Terminate,
    TripleClick,
    Type,
    Wait,
    pixel,
)
from tapforge_trainer.agents import format_action, parse
from tapforge_trainer.agents.coordinates import Grid, Plane
from tapforge_trainer.agents.mobile_use import FORMS, MOBILE_USE
from tapforge_trainer.agents.tools import short_name

PLANE = Plane(Grid(999), 1080, 2400)


def grid(x: float) -> int:
    return Grid(999).write(x, 1080)


def relative(v: int) -> float:
    return Grid(999).read(v, 1080, "coordinate")


ONE_OF_EACH: list[tuple[Action, dict]] = [
    (Tap(x=166 / 999, y=100 / 999), {"action": "click", "coordinate": [166, 100]}),
    (LongPress(x=0, y=1, seconds=2), {"action": "long_press", "coordinate": [0, 999], "time": 2}),
    (DoubleTap(x=0, y=0), {"action": "double_tap", "coordinate": [0, 0]}),
    (
        Swipe(x=500 / 999, y=900 / 999, x2=500 / 999, y2=100 / 999),
        {"action": "swipe", "coordinate": [500, 900], "coordinate2": [500, 100]},
    ),
    (Type(text='say "hi"\n✓'), {"action": "type", "text": 'say "hi"\n✓'}),
    (Key(name="VOLUME_UP"), {"action": "key", "text": "VOLUME_UP"}),
    (OpenApp(name="Clock"), {"action": "open", "text": "Clock"}),
    (Wait(seconds=0.5), {"action": "wait", "time": 0.5}),
    (Answer(text="42"), {"action": "answer", "text": "42"}),
    (AskUser(text="Which one?"), {"action": "ask_user", "text": "Which one?"}),
    (Terminate(status="success"), {"action": "terminate", "status": "success"}),
    (Terminate(status="failure"), {"action": "terminate", "status": "failure"}),
    (Terminate(status="infeasible"), {"action": "terminate", "status": "infeasible"}),
    (Back(), {"action": "system_button", "button": "Back"}),
    (Home(), {"action": "system_button", "button": "Home"}),
    (AppSwitch(), {"action": "system_button", "button": "Menu"}),
    (Enter(), {"action": "system_button", "button": "Enter"}),
]

on_grid = st.integers(0, 999).map(lambda v: v / 999)
texts = st.text(max_size=40) | st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "\ufffd", "\\u003c", "<", '"']
    ),
    max_size=5,
).map("".join)
seconds = st.floats(0, 60, allow_nan=False)
representable = st.one_of(
    st.builds(Tap, x=on_grid, y=on_grid),
    st.builds(LongPress, x=on_grid, y=on_grid, seconds=seconds.filter(bool)),
    st.builds(DoubleTap, x=on_grid, y=on_grid),
    st.builds(Swipe, x=on_grid, y=on_grid, x2=on_grid, y2=on_grid),
    st.builds(Type, text=texts),
    st.builds(Key, name=texts.map(lambda text: text[:64])),
    st.builds(OpenApp, name=texts.map(lambda text: text[:200])),
    st.builds(Wait, seconds=seconds),
    st.builds(Answer, text=texts),
    st.builds(AskUser, text=texts),
    st.sampled_from([action for action, _ in ONE_OF_EACH]),
)


@pytest.mark.parametrize(("action", "arguments"), ONE_OF_EACH, ids=lambda value: str(value)[:40])
def test_canonical_arguments_of_every_action(action: Action, arguments: dict) -> None:
    assert MOBILE_USE.write(action, PLANE) == arguments
    assert parse(format_action(action)) == action


def test_every_form_is_written_by_some_action() -> None:
    assert {arguments["action"] for _, arguments in ONE_OF_EACH} == set(FORMS)


def test_canonical_text() -> None:
    text = (
        '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [166, 100]}}\n</tool_call>'
    )
    assert format_action(Tap(x=166 / 999, y=100 / 999)) == text


@given(representable)
def test_what_is_written_is_read_back(action: Action) -> None:
    assert parse(format_action(action)) == action


@given(representable)
def test_text_never_looks_like_the_answer_format(action: Action) -> None:
    text = format_action(action)
    assert text.count("<tool_call>") == text.count("</tool_call>") == 1
    assert "<|" not in text and "<think>" not in text and "</think>" not in text


@pytest.mark.parametrize(
    "action",
    [
        Drag(x=0, y=0, x2=1, y2=1),
        Scroll(direction="up"),
        Move(x=0, y=0),
        RightClick(x=0, y=0),
        MiddleClick(x=0, y=0),
        TripleClick(x=0, y=0),
        Hotkey(keys=("ctrl", "c")),
    ],
    ids=lambda action: action.type,
)
def test_an_action_without_a_word_is_refused_by_name(action: Action) -> None:
    with pytest.raises(ValueError, match=action.type):
        format_action(action)


@pytest.mark.parametrize("size", [96, 128, 160, 224, 448, 720, 998])
def test_the_centre_of_every_pixel_survives_the_round_trip(size: int) -> None:
    for p in range(size):
        assert pixel(relative(grid((p + 0.5) / size)), size) == p


@pytest.mark.parametrize("size", [1080, 2400])
def test_on_larger_screens_the_round_trip_is_off_by_less_than_the_grid(size: int) -> None:
    for p in range(size):
        assert abs(pixel(relative(grid((p + 0.5) / size)), size) - p) <= -(-size // 999)


@pytest.mark.parametrize("size", [1, 2, 96, 998, 999, 1080, 2400])
def test_the_ends_of_the_grid_are_the_ends_of_the_screen(size: int) -> None:
    assert pixel(relative(0), size) == 0
    assert pixel(relative(999), size) == size - 1


@given(st.integers(0, 999))
def test_grid_undoes_relative(v: int) -> None:
    assert grid(relative(v)) == v


def test_the_tool_schema_names_every_form_and_only_known_fields() -> None:
    parameters = MOBILE_USE.schema(PLANE)["function"]["parameters"]
    assert parameters["properties"]["action"]["enum"] == list(FORMS)
    assert set(parameters["properties"]) == {"action"} | {field for form in FORMS.values() for field in form.fields}
    json.dumps(parameters)


def test_short_names_are_one_word() -> None:
    names = [short_name(action) for action, _ in ONE_OF_EACH]
    assert all(name.isalpha() for name in names)
    assert (short_name(Tap(x=0, y=0)), short_name(Home()), short_name(None)) == ("click", "home", "invalid")
