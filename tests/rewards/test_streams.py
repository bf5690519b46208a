"""What an episode is worth, stream by stream, from its record."""

from dataclasses import replace

import numpy as np
import pytest

from tapforge_api.algorithm import Algorithm
from tapforge_api.rewards import Rewards
from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.batch import BatchRules, build_batch, steps_of
from tapforge_trainer.records import EpisodeRecord, EpisodeRewards, Generation, GroupRecord, StepRecord
from tapforge_trainer.rewards.streams import DEFAULT, OutcomeRewards, episode_streams, stream_rules

TASK = Task(suite="quickstart", template="open", goal="Open the clock")
JUDGE = {"models": [{"url": "http://127.0.0.1:9/v1", "model": "m"}]}


def episode(name: str, outcome: Outcome, rewards: EpisodeRewards | None = None, bad: int = 0) -> EpisodeRecord:
    """Of three steps with 10 tokens each, `bad` of which are no action."""
    answer = Generation((1,), (7,) * 10, (-0.5,) * 10, (0,) * 10, "stop", 1)
    steps = tuple(
        StepRecord(name, i, ("f",), f"{i}", None, answer, "t", None, "json" if i < bad else None, 0.25, "", 0.0, 0.0)
        for i in range(3)
    )
    return EpisodeRecord(name, "g", TASK, 0, "s", 1, Reason.DONE, outcome, None, "", steps, 0, 1, rewards=rewards)


def judged(value: float | None, *steps: float | None) -> EpisodeRewards:
    streams = {"judge": (0.0, 0.0, value), "steps": steps or (0.0, 0.0, 0.0)}
    return EpisodeRewards(streams, Outcome.SUCCESS, Reason.DONE)


def rules_of(*streams, **more) -> tuple:
    return stream_rules(Rewards.model_validate({"streams": list(streams), **more}))


WON, LOST = episode("won", Outcome.SUCCESS), episode("lost", Outcome.FAILURE, bad=2)


def test_a_file_that_names_no_streams_has_those_it_always_had():
    assert stream_rules(Rewards()) == DEFAULT
    found = episode_streams(LOST, DEFAULT, OutcomeRewards(2.0, -1.0, 0.5))
    assert found == {
        "environment": [0.25] * 3,
        "invalid_answer": [-0.5, -0.5, 0.0],
        "outcome": [0.0, 0.0, -1.0],
    }


@pytest.mark.parametrize(
    ("stream", "values"),
    [
        ({"name": "outcome"}, [0, 0, 1]),
        ({"name": "outcome", "scale": -2}, [0, 0, -2]),
        ({"name": "end", "reward": "outcome"}, [0, 0, 1]),
        ({"name": "format"}, [0, 0, 1]),
        ({"name": "length"}, [0, 0, -0.03]),
        ({"name": "length", "options": [{"name": "tokens", "value": "10"}]}, [0, 0, -3]),
        ({"name": "judge", "judge": JUDGE}, [0, 0, 0.75]),
        ({"name": "steps", "judge": JUDGE}, [1, 0, 0.5]),
    ],
)
def test_values_of_streams(stream, values):
    record = replace(WON, rewards=judged(0.75, 1.0, None, 0.5))
    (rule,) = rules_of(stream)
    assert episode_streams(record, (rule,), OutcomeRewards())[rule.name] == pytest.approx(values)


def test_format_is_the_share_of_answers_that_are_an_action():
    assert episode_streams(LOST, rules_of({"name": "format"}), OutcomeRewards())["format"] == [
        0,
        0,
        pytest.approx(1 / 3),
    ]


@pytest.mark.parametrize(
    ("gate", "of_won", "of_lost", "mixed"),
    [
        ("always", 1, 1 / 3, False),
        ("mixedOutcomes", 0, 0, False),
        ("mixedOutcomes", 1, 1 / 3, True),
        ("success", 1, 0, True),
        ("failure", 0, 1 / 3, True),
    ],
)
def test_gates(gate, of_won, of_lost, mixed):
    rules = rules_of({"name": "format", "gate": gate})
    for record, value in ((WON, of_won), (LOST, of_lost)):
        assert sum(episode_streams(record, rules, OutcomeRewards(), mixed=mixed)["format"]) == pytest.approx(value)


