"""What an answer to a recorded step is worth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_api.dataset import StepReward
from tapforge_envs.protocol import (
    Action,
    Answer,
    Back,
    Home,
    Key,
    LongPress,
    OpenApp,
    Scroll,
    Swipe,
    Tap,
    Terminate,
    Type,
    Wait,
)
from tapforge_trainer.data.comparison import compare
from tapforge_trainer.data.episodes import Box

#: as verl's example has it, and R1-V-GUI-Agent
VERL = StepReward(type=0, place="distance", tolerance=0.1, reach=1.0, text="exact")
R1V = StepReward(type=0.5, place="distance", tolerance=0, text="exact")
PHONE = (1080, 2400)
DIAGONAL = math.hypot(*PHONE)


@pytest.mark.parametrize(
    ("said", "recorded", "reward", "worth"),
    [
        (Tap(x=0.5, y=0.5), Tap(x=0.5, y=0.5), StepReward(), 1),
        (Tap(x=0.5, y=0.5), Back(), StepReward(), 0),
        (Back(), Back(), StepReward(), 1),
        (Home(), Back(), StepReward(), 0),
        # R1-V: half for the type, all for the same place
        (Tap(x=0.501, y=0.5), Tap(x=0.5, y=0.5), R1V, 0.5),
        (Tap(x=0.5, y=0.5), Tap(x=0.5, y=0.5), R1V, 1),
        (Back(), Back(), R1V, 1),
        # verl: nothing for the type alone; 1 within a tenth of the diagonal, then down to 0 at all of it
        (Tap(x=0.5, y=0.5 + 0.09 * DIAGONAL / 2400), Tap(x=0.5, y=0.5), VERL, 1),
        (Tap(x=1, y=1), Tap(x=0, y=0), VERL, 0),
        (Tap(x=0, y=0.55 * DIAGONAL / 2400), Tap(x=0, y=0), VERL, 0.5),
        (Type(text="Anna"), Type(text="anna"), VERL, 0),
        # a share of the diagonal is the same distance in any direction
        (Tap(x=0.09 * DIAGONAL / 1080, y=0), Tap(x=0, y=0), StepReward(), 1),
        (Tap(x=0.11 * DIAGONAL / 1080, y=0), Tap(x=0, y=0), StepReward(), 0.5),
        (LongPress(x=0.5, y=0.5, seconds=3), LongPress(x=0.5, y=0.5), StepReward(), 1),
        (Swipe(x=0, y=0, x2=1, y2=1), Swipe(x=0, y=0, x2=0, y2=0), StepReward(), 0.75),
        (Scroll(direction="down"), Scroll(direction="down"), StepReward(), 1),
        (Scroll(direction="up"), Scroll(direction="down"), StepReward(), 0.5),
        (Type(text="Hello,  World"), Type(text="hello world"), StepReward(), 1),
        (Type(text="hello"), Type(text="hello world"), StepReward(), 0.5),
        (Type(text="hello"), Type(text="hello world"), StepReward(text="f1", type=0), 2 / 3),
        (Type(text="你好, 世界"), Type(text="你好世"), StepReward(text="f1", type=0), 6 / 7),
        (Type(text="你好、世界。"), Type(text="你好 世界"), StepReward(), 1),
        (Type(text="हिन्दी"), Type(text="हन्द"), StepReward(), 0.5),
        (Type(text="!"), Type(text="?"), StepReward(), 0.5),
        (Type(text="!"), Type(text="!"), StepReward(), 1),
        (Answer(text="7"), Answer(text="7"), StepReward(), 1),
        (OpenApp(name="notes"), OpenApp(name="Notes "), StepReward(), 1),
        (Key(name="DEL"), Key(name="ENTER"), StepReward(), 0.5),
        (Terminate(status="success"), Terminate(status="infeasible"), StepReward(), 0.5),
        (Wait(seconds=5), Wait(seconds=1), StepReward(), 1),
    ],
    ids=str,
)
def test_worth(said: Action, recorded: Action, reward: StepReward, worth: float) -> None:
    found = compare(said, recorded, PHONE, reward)
    assert found.worth(reward) == pytest.approx(worth)
    assert found.right == (found.type and found.parameters == 1)


def test_inside_the_box_is_right_however_far_from_its_middle() -> None:
    box, recorded = Box(left=0, top=0.4, right=1, bottom=0.6), Tap(x=0.5, y=0.5)
    assert compare(Tap(x=0, y=0.4), recorded, PHONE, StepReward(), box).right
    assert not compare(Tap(x=0.5, y=0.39), recorded, PHONE, StepReward(), box).right
    assert not compare(Tap(x=0, y=0.5), recorded, PHONE, StepReward(place="distance"), box).right


@given(
    x=st.floats(0, 1), y=st.floats(0, 1), tolerance=st.floats(0, 1), reach=st.floats(0, 1),
    place=st.sampled_from(["box", "distance"]),
)  # fmt: skip
def test_worth_is_from_0_to_1_and_falls_with_the_distance(
    x: float, y: float, tolerance: float, reach: float, place: str
) -> None:
    reward = StepReward(tolerance=tolerance, reach=reach, place=place)
    far, near = (compare(Tap(x=x * s, y=y * s), Tap(x=0, y=0), PHONE, reward).worth(reward) for s in (1, 0.5))
    assert 0.5 <= far <= near <= 1
