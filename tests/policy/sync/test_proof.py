"""The probe of a weight sync fits into the context, whatever its length, and is as large as it can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_trainer.learner.frame_store import PixelFormat, decode
from tapforge_trainer.sync.proof import PROBE_TOKENS, Probe, disagreement, least_context, make_probe, shrunk

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


@pytest.mark.parametrize(
    ("dtype", "gaps", "tolerance", "why"),
    [
        ("float32", [0.0, 9e-5], None, ""),
        ("float32", [0.0, 2e-4], None, "tolerance 0.0001"),
        ("float32", [0.0, 2e-4], 1e-3, ""),
        ("bfloat16", [0.02, 0.03, 0.9], None, ""),
        ("bfloat16", [0.02, 0.03, 0.9], 0.5, "tolerance 0.5"),
        ("bfloat16", [0.2, 0.2, 0.3], 0.5, ""),
        ("bfloat16", [0.2, 0.2, 0.01], None, "the median of its prompt is 0.2, which may be 0.1 in bfloat16"),
        ("float16", [0.03, 0.03, 0.01], None, "the median of its prompt is 0.03, which may be 0.02 in float16"),
        ("bfloat16", [0.0, 0.0, np.nan], 100.0, "not a number"),
    ],
)
def test_what_two_correct_sides_may_differ_by(dtype: str, gaps: list[float], tolerance: float | None, why: str) -> None:
    assert disagreement(np.asarray(gaps), dtype, tolerance) == why


@pytest.mark.parametrize("spread", [0.0, 0.5, 0.8, 1.3])
def test_correct_syncs_in_bf16_pass_however_their_noise_is_spread(spread: float) -> None:
    """Root mean square as measured between a trainer and vLLM (0.0227); the scale of a token's noise is log-normal. A
    run of 200 syncs to four engines is 2,400 prompts: fewer than one such run in a thousand may end."""
    numbers = np.random.default_rng(1)
    scale = 0.0227 * np.exp(spread * numbers.standard_normal((400_000, PROBE_TOKENS)) - spread**2)
    gaps = np.abs(scale * numbers.standard_normal(scale.shape))
    assert np.sqrt((gaps**2).mean()) == pytest.approx(0.0227, rel=0.1)
    assert np.median(gaps, axis=1).max() < 0.05, "half of what is allowed"
    assert disagreement(gaps[0], "bfloat16") == ""
