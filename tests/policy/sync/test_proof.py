"""The probe of a weight sync fits into the context, whatever its length, and is as large as it can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.learner.frame_store import PixelFormat, decode
from tapforge_trainer.records import Prompt
from tapforge_trainer.sync.proof import PROBE_TOKENS, STATISTICS, Probe, least_context, make_probe, shrunk

HALF = (0.5, 0.5, 0.5)
TINY = PixelFormat(16, 2, HALF, HALF, least_tokens=1)
LARGE = PixelFormat(16, 2, HALF, HALF, least_tokens=64)
IMAGE, START, END = 900, 901, 902


def probe_of(form: PixelFormat, context: int) -> Probe:
    return make_probe(form, tuple(range(300)), IMAGE, START, END, context)


def lengths(probe: Probe) -> list[int]:
    return [len(probe.expand(ids, names)) for ids, names in probe.prompts]


@pytest.mark.parametrize(("form", "room"), [(TINY, 256), (LARGE, 1024)])
def test_where_there_is_room_the_probe_is_whole(form: PixelFormat, room: int) -> None:
    probe = probe_of(form, room)
    assert [len(names) for _, names in probe.prompts] == [1, 2, 1]
    assert lengths(probe)[2] > 128
    assert probe == probe_of(form, 8192), "the same for every context that it fits into"


@given(st.sampled_from([TINY, LARGE]), st.integers(0, 400))
def test_in_a_short_context_it_shrinks_and_still_shows_a_frame(form: PixelFormat, more: int) -> None:
    context = least_context(form) + more
    probe = probe_of(form, context)
    assert max(lengths(probe)) <= context - PROBE_TOKENS
    assert len(probe.prompts) >= 2 and all(names for _, names in probe.prompts)
    for ids, names in probe.prompts:
        assert [ids.count(t) for t in (START, IMAGE, END)] == [len(names)] * 3
    for frame in probe.frames.values():
        rows, columns = form.grid(frame.width, frame.height)
        assert rows * columns >= form.least_tokens and decode(frame.data, "").shape[:2] == (frame.height, frame.width)


def test_in_the_shortest_context_the_largest_prompt_fills_it() -> None:
    for form, least in ((TINY, 16 + 2 + 6), (LARGE, 16 + 2 + 72)):
        assert least_context(form) == least
        assert max(lengths(probe_of(form, least))) == least - PROBE_TOKENS
        with pytest.raises(ValueError, match=f"{least} at least"):
            probe_of(form, least - 1)


def recorded(count: int, length: int) -> list[Prompt]:
    shown = FittedFrame.of(np.zeros((32, 64, 3), np.uint8))
    return [Prompt((k, START, IMAGE, END), (shown,), length) for k in range(count)]


@pytest.mark.parametrize(
    ("statistical", "count", "asked"), [(True, 16, 16), (True, 3, 16), (False, 16, 2), (False, 1, 1)]
)
def test_recorded_prompts_take_the_place_of_what_is_made_up(statistical: bool, count: int, asked: int) -> None:
    made_up = recorded(2, 40)
    probe = make_probe(
        TINY,
        tuple(range(300)),
        IMAGE,
        START,
        END,
        2048,
        statistical=statistical,
        episode=made_up,
        recorded=[*recorded(count, 1900), *recorded(2, 2040)],
    )
    assert probe.episode == () and len(probe.prompts) == 3 + asked, "those that leave no room are left out"
    assert [ids[0] for ids, _ in probe.prompts[3:]] == [k % count for k in range(asked)]
    if statistical:
        assert asked * probe.answer >= STATISTICS and probe.scored
    none = make_probe(
        TINY,
        tuple(range(300)),
        IMAGE,
        START,
        END,
        2048,
        statistical=statistical,
        episode=made_up,
        recorded=recorded(2, 2048),
    )
    assert len(none.prompts) * none.answer >= (STATISTICS if statistical else 3)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=4), st.integers(0, 400))
def test_the_longest_gives_way_first(wanted: list[int], room: int) -> None:
    found = shrunk(wanted, room)
    assert sum(found) <= room and all(f <= w for f, w in zip(found, wanted, strict=True))
    if sum(wanted) <= room:
        assert list(found) == wanted
    else:
        cap = max(found)
        assert all(f == min(w, cap) for f, w in zip(found, wanted, strict=True))
        assert sum(min(w, cap + 1) for w in wanted) > room, "as long as they can be"


@given(st.sampled_from([TINY, LARGE]), st.integers(0, 4000), st.integers(1, 80), st.integers(1, 80))
def test_the_largest_screen_is_in_it_as_large_as_the_context_has_room(
    form: PixelFormat, more: int, columns: int, rows: int
) -> None:
    context = least_context(form) + more
    largest = (columns * form.cell, rows * form.cell)
    probe = make_probe(form, tuple(range(300)), IMAGE, START, END, context, largest)
    assert max(lengths(probe)) <= context - PROBE_TOKENS
    small = probe_of(form, context)
    assert [names for _, names in probe.prompts][:-1] == [names for _, names in small.prompts][:-1]
    (shown,) = probe.prompts[-1][1]
    frame, room = probe.frames[shown], context - PROBE_TOKENS - 2
    found = form.grid(frame.width, frame.height)
    assert np.prod(found) >= form.least_tokens
    if form.least_tokens <= rows * columns <= room:
        assert (frame.width, frame.height) == largest
    elif rows * columns > room and np.prod(found) > 2 * form.least_tokens:
        assert np.prod(found) > 0.4 * room, "nearly all of the room"


def test_a_phones_screen_in_a_usual_context() -> None:
    probe = make_probe(TINY, tuple(range(300)), IMAGE, START, END, 8192, (1088, 2400))
    assert lengths(probe)[:2] == lengths(probe_of(TINY, 8192))[:2], "small where a large one shows nothing more"
    assert lengths(probe)[2] == 34 * 75 + 2 + 158
    assert sum(lengths(probe)) < 2900


def test_where_statistics_decide_there_are_enough_tokens_of_other_words_with_the_largest_screens() -> None:
    probe = make_probe(TINY, tuple(range(300)), IMAGE, START, END, 8192, (1088, 2400), statistical=True)
    assert len(probe.prompts) * probe.answer >= STATISTICS and probe.answer == 64
    assert len({ids[:4] for ids, _ in probe.prompts if len(ids) > 40}) > 3, "not the same words again"
    large = [ids for ids, names in probe.prompts if probe.frames[names[0]].width == 1088]
    assert len(large) * probe.answer > STATISTICS / 4
    assert len(probe.scored) * probe.scored_tokens >= STATISTICS
    for ids, names in probe.scored:
        assert IMAGE not in ids[-probe.scored_tokens :] and len(probe.expand(ids, names)) < 300, "vLLM's logits of all"


@given(st.sampled_from([TINY, LARGE]), st.integers(0, 1400))
def test_statistics_fit_into_a_short_context_too(form: PixelFormat, more: int) -> None:
    context = least_context(form) + more
    probe = make_probe(form, tuple(range(300)), IMAGE, START, END, context, statistical=True)
    assert probe.prompts and len(probe.prompts) * probe.answer >= STATISTICS
    assert max(lengths(probe)) <= context - probe.answer
    assert all(len(probe.expand(ids, names)) < context for ids, names in probe.scored)


def test_a_made_up_episode_s_steps_are_in_it_where_they_have_room() -> None:
    shown = FittedFrame.of(np.zeros((64, 64, 3), np.uint8))
    steps = [Prompt((1, START, IMAGE, END, 2), (shown,), length) for length in (8, 8192)]
    probe = make_probe(TINY, tuple(range(300)), IMAGE, START, END, 8192, episode=steps)
    assert probe.episode == (((1, START, IMAGE, END, 2), (shown.name,)),) and probe.frames[shown.name] is shown
    assert probe.prompts == probe_of(TINY, 8192).prompts
