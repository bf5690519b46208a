"""Screens of a real phone through fitting, positions and the tower, as transformers has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.families import real
from tests.families.samples import IMAGE, Case, phone_frame, sample, tokens

from tapforge_trainer.learner.batches import MicroBatchPlan, micro_batch, token_batch


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b-tiny", "qwen3-vl-8b-tiny"])
def test_a_screen_of_1080x2400_is_1272_tokens_with_either_patch(name: str) -> None:
    """At 1280 at most; and places are those of transformers, with several screens in one sample."""
    case = Case(real.folder(name))
    frames = [phone_frame(case.folder, seed) for seed in range(2)]
    grids = {f.name: case.form.grid(f.width, f.height) for f in frames}
    assert set(grids.values()) == {(53, 24)}
    samples = [
        sample(case.form, frames, 0, 20, 4),
        sample(case.form, [], 1, 5, 2),
        sample(case.form, frames[1:], 2, 3, 9),
    ]
    data = token_batch(samples, case.vocabulary)
    micro = micro_batch(data, MicroBatchPlan((0, 1, 2)), grids, case.vocabulary)
    with torch.device("meta"):
        model = real.model_class(name)(real.config(name, 2, 2))
    end = 0
    for one in samples:
        ids = torch.tensor([tokens().expand(one.ids, [1272] * len(one.frames))])
        begin, end = end, end + ids.shape[1]
        assert np.array_equal(micro.ids[:, begin:end], ids.numpy())
        shown = torch.tensor([[1, 106, 48]] * len(one.frames)) if one.frames else None
        expected, _ = model.model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=shown)
        assert np.array_equal(micro.positions[:, :, begin:end], expected.numpy())
    assert end == micro.ids.shape[1]
