"""What an adapter writes it reads back, for every adapter and every action; what it reads never raises."""

import random
import string

import pytest
from families import CASES, Case, actions
from hypothesis import given, settings
from hypothesis import strategies as st

from tapforge_envs.protocol import ACTION, Action, Swipe, Tap, pixel
from tapforge_trainer.agents import ParseFailure
from tapforge_trainer.agents.coordinates import Fraction, Grid, ImagePixels, Plane
from tapforge_trainer.agents.vision import VisionGrid
from tapforge_trainer.run.base_check import _OUT_OF_RANGE

WIDTH, HEIGHT = 1092, 2408
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def plane_of(case: Case, width: int = WIDTH, height: int = HEIGHT) -> Plane:
    return Plane(case.dialect.coordinates, width, height)


@every
def test_what_is_written_is_read_back(case: Case) -> None:
    plane = plane_of(case)

    @settings(max_examples=400)
    @given(actions(case, plane))
    def check(action: Action) -> None:
        text = case.dialect.write(action, plane)
        assert case.dialect.parse(text, plane) == action, text

    check()


@every
def test_an_action_without_a_word_is_refused_by_name(case: Case) -> None:
    for kind in {type(a) for a in ONE_OF_EACH} - case.words:
        action = next(a for a in ONE_OF_EACH if type(a) is kind)
        with pytest.raises(ValueError, match=action.type):
            case.dialect.write(action, plane_of(case))


@every
def test_ten_thousand_texts_are_actions_or_failures(case: Case) -> None:
    dice = random.Random(case.name)
    plane = plane_of(case)
    good = [case.dialect.write(a, plane) for a in ONE_OF_EACH if type(a) in case.words and writable(case, a)]
    read = 0
    for _ in range(10_000):
        text = mangled(dice, good)
        found = case.dialect.parse(text, plane)
        if isinstance(found, ParseFailure):
            assert found.detail and len(found.detail) < 1000
        else:
            read += 1
            assert ACTION.validate_python(found.model_dump()) == found
    assert 0 < read < 10_000


PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", "</thinking>", "Action:", "\nAction: ", "Thought: "]
PIECES += ["click(", "start_box='", "(1,2)", "')", ")\n\n", "\\", "'", '"', "{", "}", "[", "]", ",", "\n", "1e999"]
PIECES += ["<|box_start|>", "<|recipient|>os\n", "pyautogui.", "mobile.swipe(", "assistantos\n", "\ufffd", "\ud800"]
PIECES += ["NaN", "true", "null", "99999999999999999999", "0.5", "[" * 500, "(" * 500, "content='", "lambda: 0"]
PIECES += ["-1", "\x00", "\\u0000"]


def mangled(dice: random.Random, good: list[str]) -> str:
    """A good answer with parts cut out, doubled, swapped or put in, or only parts."""
    text = dice.choice(good) if dice.random() < 0.8 else ""
    for _ in range(dice.randrange(5)):
        at, to = sorted((dice.randrange(len(text) + 1), dice.randrange(len(text) + 1)))
        match dice.randrange(5):
            case 0:
                text = text[:at] + text[to:]
            case 1:
                text = text[:at] + dice.choice(PIECES) + text[at:]
            case 2:
                text = text[:to] + text[at:]
            case 3:
                text = text[:at] + "".join(dice.choices(string.printable, k=dice.randrange(8))) + text[to:]
            case 4:
                text += dice.choice(PIECES) + dice.choice(good)
    return text


@every
@settings(max_examples=300)
@given(text=st.text(max_size=200))
def test_no_text_makes_a_parser_raise(case: Case, text: str) -> None:
    found = case.dialect.parse(text, plane_of(case))
    assert isinstance(found, ParseFailure) or ACTION.validate_python(found.model_dump()) == found


# --- coordinates ------------------------------------------------------------------------------------------------------


