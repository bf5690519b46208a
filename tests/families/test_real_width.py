"""`make test-models`: each family at its real width, two text layers and two vision blocks, frames of a real phone.

One update by LoRA on a bf16 base, through the rank as it is in a run. A full update of 1.6 billion parameters takes 16
bytes for each, which is more than this machine has; with one layer fewer it would no longer be the model. Where the CPU
has no instructions for bf16 the base is fp32: there a backward product takes 500 times as long in bf16.
"""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.families import real
from tests.families.samples import PlainFrames, phone_frame, sample, tokens, vocabulary

from tapforge_trainer.algorithms.objective import Counts, Objective
from tapforge_trainer.learner.batches import plan_micro_batches, token_batch
from tapforge_trainer.learner.families import ModelConfig
from tapforge_trainer.learner.frame_store import PixelFormat
from tapforge_trainer.learner.rank import MiniBatch, Rank
from tapforge_trainer.placement.settings import LearnerSettings, LoraSettings, UpdateSettings

#: the first at width 256, with the others' vocabulary
NAMES = (
    "qwen2.5-vl-7b-tiny",
    pytest.param("qwen3-vl-8b", marks=pytest.mark.long),
    *(pytest.param(name, marks=pytest.mark.width) for name in ("qwen2-vl-7b", "qwen2.5-vl-7b", "qwen3-vl-30b-a3b")),
)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Folders of gigabytes are gone as soon as the test is over."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_learns_from_screens_of_a_real_phone(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.perf_counter()
    dtype = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
    real.write_folder(place, name, 2, 2, dtype)
    written = time.perf_counter()
    config, form = ModelConfig.of_folder(place), PixelFormat.of_folder(place)
    frames = [phone_frame(place, seed) for seed in range(2)]
    assert [np.prod(form.grid(f.width, f.height)) for f in frames] == [1272, 1272]
    samples = [sample(form, frames, 0, 30, 12), sample(form, frames[:1], 1, 8, 20), sample(form, [], 2, 40, 16)]
    data = token_batch(samples, vocabulary(config))
    settings = LearnerSettings(
        str(place),
        tokens().allowed_ids,
        dtype=dtype,
        lora=LoraSettings(8, 16.0),
        activation_checkpointing=True,
        threads=2,
    )
    rank = Rank(settings, 0, torch.distributed.HashStore())
    try:
        ready = time.perf_counter()
        plans = tuple(plan_micro_batches(data.lengths, 1, 4096)[0])
        counts = Counts.of((len(s.spans[0].logprobs), 1.0) for s in samples)
        named = PlainFrames({f.name: f for f in frames})
        before = rank.logprobs(data, named, plans, 1.0)
        looked = time.perf_counter()
        update = UpdateSettings(objective=Objective(importance_cap=None), learning_rate=1e-3)
        metrics = rank.update(data, named, [MiniBatch(plans, counts)], update, 0)
        learned = time.perf_counter()
        after = rank.logprobs(data, named, plans, 1.0)
    finally:
        torch.distributed.destroy_process_group()
    trained = sum(p.numel() for p in rank.policy.parameters() if p.requires_grad)
    total = sum(p.numel() for p in rank.policy.parameters())
    with capsys.disabled():
        print(
            f"\n{name} in {dtype}, 2 + 2 layers, {total / 1e9:.2f} B parameters, {trained / 1e6:.1f} M adapted, "
            f"{int(data.lengths.sum())} tokens: folder {written - started:.0f} s, rank {ready - written:.0f} s, "
            f"forward {looked - ready:.0f} s, update {learned - looked:.0f} s, "
            f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"
        )
    assert np.isfinite(before).all() and np.isfinite(after).all()
    assert metrics.maxima["gradient_norm"] > 0
    assert float(np.abs(after - before).max()) > 1e-3
