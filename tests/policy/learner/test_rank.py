"""One rank in this process: what settings change, without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_samples import PlainFrames, Tiny, frame, one_rank

from tapforge_trainer.algorithms.loss_registry import BUILT_IN
from tapforge_trainer.algorithms.objective import Anchor, Counts, Objective
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.frames.handles import FramesLost
from tapforge_trainer.learner.batches import TokenBatch, plan_micro_batches
from tapforge_trainer.learner.families.build import transformer_layers, vision_blocks
from tapforge_trainer.learner.rank import MiniBatch, Rank
from tapforge_trainer.placement.settings import UpdateSettings
from tapforge_trainer.records import Sample

OBJECTIVE = Objective(importance_cap=None)


def whole(data: TokenBatch, samples: list[Sample], budget: int = 8192) -> MiniBatch:
    counts = Counts.of((len(s.spans[0].logprobs), 1.0) for s in samples)
    return MiniBatch(tuple(plan_micro_batches(data.lengths, 1, budget)[0]), counts)


def learn(
    rank: Rank, tiny: Tiny, samples: list[Sample], frames: dict[str, FittedFrame], **settings: Any
) -> dict[str, torch.Tensor]:
    data = tiny.token_batch(samples)
    options = {"objective": OBJECTIVE, "learning_rate": 1e-3} | settings
    rank.update(data, PlainFrames(frames), [whole(data, samples)], UpdateSettings(**options), 0)
    return {name: tensor.clone() for name, tensor in rank.weights().items()}


def logprobs(rank: Rank, tiny: Tiny, samples: list[Sample], frames: dict[str, FittedFrame]) -> np.ndarray:
    data = tiny.token_batch(samples)
    return rank.logprobs(data, PlainFrames(frames), whole(data, samples).plans, 1.0)


def test_a_frozen_tower_stays_and_the_rest_learns_the_same(tiny: Tiny) -> None:
    samples, frames = tiny.mixed()
    with one_rank(tiny) as rank:
        before = {name: tensor.clone() for name, tensor in rank.weights().items()}
        free = learn(rank, tiny, samples, frames, gradient_clip=1e9)
    with one_rank(tiny, freeze_vision=True) as rank:
        frozen = learn(rank, tiny, samples, frames, gradient_clip=1e9)
        assert logprobs(rank, tiny, samples, frames).shape == (sum(len(s.spans[0].logprobs) for s in samples),)
    for name, tensor in frozen.items():
        if ".visual." in name:
            assert torch.equal(tensor, before[name]), name
            assert not torch.equal(free[name], before[name]), name
        else:
            assert torch.allclose(tensor, free[name], atol=2e-5), name


def test_recomputed_activations_change_nothing(tiny: Tiny) -> None:
    samples, frames = tiny.mixed()
    found = []
    for share in (0.0, 0.5, 1.0):
        with one_rank(tiny, activation_checkpointing=share > 0, checkpointed_share=share or 1.0) as rank:
            layers, blocks = transformer_layers(rank.policy.model), vision_blocks(rank.policy.model)
            for stack in (layers, blocks):
                again = round(share * len(stack))
                assert [one.gradient_checkpointing for one in stack] == [k < again for k in range(len(stack))]
            found.append(learn(rank, tiny, samples, frames))
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], atol=1e-6), name
        assert torch.allclose(tensor, found[2][name], atol=1e-6), name


@pytest.mark.parametrize("freeze", [True, False])
def test_bfloat16_is_near_and_keeps_fp32_masters(tiny: Tiny, freeze: bool) -> None:
    samples, frames = tiny.mixed()
    with one_rank(tiny) as rank:
        exact = logprobs(rank, tiny, samples, frames)
    with one_rank(tiny, dtype="bfloat16", freeze_vision=freeze) as rank:
        near = logprobs(rank, tiny, samples, frames)
        learn(rank, tiny, samples, frames, learning_rate=1e-5)
        trained = [p for p in rank.policy.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32}
        assert {t.dtype for t in rank.weights().values()} == {torch.bfloat16}
        moved = logprobs(rank, tiny, samples, frames)
    assert 0 < np.abs(near - exact).mean() < 0.05
    assert np.isfinite(moved).all()


def test_kl_pulls_towards_the_first_weights(tiny: Tiny) -> None:
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    pulled = UpdateSettings(objective=replace(OBJECTIVE, kl_coefficient=1.0), learning_rate=0.0)
    with one_rank(tiny, reference=True) as rank:
        assert rank.reference.policy is None  # loaded once, when it is known which it is
        rank.reference.load(str(tiny.folder))
        assert rank.reference.policy is not None
        assert rank.update(data, PlainFrames(frames), [whole(data, samples)], pulled, 0).sums[
            "kl_loss"
        ] == pytest.approx(0, abs=1e-9)
        learn(rank, tiny, samples, frames, learning_rate=1e-2)
        far = rank.update(data, PlainFrames(frames), [whole(data, samples)], pulled, 1).sums["kl_loss"]
        assert far > 0.01
        only_kl = [replace(s, spans=(replace(s.spans[0], advantage=0.0),)) for s in samples]
        for _ in range(8):
            learn(rank, tiny, only_kl, frames, objective=pulled.objective, learning_rate=1e-3)
        assert rank.update(data, PlainFrames(frames), [whole(data, samples)], pulled, 2).sums["kl_loss"] < far / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_sees_frames_by_what_the_frozen_tower_made_of_them(tiny: Tiny, dtype: str) -> None:
    """It has no tower and no memory of its own: each frame is computed once, and kept once."""
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    settings = UpdateSettings(objective=replace(OBJECTIVE, kl_coefficient=1.0))
    with one_rank(tiny, reference=True, freeze_vision=True, dtype=dtype) as rank:
        rank.reference.load(str(tiny.folder))
        made: list[int] = []
        rank.policy.visual.merger.register_forward_hook(lambda _module, _given, found: made.append(len(found)))
        rank.update(data, PlainFrames(frames), [whole(data, samples)], settings, 0)
    grids = [rank.form.grid(shown.width, shown.height) for shown in frames.values()]
    assert sum(made) == sum(rows * columns for rows, columns in grids)


def test_a_kl_term_without_a_reference_is_refused(tiny: Tiny) -> None:
    samples, frames = tiny.mixed(3)
    with one_rank(tiny) as rank, pytest.raises(ValueError, match="without a reference"):
        learn(rank, tiny, samples, frames, objective=replace(OBJECTIVE, kl_coefficient=0.1))


def test_one_step_on_older_samples_needs_one_forward_pass(tiny: Tiny) -> None:
    """The old log-probabilities are those of the gradient's own pass: the ratio is 1, which no figure tells, and what
    the samples are corrected by is the learner's distance from the engine."""
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    batch = whole(data, samples, budget=256)
    settings = UpdateSettings(objective=replace(OBJECTIVE, importance_cap=1.5), learning_rate=1e-3, off_policy=True)
    with one_rank(tiny) as rank:
        distance = np.abs(rank.logprobs(data, PlainFrames(frames), batch.plans, 1.0) - data.behavior)
        passes: list[bool] = []
        hook = rank.policy.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
        metrics = rank.update(data, PlainFrames(frames), [batch], settings, 3)
        hook.remove()
    assert passes == [True] * len(batch.plans) and len(batch.plans) > 1
    told = metrics.sums.keys() | metrics.maxima.keys()
    assert told.isdisjoint({"ratio_mean", "ratio_max", "clip_fraction_low", "clip_fraction_high", "approx_kl"})
    assert metrics.maxima["engine_gap_max"] == pytest.approx(float(distance.max()), abs=1e-5)


