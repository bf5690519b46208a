"""From groups of episodes to samples with advantages, and the figures that show what an update is made of. Pure.

Rules:
- A step's reward is the sum of its reward streams, each times its weight (`rewards/streams.py`): what the environment
  gave, what the outcome is worth, penalties, judges.
- Invalid episodes and those that we stopped ourselves are in no statistic of rewards and give no sample.
- With `signal` "outcome", a group whose valid episodes all ended alike has no advantages: penalties and discounting
  refine what outcomes tell and are never all there is. (An estimator that compares with the whole batch, or with a
  critic, says in its docstring what holds for it.) With "reward", any difference of rewards counts (as published).
- An episode that failed at its step limit is a failure, or compared with none (`mask_step_limit`); an answer without
  an end is learned from, or not (`mask_answer_limit`).
- A group with fewer than `min_valid` valid episodes gives no sample and is counted as dropped.
- A group whose advantages are all exactly 0 is counted as a zero-variance group and, unless asked for, gives no sample:
  it has no policy gradient, but would take part in means over tokens and in the KL term.
- One step, one response span: the prompt's ids, one placeholder per frame, then the engine's own ids. Steps that extend
  each other share a sample (`samples.py`).
  A step without response tokens takes part in the comparison and gives no sample.
- The order is that of the groups' `order`, then of the episodes' seed and attempt, then of time. The order in which
  episodes happened to finish changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapforge_api.algorithm import Algorithm, Signal, StateKey
from tapforge_api.rewards import Rewards
from tapforge_envs.protocol import Outcome

from .algorithms.composition import check_critic, estimator_of
from .algorithms.registry import NotFinite, estimate, reads_of
from .algorithms.steps import Advantages, Steps
from .records import EpisodeRecord, Facts, GroupRecord, Sample, StepRecord, facts_at_steps
from .rewards.streams import DEFAULT, KL, OutcomeRewards, StreamRule, episode_streams, means_of, stream_rules, weights
from .samples import sample_of, sequences
from .states.keys import group_states


@dataclass(frozen=True, slots=True)
class BatchRules:
    """What is compared with what, and what it is worth."""

    estimator: str = "gigpo"
    #: keyword options of the estimator
    options: Mapping[str, Any] = field(default_factory=dict)
    signal: Signal = "outcome"
    #: what makes two steps of a group the same state
    states: StateKey = "screen"
    min_valid: int = 2
    success_reward: float = 1.0
    failure_reward: float = 0.0
    invalid_answer_penalty: float = 0.0
    mask_step_limit: bool = False
    mask_answer_limit: bool = False
    keep_zero_variance_groups: bool = False
    #: k1 of the divergence from the reference is a reward, times minus this
    kl_reward: float = 0.0
    #: what an episode is worth
    streams: tuple[StreamRule, ...] = DEFAULT

    @staticmethod
    def of(algorithm: Algorithm, rewards: Rewards | None = None, *, min_valid: int) -> BatchRules:
        """Raises ValueError for options that make no sense."""
        estimator, options = estimator_of(algorithm)
        check_critic(algorithm, reads_of(estimator))
        return BatchRules(
            estimator,
            options,
            algorithm.signal,
            algorithm.states,
            min_valid,
            invalid_answer_penalty=algorithm.invalid_answer_penalty,
            mask_step_limit=algorithm.truncated.episodes == "masked",
            mask_answer_limit=algorithm.truncated.answers == "masked",
            # Without a policy gradient they still have the KL term's or a teacher's, or teach the critic.
            keep_zero_variance_groups=algorithm.kl.in_loss > 0
            or algorithm.critic is not None
            or algorithm.distillation is not None,
            kl_reward=algorithm.kl.in_reward,
            streams=stream_rules(rewards or Rewards()),
        )

    @property
    def reads(self) -> frozenset[str]:
        """What the learner has to say of answers first: names of `AnswerFacts`."""
        return reads_of(self.estimator) | ({"divergence"} if self.kl_reward else frozenset())

    @property
    def outcomes(self) -> OutcomeRewards:
        return OutcomeRewards(self.success_reward, self.failure_reward, self.invalid_answer_penalty)

    def __post_init__(self) -> None:
        if self.min_valid < 2:
            raise ValueError(f"min_valid is {self.min_valid}; at least 2 episodes are needed to compare any")
        if self.invalid_answer_penalty < 0:
            raise ValueError(f"invalid_answer_penalty is {self.invalid_answer_penalty}; it is subtracted: at least 0")


@dataclass(frozen=True, slots=True)
class Credit:
    """Why a step was pushed up or down: kept with the recording, shown by the viewer."""

    episode: str
    step: int
    reward: float
    advantage: float
    episode_advantage: float
    step_advantage: float
    #: steps that saw the same state in the group, itself included
    state_group_size: int


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Shares and means over nothing are None, never a made-up 0."""

    groups: int
    groups_dropped: int
    #: of the groups that were compared
    groups_zero_variance: int
    #: of the groups that were compared, those in which some succeeded and some didn't
    mixed_group_share: float | None
    group_size_mean: float | None
    group_size_min: int | None
    episodes: int
    episodes_invalid: int
    #: stopped by ourselves
    episodes_stopped: int
    #: valid, but ended before the first answer: nothing to compare
    episodes_without_steps: int
    #: successes over valid, and over valid and invalid episodes, dropped groups included
    success_rate: float | None
    success_rate_attempted: float | None
    #: of valid episodes
    steps_mean: float | None
    #: answers that could be parsed, over all answers of valid episodes
    valid_action_ratio: float | None
    #: failed at their step limit, over valid episodes
    step_limit_rate: float | None
    #: without an end at the longest answer, over all answers of valid episodes
    answer_limit_rate: float | None
    #: answers that are learned from
    samples: int
    response_tokens: int
    # Of the steps that were compared:
    state_groups: int
    state_group_size_mean: float | None
    state_group_size_max: int | None
    #: share of state groups that hold a single step
    singleton_group_share: float | None
    #: share of steps that are alone in their state group
    singleton_step_share: float | None
    #: standard deviations
    step_advantage_spread: float | None
    episode_advantage_spread: float | None
    #: share of the variance of returns that a critic had foreseen; below 0: worse than their mean
    explained_variance: float | None


