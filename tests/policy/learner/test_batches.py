"""Samples are checked, laid out and planned: pure functions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_samples import Tiny, frame, plain_model

from tapforge_trainer.learner.batches import MicroBatchPlan, SampleError, _spread, plan_micro_batches
from tapforge_trainer.learner.client import split_groups


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    ranks=st.integers(1, 5),
    budget=st.integers(50, 1000),
    square=st.sampled_from([None, 0.0, 0.1, 1.0]),
)
def test_a_plan_covers_every_sample_once_and_keeps_ranks_in_step(
    lengths: list[int], ranks: int, budget: int, square: float | None
) -> None:
    work = None if square is None else [(n + square * n * n) % 30_000 for n in lengths]
    plans = plan_micro_batches(lengths, ranks, budget, work)
    assert len(plans) == ranks
    assert len({len(rank) for rank in plans}) == 1
    counted = [k for rank in plans for plan in rank if not plan.padding for k in plan.samples]
    assert sorted(counted) == list(range(len(lengths)))
    for plan in (plan for rank in plans for plan in rank):
        assert len(plan.samples) == 1 or sum(lengths[k] for k in plan.samples) <= budget
        assert not plan.padding or len(plan.samples) == 1


@given(
    samples=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 10_000)), min_size=1, max_size=40),
    count=st.integers(1, 12),
    budget=st.integers(50, 1000),
)
def test_the_lightest_micro_batch_that_has_room_gets_a_sample(
    samples: list[tuple[int, int]], count: int, budget: int
) -> None:
    """As a search of all of them says."""
    lengths, work = np.asarray(samples).T
    order = np.argsort(-work, kind="stable").tolist()
    tokens, load, batches = [0] * count, [0] * count, [[] for _ in range(count)]
    for k in order:
        room = [n for n in range(count) if not tokens[n] or tokens[n] + lengths[k] <= budget]
        if not room:
            assert _spread(lengths, work, order, count, budget) is None
            return
        lightest = min(room, key=lambda n: (load[n], n))
        batches[lightest].append(k)
        tokens[lightest] += lengths[k]
        load[lightest] += work[k]
    assert _spread(lengths, work, order, count, budget) == batches


def test_a_plan_wastes_nothing_and_is_balanced_at_every_moment() -> None:
    lengths = np.random.default_rng(0).integers(40, 800, 640)
    plans = plan_micro_batches(lengths, 4, 8192)
    assert not any(plan.padding for rank in plans for plan in rank)
    least = -(-int(lengths.sum()) // 8192)
    assert len(plans[0]) <= -(-least // 4) + 1
    for together in zip(*plans, strict=True):
        loads = [int(lengths[list(plan.samples)].sum()) for plan in together]
        assert max(loads) / min(loads) < 1.1


def test_work_is_balanced_where_tokens_alone_would_not_be() -> None:
    """Whole windows of an episode beside short sequences: attention makes a token of a window dearer."""
    dice = np.random.default_rng(0)
    lengths = np.concatenate([dice.integers(6_000, 9_500, 24), dice.integers(500, 2_500, 200)])
    work = lengths + lengths**2 / 8_000
    spread = {}
    for name, plans in (
        ("tokens", plan_micro_batches(lengths, 4, 20_000)),
        ("work", plan_micro_batches(lengths, 4, 20_000, work)),
    ):
        together = [[work[list(plan.samples)].sum() for plan in moment] for moment in zip(*plans, strict=True)]
        #: what ranks compute over what they have time for while they wait for the slowest
        spread[name] = sum(map(sum, together)) / sum(4 * max(moment) for moment in together)
    assert spread["work"] > 0.99 > spread["tokens"]


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        plan_micro_batches([], 2, 100)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)), max_size=4), st.integers(0, 6))
def test_positions_are_those_of_transformers(tiny: Tiny, shapes: list[tuple[int, int, int]], tail: int) -> None:
    """Frames of any shape, also as the first and the last thing of a prompt."""
    frames = [frame(32 * columns, 32 * rows, seed) for seed, rows, columns in shapes]
    samples = [tiny.sample(frames, 1, before=tail, after=tail), tiny.sample([], 2), tiny.sample(frames[::-1], 3)]
    data, named = tiny.token_batch(samples), {f.name: f for f in frames}
    micro = tiny.micro_batch(data, MicroBatchPlan((0, 1, 2)), named)
    model = _plain(tiny)
    ends = np.cumsum(micro.lengths)
    for begin, end, sample in zip(ends - micro.lengths, ends, samples, strict=True):
        ids = torch.tensor([tiny.expanded(sample, named)])
        assert micro.ids[0, begin:end].tolist() == ids[0].tolist()
        grids = [[1, rows * 2, columns * 2] for rows, columns in (tiny.grids(named)[name] for name in sample.frames)]
        expected, _ = model.model.get_rope_index(
            ids, (ids == tiny.tokens.image_pad).int(), image_grid_thw=torch.tensor(grids) if grids else None
        )
        assert np.array_equal(micro.positions[:, 0, begin:end], expected[:, 0].numpy())


_models: dict[str, object] = {}


def _plain(tiny: Tiny):
    return _models.setdefault(str(tiny.folder), plain_model(tiny))


def test_a_placeholder_in_an_answer_is_refused_by_name(tiny: Tiny) -> None:
    shot = frame(96, 160, 0)
    good = tiny.sample([shot], 3)
    ids = list(good.ids)
    ids[good.spans[0].start + 2] = tiny.tokens.image_pad
    with pytest.raises(SampleError, match=r"episode-3 step 3.*image placeholder.*may not say"):
        tiny.token_batch([good, replace(good, ids=tuple(ids))])


@pytest.mark.parametrize("special", ["video_pad", "vision_start", "im_start"])
def test_other_special_tokens_in_an_answer_are_refused(tiny: Tiny, special: str) -> None:
    good = tiny.sample([], 4)
    ids = (*good.ids[:-1], getattr(tiny.tokens, special))
    with pytest.raises(SampleError, match="special token"):
        tiny.token_batch([replace(good, ids=ids)])


def test_frames_and_visual_tokens_have_to_agree(tiny: Tiny) -> None:
    shot, other = frame(96, 160, 0), frame(64, 64, 1)
    sample = tiny.sample([shot], 5)
    with pytest.raises(SampleError, match=r"episode-5 step 5: 1 image placeholders .* but 2 frames"):
        tiny.token_batch([replace(sample, frames=(shot.name, other.name))])
    with pytest.raises(SampleError, match="22 tokens after expansion"):
        tiny.token_batch([replace(sample, length=22)])
    data = tiny.token_batch([tiny.sample([], 4), replace(sample, frames=(other.name,))])
    with pytest.raises(SampleError, match=r"episode-5 step 5: 38 tokens when it was sampled, but 27 with .* of 2x2"):
        tiny.micro_batch(data, MicroBatchPlan((0, 1)), {other.name: other})


def test_spans_have_to_fit(tiny: Tiny) -> None:
    sample = tiny.sample([], 6)
    span = sample.spans[0]
    wrong = {
        "lies outside": replace(span, end=span.end + 1, logprobs=(*span.logprobs, 0.0), versions=(*span.versions, 0)),
        "one per token": replace(span, logprobs=span.logprobs[1:]),
        "overlaps": replace(span, start=0, logprobs=(0.0,) * span.end, versions=(0,) * span.end),
    }
    for message, bad in wrong.items():
        with pytest.raises(SampleError, match=message):
            tiny.token_batch([replace(sample, spans=(bad,))])
    with pytest.raises(SampleError, match="outside the vocabulary"):
        tiny.token_batch([replace(sample, ids=(9999, *sample.ids[1:]))])


def test_groups_stay_whole_over_mini_batches(tiny: Tiny) -> None:
    samples = [tiny.sample([], k, group=f"g{k % 5}") for k in range(23)]
    steps = split_groups(samples, 3, seed=1)
    assert sorted(k for step in steps for k in step.tolist()) == list(range(23))
    where = [{samples[k].group for k in step.tolist()} for step in steps]
    assert all(not a & b for i, a in enumerate(where) for b in where[i + 1 :])
    assert max(map(len, steps)) - min(map(len, steps)) <= 5
    again = split_groups(samples, 3, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(steps, again, strict=True))
    assert len(split_groups(samples[:1], 4, seed=0)) == 1
