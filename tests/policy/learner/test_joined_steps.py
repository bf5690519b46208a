"""Steps that extend each other are one sequence, and episodes that begin with the same prompt share it: the same loss
and the same gradient, from fewer tokens."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_samples import PlainFrames, Tiny, at_hand, frame, one_rank

from tapforge_trainer.algorithms.distillation import Distillation
from tapforge_trainer.algorithms.objective import Counts, Objective
from tapforge_trainer.learner.answers import answers, by_step, read_answers
from tapforge_trainer.learner.client import Learner
from tapforge_trainer.learner.planning import plan_samples
from tapforge_trainer.learner.rank import MiniBatch, Rank
from tapforge_trainer.placement.settings import CriticSettings, LoraSettings, UpdateSettings
from tapforge_trainer.records import Sample
from tapforge_trainer.samples import sequences
from tapforge_trainer.tiny.folder import write_model

OBJECTIVES = {
    "mean over tokens": Objective(importance_cap=None),
    "mean over answers": Objective(aggregation="seq_mean_token_mean"),
    "ratio of answers": Objective(
        loss="gspo", options={"clip_low": 0.5, "clip_high": 9.0}, aggregation="seq_mean_token_mean", anchor="behavior",
        importance_cap=None,
    ),
}  # fmt: skip

WAYS: dict[str, dict[str, Any]] = {
    "all weights": {"freeze_vision": False},
    "adapters": {"lora": LoraSettings(4, 8.0)},
    "critic": {"critic": CriticSettings(clip=0.2)},
}
RECOMPUTED = {"layers computed again": {"freeze_vision": False, "activation_checkpointing": True}}


def episode(tiny: Tiny, name: str, steps: int, seed: int, shots: list[Any]) -> list[Sample]:
    """Each step's prompt is all that there was before, and a screen; the third step has no new one."""
    ids, frames, length, found = array("i"), (), 0, []
    for index in range(steps):
        shown = [] if index == 2 else [shots[(seed + index) % len(shots)]]
        one = tiny.sample(shown, 1000 * seed + index, answer=3 + index)
        (span,) = one.spans
        start = len(ids) + span.start
        ids = array("i", [*ids, *one.ids])
        frames, length = (*frames, *one.frames), length + one.length
        span = replace(
            span,
            step=index,
            start=start,
            end=start + len(span.logprobs),
            advantage=1.0 - 0.7 * index,
            versions=(index % 2,) * len(span.logprobs),
            value=0.1 * index,
            target=0.5,
        )
        found.append(Sample(name, name, ids, length, frames, (span,)))
    return found


@pytest.fixture(scope="module")
def played(tiny: Tiny) -> tuple[list[Sample], dict[str, Any]]:
    shots = [frame(96, 160, k) for k in range(3)]
    samples = [one for k in range(3) for one in episode(tiny, f"e{k}", 2 + k, k, shots)]
    return samples, {shot.name: shot for shot in shots}


def batch_of(data: Any, samples: Any, budget: int) -> MiniBatch:
    counts = Counts.of((len(span.logprobs), span.weight) for sample in samples for span in sample.spans)
    return MiniBatch(tuple(plan_samples(data, np.arange(len(data)), 1, budget)[0]), counts)


def learned(
    rank: Rank, tiny: Tiny, samples: Any, frames: Any, objective: Objective, budget: int = 100_000, share: bool = True
) -> Any:
    """Figures of an update, its gradient, and how many positions it computed."""
    data = tiny.token_batch(samples, share=share)
    batch, gradient = batch_of(data, samples, budget), {}
    apply = rank.optimizer.step

    def step() -> None:
        named = rank.policy.named_parameters()
        gradient.update({name: p.grad.full_tensor().clone() for name, p in named if p.grad is not None})
        apply()

    rank.optimizer.step = step  # type: ignore[method-assign]
    settings = UpdateSettings(objective=objective, learning_rate=1e-4, gradient_clip=1e9, off_policy=True)
    found = rank.update(data, PlainFrames(frames), [batch], settings, 1)
    return {**found.sums, **found.maxima}, gradient


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("how", WAYS)
def test_joined_steps_give_the_same_gradient(tiny: Tiny, played: Any, name: str, how: str) -> None:
    samples, frames = played
    joined = sequences(samples)
    assert [len(one.spans) for one in joined] == [2, 3, 4]
    seen = []
    for given, budget in ((samples, 100_000), (joined, 100_000), (joined, 1)):
        with one_rank(tiny, **WAYS[how]) as rank:
            seen.append(learned(rank, tiny, given, frames, OBJECTIVES[name], budget))
    (apart, expected), *others = seen
    for figures, gradient in others:
        assert gradient.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.allclose(gradient[key], value, atol=1e-6, rtol=1e-4), key
        assert figures["positions"] < 0.7 * apart["positions"], "what steps share is computed once"
        for key in ("policy_loss", "response_tokens", "weight", "entropy", "age_tokens_0", "age_k3_1"):
            assert figures[key] == pytest.approx(apart[key], rel=1e-4, abs=1e-6), key


def group(tiny: Tiny, episodes: list[list[Sample]]) -> list[Sample]:
    """All of them with the first one's first prompt, the screen in it included, and their own answers to it."""
    first = episodes[0][0]
    start, found = first.spans[0].start, []
    for steps in episodes:
        old = steps[0].spans[0].start
        extra = first.length - len(first.ids) - (steps[0].length - len(steps[0].ids))
        for one in steps:
            ids = array("i", [*first.ids[:start], *one.ids[old:]])
            (span,) = one.spans
            span = replace(span, start=span.start + start - old, end=span.end + start - old)
            frames, length = (*first.frames, *one.frames[1:]), one.length + len(ids) - len(one.ids) + extra
            prompt = length - (len(span.logprobs))
            found.append(replace(one, ids=ids, frames=frames, length=length, spans=(span,), prompt_length=prompt))
    return found


