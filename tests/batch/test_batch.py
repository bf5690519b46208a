"""What becomes of recorded groups: rewards, who is compared, what is left out, the tokens of a sample, the figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapforge_api.algorithm import Algorithm
from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_trainer.algorithms import registry
from tapforge_trainer.algorithms.registry import built_in
from tapforge_trainer.algorithms.steps import NO_STATE, Advantages
from tapforge_trainer.batch import BatchRules, BatchStatistics, answers_of, build_batch, steps_of
from tapforge_trainer.records import AnswerFacts, EpisodeRecord, Generation, GroupRecord, StepRecord
from tapforge_trainer.rewards.streams import episode_streams
from tapforge_trainer.states.frame import FrameKey

TASK = Task(suite="quickstart", template="open", params={"app": "clock"})
REASONS = {Outcome.SUCCESS: Reason.DONE, Outcome.FAILURE: Reason.STEP_LIMIT, Outcome.INVALID: Reason.ENV_ERROR}
RULES = BatchRules(options={"normalization": "mean", "gamma": 0.9})


def step(
    episode: str, index: int, state: str | None, parse_error: str | None = None, reward: float = 0.0
) -> StepRecord:
    generation = Generation(
        prompt_ids=(1, 2, 3),
        ids=(7, 8),
        logprobs=(-0.5, -0.25),
        versions=(4, 5),
        finish_reason="stop",
        prompt_length=17,
    )
    action = None if parse_error else {"type": "home"}
    return StepRecord(
        episode, index, (f"frame-{state}",), state, None, generation, "go", action, parse_error, reward, "", 0.1, 0.1
    )


def episode(name: str, outcome: Outcome | None, states: list[str | None], group: str = "g", seed: int = 0, **other):
    steps = tuple(step(name, i, state) for i, state in enumerate(states))
    reason = REASONS[outcome] if outcome else Reason.RECLAIMED
    record = EpisodeRecord(name, group, TASK, 0, "slot", seed, reason, outcome, None, "", steps, 0.0, 1.0)
    return replace(record, **other)


def step_rewards(episode: EpisodeRecord, rules: BatchRules) -> list[float]:
    streams = episode_streams(episode, rules.streams, rules.outcomes)
    return [sum(parts) for parts in zip(*streams.values(), strict=True)]


def group_of(*episodes: EpisodeRecord, name: str = "g", order: int = 0) -> GroupRecord:
    return GroupRecord(name, order, TASK, 4, episodes)


PAIR = (
    episode("won", Outcome.SUCCESS, ["home", "clock"], seed=1),
    episode("lost", Outcome.FAILURE, ["home", "mail"], seed=2),
)


def test_a_sample_holds_the_engines_own_tokens():
    samples = build_batch([group_of(*PAIR)], RULES).samples
    assert [(s.episode, s.spans[0].step) for s in samples] == [("won", 0), ("won", 1), ("lost", 0), ("lost", 1)]
    first = samples[0]
    assert (tuple(first.ids), first.frames, first.group) == ((1, 2, 3, 7, 8), ("frame-home",), "g")
    assert first.length == 17 + 2
    (span,) = first.spans
    assert (span.start, span.end, *span.logprobs, *span.versions) == (3, 5, -0.5, -0.25, 4, 5)
    assert tuple(first.ids[span.start : span.end]) == (7, 8)
    assert span.weight == 1.0


def test_advantages_and_their_parts():
    batch = build_batch([group_of(*PAIR)], RULES)
    assert [s.spans[0].advantage for s in batch.samples] == pytest.approx([0.95, 0.5, -0.95, -0.5])
    assert [s.spans[0].score for s in batch.samples] == [1.0, 1.0, 0.0, 0.0], "returns of whole episodes"
    assert [(c.episode, c.step, c.reward, c.state_group_size) for c in batch.credits] == [
        ("won", 0, 0.0, 2),
        ("won", 1, 1.0, 1),
        ("lost", 0, 0.0, 2),
        ("lost", 1, 0.0, 1),
    ]
    assert [c.episode_advantage + c.step_advantage for c in batch.credits] == pytest.approx(
        [c.advantage for c in batch.credits]
    )


def test_rewards_of_steps():
    rules = BatchRules(success_reward=2.0, failure_reward=-1.0, invalid_answer_penalty=0.25)
    steps = (step("e", 0, "a", reward=0.5), step("e", 1, "a", parse_error="no tool call"), step("e", 2, "b"))
    assert step_rewards(replace(PAIR[0], steps=steps), rules) == pytest.approx([0.5, -0.25, 2.0])
    assert step_rewards(replace(PAIR[1], steps=steps), rules) == pytest.approx([0.5, -0.25, -1.0])


def test_what_estimators_read():
    rules = BatchRules(success_reward=2.0, failure_reward=-1.0, invalid_answer_penalty=0.25)
    lost = replace(PAIR[1], steps=(step("lost", 0, "home", "no tool call", 0.5), step("lost", 1, "mail")))
    steps = steps_of([[PAIR[0], lost], [episode("other", Outcome.FAILURE, ["home"])]], rules)
    assert steps.group.tolist() == [0, 0, 0, 0, 1]
    assert steps.trajectory.tolist() == [0, 0, 1, 1, 2]
    assert steps.state[0] == steps.state[2] != steps.state[3]
    assert steps.tokens.tolist() == [2] * 5
    assert {name: values.tolist() for name, values in steps.streams.items()} == {
        "environment": [0, 0, 0.5, 0, 0],
        "invalid_answer": [0, 0, -0.25, 0, 0],
        "outcome": [0, 2, 0, -1, -1],
    }
    np.testing.assert_array_equal(sum(steps.streams.values()), steps.reward)
    np.testing.assert_array_equal(steps.reward[2:4], step_rewards(lost, rules))
    # Cut off by the limit on steps: nobody knows where the last step led.
    assert steps.final_state[2:].tolist() == [NO_STATE] * 3
    assert steps.goal.tolist() == steps.success.tolist() == [True, True, False, False, False]
    by_reward = steps_of([[PAIR[0], lost]], replace(rules, signal="reward"))
    assert by_reward.success is None
    assert by_reward.goal.tolist() == [True, True, False, False]


def test_a_divergence_in_the_reward_is_a_stream_of_its_own():
    """Of two answers that end alike, the one that is farther from the reference is pushed down."""
    rules = BatchRules("dr_grpo", signal="reward", kl_reward=0.5)
    alike = [episode(f"a{i}", Outcome.SUCCESS, ["home", "clock"], "alike", i) for i in range(2)]
    far = {("a0", 0): 1.0, ("a0", 1): 3.0, ("a1", 0): 1.0, ("a1", 1): 0.0}
    facts = {key: AnswerFacts(divergence=value) for key, value in far.items()}
    steps = steps_of([alike], rules, facts)
    assert steps.streams["kl"].tolist() == [-0.5, -1.5, -0.5, 0.0]
    assert steps.reward.sum() == pytest.approx(2.0 - 2.5)
    batch = build_batch([group_of(*alike, name="alike")], rules, facts)
    assert [one.advantage for one in batch.credits] == pytest.approx([-0.75, -0.75, 0.75, 0.75])


@pytest.mark.parametrize("signal", ["outcome", "reward"])
@pytest.mark.parametrize("states", ["screen", "actions"])
@pytest.mark.parametrize("name", built_in())
def test_every_estimator_of_ours_has_what_it_needs(name, states, signal):
    third = episode("early", Outcome.FAILURE, ["home", "mail", "home"], seed=3, reason=Reason.DONE)
    alike = [episode(f"a{i}", Outcome.SUCCESS, ["home", "clock"], "alike", i) for i in range(2)]
    groups = [group_of(*PAIR, third), group_of(*alike, name="alike", order=1)]
    rules = BatchRules(name, signal=signal, states=states)
    facts = {(one.episode, one.spans[0].step): AnswerFacts(0.1, 0.5, 0.5) for one in answers_of(groups, rules)}
    if rules.reads:
        with pytest.raises(ValueError, match="of step 0 of episode won was not read"):
            build_batch(groups, rules)
    batch = build_batch(groups, rules, facts)
    advantage = {(one.episode, one.step): one.advantage for one in batch.credits}
    assert len(advantage) == 11
    assert advantage["won", 0] > 0 >= min(advantage["lost", 0], advantage["early", 0])
    assert (batch.statistics.explained_variance is not None) == (name == "gae")
    if signal == "outcome" and name not in ("reinforce_plus_plus", "gae"):
        assert not any(advantage[one.id, step.index] for one in alike for step in one.steps)


def test_a_critic_learns_of_a_batch_that_teaches_the_policy_nothing():
    algorithm = {"advantage": {"plugin": {"name": "gae", "options": [{"name": "whiten", "value": "steps"}]}}}
    rules = BatchRules.of(Algorithm.model_validate({**algorithm, "critic": {}}), min_valid=2)
    groups = [group_of(*[episode(f"a{i}", Outcome.SUCCESS, ["home"], "alike", i) for i in range(2)])]
    facts = {(one.episode, 0): AnswerFacts(value=0.0) for one in answers_of(groups, rules)}
    batch = build_batch(groups, rules, facts)
    assert [(s.spans[0].advantage, s.spans[0].target) for s in batch.samples] == [(0.0, 1.0)] * 2


def test_states_by_actions_are_those_of_the_spec():
    walks = [["tap", "tap"], ["tap", "home"]]
    pair = [
        replace(e, steps=tuple(replace(s, action={"type": t}) for s, t in zip(e.steps, walk, strict=True)))
        for e, walk in zip(PAIR, walks, strict=True)
    ]
    rules = BatchRules.of(Algorithm.model_validate({"states": "actions"}), min_valid=2)
    sizes = [one.state_group_size for one in build_batch([group_of(*pair)], rules).credits]
    assert sizes == [2, 2, 2, 2]  # after one and the same tap, whatever they saw
    assert [one.state_group_size for one in build_batch([group_of(*pair)], RULES).credits] == [2, 1, 2, 1]


def test_invalid_and_stopped_episodes_change_no_advantage():
    with_them = build_batch(
        [
            group_of(
                episode("sick", Outcome.INVALID, ["home", "home"]),
                PAIR[1],
                episode("stopped", None, ["home"]),
                PAIR[0],
            )
        ],
        RULES,
    )
    without = build_batch([group_of(*PAIR)], RULES)
    assert with_them.samples == without.samples
    assert with_them.credits == without.credits
    figures = with_them.statistics
    assert (figures.episodes, figures.episodes_invalid, figures.episodes_stopped) == (4, 1, 1)
    assert figures.success_rate == 0.5
    assert figures.success_rate_attempted == pytest.approx(1 / 3)


@pytest.mark.parametrize(("min_valid", "dropped"), [(2, 0), (3, 1)])
def test_groups_with_too_few_valid_members_are_dropped(min_valid, dropped):
    batch = build_batch([group_of(*PAIR, episode("x", Outcome.INVALID, ["home"]))], replace(RULES, min_valid=min_valid))
    assert batch.statistics.groups_dropped == dropped
    assert bool(batch.samples) is not bool(dropped)
    assert batch.statistics.success_rate == 0.5  # dropping a group hides no episode from the success rate


def test_an_advantage_that_is_no_number_names_step_episode_and_group(monkeypatch):
    def broken(steps):
        total = np.where(steps.trajectory == 1, np.nan, 0.0)
        return Advantages(total, total, total, np.ones(len(steps), dtype=np.int64))

    monkeypatch.setitem(registry._BUILT_IN, "broken", broken)
    with pytest.raises(ValueError, match="^step 0 of episode lost in group g: broken returned nan for step 2 of 4"):
        build_batch([group_of(*PAIR)], BatchRules("broken"))


def test_zero_variance_groups_are_counted_and_left_out():
    won = [episode(f"w{i}", Outcome.SUCCESS, ["home", "clock"], group="won") for i in range(3)]
    groups = [group_of(*won, name="won", order=1), group_of(*PAIR)]
    batch = build_batch(groups, RULES)
    assert batch.statistics.groups_zero_variance == 1
    assert {sample.group for sample in batch.samples} == {"g"}
    assert len(batch.credits) == 10
    kept = build_batch(groups, replace(RULES, keep_zero_variance_groups=True))
    assert len(kept.samples) == 10
    assert kept.statistics.groups_zero_variance == 1


def advantages_of(groups: list[GroupRecord], **algorithm) -> dict[tuple[str, int], float]:
    batch = build_batch(groups, BatchRules.of(Algorithm.model_validate(algorithm), min_valid=2))
    return {(c.episode, c.step): c.advantage for c in batch.credits}


@pytest.mark.parametrize("advantage", [{"grpo": {}}, {"gigpo": {}}, {"rloo": {}}])
def test_an_unreadable_answer_is_no_signal_where_all_failed(advantage):
    lost = [episode(f"e{i}", Outcome.FAILURE, ["home"] * 40) for i in range(4)]
    stray = replace(lost[0].steps[7], parse_error="no tool call")
    lost[0] = replace(lost[0], steps=(*lost[0].steps[:7], stray, *lost[0].steps[8:]))
    group = [group_of(*lost)]
    assert not any(advantages_of(group, advantage=advantage, invalidAnswerPenalty=0.1).values())
    rules = BatchRules.of(Algorithm.model_validate({"advantage": advantage, "invalidAnswerPenalty": 0.1}), min_valid=2)
    batch = build_batch(group, rules)
    assert (batch.samples, batch.statistics.groups_zero_variance) == ((), 1)
    # Published: one stray answer in 160 gives its whole episode an advantage as large as a success would.
    if "grpo" in advantage:
        published = {"advantage": {"grpo": {"minDeviation": 0.0}}, "signal": "reward", "invalidAnswerPenalty": 0.1}
        assert advantages_of(group, **published)["e0", 0] == pytest.approx(-1.5, abs=1e-3)


def test_length_is_no_signal_where_all_succeeded():
    ways = [["home"] * 3 + ["clock"], ["home", "clock"], ["home", "mail", "clock"]]
    group = [group_of(*(episode(f"e{i}", Outcome.SUCCESS, states) for i, states in enumerate(ways)))]
    assert not any(advantages_of(group).values())
    published = {"advantage": {"gigpo": {"minDeviation": 0.0}}, "signal": "reward"}
    assert max(map(abs, advantages_of(group, **published).values())) > 1.0


def test_a_state_that_only_successes_saw_tells_nothing():
    """The group has a signal; on the way that both successes took, discounting alone would tell their steps apart."""
    short = episode("short", Outcome.SUCCESS, ["home", "clock"])
    long = episode("long", Outcome.SUCCESS, ["home", "clock", "clock", "clock"])
    group = [group_of(short, long, episode("lost", Outcome.FAILURE, ["home", "mail"]))]
    batch = build_batch(group, BatchRules.of(Algorithm(), min_valid=2))
    parts = {(c.episode, c.step): (c.episode_advantage, c.step_advantage) for c in batch.credits}
    assert [parts[name][1] for name in [("short", 1), ("long", 1), ("long", 2), ("long", 3)]] == [0.0] * 4
    assert parts["short", 0][1] > parts["long", 0][1] > 0 > parts["lost", 0][1]  # they refine what outcomes tell
    assert parts["short", 1][0] > 0


def test_small_differences_stay_small():
    """Two of a group's ways differ by a tenth of what the outcome is worth; its deviation is no smaller than the least
    one that may be divided by."""
    steps = [step("won", 0, "home", reward=-0.98), step("lost", 0, "home", reward=0.0)]
    won, lost = (replace(e, steps=(s,)) for e, s in zip(PAIR, steps, strict=True))
    assert advantages_of([group_of(won, lost)], advantage={"grpo": {}})["won", 0] == pytest.approx(0.1, abs=1e-3)
    published = advantages_of([group_of(won, lost)], advantage={"grpo": {"minDeviation": 0.0}})
    assert published["won", 0] == pytest.approx(2**-0.5, abs=1e-3)


def test_steps_and_episodes_without_tokens():
    silent = replace(PAIR[1].steps[1], generation=Generation((1, 2, 3), (), (), (), "length", 17))
    pair = (PAIR[0], replace(PAIR[1], steps=(PAIR[1].steps[0], silent)))
    batch = build_batch([group_of(*pair, episode("none", Outcome.FAILURE, []))], RULES)
    assert [(s.episode, s.spans[0].step) for s in batch.samples] == [("won", 0), ("won", 1), ("lost", 0)]
    assert batch.statistics.episodes_without_steps == 1
    assert batch.statistics.group_size_mean == 2


def test_what_a_limit_cut_off_fails_or_is_masked():
    """Two that succeeded, one that gave up, one whose steps ran out; the first answer of one has no end."""
    late = episode("late", Outcome.FAILURE, ["home", "mail", "clock"], seed=4, reason=Reason.STEP_LIMIT)
    done = episode("done", Outcome.SUCCESS, ["home"], seed=3, reason=Reason.STEP_LIMIT)
    endless = replace(PAIR[0].steps[0], generation=replace(PAIR[0].steps[0].generation, finish_reason="length"))
    lost = replace(PAIR[1], reason=Reason.DONE)
    group = group_of(replace(PAIR[0], steps=(endless, PAIR[0].steps[1])), lost, done, late)

    def learned(**truncated: str) -> tuple[list[tuple[str, int]], BatchStatistics]:
        algorithm = Algorithm.model_validate({"advantage": {"grpo": {}}, "truncated": truncated})
        batch = build_batch([group], BatchRules.of(algorithm, min_valid=2))
        assert batch.statistics.step_limit_rate == 1 / 4 and batch.statistics.answer_limit_rate == 1 / 8
        return [(s.episode, s.spans[0].step) for s in batch.samples], batch.statistics

    everything = [("won", 0), ("won", 1), ("lost", 0), ("lost", 1), ("done", 0), ("late", 0), ("late", 1), ("late", 2)]
    assert learned()[0] == everything
    kept, figures = learned(episodes="masked")
    assert kept == everything[:5] and figures.group_size_mean == 3 and figures.success_rate == 1 / 2
    assert learned(answers="masked")[0] == everything[1:]
    assert learned(answers="masked", episodes="masked")[0] == everything[1:5]


def test_figures_show_how_states_met():
    lost = replace(PAIR[1], steps=(PAIR[1].steps[0], replace(PAIR[1].steps[1], parse_error="no tool call")))
    figures = build_batch([group_of(PAIR[0], lost)], RULES).statistics
    assert figures.state_groups == 3
    assert figures.state_group_size_mean == pytest.approx(4 / 3)
    assert figures.state_group_size_max == 2
    assert figures.singleton_group_share == pytest.approx(2 / 3)
    assert figures.singleton_step_share == pytest.approx(1 / 2)
    assert figures.step_advantage_spread == pytest.approx(0.45 / 2**0.5)
    assert figures.valid_action_ratio == pytest.approx(3 / 4)
    assert figures.mixed_group_share == 1.0
    assert (figures.samples, figures.response_tokens, figures.steps_mean) == (4, 8, 2.0)


def test_unique_state_keys_make_gigpo_inert_and_visible():
    keyless = [replace(e, steps=tuple(replace(s, state_key=None) for s in e.steps)) for e in PAIR]
    figures = build_batch([group_of(*keyless)], RULES).statistics
    assert figures.singleton_step_share == 1.0
    assert figures.step_advantage_spread == 0.0


@pytest.mark.parametrize("told", ["ui_key", "frame_key"])
def test_gigpo_compares_steps_of_environments_without_exact_keys(told):
    def key(state: str) -> str:
        return state if told == "ui_key" else FrameKey(np.full((9, 16), ord(state[0]), np.uint16), b"12345678").text()

    foreign = [
        replace(e, steps=tuple(replace(s, state_key=None, **{told: key(s.state_key)}) for s in e.steps)) for e in PAIR
    ]
    ours, theirs = build_batch([group_of(*PAIR)], RULES), build_batch([group_of(*foreign)], RULES)
    assert ours.statistics.singleton_step_share == theirs.statistics.singleton_step_share == 0.5
    assert [c.step_advantage for c in theirs.credits] == [c.step_advantage for c in ours.credits]
    assert any(c.step_advantage for c in theirs.credits)


def test_nothing_to_train_on():
    batch = build_batch([], RULES)
    assert batch.samples == batch.credits == ()
    assert batch.statistics.success_rate is None
    assert batch.statistics.singleton_step_share is None


@settings(max_examples=25, deadline=None)
@given(
    st.permutations(range(4)),
    st.permutations(range(2)),
    st.lists(st.sampled_from([Outcome.SUCCESS, Outcome.FAILURE]), min_size=8, max_size=8),
)
def test_the_order_of_arrival_changes_nothing(order, groups, outcomes):
    def build(episode_order, group_order):
        records = [
            group_of(
                *(episode(f"{g}{i}", outcomes[4 * g + i], ["home", f"s{i % 2}"], f"g{g}", i) for i in episode_order),
                name=f"g{g}",
                order=g,
            )
            for g in group_order
        ]
        return build_batch(records, RULES)

    assert build(order, groups) == build(range(4), range(2))


def test_refuses_what_must_not_be_compared():
    other = Task(suite="quickstart", template="open", params={"app": "mail"})
    with pytest.raises(ValueError, match="only attempts at the same task"):
        build_batch([group_of(PAIR[0], replace(PAIR[1], task=other))], RULES)
    with pytest.raises(ValueError, match="episode won is in group g and again in h"):
        build_batch([group_of(*PAIR), group_of(PAIR[0], name="h", order=1)], RULES)
    damaged = replace(PAIR[0].steps[0], generation=Generation((1,), (7, 8), (-0.5,), (4, 4), "stop", 15))
    with pytest.raises(ValueError, match="step 0 of episode won has 2 tokens, 1 log-prob"):
        build_batch([group_of(replace(PAIR[0], steps=(damaged,)), PAIR[1])], RULES)
    with pytest.raises(ValueError, match="min_valid is 1"):
        BatchRules(min_valid=1)
    with pytest.raises(ValueError, match="at least 0"):
        BatchRules(invalid_answer_penalty=-1)