def test_weights_add_streams_up_and_gates_look_at_the_group():
    rewards = Rewards.model_validate(
        {"streams": [{"name": "outcome", "weight": 2}, {"name": "format", "weight": 0.5, "gate": "mixedOutcomes"}]}
    )
    rules = BatchRules.of(Algorithm(invalid_answer_penalty=0.1), rewards, min_valid=2)
    steps = steps_of([(WON, LOST), (replace(WON, id="a"), replace(WON, id="b"))], rules)
    assert np.bincount(steps.trajectory, steps.reward) == pytest.approx([2.5, 0.5 / 3 - 0.2, 2, 2])
    assert set(steps.streams) == {"outcome", "format", "invalid_answer"}
    assert steps.stream_weights == {"outcome": 2, "format": 0.5, "invalid_answer": 1}


def test_gdpo_compares_streams_apart_and_weighs_them_as_the_file_says():
    """A stream of weight 0 changes nothing, whatever its values are."""
    algorithm = {"advantage": {"plugin": {"name": "gdpo"}}, "signal": "reward"}
    records = [
        replace(WON, rewards=judged(1.0)),
        replace(LOST, rewards=judged(0.0)),
        replace(WON, id="third", rewards=judged(1.0)),
    ]
    group = GroupRecord("g", 0, TASK, 0, tuple(records))

    def advantages(weight: float) -> list[float]:
        streams = [{"name": "outcome"}, {"name": "format", "weight": weight}]
        rewards = Rewards.model_validate({"streams": streams})
        rules = BatchRules.of(Algorithm.model_validate(algorithm), rewards, min_valid=2)
        return [credit.advantage for credit in build_batch([group], rules).credits]

    only = Rewards.model_validate({"streams": [{"name": "outcome"}]})
    alone = build_batch([group], BatchRules.of(Algorithm.model_validate(algorithm), only, min_valid=2))
    assert advantages(0.0) == [credit.advantage for credit in alone.credits]


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ({"streams": [{"name": "judge"}]}, "judge is needed"),
        ({"streams": [{"name": "outcome", "judge": JUDGE}]}, "judge is needed"),
        ({"streams": [{"name": "outcome"}], "success": "judge"}, "success must name one of streams"),
        ({"streams": [{"name": "format"}], "success": "format"}, "success can't be outcome"),
        ({"streams": [{"name": "steps", "judge": JUDGE}], "success": "steps"}, "success can't be outcome"),
        ({"verifier": "ignored"}, "needs success"),
        ({"streams": [{"name": "outcome"}, {"name": "outcome"}]}, "more than once"),
    ],
)
def test_what_a_file_can_not_say(rewards, why):
    with pytest.raises(ValueError, match=why):
        Rewards.model_validate(rewards)


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        ({"name": "invalid_answer", "reward": "format"}, "take another name"),
        ({"name": "length", "options": [{"name": "token", "value": "1"}]}, "did you mean 'tokens'"),
        ({"name": "length", "options": [{"name": "tokens", "value": "0"}]}, "more than 0"),
        ({"name": "format", "options": [{"name": "tokens", "value": "1"}]}, "unknown option"),
    ],
)
def test_options_that_can_not_be(stream, why):
    with pytest.raises(ValueError, match=why):
        rules_of(stream)


def test_a_step_without_a_verdict_gets_the_mean_of_its_group_and_is_pushed_nowhere():
    one = replace(WON, rewards=judged(1.0, 1.0, None, 0.5))
    other = replace(LOST, rewards=judged(0.0, 0.0, 0.5, None))
    rewards = Rewards.model_validate({"streams": [{"name": "steps", "judge": JUDGE, "scale": 2}]})
    steps = steps_of([(one, other)], BatchRules.of(Algorithm(), rewards, min_valid=2))
    assert steps.streams["steps"] == pytest.approx([2, 1, 1, 0, 1, 1])
    silent = replace(one, rewards=judged(1.0, None, None, None))
    alone = steps_of([(silent, replace(silent, id="b"))], BatchRules.of(Algorithm(), rewards, min_valid=2))
    assert not alone.streams["steps"].any()


def test_a_recording_without_a_stream_names_the_way_to_it():
    with pytest.raises(ValueError, match="tapforge rescore"):
        episode_streams(WON, rules_of({"name": "judge", "judge": JUDGE}), OutcomeRewards())