@pytest.mark.parametrize("how", [*WAYS, *RECOMPUTED])
def test_episodes_that_share_their_first_prompt_give_the_same_gradient(tiny: Tiny, how: str) -> None:
    shots = [frame(96, 160, 5), frame(128, 64, 6)]
    played = [episode(tiny, f"e{k}", 1 + k % 3, 10 + k, shots) for k in range(5)]
    texts = [episode(tiny, f"t{k}", 1, 20 + k, shots) for k in range(2)]
    samples = list(sequences(group(tiny, played) + group(tiny, texts)))
    frames, seen = {shot.name: shot for shot in shots}, []
    for share, budget in ((False, 100_000), (True, 100_000), (True, 120)):
        with one_rank(tiny, **(WAYS | RECOMPUTED)[how]) as rank:
            seen.append(learned(rank, tiny, samples, frames, OBJECTIVES["ratio of answers"], budget, share))
    (apart, expected), *others = seen
    spared = 4 * (samples[0].prompt_length or 0) + (samples[-1].prompt_length or 0)
    assert others[0][0]["positions"] == apart["positions"] - spared < others[1][0]["positions"] < apart["positions"]
    assert others[0][0]["tokens"] == others[0][0]["positions"] and others[0][0]["flops"] < apart["flops"]
    for figures, gradient in others:
        assert gradient.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.allclose(gradient[key], value, atol=1e-6, rtol=1e-4), key
        for key in ("policy_loss", "response_tokens", "weight", "entropy", "age_tokens_0", "age_k3_1"):
            assert figures[key] == pytest.approx(apart[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("kind", ["k1", "k3", "forward_kl"])
def test_joined_steps_learn_the_same_from_a_teacher(tiny: Tiny, played: Any, kind: Any, tmp_path: Path) -> None:
    samples, frames = played
    write_model(tmp_path / "teacher", 7)
    objective = Objective(importance_cap=None, distillation=Distillation(kind, 0.5))
    seen = []
    for given, budget in ((samples, 100_000), (sequences(samples), 1)):
        with one_rank(tiny, teacher=str(tmp_path / "teacher")) as rank:
            seen.append(learned(rank, tiny, given, frames, objective, budget))
    (apart, expected), (together, gradient) = seen
    assert together["distillation_kl"] == pytest.approx(apart["distillation_kl"], rel=1e-4)
    for key, value in expected.items():
        assert torch.allclose(gradient[key], value, atol=1e-6 * float(value.abs().max()) + 1e-6, rtol=1e-3), key


def test_what_is_read_of_answers_is_by_step(tiny: Tiny, played: Any) -> None:
    samples, frames = played
    joined = sequences(samples)
    with one_rank(tiny, critic=CriticSettings()) as rank:

        def facts(given: Any) -> Any:
            data = tiny.token_batch(given)
            plans = batch_of(data, given, 1).plans
            reads = {"score_square", "value"}
            return by_step(given, answers(data, *read_answers(rank, data, PlainFrames(frames), plans, 1.0, reads)))

        apart, together = facts(samples), facts(joined)
    assert apart.keys() == together.keys() and len(apart) == 9
    for key, fact in apart.items():
        assert together[key].score_square == pytest.approx(fact.score_square, rel=1e-4)
        assert together[key].value == fact.value == 0.0


@pytest.mark.asyncio(loop_scope="session")
async def test_two_ranks_learn_the_same_from_sequences(tiny: Tiny, fresh: Learner, played: Any) -> None:
    samples, frames = played
    joined = sequences(samples)
    settings = UpdateSettings(objective=Objective(), learning_rate=1e-3, off_policy=True)
    figures = await fresh.update(joined, at_hand(joined, frames), settings, 1)

    def alone() -> Any:
        with one_rank(tiny) as rank:
            data = tiny.token_batch(samples)
            metrics = rank.update(data, PlainFrames(frames), [batch_of(data, samples, 1)], settings, 1)
        return {**metrics.sums, **metrics.maxima}

    one = await asyncio.to_thread(alone)
    for key in ("policy_loss", "gradient_norm"):
        assert figures[key] == pytest.approx(one[key], rel=1e-4, abs=1e-7), key


@pytest.mark.asyncio(loop_scope="session")
async def test_an_update_says_what_it_computed_of_each_token(tiny: Tiny, fresh: Learner) -> None:
    """In joined steps, behind a prompt that episodes share, and on two ranks: as the learner reads each step alone."""
    shots = [frame(96, 160, 5), frame(128, 64, 6)]
    samples = group(tiny, [episode(tiny, f"e{k}", 1 + k % 3, 10 + k, shots) for k in range(5)])
    joined, frames = sequences(samples), {shot.name: shot for shot in shots}
    assert [len(one.spans) for one in joined] == [1, 2, 3, 1, 2]
    alone = await fresh.logprobs(samples, at_hand(samples, frames))
    settings, kept = UpdateSettings(objective=Objective(), learning_rate=1e-3, off_policy=True), []
    figures = await fresh.update(joined, at_hand(joined, frames), settings, 1, kept.extend)
    numbers = {(one.episode, step): one.of_step(step) for one in kept for step, _ in one.steps}
    assert numbers.keys() == {(one.episode, one.spans[0].step) for one in samples}
    entropies = []
    for one, expected in zip(samples, alone, strict=True):
        gaps, spread = numbers[one.episode, one.spans[0].step]
        assert np.subtract(one.spans[0].logprobs, gaps) == pytest.approx(expected, abs=1e-5)
        entropies += spread
    assert np.mean(entropies) == pytest.approx(figures["entropy"], rel=1e-5)
