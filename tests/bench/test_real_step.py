"""The step at a real width: every contender gets the same tokens."""

from __future__ import annotations

import pytest
from load import real_step
from tests.families import real

from tapforge_trainer.learner.frame_store import PixelFormat


@pytest.mark.parametrize("lengths", real_step.LENGTHS)
def test_a_batch_has_the_lengths_that_it_says(lengths: str) -> None:
    folder = real.folder("qwen3-vl-8b-tiny")
    samples, frames = real_step.batch(real_step.LENGTHS[lengths], PixelFormat.of_folder(folder))
    assert sorted(sample.length for sample in samples) == sorted(real_step.LENGTHS[lengths])
    assert {name for sample in samples for name in sample.frames} == set(frames)


def test_mixed_lengths_are_as_many_tokens_as_equal_ones() -> None:
    equal, mixed = (sum(real_step.LENGTHS[lengths]) for lengths in ("equal", "mixed"))
    assert abs(equal - mixed) < 0.1 * equal


def test_those_that_pad_get_the_same_tokens() -> None:
    folder = real.folder("qwen3-vl-8b-tiny")
    _, batches = real_step._padded(folder, real_step.LENGTHS["mixed"])
    tokens = sum(int(one["prompt_mask"].sum() + one["completion_mask"].sum()) for one in batches)
    assert tokens == sum(real_step.LENGTHS["mixed"])
    assert sum(int(one["mm_token_type_ids"].sum()) for one in batches) == 20 * 8
