"""Units of samples that share a prompt, as micro-batches: pure functions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_trainer.learner.batches import MicroBatchPlan, TokenBatch, Vocabulary, token_batch
from tapforge_trainer.learner.planning import (
    ATTENDED,
    answers_at_once,
    computed_tokens,
    padding_share,
    plan_samples,
)
from tapforge_trainer.learner.prompts import first_prompts
from tapforge_trainer.records import ResponseSpan, Sample

VOCABULARY = Vocabulary.of(100, 99, tuple(range(99)))


def answer(prompt: int, length: int, said: int, shown: tuple[str, ...] = ()) -> Sample:
    """To the prompt of this number, which has so many tokens."""
    ids = (*(99 for _ in shown), *(prompt for _ in range(length)), *(1 for _ in range(said)))
    start = len(shown) + length
    span = ResponseSpan(0, start, start + said, (0.0,) * said, (0,) * said, 1.0)
    return Sample("e", "g", ids, len(ids), shown, (span,))


def laid_out(*groups: tuple[int, list[int]]) -> TokenBatch:
    """Of each prompt its tokens, and those of its answers."""
    samples = [answer(k, length, said) for k, (length, answers) in enumerate(groups) for said in answers]
    return token_batch(samples, VOCABULARY)


GROUPS = st.lists(st.tuples(st.integers(1, 200), st.lists(st.integers(1, 60), min_size=1, max_size=9)), min_size=1,
                  max_size=12)  # fmt: skip


@given(groups=GROUPS, ranks=st.integers(1, 4), budget=st.integers(50, 1000))
def test_every_sample_is_learned_from_once_within_the_budget(
    groups: list[tuple[int, list[int]]], ranks: int, budget: int
) -> None:
    data = laid_out(*groups)
    chosen = np.arange(len(data))[:: 1 + len(data) % 2]
    plans = plan_samples(data, chosen, ranks, budget)
    assert len(plans) == ranks and len({len(rank) for rank in plans}) == 1
    everything = [plan for rank in plans for plan in rank]
    assert sorted(k for plan in everything if not plan.padding for k in plan.samples) == chosen.tolist()
    for plan in everything:
        assert not plan.padding or len(plan.samples) == 1
        assert len(plan.samples) == 1 or computed_tokens(data, plan) <= budget
        assert len(plan.samples) == 1 or data.lengths[list(plan.samples)].sum() <= ATTENDED * budget


def test_a_prompt_is_computed_once_and_in_each_part_of_what_is_too_large() -> None:
    data = laid_out((300, [20] * 8), (300, [20] * 8))
    (together,) = plan_samples(data, np.arange(16), 1, 5_000)
    assert [computed_tokens(data, plan) for plan in together] == [2 * (300 + 160)]
    (apart,) = plan_samples(data, np.arange(16), 1, 400)
    assert sorted(computed_tokens(data, plan) for plan in apart) == [340] * 8, "two of 300 + 20 are attended to at most"


@given(prompt=st.integers(1, 300), said=st.integers(1, 200), count=st.integers(1, 20), budget=st.integers(50, 2000))
def test_a_group_has_its_prompt_as_often_as_is_counted_on(prompt: int, said: int, count: int, budget: int) -> None:
    data = laid_out((prompt, [said] * count))
    (plans,) = plan_samples(data, np.arange(count), 1, budget)
    prompts = -(-count // answers_at_once(prompt + said, prompt, budget))
    assert sum(computed_tokens(data, plan) for plan in plans) == count * said + prompts * prompt


def test_units_are_cut_where_ranks_would_wait_for_one_of_them() -> None:
    """Three ranks have four groups of long answers: whole, one rank would have two of them."""
    data = laid_out(*((100, [60] * 8),) * 4)
    plans = plan_samples(data, np.arange(32), 3, 10_000)
    loads = [sum(computed_tokens(data, plan) for plan in rank) for rank in plans]
    assert max(loads) < 1.35 * (32 * 60 + 4 * 100) / 3 < 2 * 580
    # Where the prompt is all, cutting costs more than it spares.
    data = laid_out(*((1000, [1] * 2),) * 4)
    plans = plan_samples(data, np.arange(8), 2, 10_000)
    assert [sum(computed_tokens(data, plan) for plan in rank) for rank in plans] == [2004, 2004]


def test_padding_counts_as_padding() -> None:
    data = laid_out((6, [4, 4]))
    assert padding_share(data, [MicroBatchPlan((0, 1))]) == 0.0
    assert padding_share(data, [MicroBatchPlan((0,)), MicroBatchPlan((1,), padding=True)]) == 0.5
    assert padding_share(data, [MicroBatchPlan((0, 1)), MicroBatchPlan((0,), padding=True)]) == pytest.approx(10 / 24)


def test_equal_ids_are_shared_where_the_screens_are_equal_too() -> None:
    # a later step shows another screen: how long the prompt is `prompt_length` alone says
    ids = (99, *(1,) * 7, 99)
    unsaid = replace(answer(1, 5, 2, ("a",)), frames=("a", "c"), ids=ids, length=30)
    samples = [
        answer(1, 5, 3, ("a",)),
        answer(1, 5, 2, ("b",)),
        answer(1, 5, 4, ("a",)),
        answer(1, 6, 4, ("a",)),
        unsaid,
        replace(unsaid, prompt_length=6),
    ]
    found = first_prompts(samples, 99, share=True)
    assert found.tokens.tolist() == [6, 0, 6, 0, 0, 6]
    assert found.leads(np.arange(6)).tolist() == [0, 1, 0, 3, 4, 0]
    assert found.leads(np.asarray([5, 1, 2])).tolist() == [0, 1, 0]
    assert not first_prompts(samples, 99, share=False).tokens.any()
