"""Samples that share a prompt against the same samples apart, for every family: log-probabilities and gradients."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.families import real
from tests.families.samples import Case, sample, tokens

from tapforge_trainer.learner.batches import MicroBatchPlan, TokenBatch, micro_batch, token_batch
from tapforge_trainer.records import Sample
from tapforge_trainer.samples import sequences


def beside(one: Sample, name: str, answer: int) -> Sample:
    """Another answer to the same prompt."""
    (span,) = one.spans
    rng = np.random.default_rng((13, answer, span.start))
    said = rng.choice(np.asarray(tokens().allowed_ids[:140_000]), answer).tolist()
    span = replace(span, end=span.start + answer, logprobs=(-9.0,) * answer, versions=(answer % 2,) * answer)
    ids = (*one.ids[: span.start], *said)
    length = one.length + len(ids) - len(one.ids)
    return replace(one, episode=name, ids=ids, length=length, spans=(span,), prompt_length=length - answer)


def after(one: Sample, later: Sample, step: int) -> Sample:
    """A step whose prompt is all of `one`, and what `later` has before its answer."""
    (span,), start = later.spans, len(one.ids)
    span = replace(span, step=step, start=start + span.start, end=start + span.end)
    ids = array("i", [*one.ids, *later.ids])
    return replace(
        later, episode=one.episode, group=one.group, ids=ids, length=one.length + later.length,
        frames=(*one.frames, *later.frames), spans=(span,),
    )  # fmt: skip


def branching(case: Case) -> list[Sample]:
    """Prompts with two frames, one frame and none; answers of one token; steps behind an answer, with and without a
    frame of their own; a prompt that no other sample has, and one with the same ids and another frame."""
    two, one, none = case.samples[2], case.samples[0], case.samples[1]
    first, second = beside(one, "a", 4), beside(one, "b", 1)
    frames = list(case.frames)
    other = replace(beside(one, "c", 3), frames=(next(f for f in frames[3:] if f != one.frames[0]),))
    return list(sequences([
        two, beside(two, "d", 1), beside(two, "e", 7),
        first, after(first, sample(case.form, [case.frames[frames[2]]], 31, 3, 2), 1),
        second, after(second, sample(case.form, [], 32, 2, 3), 1),
        beside(one, "f", 9), other,
        none, beside(none, "g", 2), case.samples[4],
    ]))  # fmt: skip


def passed(case: Case, policy: Any, data: TokenBatch, plans: Sequence[Sequence[int]]) -> tuple[Any, Any, int]:
    """Log-probabilities of all response tokens, gradients of a weighted sum of them, and positions computed."""
    grids = {name: case.form.grid(f.width, f.height) for name, f in case.frames.items()}
    found, computed, factor = torch.zeros(len(data.index)), 0, torch.linspace(-1, 1, len(data.index))
    policy.zero_grad(set_to_none=True)
    for plan in plans:
        micro = micro_batch(data, MicroBatchPlan(tuple(plan)), grids, case.vocabulary, place=case.family.positions)
        logp, _ = policy(micro, case.store.get(micro.frames, case.frames), 0.7)
        chosen = torch.from_numpy(micro.response)
        (logp * factor[chosen]).sum().backward()
        found[chosen] = logp.detach()
        computed += micro.tokens
    return found, {key: p.grad for key, p in policy.named_parameters() if p.grad is not None}, computed


@pytest.mark.parametrize("name", real.TINY)
def test_sharing_a_prompt_changes_neither_log_probabilities_nor_gradients(name: str) -> None:
    case = Case(real.folder(name))
    samples, policy = branching(case), case.policy(case.model())
    assert [len(one.spans) for one in samples] == [1, 1, 1, 2, 2, 1, 1, 1, 1, 1]
    shared, apart = (token_batch(samples, case.vocabulary, share=share) for share in (True, False))
    expected, gradients, whole = passed(case, policy, apart, [range(10)])
    assert whole == sum(one.length for one in samples)
    found, mine, computed = passed(case, policy, shared, [[3, 0, 6, 5, 2, 1], [9, 4, 8, 7]])
    assert computed == whole - 2 * 32 - 27 - 12
    assert torch.allclose(found, expected, atol=1e-5, rtol=0)
    assert mine.keys() == gradients.keys()
    for key, value in gradients.items():
        scale = max(1.0, float(value.abs().max()))
        assert torch.allclose(mine[key], value, atol=1e-5 * scale, rtol=1e-4), key
