"""What is decided over a whole optimizer step, from a file to the gradient: splits and ranks change nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_samples import PlainFrames, Tiny, at_hand, one_rank

from tapforge_api import TrainingRun
from tapforge_api.loading import from_object
from tapforge_trainer.algorithms.composition import objective_of
from tapforge_trainer.algorithms.losses import policy_loss
from tapforge_trainer.algorithms.objective import Counts, Objective, old_known
from tapforge_trainer.algorithms.whole_step import StepTokens, checked, passes
from tapforge_trainer.learner import head
from tapforge_trainer.learner.answers import answers, read_answers
from tapforge_trainer.learner.batches import plan_micro_batches
from tapforge_trainer.learner.client import Learner
from tapforge_trainer.learner.rank import MiniBatch
from tapforge_trainer.placement.settings import UpdateSettings
from tapforge_trainer.records import Sample

HEAD = {"apiVersion": "tapforge.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "r"}}


def written(**loss: Any) -> Objective:
    run = from_object(TrainingRun, {**HEAD, "spec": {"algorithm": {"loss": loss}}})
    return objective_of(run.spec.algorithm, 16)


def plugin(name: str, **options: str) -> dict[str, Any]:
    return {"name": name, "options": [{"name": key, "value": value} for key, value in options.items()]}


#: nothing is clipped: the samples' log-probabilities are made up, far from the policy's
WIDE = {"clipLow": 1, "clipHigh": 10}
CLIP_COV = plugin("clip_cov", share="0.3", low="0", high="50", clip_low="1", clip_high="1e6")
#: of a file -> the forward passes that an update of one step takes, that with gradients included
LOSSES: dict[str, tuple[dict[str, Any], int]] = {
    "kl_cov": ({"plugin": plugin("kl_cov", share="0.3"), "anchor": "behavior"}, 2),
    "clip_cov": ({"plugin": CLIP_COV, "anchor": "behavior"}, 2),
    "second moment": (WIDE | {"corrections": {"secondMoment": {"threshold": 0.3}}}, 2),
    "second moment, anchored on what sampled": (
        WIDE | {"corrections": {"secondMoment": {"threshold": 0.3}}, "anchor": "behavior"},
        2,
    ),
    "normalised": (WIDE | {"corrections": {"normalised": {"by": "sequence"}}}, 2),
    "top entropy": (WIDE | {"topEntropy": {"share": 0.4}}, 2),
    "top entropy as published": (WIDE | {"topEntropy": {"share": 0.4, "over": "micro_batch"}}, 1),
    "entropy bonus": (WIDE | {"entropyBonus": 0.5}, 1),
}


def uneven(samples: list[Sample]) -> list[Sample]:
    """With advantages that differ."""
    spans = [s.spans[0] for s in samples]
    return [
        Sample(s.episode, s.group, s.ids, s.length, s.frames, (_with(span, 1.5 - k),))
        for k, (s, span) in enumerate(zip(samples, spans, strict=True))
    ]


def _with(span: Any, advantage: float) -> Any:
    return replace(span, advantage=advantage)


def batch_of(data: Any, samples: list[Sample], budget: int) -> MiniBatch:
    counts = Counts.of((len(s.spans[0].logprobs), 1.0) for s in samples)
    return MiniBatch(tuple(plan_micro_batches(data.lengths, 1, budget)[0]), counts)


@pytest.mark.parametrize("name", LOSSES)
def test_an_update_does_not_depend_on_how_it_is_split(tiny: Tiny, name: str) -> None:
    loss, expected_passes = LOSSES[name]
    samples, frames = tiny.mixed()
    samples = uneven(samples)
    data = tiny.token_batch(samples)
    settings = UpdateSettings(objective=written(**loss), learning_rate=1e-3, gradient_clip=1e9)
    found, figures, counted = [], [], []
    for budget in (100_000, 1):  # all at once; a micro-batch for each sample
        with one_rank(tiny) as rank:
            batch = batch_of(data, samples, budget)
            seen: list[bool] = []
            hook = rank.policy.register_forward_hook(lambda *_, seen=seen: seen.append(torch.is_grad_enabled()))
            metrics = rank.update(data, PlainFrames(frames), [batch], settings, 0)
            hook.remove()
            counted.append(len(seen) // len(batch.plans))
            figures.append(metrics.maxima["gradient_norm"])
            found.append(metrics.sums)
    assert counted == [expected_passes, expected_passes]
    if "published" in name:
        assert figures[0] != pytest.approx(figures[1], rel=1e-4), "the split decides what is selected"
    else:
        assert figures[0] == pytest.approx(figures[1], rel=1e-4)
        shares = [key for key in found[0] if "fraction" in key or key.startswith("cut_")]
        assert {key: found[1][key] for key in shares} == pytest.approx({key: found[0][key] for key in shares})


@pytest.mark.asyncio(loop_scope="session")
async def test_ranks_change_nothing(tiny: Tiny, fresh: Learner) -> None:
    """Two ranks with a micro-batch each sample, against one rank with all at once."""
    samples, frames = tiny.mixed()
    samples = uneven(samples)
    objective = written(
        plugin=CLIP_COV,
        topEntropy={"share": 0.7},
        corrections={"secondMoment": {"threshold": 0.5}},
    )
    settings = UpdateSettings(objective=objective, learning_rate=1e-3, gradient_clip=1e9)
    two = await fresh.update(samples, at_hand(samples, frames), settings, 0)
    data = tiny.token_batch(samples)

    def alone() -> Any:
        with one_rank(tiny) as rank:
            return rank.update(data, PlainFrames(frames), [batch_of(data, samples, 100_000)], settings, 0)

    one = await asyncio.to_thread(alone)
    assert two["gradient_norm"] == pytest.approx(one.maxima["gradient_norm"], rel=1e-4)
    for name in ("cut_top_entropy", "cut_second_moment"):
        assert two[name] == pytest.approx(one.sums[name]) and 0 < two[name] < 1


def test_an_entropy_bonus_widens_the_policy(tiny: Tiny) -> None:
    samples, frames = tiny.mixed()
    samples = [Sample(s.episode, s.group, s.ids, s.length, s.frames, (_with(s.spans[0], 0.0),)) for s in samples]
    data = tiny.token_batch(samples)
    settings = UpdateSettings(objective=written(entropyBonus=1.0), learning_rate=1e-3)
    with one_rank(tiny) as rank:
        batch = batch_of(data, samples, 100_000)
        told = [rank.update(data, PlainFrames(frames), [batch], settings, k).sums for k in range(4)]
    entropies = [sums["entropy"] / sums["weight"] for sums in told]
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0]


def test_what_is_drawn_depends_on_the_seed_and_not_on_the_split() -> None:
    part = written(plugin=plugin("clip_cov", share="0.2", low="-50", high="50")).whole_step()["loss"]
    random = np.random.default_rng(0)
    values = {name: random.normal(size=50) for name in ("advantage", "logp")}
    step = StepTokens(
        values["advantage"], np.zeros(50, int), np.arange(50), values["logp"], anchor=values["logp"], seed=1
    )
    first, again, other = part.gather(step), part.gather(step), part.gather(replace(step, seed=2))
    assert first.sum() == 10 and (first == again).all() and (first != other).any()


def test_a_draw_in_each_micro_batch_is_of_the_step() -> None:
    """As published: from other tokens each time, not always from the first ones."""
    objective = written(plugin=plugin("clip_cov", share="0.2", low="-50", high="50", over="micro_batch"))
    random = torch.Generator().manual_seed(0)
    values, advantage = torch.randn(2, 50, generator=random)
    logp = values.requires_grad_()

    def drawn(seed: int) -> list[bool]:
        counts, sequence = Counts(50, 1), torch.zeros(50, dtype=torch.long)
        found = policy_loss(logp, None, advantage, sequence, objective=objective, counts=counts, seed=seed)
        (slope,) = torch.autograd.grad(found.loss, logp)
        return (slope == 0).tolist()

    assert drawn(1) == drawn(1) != drawn(2) and sum(drawn(1)) == 10


def test_what_a_whole_step_takes_out_is_shown_at_the_only_step_as_well(tiny: Tiny) -> None:
    """No ratio has moved there, and its own figures say nothing."""
    samples, frames = tiny.mixed()
    samples = uneven(samples)
    data = tiny.token_batch(samples)
    objective = written(plugin=plugin("clip_cov", share="0.3", low="0", high="50"))
    settings = UpdateSettings(objective=objective, learning_rate=1e-3, off_policy=True)
    with one_rank(tiny) as rank:
        told = rank.update(data, PlainFrames(frames), [batch_of(data, samples, 100_000)], settings, 0).sums
    assert 0 < told["clip_cov_fraction"] < 1 and {"ratio_mean", "clip_fraction_high"}.isdisjoint(told)


@pytest.mark.parametrize("answer", [np.ones(3), 1.0, np.array([1.0, np.nan]), np.ones((2, 1))])
def test_an_answer_that_is_no_number_for_each_token_is_refused(answer: Any) -> None:
    step = StepTokens(np.zeros(2), np.zeros(2, int), np.array([4, 9]))
    with pytest.raises(ValueError, match=r"mine gathered .* of a step"):
        checked(answer, "mine", step)


@pytest.mark.parametrize(
    ("loss", "own", "first", "expected"),
    [
        ({"plugin": plugin("kl_cov")}, True, False, True),
        ({"plugin": plugin("kl_cov", over="micro_batch")}, True, True, False),
        ({"corrections": {"secondMoment": {}}}, True, True, True),
        ({"corrections": {"secondMoment": {}}}, True, False, False),
        ({"corrections": {"secondMoment": {}}}, False, True, False),
        ({"corrections": {"secondMoment": {}}, "anchor": "behavior"}, False, True, True),
        ({"corrections": {"secondMoment": {}}, "anchor": "behavior"}, False, False, True),
        ({}, True, True, False),
    ],
)
def test_what_takes_a_pass(loss: dict[str, Any], own: bool, first: bool, expected: bool) -> None:
    objective = written(**loss)
    known = old_known(objective.anchor, own=own, first=first)
    assert passes(objective.whole_step(), known=known) is expected


# --- what is read of answers before advantages are made ---------------------------------------------------------------


@pytest.mark.parametrize("at_once", [head.LOGITS_AT_ONCE, 64])
def test_what_is_told_beside_a_log_probability_is_that_of_the_softmax(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over what may be said alone, whole or in pieces; an entropy's gradient is that of autograd."""
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", at_once)
    random = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(8, 32, bias=False)
    hidden = torch.randn(5, 8, generator=random, requires_grad=True)
    allowed = torch.arange(32) % 3 > 0
    target = torch.tensor([1, 2, 4, 5, 31])
    chances = torch.softmax((hidden @ module.weight.t() / 0.7)[:, allowed], -1)
    _, squared = head.token_logprobs(module, hidden, target, allowed, 0.7, "squared")
    torch.testing.assert_close(squared, chances.square().sum(-1).detach())
    expected = -(chances * chances.log()).sum(-1)
    _, entropy = head.token_logprobs(module, hidden, target, allowed, 0.7, "entropy_with_gradient")
    torch.testing.assert_close(entropy, expected)
    (mine,) = torch.autograd.grad(entropy.sum(), hidden)
    (plain,) = torch.autograd.grad(expected.sum(), hidden)
    torch.testing.assert_close(mine, plain, atol=1e-6, rtol=1e-5)
    assert not head.token_logprobs(module, hidden, target, allowed, 0.7)[1].requires_grad


