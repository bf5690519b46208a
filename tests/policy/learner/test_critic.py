"""A critic: what it learns, that ranks and splits change nothing, and where it is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_samples import PlainFrames, Tiny, at_hand, one_rank

from tapforge_trainer.algorithms.objective import Counts, Objective
from tapforge_trainer.learner import checkpoints
from tapforge_trainer.learner.answers import answers, read_answers
from tapforge_trainer.learner.batches import plan_micro_batches
from tapforge_trainer.learner.checkpoint_storage import CheckpointFolder
from tapforge_trainer.learner.client import Learner
from tapforge_trainer.learner.rank import MiniBatch, Rank
from tapforge_trainer.placement.settings import CriticSettings, UpdateSettings
from tapforge_trainer.policy import _fresh_optimizer
from tapforge_trainer.records import Sample

SETTINGS = UpdateSettings(objective=Objective(), learning_rate=1e-4, gradient_clip=1e9)
READS = {"value"}


def told(samples: list[Sample], returns: list[float], values: list[float], advantage: float = 0.0) -> list[Sample]:
    """Samples whose steps have these returns, and for which the critic has said these values."""
    return [
        replace(sample, spans=(replace(sample.spans[0], advantage=advantage, value=value, target=target),))
        for sample, target, value in zip(samples, returns, values, strict=True)
    ]


def batch_of(tiny: Tiny, samples: list[Sample], budget: int = 100_000) -> tuple[Any, MiniBatch]:
    data = tiny.token_batch(samples)
    counts = Counts.of((len(s.spans[0].logprobs), 1.0) for s in samples)
    return data, MiniBatch(tuple(plan_micro_batches(data.lengths, 1, budget)[0]), counts)


def values_of(rank: Rank, tiny: Tiny, samples: list[Sample], frames: Any) -> list[float]:
    data, batch = batch_of(tiny, samples, 150)
    found = answers(data, *read_answers(rank, data, frames, batch.plans, 1.0, READS))
    return [fact.value for fact in found if fact.value is not None]


def taught(rank: Rank, tiny: Tiny, samples: list[Sample], frames: Any, updates: int, budget: int = 100_000) -> Any:
    """Value losses of these updates; the values before each are the critic's own."""
    losses = []
    for version in range(updates):
        now = values_of(rank, tiny, samples, frames)
        named = told(samples, [float(k % 2) for k in range(len(samples))], now)
        data, batch = batch_of(tiny, named, budget)
        losses.append(rank.update(data, frames, [batch], SETTINGS, version).sums["value_loss"])
    return losses


@pytest.mark.parametrize("shared", [True, False])
def test_it_learns_which_states_are_worth_what(tiny: Tiny, shared: bool) -> None:
    samples, found = tiny.mixed()
    frames = PlainFrames(found)
    with one_rank(tiny, critic=CriticSettings(shared=shared)) as rank:
        before = {name: tensor.clone() for name, tensor in rank.weights().items()}
        assert values_of(rank, tiny, samples, frames) == [0.0] * len(samples), "it knows nothing yet"
        losses = taught(rank, tiny, samples, frames, 40)
        now = values_of(rank, tiny, samples, frames)
        moved = any(not torch.equal(tensor, before[name]) for name, tensor in rank.weights().items())
    returns = [k % 2 for k in range(len(samples))]
    assert losses[0] == pytest.approx(0.5 * np.mean(returns)), "half of the squared distance from 0, mean over steps"
    assert losses[-1] < losses[0] / 10
    assert np.abs(np.subtract(now, returns)).max() < 0.35
    assert moved == shared, "without advantages only the value loss moves the policy, if it may"


def test_a_policy_learns_the_same_beside_a_critic_that_is_held(tiny: Tiny) -> None:
    samples, found = tiny.mixed()
    samples = told(samples, [1.0] * len(samples), [0.0] * len(samples), advantage=1.0)
    after = []
    for critic in (None, CriticSettings(shared=False)):
        with one_rank(tiny, critic=critic) as rank:
            data, batch = batch_of(tiny, samples)
            rank.update(data, PlainFrames(found), [batch], SETTINGS, 0)
            after.append(rank.weights())
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])


def test_a_clipped_value_that_moved_far_enough_has_no_gradient(tiny: Tiny) -> None:
    """The critic says 0 everywhere; the value before the update is said to be 1, the return 2: it is further away than
    the clip lets it move back, and the clipped error is the smaller one."""
    samples, found = tiny.mixed()
    count = len(samples)
    for before, expected in ((0.0, 0.5 * 4), (1.0, 0.5 * 4), (-1.0, 0.5 * 2.9**2)):
        with one_rank(tiny, critic=CriticSettings(clip=0.1)) as rank:
            data, batch = batch_of(tiny, told(samples, [2.0] * count, [before] * count))
            loss = rank.update(data, PlainFrames(found), [batch], SETTINGS, 0).sums["value_loss"]
            moved = float(rank.critic.bias.detach()) if rank.critic is not None else 0.0
        assert loss == pytest.approx(expected)
        # From -1 the value has moved by 1 towards its return already: what is left of the loss holds it where it is.
        assert (moved > 0) == (before >= 0)