def test_several_mini_batches_keep_the_first_ones_old_log_probabilities(tiny: Tiny) -> None:
    """Two steps on the same samples: at the second one the ratio is no longer 1, because the old policy stayed."""
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    batch = whole(data, samples)
    with one_rank(tiny) as rank:
        settings = UpdateSettings(objective=OBJECTIVE, learning_rate=3e-3)
        passes: list[bool] = []
        rank.policy.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
        metrics = rank.update(data, PlainFrames(frames), [batch, batch], settings, 0)
        assert rank.steps == 2
        # Only what the second step learns from is read beforehand: at the first one the weights are the old ones.
        assert passes == [False] * len(batch.plans) + [True] * 2 * len(batch.plans)
    assert metrics.maxima["ratio_max"] > 1.01
    assert metrics.maxima["engine_gap_max"] > 0.1  # the samples' own are random numbers


def test_the_engines_log_probabilities_as_anchor_cost_no_pass(tiny: Tiny) -> None:
    """Also with several steps on older samples: the ratio is to what the tokens were sampled with, from the first step
    on, and nobody reads old log-probabilities."""
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    batch = whole(data, samples)
    objective = replace(OBJECTIVE, anchor="behavior", corrections={"range": {"low": 0.5, "high": 2.0}})
    with one_rank(tiny) as rank:
        distance = rank.logprobs(data, PlainFrames(frames), batch.plans, 1.0) - data.behavior
        passes: list[bool] = []
        hook = rank.policy.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
        settings = UpdateSettings(objective=objective, learning_rate=0.0, off_policy=True)
        metrics = rank.update(data, PlainFrames(frames), [batch, batch], settings, 3)
        hook.remove()
    assert passes == [True] * 2 * len(batch.plans)
    assert metrics.sums["ratio_mean"] == pytest.approx(float(np.exp(distance).mean()), rel=1e-4)
    lengths = [len(s.spans[0].logprobs) for s in samples]
    means = [part.mean() for part in np.split(distance, np.cumsum(lengths)[:-1])]
    outside = sum(n for n, mean in zip(lengths, means, strict=True) if not 0.5 <= np.exp(mean) <= 2.0)
    assert metrics.sums["cut_range"] == metrics.sums["masked"] == pytest.approx(outside / sum(lengths)) != 0
    assert not {name for name in metrics.sums if "importance" in name or "gap" in name}


