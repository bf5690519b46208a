"""What becomes of samples: no token twice, none lost, and only what was recorded decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_trainer.records import ResponseSpan, Sample
from tapforge_trainer.samples import sequences


def sample(ids: str, answer: int, frames: str = "", step: int = 0, episode: str = "e") -> Sample:
    """`ids` are letters, of which the last `answer` are the answer."""
    start = len(ids) - answer
    span = ResponseSpan(step, start, len(ids), (-1.0,) * answer, (0,) * answer, 1.0)
    return Sample(episode, "g", tuple(map(ord, ids)), len(ids), tuple(frames), (span,))


FIRST = sample("ab!xy", 2, "1")


@pytest.mark.parametrize(
    ("second", "joined"),
    [
        (sample("ab!xy.cz", 1, "12"), True),
        (sample("ab!xy.cz", 1, "1"), True),
        (sample("ab!xY.cz", 1, "12"), False),
        (sample("ab!xy.cz", 1, "32"), False),  # equal ids, another screen
        (sample("ab!xy.cz", 1, "12", episode="f"), False),
        (sample("ab!xyz", 1, "1"), False),  # nothing stands between the answers: they'd be one
        (sample("b!xy.cz", 1, "12"), False),  # the window has moved
    ],
)
def test_only_what_extends_is_joined(second: Sample, joined: bool) -> None:
    found = sequences([FIRST, second])
    assert len(found) == (1 if joined else 2)
    assert [span for one in found for span in one.spans] == [*FIRST.spans, *second.spans]
    if joined:
        assert found == (replace(second, spans=(*FIRST.spans, *second.spans)),)


@given(st.lists(st.tuples(st.text("ab", max_size=3), st.text("xy", min_size=1, max_size=3), st.booleans()), max_size=8))
def test_every_answer_is_in_one_sequence_where_it_was(steps: list[tuple[str, str, bool]]) -> None:
    made, before = [], ""
    for number, (prompt, answer, forgets) in enumerate(steps):
        before = ("" if forgets else before) + "." + prompt + answer
        made.append(sample(before, len(answer), step=number))
    found = sequences(made)
    assert [span.step for one in found for span in one.spans] == list(range(len(made)))
    spans = {span.step: (one, span) for one in found for span in one.spans}
    for one in made:
        sequence, span = spans[one.spans[0].step]
        assert span == one.spans[0] and sequence.ids[: span.end] == one.ids
    for one in found:
        assert all(a.end < b.start for a, b in zip(one.spans, one.spans[1:], strict=False))
    assert sequences(found) == found or len(sequences(found)) < len(found)