def test_a_warm_start_leaves_it_alone(tiny: Tiny) -> None:
    samples, found = tiny.mixed()
    with one_rank(tiny, critic=CriticSettings()) as rank:
        data, batch = batch_of(tiny, samples)
        assert "value_loss" not in rank.supervised(data, PlainFrames(found), [batch], SETTINGS).sums
        assert values_of(rank, tiny, samples, PlainFrames(found)) == [0.0] * len(samples)
        assert rank.critic is not None and not rank.critic.optimizer.state, "its first update is its optimizer's first"
        taught(rank, tiny, samples, PlainFrames(found), 1)
        before = values_of(rank, tiny, samples, PlainFrames(found))
        layer = rank.critic.weight.detach().clone(), rank.critic.bias.detach().clone()
        rank.supervised(data, PlainFrames(found), [batch], replace(SETTINGS, learning_rate=0.0))
        assert torch.equal(layer[0], rank.critic.weight) and torch.equal(layer[1], rank.critic.bias), "no old moments"
        assert values_of(rank, tiny, samples, PlainFrames(found)) == before
        _fresh_optimizer(rank)
        assert not rank.critic.optimizer.state


def test_fewer_groups_than_mini_batches_are_no_smaller_loss(tiny: Tiny) -> None:
    samples, found = tiny.mixed()
    data, batch = batch_of(tiny, told(samples, [1.0] * len(samples), [0.0] * len(samples)))
    with one_rank(tiny, critic=CriticSettings()) as rank:
        sums = rank.update(data, PlainFrames(found), [batch], replace(SETTINGS, mini_batches=4), 0).sums
    assert sums["value_loss"] == pytest.approx(0.5)


@pytest.mark.asyncio(loop_scope="session")
async def test_ranks_and_splits_change_nothing_and_a_checkpoint_has_it(tiny: Tiny, tmp_path: Path) -> None:
    """Two ranks with a micro-batch each sample, against one rank with all at once; then one rank goes on from the
    checkpoint of two, moments included. The learners that other tests share have no critic."""
    samples, found = tiny.mixed()
    settings = tiny.learner_settings(ranks=2, critic=CriticSettings(clip=0.2), tokens_per_micro_batch=1)
    place, returns = CheckpointFolder(tmp_path), [float(k % 2) for k in range(len(samples))]
    learner = Learner(settings)
    try:
        await learner.ready()
        for version in range(3):
            facts = await learner.answers(samples, at_hand(samples, found), 1.0, READS)
            now = [facts[s.episode, s.spans[0].step].value for s in samples]
            named = told(samples, returns, now)
            figures = await learner.update(named, at_hand(samples, found), SETTINGS, version)
        saving = checkpoints.Checkpoints(learner, place)
        await saving.save(3, {}, lambda written: None)
        await saving.settle()
        facts = await learner.answers(samples, at_hand(samples, found), 1.0, READS)
        two = [facts[s.episode, s.spans[0].step].value for s in samples]
    finally:
        await learner.close()
    with one_rank(tiny, critic=CriticSettings(clip=0.2)) as rank:
        losses = taught(rank, tiny, samples, PlainFrames(found), 3)
        one = values_of(rank, tiny, samples, PlainFrames(found))
        fourth = taught(rank, tiny, samples, PlainFrames(found), 1)
        later = values_of(rank, tiny, samples, PlainFrames(found))
    assert two == pytest.approx(one, abs=1e-4) and figures["value_loss"] == pytest.approx(losses[-1], rel=1e-3)
    alone = Learner(tiny.learner_settings(critic=CriticSettings(clip=0.2)))
    try:
        await alone.ready()
        await checkpoints.load(alone, place)
        facts = await alone.answers(samples, at_hand(samples, found), 1.0, READS)
        now = [facts[s.episode, s.spans[0].step].value for s in samples]
        assert now == pytest.approx(two, abs=1e-5)
        figures = await alone.update(told(samples, returns, now), at_hand(samples, found), SETTINGS, 4)
        facts = await alone.answers(samples, at_hand(samples, found), 1.0, READS)
        assert [facts[s.episode, s.spans[0].step].value for s in samples] == pytest.approx(later, abs=1e-4)
        assert figures["value_loss"] == pytest.approx(fourth[0], rel=1e-3)
    finally:
        await alone.close()


def test_a_return_that_breaks_the_critic_moves_nothing(tiny: Tiny) -> None:
    samples, found = tiny.mixed()
    with one_rank(tiny, critic=CriticSettings(shared=False)) as rank:
        before = {name: tensor.clone() for name, tensor in rank.weights().items()}
        data, batch = batch_of(tiny, told(samples, [float("inf")] * len(samples), [0.0] * len(samples), advantage=1.0))
        with pytest.raises(FloatingPointError, match="that of the critic is not finite, at optimizer step 0"):
            rank.update(data, PlainFrames(found), [batch], replace(SETTINGS, learning_rate=1.0), 0)
        assert values_of(rank, tiny, samples, PlainFrames(found)) == [0.0] * len(samples)
        assert all(torch.equal(tensor, before[name]) for name, tensor in rank.weights().items())


def test_values_without_a_critic_are_refused(tiny: Tiny) -> None:
    samples, found = tiny.mixed()
    with one_rank(tiny) as rank, pytest.raises(ValueError, match="started without a critic"):
        values_of(rank, tiny, samples, PlainFrames(found))