@pytest.mark.parametrize(("steps", "anchor"), [(1, "behavior"), (2, "behavior"), (2, "old")])
def test_figures_of_the_ratio_are_means_over_all_steps(tiny: Tiny, steps: int, anchor: Anchor) -> None:
    """Nothing moves, so that each step's are the same: those of a step that is left out would be missing."""
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    batch = whole(data, samples)
    with one_rank(tiny) as rank:
        distance = rank.logprobs(data, PlainFrames(frames), batch.plans, 1.0) - data.behavior
        objective = replace(OBJECTIVE, anchor=anchor)
        settings = UpdateSettings(objective=objective, learning_rate=0.0, off_policy=True)
        metrics = rank.update(data, PlainFrames(frames), [batch] * steps, settings, 3)
    ratio = np.exp(distance) if anchor == "behavior" else np.ones(1)
    assert metrics.sums["ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert metrics.maxima["ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-4)


def test_a_loss_reads_how_episodes_ended(tiny: Tiny) -> None:
    """topr tapers what is likelier than it was, unless the episode has a positive return, whatever the advantage."""
    samples, frames = tiny.mixed()
    samples = [
        replace(s, spans=(replace(s.spans[0], score=float(k % 2), advantage=1.0),)) for k, s in enumerate(samples)
    ]
    data = tiny.token_batch(samples)
    batch = whole(data, samples)
    objective = Objective(loss="topr", anchor="behavior", importance_cap=None)
    with one_rank(tiny) as rank:
        distance = rank.logprobs(data, PlainFrames(frames), batch.plans, 1.0) - data.behavior
        metrics = rank.update(data, PlainFrames(frames), [batch], UpdateSettings(objective=objective), 0)
    tapered = (distance > 0) & (data.sample % 2 == 0)
    assert metrics.sums["clip_fraction_high"] == pytest.approx(float(tapered.mean())) != 0


def test_corrections_compare_with_the_learner_itself_also_on_policy(tiny: Tiny) -> None:
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    batch = whole(data, samples)
    with one_rank(tiny) as rank:
        distance = rank.logprobs(data, PlainFrames(frames), batch.plans, 1.0) - data.behavior
        objective = replace(OBJECTIVE, corrections={"truncate": {"cap": 1.5}})
        metrics = rank.update(data, PlainFrames(frames), [batch], UpdateSettings(objective=objective), 0)
    assert metrics.sums["importance_mean"] == pytest.approx(float(np.exp(distance).clip(max=1.5).mean()), rel=1e-4)
    assert metrics.sums["cut_truncate"] == pytest.approx(float((np.exp(distance) > 1.5).mean()), abs=1e-6)


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_loss_moves_the_policy(tiny: Tiny, name: str) -> None:
    samples, frames = tiny.mixed()
    objective = Objective(loss=name, anchor="behavior", importance_cap=None)
    with one_rank(tiny) as rank:
        before = {key: tensor.clone() for key, tensor in rank.weights().items()}
        after = learn(rank, tiny, samples, frames, objective=objective)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(tensor, before[key]) for key, tensor in after.items())


