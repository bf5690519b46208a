"""Which steps of a group share a state: levels in order, neighbours without chains, whatever order they come in."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tapforge_trainer.records import Generation, StepRecord
from tapforge_trainer.states.frame import FrameKey
from tapforge_trainer.states.grouping import UNKNOWN, states_of

GENERATION = Generation((), (), (), (), "stop", 0)
BLANK = np.zeros((34, 16), dtype=np.uint16)


def step(index: int = 1, episode: str = "e", app: str | None = "mail", **told) -> StepRecord:
    exact = told.pop("exact", None)
    return StepRecord(episode, index, (), exact, app, GENERATION, "", None, None, 0.0, "", 0.0, 0.0, **told)


def frame(*changed: tuple[int, int], barless: bytes = b"same....") -> str:
    """A frame whose tiles at these places (row, column) are others."""
    tiles = BLANK.copy()
    for number, place in enumerate(changed):
        tiles[place] = 1 + number
    return FrameKey(tiles, barless).text()


def sets(steps: list[StepRecord]) -> set[frozenset[int]]:
    """Places of the steps that share a state."""
    states = states_of(steps)
    return {frozenset(i for i, s in enumerate(states) if s == state) for state in states if state != UNKNOWN}


def test_the_best_key_of_a_step_tells_its_state():
    steps = [
        step(exact="a", ui_key="u"),
        step(exact="a", ui_key="v"),
        step(exact="b", ui_key="u"),
        step(ui_key="u"),
        step(ui_key="u"),
        step(frame_key=frame()),
        step(),
    ]
    assert sets(steps) == {frozenset((0, 1)), frozenset((2,)), frozenset((3, 4)), frozenset((5,))}
    assert states_of(steps)[6] == UNKNOWN


def test_another_app_or_window_is_another_state_unless_the_key_is_exact():
    for told in ({"ui_key": "u"}, {"frame_key": frame()}):
        steps = [step(**told), step(app="shop", **told), step(window="inbox", **told), step(**told)]
        assert sets(steps) == {frozenset((0, 3)), frozenset((1,)), frozenset((2,))}
    assert sets([step(exact="a"), step(app="shop", exact="a")]) == {frozenset((0, 1))}


def test_episodes_begin_in_one_state_unless_their_exact_keys_differ():
    steps = [
        step(0, frame_key=frame((5, 5), (20, 3))),
        step(0, frame_key=frame()),
        step(0, ui_key="u"),
        step(ui_key="u"),
    ]
    assert sets(steps) == {frozenset((0, 1, 2, 3))}
    assert len(sets([step(0, exact="a"), step(0, exact="b")])) == 2


def test_what_differs_between_first_frames_changes_by_itself():
    ten, eleven = frame((5, 5), barless=b"10......"), frame((5, 5), (5, 6), barless=b"11......")
    later = frame((5, 7), barless=b"12......")
    elsewhere = frame((5, 5), (9, 9), barless=b"x.......")
    steps = [step(0, frame_key=ten), step(0, frame_key=eleven), step(frame_key=later), step(frame_key=elsewhere)]
    assert sets(steps) == {frozenset((0, 1, 2)), frozenset((3,))}
    # the same places in another app are content
    steps = [*steps[:2], step(app="shop", frame_key=ten), step(app="shop", frame_key=later)]
    assert sets(steps) == {frozenset((0, 1)), frozenset((2,)), frozenset((3,))}


def test_where_the_whole_screen_moves_nobody_is_joined():
    moving = frame(*((row, column) for row in range(6) for column in range(16)), barless=b"moving..")
    steps = [step(0, frame_key=moving), step(0, frame_key=frame()), step(frame_key=frame((2, 2), barless=b"x......."))]
    assert sets(steps) == {frozenset((0, 1)), frozenset((2,))}


def test_a_blinking_caret_is_no_other_state():
    assert sets([step(frame_key=frame()), step(frame_key=frame((7, 4), (8, 4)))]) == {frozenset((0, 1))}


def test_what_is_no_caret_is_another_state():
    for other in (
        frame((7, 4), barless=b"letter.."),  # it shows without bars
        frame((7, 4), (7, 5), (7, 6)),  # wider than a caret
        frame((7, 4), (8, 4), (9, 4), (10, 4)),  # taller
    ):
        assert len(sets([step(frame_key=frame()), step(frame_key=other)])) == 2


def test_carets_in_two_fields_are_not_one_state_by_way_of_none():
    steps = [step(frame_key=frame((7, 4))), step(frame_key=frame()), step(frame_key=frame((20, 4)))]
    assert len(sets(steps)) == 3


places = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3)
keys = st.builds(lambda at, b: frame(*at, barless=b), places, st.sampled_from([b"one.....", b"two....."]))
anything = st.builds(
    lambda index, app, told: step(index, app=app, **told),
    st.integers(0, 2),
    st.sampled_from([None, "mail", "shop"]),
    st.one_of(
        st.builds(lambda k: {"frame_key": k}, keys),
        st.builds(lambda k: {"ui_key": k}, st.sampled_from("uv")),
        st.builds(lambda k: {"exact": k}, st.sampled_from("ab")),
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(anything, max_size=14), st.randoms())
def test_the_order_of_steps_changes_nothing(steps, random):
    numbered = [replace(s, text=str(i)) for i, s in enumerate(steps)]
    shuffled = list(numbered)
    random.shuffle(shuffled)

    def named(order):
        return {frozenset(order[i].text for i in together) for together in sets(order)}

    assert named(numbered) == named(shuffled)
