"""Each preset makes three updates: from its file over advantages to the weights, on one rank in this process.

The same groups for all: screens, answers and log-probabilities that are those of the first weights but for some noise,
as of an engine. An engine and phones are in `tests/run`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny_samples import PlainFrames, Tiny, frame, one_rank

from tapforge_api import TrainingRun, load
from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.algorithms.objective import Counts
from tapforge_trainer.algorithms.presets import PRESETS, preset
from tapforge_trainer.batch import BatchRules, answers_of, build_batch
from tapforge_trainer.learner.answers import answers, read_answers
from tapforge_trainer.learner.batches import MicroBatchPlan, plan_micro_batches
from tapforge_trainer.learner.client import split_groups
from tapforge_trainer.learner.rank import MiniBatch, Rank
from tapforge_trainer.records import EpisodeRecord, Generation, GroupRecord, Sample, StepRecord
from tapforge_trainer.run.policy_settings import critic_of, update_settings

#: eight groups, so that a group is never split between the optimizer steps of any preset
RUN = """\
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {name: x}
spec:
  environment: {source: {processes: {count: 3}}}
  rollout: {groupSize: 2, groupsPerUpdate: 8}
  learner: {learningRate: 0.001}
"""
GROUPS = 8
TASK = Task(suite="quickstart", template="open", seed=1)
#: what no preset has, as `--set` writes it
FURTHER = {
    "otb": ["algorithm.advantage={plugin: {name: otb}}"],
    "k1 in the reward": ["algorithm.kl={place: reward, estimator: k1, coefficient: 0.05}", "algorithm.signal=reward"],
    "top entropies, with a bonus": ["algorithm.loss={topEntropy: {share: 0.5}, entropyBonus: 0.01}"],
    "normalised weights": ["algorithm.loss={corrections: {normalised: {by: sequence}}}", "learner.miniBatches=2"],
}


def rules_of(name: str) -> list[str]:
    return FURTHER[name] if name in FURTHER else [value.override for value in preset(name).values]


@pytest.fixture(scope="module")
def played(tiny: Tiny) -> tuple[list[GroupRecord], PlainFrames]:
    shots = [frame(96, 160, k) for k in range(3)]
    frames = PlainFrames({shot.name: shot for shot in shots})
    made = [
        (f"g{g}", f"g{g}.{e}", i, tiny.sample([shots[(g + i) % 3]], 100 * g + 10 * e + i, answer=4))
        for g in range(GROUPS)
        for e in range(2)
        for i in range(2 + e)
    ]
    data = tiny.token_batch([sample for *_, sample in made])
    with one_rank(tiny) as rank:
        logp = rank.logprobs(data, frames, plan_micro_batches(data.lengths, 1, 8192)[0], 1.0)
    logp = logp + np.random.default_rng(0).normal(0, 0.02, len(logp))
    steps: dict[str, list[StepRecord]] = {}
    for number, (_, episode, index, sample) in enumerate(made):
        (span,) = sample.spans
        prompt, said = tuple(sample.ids[: span.start]), tuple(sample.ids[span.start :])
        answer = Generation(
            prompt, said, tuple(logp[data.sample == number].tolist()), (0,) * 4, "stop", sample.length - 4
        )
        steps.setdefault(episode, []).append(step_of(episode, index, answer, sample))
    groups = []
    for g in range(GROUPS):
        outcomes = (Outcome.SUCCESS, Outcome.FAILURE)
        members = (
            EpisodeRecord(n, f"g{g}", TASK, 0, "s", e, Reason.DONE, outcomes[e], None, "", tuple(steps[n]), 0.0, 1.0)
            for e, n in enumerate((f"g{g}.0", f"g{g}.1"))
        )
        groups.append(GroupRecord(f"g{g}", g, TASK, 0, tuple(members)))
    return groups, frames


def step_of(episode: str, index: int, answer: Generation, sample: Sample) -> StepRecord:
    return StepRecord(
        episode=episode,
        index=index,
        frames=sample.frames,
        state_key=f"s{index}",
        app=None,
        generation=answer,
        text="",
        action={"type": "home"},
        parse_error=None,
        reward=0.0,
        note="",
        seconds_model=0.0,
        seconds_environment=0.0,
    )


def planned(data: Any, chosen: np.ndarray) -> MiniBatch:
    plans = plan_micro_batches(data.lengths[chosen], 1, 1000)[0]
    mine = tuple(MicroBatchPlan(tuple(chosen[list(plan.samples)].tolist())) for plan in plans)
    return MiniBatch(mine, Counts(float(np.isin(data.sample, chosen).sum()), float(len(chosen))))


def updated(rank: Rank, tiny: Tiny, run: TrainingRun, played: Any, number: int) -> dict[str, float]:
    """Figures of one update of the file."""
    groups, frames = played
    rules = BatchRules.of(run.spec.algorithm, run.spec.rewards, min_valid=2)
    facts = None
    if rules.reads:
        asked = answers_of(groups, rules)
        data = tiny.token_batch(asked)
        plans = plan_micro_batches(data.lengths, 1, 1000)[0]
        told = answers(data, *read_answers(rank, data, frames, plans, 1.0, rules.reads))
        facts = {(data.episodes[k], data.steps[k]): fact for k, fact in enumerate(told)}
    samples = build_batch(groups, rules, facts).samples
    settings = update_settings(run, number)
    data = tiny.token_batch(samples)
    batches = [planned(data, chosen) for chosen in split_groups(samples, settings.mini_batches, settings.seed)]
    found = rank.update(data, frames, batches, settings, number)
    assert len(batches) == run.spec.learner.mini_batches
    return {**found.sums, **found.maxima}


@pytest.mark.parametrize("name", [*PRESETS, *FURTHER])
def test_three_updates(tiny: Tiny, played: Any, name: str) -> None:
    run = load(RUN, rules_of(name))
    critic = critic_of(run.spec.algorithm.critic)
    with one_rank(tiny, reference=run.spec.algorithm.kl.coefficient > 0, critic=critic) as rank:
        if run.spec.algorithm.kl.coefficient:
            rank.reference.load(str(tiny.folder))
        before = {key: tensor.clone() for key, tensor in rank.weights().items()}
        for number in range(3):
            figures = updated(rank, tiny, run, played, number)
            assert all(map(math.isfinite, figures.values())), figures
            assert figures["gradient_norm"] > 0
        after = rank.weights()
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(tensor, before[key]) for key, tensor in after.items())
