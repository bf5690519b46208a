"""Reward streams of an episode, from its record. Pure.

| stream | value |
|---|---|
| environment | what the environment gave for each step |
| outcome | `success_reward` or `failure_reward`, on the last step |
| invalid_answer | minus `invalid_answer_penalty` at each answer that could not be parsed; always there |
| format | share of the answers that could be parsed, on the last step |
| length | minus response tokens of all answers / `tokens`, on the last step |
| any other | what was recorded for it after the episode's end; at a step without a verdict the mean of its group's |

The mean of a group's verdicts pushes a step nowhere: with 0, a judge that was away would count as one that said no. A
value is multiplied by its stream's scale, and is 0 where the stream's gate is closed. The reward of a step is the sum
of all streams, each times its weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tapforge_api.rewards import JUDGED, Gate, Rewards, RewardStream
from tapforge_envs.protocol import Outcome

from ..algorithms.options import check_options, read_options
from ..records import EpisodeRecord

INVALID_ANSWER = "invalid_answer"
#: minus algorithm.kl.coefficient times k1 of the divergence from the reference (`batch.py`)
KL = "kl"
#: rewards without options
_PLAIN = ("outcome", "environment", "format")


@dataclass(frozen=True, slots=True)
class StreamRule:
    name: str
    #: the reward's own name
    kind: str
    weight: float = 1.0
    scale: float = 1.0
    gate: Gate = "always"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutcomeRewards:
    """What outcomes and malformed answers are worth."""

    success: float = 1.0
    failure: float = 0.0
    invalid_answer_penalty: float = 0.0


ENVIRONMENT, OUTCOME = StreamRule("environment", "environment"), StreamRule("outcome", "outcome")
DEFAULT = (ENVIRONMENT, OUTCOME)


def stream_rules(rewards: Rewards) -> tuple[StreamRule, ...]:
    """Raises ValueError for options that a stream doesn't have."""
    return tuple(map(_rule, rewards.streams)) or DEFAULT


def episode_streams(
    episode: EpisodeRecord,
    rules: Sequence[StreamRule],
    outcomes: OutcomeRewards,
    *,
    mixed: bool = True,
    unknown: Mapping[str, float] | None = None,
) -> dict[str, list[float]]:
    """Of a valid episode with steps, by name: a value for each step, scaled and gated, without its weight. `mixed`:
    whether some episodes of its group succeeded and some didn't. `unknown`: by name, in place of a missing verdict
    (`means_of`); 0 without."""
    found = {rule.name: _gated(episode, rule, outcomes, mixed, (unknown or {}).get(rule.name, 0.0)) for rule in rules}
    penalty = outcomes.invalid_answer_penalty
    found[INVALID_ANSWER] = [-penalty if step.parse_error is not None else 0.0 for step in episode.steps]
    return dict(sorted(found.items()))


def means_of(group: Sequence[EpisodeRecord], rules: Sequence[StreamRule]) -> dict[str, float]:
    """By name of stream: the mean of what was recorded for the steps of a group."""
    found = {}
    for rule in rules:
        values = [one.rewards.streams.get(rule.name, ()) for one in group if one.rewards is not None]
        known = [value for steps in values for value in steps if value is not None]
        if known:
            found[rule.name] = sum(known) / len(known)
    return found


def weights(rules: Sequence[StreamRule]) -> dict[str, float]:
    """By name of stream."""
    return {INVALID_ANSWER: 1.0, **{rule.name: rule.weight for rule in rules}}


def _rule(stream: RewardStream) -> StreamRule:
    if stream.name == INVALID_ANSWER:
        raise ValueError(
            f"rewards.streams: {INVALID_ANSWER} is the stream of algorithm.invalidAnswerPenalty; take another name"
        )
    if stream.name == KL:
        raise ValueError(f"rewards.streams: {KL} is the stream of algorithm.kl.place: reward; take another name")
    given = {option.name: option.value for option in stream.options}
    options: dict[str, Any] = {}
    if stream.kind == "length":
        options = read_options("length", _length, given, None)
        _length(None, **options)
    elif stream.kind in (*_PLAIN, *JUDGED):
        check_options(stream.kind, _plain, given)
    return StreamRule(stream.name, stream.kind, stream.weight, stream.scale, stream.gate, options)


def _gated(
    episode: EpisodeRecord, rule: StreamRule, outcomes: OutcomeRewards, mixed: bool, unknown: float
) -> list[float]:
    won = episode.outcome is Outcome.SUCCESS
    opened = {"always": True, "mixedOutcomes": mixed, "success": won, "failure": not won}[rule.gate]
    if not opened:
        return [0.0] * len(episode.steps)
    return [value * rule.scale for value in _values(episode, rule, outcomes, unknown)]


def _values(episode: EpisodeRecord, rule: StreamRule, outcomes: OutcomeRewards, unknown: float) -> Sequence[float]:
    if rule.kind == "environment":
        return [step.reward for step in episode.steps]
    if rule.kind == "outcome":
        return _at_the_end(episode, outcomes.success if episode.outcome is Outcome.SUCCESS else outcomes.failure)
    if rule.kind == "format":
        return _at_the_end(episode, sum(s.parse_error is None for s in episode.steps) / len(episode.steps))
    if rule.kind == "length":
        return _at_the_end(episode, _length(episode, **rule.options))
    recorded = None if episode.rewards is None else episode.rewards.streams.get(rule.name)
    if recorded is None:
        raise ValueError(
            f"episode {episode.id} has no rewards of the stream {rule.name!r}: `tapforge rescore` asks for them anew"
        )
    return [unknown if value is None else value for value in recorded]


def _length(episode: EpisodeRecord | None, *, tokens: float = 1000.0) -> float:
    if not tokens > 0:
        raise ValueError(f"option tokens of length is {tokens:g}; it divides the tokens of an episode: more than 0")
    answered = 0 if episode is None else sum(len(step.generation.ids) for step in episode.steps)
    return -answered / tokens


def _plain() -> None:
    """Of rewards without options."""


def _at_the_end(episode: EpisodeRecord, value: float) -> list[float]:
    return [*([0.0] * (len(episode.steps) - 1)), value]