@every
def test_a_place_outside_is_a_failure(case: Case) -> None:
    plane = plane_of(case)
    inside = case.dialect.write(Tap(x=1.0, y=1.0), plane)
    assert isinstance(case.dialect.parse(inside, plane), Tap)
    for side, most in ((0, WIDTH), (1, HEIGHT)):
        last = plane.at(1.0, 1.0)[side]
        beyond: float = {Grid: last + 1, ImagePixels: most, Fraction: 1.0001}[type(plane.coordinates)]
        for outside in (beyond, -1, -0.001, 10**12):
            point = plane.at(0.5, 0.5)
            wrong = [*point]
            wrong[side] = outside
            text = case.dialect.write(Tap(x=0.5, y=0.5), plane)
            for old, new in (("[{}, {}]", "[{}, {}]"), ("({},{})", "({},{})"), ("x={}, y={}", "x={}, y={}")):
                text = text.replace(old.format(*point), new.format(*wrong))
            said = str(case.dialect.parse(text, plane)) if outside == beyond else "which is not a number from 0 to "
            assert _OUT_OF_RANGE.search(said), said
            found = case.dialect.parse(text, plane)
            assert isinstance(found, ParseFailure) and found.kind == "action", (text, found)


@pytest.mark.parametrize("coordinates", [ImagePixels(), Fraction(4)], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize(("screen", "patch"), [((1080, 2400), 14), ((1080, 2400), 16), ((1920, 1080), 14)])
def test_every_pixel_of_a_screen_that_is_not_shrunk_survives(coordinates, screen: tuple[int, int], patch: int) -> None:
    image = VisionGrid(patch, 2, 4, 16384).fit(*screen)
    for size, side in zip(screen, image, strict=True):
        # Fitting rounds a side to the nearest cell, so it may lose some pixels: those are as near as can be.
        off = max(
            abs(pixel(coordinates.read(coordinates.write((p + 0.5) / size, side), side, "x"), size) - p)
            for p in range(size)
        )
        assert off <= (0 if side >= size or isinstance(coordinates, Fraction) else 1)


@pytest.mark.parametrize("largest", [999, 1000])
@pytest.mark.parametrize("size", [1080, 2400])
def test_a_grid_is_off_by_less_than_its_own_step(largest: int, size: int) -> None:
    grid = Grid(largest)
    for p in range(size):
        found = pixel(grid.read(grid.write((p + 0.5) / size, size), size, "x"), size)
        assert abs(found - p) <= -(-size // largest)


def test_the_ends_are_the_ends() -> None:
    for coordinates in (Grid(999), Grid(1000), Fraction(4), ImagePixels()):
        for side in (28, 1092, 2408):
            assert pixel(coordinates.read(coordinates.write(0.0, side), side, "x"), side) == 0
            assert pixel(coordinates.read(coordinates.write(1.0, side), side, "x"), side) == side - 1


# --- one of each action -----------------------------------------------------------------------------------------------

ONE_OF_EACH: list[Action] = [
    ACTION.validate_python(value)
    for value in (
        *({"type": kind, "x": 0.5, "y": 0.25} for kind in ("tap", "double_tap", "long_press", "move", "right_click")),
        *({"type": kind, "x": 0.5, "y": 0.25} for kind in ("middle_click", "triple_click")),
        {"type": "swipe", "x": 0.5, "y": 0.75, "x2": 0.5, "y2": 0.25},
        {"type": "drag", "x": 0.5, "y": 0.75, "x2": 0.5, "y2": 0.25},
        {"type": "scroll", "direction": "down"},
        {"type": "type", "text": "hello"},
        {"type": "key", "name": "f5"},
        {"type": "hotkey", "keys": ["ctrl", "c"]},
        {"type": "open_app", "name": "Clock"},
        {"type": "wait", "seconds": 5},
        {"type": "wait", "seconds": 1},
        {"type": "answer", "text": "42"},
        {"type": "ask_user", "text": "Which?"},
        {"type": "terminate", "status": "success"},
        {"type": "terminate", "status": "infeasible"},
        *({"type": kind} for kind in ("home", "back", "app_switch", "enter")),
    )
]


def writable(case: Case, action: Action) -> bool:
    try:
        case.dialect.write(action, plane_of(case))
    except ValueError:
        return False
    return True


@every
def test_the_canonical_answers_cover_the_words(case: Case) -> None:
    written = {type(a) for a in ONE_OF_EACH if type(a) in case.words and writable(case, a)}
    # MAI-UI has a word for a stroke of one length only.
    assert case.words - written <= ({Swipe} if case.dialect.name == "mai-ui" else set())
