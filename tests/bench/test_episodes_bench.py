"""Whole episodes in benchmarks: every contender gets the same screens and answers, and operations are counted right."""

from __future__ import annotations

import torch
from load import episodes_step, real_step
from load.operations import counter
from tests.families import real

from tapforge_trainer.learner.attention import Bounds, by_torch
from tapforge_trainer.learner.linear import linear
from tapforge_trainer.samples import sequences

STEPS = 7


def test_contenders_learn_from_the_same_answers() -> None:
    folder = real.folder("qwen3-vl-8b-tiny")
    (sliding, seen), (blocks, others) = (
        episodes_step.recorded(folder, mode, 1, STEPS, 100_000) for mode in ("sliding", "blocks")
    )
    assert [len(one.frames) for one in sliding] == [1, 2, 3, 3, 3, 3, 3]
    assert [len(one.frames) for one in blocks] == [1, 2, 3, 4, 5, 6, 2]
    assert seen.keys() == others.keys() and len(seen) == STEPS

    def said(samples: list) -> list[list[int]]:
        return [list(one.ids[span.start : span.end]) for one in samples for span in one.spans]

    joined = list(sequences(blocks))
    assert [len(one.spans) for one in joined] == [6, 1]
    assert said(sliding) == said(blocks) == said(joined)
    assert all(len(answer) == episodes_step.ANSWER for answer in said(joined))
    # those that pad: several screens in a row
    given = sliding[2:4]
    _, rows = real_step.padded(folder, given, seen, 1)
    lengths = [int(one["prompt_mask"].sum() + one["completion_mask"].sum()) for one in rows]
    assert lengths == [one.length for one in given]
    assert [one["image_grid_thw"].shape for one in rows] == [(3, 3)] * 2


def test_operations_of_cpu_kernels_are_counted() -> None:
    x, weight = torch.randn(200, 48, requires_grad=True), torch.randn(64, 48)
    with counter() as counted:
        linear(x, weight).sum().backward()
    assert counted.get_total_flops() == 2 * 2 * 200 * 48 * 64  # forward, and for its input
    heads, size, bounds = 4, 16, Bounds(torch.tensor([0, 20, 50], dtype=torch.int32), 30)
    q, k, v = (torch.randn(50, heads, size, requires_grad=True) for _ in range(3))
    square = 4 * heads * size * (20**2 + 30**2)
    for causal, share in ((True, 2), (False, 1)):
        with counter() as counted:
            by_torch(q, k, v, bounds, bounds, None, causal).sum().backward()
        assert counted.get_total_flops() == 3 * square // share