@dataclass(frozen=True, slots=True)
class Batch:
    samples: tuple[Sample, ...]
    #: one per step of every compared episode, zero-variance groups included
    credits: tuple[Credit, ...]
    statistics: BatchStatistics


def answers_of(groups: Sequence[GroupRecord], rules: BatchRules) -> tuple[Sample, ...]:
    """The answers of all episodes that are compared, for the learner to read: without advantages."""
    return sequences(
        sample_of(episode, step)
        for _, episodes in _compared(groups, rules)
        for episode in episodes
        for step in episode.steps
        if step.generation.ids
    )


def _compared(groups: Sequence[GroupRecord], rules: BatchRules) -> list[tuple[GroupRecord, list[EpisodeRecord]]]:
    ordered = sorted(groups, key=lambda group: (group.order, group.id))
    members = [(group, _comparable(group, rules)) for group in ordered]
    return [(group, episodes) for group, episodes in members if len(episodes) >= rules.min_valid]


def build_batch(groups: Sequence[GroupRecord], rules: BatchRules, facts: Facts | None = None) -> Batch:
    """`facts`: of all `answers_of` these groups, where the rules read any."""
    ordered = sorted(groups, key=lambda group: (group.order, group.id))
    _check(ordered)
    compared = _compared(ordered, rules)
    all_steps = [
        (number, episode, step)
        for number, (_, episodes) in enumerate(compared)
        for episode in episodes
        for step in episode.steps
    ]
    steps = steps_of([episodes for _, episodes in compared], rules, facts)
    try:
        advantages = estimate(rules.estimator, steps, **rules.options)
    except NotFinite as error:
        number, episode, step = all_steps[error.step]
        where = f"step {step.index} of episode {episode.id} in group {compared[number][0].id}"
        raise ValueError(f"{where}: {error}") from error
    varied = np.zeros(len(compared), dtype=bool)
    varied[steps.group[advantages.total != 0.0]] = True
    returns = np.bincount(steps.trajectory, steps.reward)
    samples = tuple(
        sample_of(
            episode,
            step,
            advantage=float(advantages.total[i]),
            score=float(returns[steps.trajectory[i]]),
            value=None if steps.value is None else float(steps.value[i]),
            target=None if advantages.target is None else float(advantages.target[i]),
        )
        for i, (number, episode, step) in enumerate(all_steps)
        if (varied[number] or rules.keep_zero_variance_groups) and step.generation.ids
        if not (rules.mask_answer_limit and _cut_off(step))
    )
    credits = tuple(
        Credit(
            episode=episode.id,
            step=step.index,
            reward=float(steps.reward[i]),
            advantage=float(advantages.total[i]),
            episode_advantage=float(advantages.episode[i]),
            step_advantage=float(advantages.step[i]),
            state_group_size=int(advantages.state_group_size[i]),
        )
        for i, (_, episode, step) in enumerate(all_steps)
    )
    statistics = _statistics(ordered, compared, int((~varied).sum()), samples, steps, advantages)
    return Batch(sequences(samples), credits, statistics)