class Watched(PlainFrames):
    """Says which frames are read, and by which thread."""

    def __init__(self, frames: dict[str, FittedFrame]):
        super().__init__(frames)
        object.__setattr__(self, "seen", [])

    def read(self, episode: str, names: Collection[str]) -> dict[str, FittedFrame]:
        self.seen.append((threading.current_thread(), sorted(names)))  # type: ignore[attr-defined]
        return super().read(episode, names)


def test_the_next_frames_are_read_while_a_micro_batch_is_computed(tiny: Tiny) -> None:
    samples = [tiny.sample([frame(96, 160, k)], k) for k in range(4)]
    shots = {f.name: f for f in (frame(96, 160, k) for k in range(4))}
    data, watched = tiny.token_batch(samples), Watched(shots)
    batch = whole(data, samples, budget=1)  # a micro-batch each
    with one_rank(tiny) as rank:
        forward, read_by_then = rank.policy.forward, []

        def slow(*arguments: Any, **options: Any) -> Any:
            due = min(len(read_by_then) + 3, 4)
            end = time.monotonic() + 30
            while len(watched.seen) < due and time.monotonic() < end:
                time.sleep(0.005)
            read_by_then.append(len(watched.seen))
            return forward(*arguments, **options)

        rank.policy.forward = slow  # type: ignore[method-assign]
        rank.update(data, watched, [batch], UpdateSettings(objective=OBJECTIVE), 0)
        assert read_by_then == [3, 4, 4, 4]
        assert sorted(name for _, names in watched.seen for name in names) == sorted(shots)  # each once
        assert threading.current_thread() not in {thread for thread, _ in watched.seen}
        rank.update(data, watched, [batch], UpdateSettings(objective=OBJECTIVE), 0)
        assert len(watched.seen) == 4  # all at hand


def test_lost_frames_are_known_before_anything_is_learned(tiny: Tiny) -> None:
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    some = {name: shot for name, shot in frames.items() if name != samples[1].frames[0]}
    with one_rank(tiny) as rank:
        before = {name: tensor.clone() for name, tensor in rank.weights().items()}
        with pytest.raises(FramesLost) as caught:
            rank.update(data, PlainFrames(some), [whole(data, samples)], UpdateSettings(objective=OBJECTIVE), 0)
        lost = samples[1].frames[0]
        assert caught.value.episodes == tuple(sorted(s.episode for s in samples if lost in s.frames))
        assert all(torch.equal(tensor, before[name]) for name, tensor in rank.weights().items())
        learn(rank, tiny, samples, frames)


def test_an_update_says_where_its_time_went_and_what_it_computed(tiny: Tiny) -> None:
    samples, frames = tiny.mixed()
    with one_rank(tiny) as rank:
        data = tiny.token_batch(samples)
        logprobs(rank, tiny, samples, frames)  # of a sync's proof: not the update's
        before = rank.clock._seconds["forward"]
        metrics = rank.update(data, PlainFrames(frames), [whole(data, samples, 512)], UpdateSettings(), 0)
    phases = {name for name in metrics.sums if name.startswith("seconds_")}
    assert phases == {"seconds_prepare", "seconds_forward", "seconds_backward", "seconds_optimizer"}
    assert before > 0 and not rank.clock.read()
    assert sum(metrics.sums[name] for name in phases - {"seconds_prepare"}) <= metrics.sums["seconds"]
    assert metrics.sums["tokens"] == data.lengths.sum() <= metrics.sums["positions"]
    assert metrics.sums["flops"] > metrics.sums["tokens"]
    assert metrics.maxima["peak_flops"] == 0.0  # a CPU
