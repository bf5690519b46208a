"""What ranks are given by is what an update's operations are counted as (`FlopCounter`), sample by sample."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_samples import Tiny, frame

from tapforge_trainer.learner.batches import MicroBatchPlan, micro_batch
from tapforge_trainer.learner.families import ModelConfig, shape_of
from tapforge_trainer.learner.flops import FlopCounter
from tapforge_trainer.learner.frame_store import FrameStore, PixelFormat
from tapforge_trainer.learner.work import SampleWork
from tapforge_trainer.placement.settings import LearnerSettings, LoraSettings


@pytest.mark.parametrize("lora", [None, LoraSettings(4, 8.0)])
@pytest.mark.parametrize("freeze", [True, False])
def test_work_is_what_the_operations_of_an_update_are(tiny: Tiny, lora: LoraSettings | None, freeze: bool) -> None:
    shots = [frame(96, 160, seed) for seed in range(3)]
    samples = [tiny.sample(shots, 1, before=90, after=50), tiny.sample([], 2), tiny.sample(shots[:1], 3)]
    data = tiny.token_batch(samples)
    config, settings = (
        ModelConfig.of_folder(tiny.folder),
        LearnerSettings(str(tiny.folder), (), lora=lora, freeze_vision=freeze),
    )
    work = SampleWork.of(config, settings)(data)
    store = FrameStore(PixelFormat.of_folder(tiny.folder))
    for k, sample in enumerate(samples):
        counter = FlopCounter(shape_of(config), settings)
        counter.begin()
        shown = store.get(list(sample.frames), {shot.name: shot for shot in shots})
        predicted = sum(span.end - span.start for span in sample.spans)
        assert work[k] == pytest.approx(counter.passes([sample.length], predicted, shown))


def test_what_samples_share_is_work_once(tiny: Tiny) -> None:
    shot = frame(96, 160, 4)
    one = tiny.sample([shot], 1, answer=5)
    ids = (*one.ids[:-2], *tiny.sample([], 8, answer=9).ids[-9:])
    (span,) = one.spans
    span = replace(span, end=len(ids), logprobs=(0.0,) * 12, versions=(0,) * 12)
    other = replace(one, ids=ids, length=one.length + 7, spans=(span,))
    data, grids = tiny.token_batch([one, other]), tiny.grids({shot.name: shot})
    micro = micro_batch(data, MicroBatchPlan((0, 1)), grids, tiny.vocabulary)
    assert micro.lengths.tolist() == [one.length, 12] and micro.before is not None
    config, settings = ModelConfig.of_folder(tiny.folder), LearnerSettings(str(tiny.folder), ())
    work, counter = SampleWork.of(config, settings), FlopCounter(shape_of(config), settings)
    shown = FrameStore(PixelFormat.of_folder(tiny.folder)).get([shot.name], {shot.name: shot})
    counted = counter.passes(micro.lengths, len(micro.response), shown, micro.before)
    assert work(data).sum() - work.of_prompts(data)[0] == pytest.approx(counted)