def test_the_divergence_of_an_answer_is_its_tokens_distance_from_the_reference(tiny: Tiny) -> None:
    samples, frames = tiny.mixed()
    samples = uneven(samples)
    data = tiny.token_batch(samples)
    batch, reads = batch_of(data, samples, 150), {"divergence", "score_square"}
    with one_rank(tiny, reference=True) as rank:
        rank.reference.load(str(tiny.folder))
        first = answers(data, *read_answers(rank, data, PlainFrames(frames), batch.plans, 1.0, reads))
        before = rank.logprobs(data, PlainFrames(frames), batch.plans, 1.0)
        settings = UpdateSettings(objective=written(anchor="behavior", clipLow=1, clipHigh=10), learning_rate=1e-2)
        rank.update(data, PlainFrames(frames), [batch], settings, 0)
        later = answers(data, *read_answers(rank, data, PlainFrames(frames), batch.plans, 1.0, reads))
        moved = rank.logprobs(data, PlainFrames(frames), batch.plans, 1.0) - before
    assert [fact.divergence for fact in first] == pytest.approx([0.0] * len(data), abs=1e-5)
    expected = np.bincount(data.sample, moved.astype(np.float64))
    assert [fact.divergence for fact in later] == pytest.approx(expected.tolist(), abs=1e-4) and abs(expected).max() > 1
    assert all(fact.score_square > 0 for fact in later)


@pytest.mark.asyncio(loop_scope="session")
async def test_ranks_read_the_answers_of_one_rank(tiny: Tiny, fresh: Learner) -> None:
    samples, frames = tiny.mixed()
    data = tiny.token_batch(samples)
    two = await fresh.answers(samples, at_hand(samples, frames), 1.0, {"score_square"})

    def alone() -> Any:
        with one_rank(tiny) as rank:
            plans = batch_of(data, samples, 100_000).plans
            return answers(data, *read_answers(rank, data, PlainFrames(frames), plans, 1.0, {"score_square"}))

    one = await asyncio.to_thread(alone)
    assert [two[sample.episode, sample.spans[0].step].divergence for sample in samples] == [None] * len(samples)
    assert [two[sample.episode, sample.spans[0].step].score_square for sample in samples] == pytest.approx(
        [fact.score_square for fact in one], rel=1e-4
    )