def replayed_samples(group: GroupRecord, episodes: Collection[str], rules: BatchRules) -> tuple[Sample, ...]:
    """Samples of these episodes of a group, with the advantages that they have among all of it. Estimators that compare
    with a whole batch compare with the group alone here."""
    return tuple(sample for sample in build_batch([group], rules).samples if sample.episode in episodes)


def batches_of(groups: Sequence[GroupRecord], per_update: int) -> list[Sequence[GroupRecord]]:
    """Recorded groups, in their order, as updates took them."""
    return [groups[start : start + per_update] for start in range(0, len(groups), per_update)]


def steps_of(groups: Sequence[Sequence[EpisodeRecord]], rules: BatchRules, facts: Facts | None = None) -> Steps:
    """What estimators read of groups of valid episodes with steps, in the order of groups, episodes and time. Numbers
    of states mean the same inside a group alone."""
    episodes = [episode for group in groups for episode in group]
    length = np.array([len(episode.steps) for episode in episodes], dtype=np.int64)

    def at_each_step(values: Sequence[int] | Sequence[bool], kind: type) -> Any:
        return np.repeat(np.array(values, dtype=kind), length)

    weight_of = weights(rules.streams)
    streams: dict[str, list[float]] = {name: [] for name in sorted(weight_of)}
    for group in groups:
        mixed, unknown = _is_mixed(group), means_of(group, rules.streams)
        for episode in group:
            found = episode_streams(episode, rules.streams, rules.outcomes, mixed=mixed, unknown=unknown)
            for name, rewards in found.items():
                streams[name] += rewards
    known = {name: facts_at_steps(name, episodes, facts) for name in rules.reads}
    if rules.kl_reward:
        weight_of = {**weight_of, KL: 1.0}
        streams[KL] = [-rules.kl_reward * value for value in known["divergence"]]
    states = [group_states(group, rules.states) for group in groups]
    succeeded = at_each_step([episode.outcome is Outcome.SUCCESS for episode in episodes], np.bool_)
    named = {name: np.array(rewards, dtype=np.float64) for name, rewards in streams.items()}
    return Steps(
        group=at_each_step([number for number, group in enumerate(groups) for _ in group], np.int64),
        trajectory=np.repeat(np.arange(len(episodes)), length),
        state=np.array([state for group in states for state in group.steps], dtype=np.int64),
        reward=sum((weight_of[name] * one for name, one in named.items()), np.zeros(len(succeeded))),
        valid=np.ones(int(length.sum()), dtype=bool),
        success=succeeded if rules.signal == "outcome" else None,
        tokens=np.array([len(step.generation.ids) for one in episodes for step in one.steps], dtype=np.int64),
        streams=named,
        stream_weights=weight_of,
        final_state=at_each_step([state for group in states for state in group.final], np.int64),
        goal=succeeded,
        score_square=np.array(known["score_square"]) if "score_square" in known else None,
        value=np.array(known["value"]) if "value" in known else None,
    )


