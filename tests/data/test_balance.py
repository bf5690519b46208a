"""Which episodes are kept so that templates and lengths count alike, and what a pass over a data set is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_api.learning import ImitationData, WarmStart
from tapforge_trainer.data.balance import Candidate, balanced
from tapforge_trainer.run.warm_start import schedule_of


def candidates(**lengths: list[int]) -> list[Candidate]:
    return [Candidate(f"{name}{k}", name, length) for name, of in lengths.items() for k, length in enumerate(of)]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], set()),
        (candidates(a=[3]), {"a0"}),
        # the template in the middle has two; short ones don't crowd out long ones
        (candidates(a=[1, 1, 1, 1, 9], b=[2, 2], c=[4]), {"a0", "a4", "b0", "b1", "c0"}),
        # the earliest of each length
        (candidates(a=[5, 5, 2, 2], b=[1, 1, 1]), {"a0", "a1", "a2", "a3", "b0", "b1", "b2"}),
    ],
)
def test_templates_and_lengths_count_alike(given: list[Candidate], kept: set[str]) -> None:
    assert balanced(given) == kept


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 6)), max_size=60))
def test_no_template_has_more_than_the_one_in_the_middle(drawn: list[tuple[str, int]]) -> None:
    found = [Candidate(str(number), template, length) for number, (template, length) in enumerate(drawn)]
    kept = balanced(found)
    sizes = sorted(sum(one.template == name for one in found) for name in {one.template for one in found})
    for name in {one.template for one in found}:
        own = [one for one in found if one.template == name]
        chosen = [one for one in own if one.id in kept]
        assert len(chosen) == min(len(own), sizes[len(sizes) // 2])
        counts = [sum(one.length == length for one in chosen) for length in {one.length for one in own}]
        left = {one.length for one in own if one.id not in kept}
        # a length of which some are left out has at most one less than any other
        assert all(sum(o.length == n for o in chosen) >= max(counts) - 1 for n in left)


@pytest.mark.parametrize(
    ("settings", "answers", "steps", "passes"),
    [
        ({"steps": 5, "batch_size": 4}, 10, 5, {3, 5}),
        ({"epochs": 2, "batch_size": 4}, 10, 5, {3, 5}),
        ({"epochs": 3, "batch_size": 64}, 10, 3, {1, 2, 3}),
        ({"epochs": 1, "batch_size": 1}, 3, 3, {3}),
        ({"steps": 2, "batch_size": 1}, 3, 2, {2}),  # the end of imitation ends a pass
    ],
)
def test_what_a_pass_over_a_data_set_is(settings: dict[str, int], answers: int, steps: int, passes: set[int]) -> None:
    found = schedule_of(WarmStart(data=ImitationData(path="set"), **settings), answers)
    assert (found.steps, found.passes) == (steps, passes)