def _comparable(group: GroupRecord, rules: BatchRules) -> list[EpisodeRecord]:
    episodes = [episode for episode in group.episodes if episode.valid and episode.steps]
    if rules.mask_step_limit:
        episodes = [episode for episode in episodes if not episode.out_of_steps]
    return sorted(episodes, key=lambda episode: (episode.seed, episode.attempt, episode.id))


def _cut_off(step: StepRecord) -> bool:
    return step.generation.finish_reason == "length"


def _check(groups: Sequence[GroupRecord]) -> None:
    seen: dict[str, str] = {}
    for group in groups:
        for episode in group.episodes:
            if episode.id in seen:
                raise ValueError(
                    f"episode {episode.id} is in group {seen[episode.id]} and again in {group.id}; "
                    "ids are unique in a batch"
                )
            seen[episode.id] = group.id
            if episode.task.key != group.task.key:
                raise ValueError(
                    f"episode {episode.id} of task {episode.task.key} is in group {group.id} of task {group.task.key}; "
                    "only attempts at the same task are compared"
                )


def _statistics(
    groups: Sequence[GroupRecord],
    compared: Sequence[tuple[GroupRecord, list[EpisodeRecord]]],
    zero_variance: int,
    samples: Sequence[Sample],
    compared_steps: Steps,
    advantages: Advantages,
) -> BatchStatistics:
    episodes = [episode for group in groups for episode in group.episodes]
    valid = [episode for episode in episodes if episode.valid]
    invalid = sum(episode.outcome is Outcome.INVALID for episode in episodes)
    successes = sum(episode.outcome is Outcome.SUCCESS for episode in valid)
    answers = [step for episode in valid for step in episode.steps]
    sizes = [len(members) for _, members in compared]
    state_sizes = advantages.state_group_size
    steps = len(state_sizes)
    alone = int((state_sizes == 1).sum())
    # Each step carries 1 / size of its state group, so that these add up to the number of state groups.
    state_groups = round(float((1.0 / np.maximum(state_sizes, 1)).sum()))
    return BatchStatistics(
        groups=len(groups),
        groups_dropped=len(groups) - len(compared),
        groups_zero_variance=zero_variance,
        mixed_group_share=_share(sum(_is_mixed(episodes) for _, episodes in compared), len(compared)),
        group_size_mean=_share(sum(sizes), len(sizes)),
        group_size_min=min(sizes, default=None),
        episodes=len(episodes),
        episodes_invalid=invalid,
        episodes_stopped=len(episodes) - len(valid) - invalid,
        episodes_without_steps=sum(not episode.steps for episode in valid),
        success_rate=_share(successes, len(valid)),
        success_rate_attempted=_share(successes, len(valid) + invalid),
        steps_mean=_share(len(answers), len(valid)),
        valid_action_ratio=_share(sum(step.parse_error is None for step in answers), len(answers)),
        step_limit_rate=_share(sum(episode.out_of_steps for episode in valid), len(valid)),
        answer_limit_rate=_share(sum(map(_cut_off, answers)), len(answers)),
        samples=len(samples),
        response_tokens=sum(span.end - span.start for sample in samples for span in sample.spans),
        state_groups=state_groups,
        state_group_size_mean=_share(steps, state_groups),
        state_group_size_max=int(state_sizes.max()) if steps else None,
        singleton_group_share=_share(alone, state_groups),
        singleton_step_share=_share(alone, steps),
        step_advantage_spread=float(advantages.step.std()) if steps else None,
        episode_advantage_spread=float(advantages.episode.std()) if steps else None,
        explained_variance=_explained(compared_steps.value, advantages.target),
    )


def _explained(value: Any, target: Any) -> float | None:
    if value is None or target is None or not len(target) or not (variance := float(target.var())):
        return None
    return 1.0 - float((target - value).var()) / variance


def _is_mixed(episodes: Sequence[EpisodeRecord]) -> bool:
    return len({episode.outcome for episode in episodes}) > 1


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
