"""What every estimator of ours promises, by a loop over the registry: order, names and invalid episodes change nothing,
no degenerate group gives NaN, what outcomes gate is exactly 0, and sums where the formula has one."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapforge_trainer.algorithms.registry import built_in, defaults_of, estimate
from tapforge_trainer.algorithms.steps import NO_STATE, Steps

#: options beside the defaults, which every estimator is tried with
FURTHER = {
    "gae": [{"gamma": 0.9, "lambda_": 0.8}, {"whiten": "steps"}, {"whiten": "tokens"}],
    "gdpo": [{"whiten": "trajectories", "epsilon": 1e-4}, {"whiten": "none", "weights": "outcome=2, penalty=0.5"}],
    "gigpo": [{"normalization": "mean", "gamma": 0.9, "weight": 0.5}, {"row_statistics": True}],
    "discounted_grpo": [{"normalization": "mean", "gamma": 0.5}],
    "graphgpo": [
        {"form": "gain", "row_statistics": True},
        {"form": "paper", "normalization": "mean", "omega": 0.1},
        {"unknown_end": "dead_end", "episode_weight": 0.0},
    ],
    "grpo": [{"normalization": "mean"}, {"row_statistics": True}, {"deviation": "batch", "epsilon": 1e-4}],
    "grpo_length_penalty": [{"output": 0.3, "turns": 0.2}],
    "grpo_passk": [{"normalization": "mean"}],
    "hgpo": [
        {"form": "paper"},
        {"drop_zeros": True, "base": True, "history": 1},
        {"base": True, "normalization": "mean", "alpha": 0.0},
        {"history": 0},
    ],
    "maxrl": [{"epsilon": 1e-6}],
    "reinforce_plus_plus": [{"gamma": 0.9, "per": "step"}],
    "reinforce_plus_plus_baseline": [{"per": "step"}],
}
EVERY = [(name, options) for name in built_in() for options in [{}, *FURTHER.get(name, [])]]
#: they compare with the whole batch, or with a critic's expectation, and not inside groups
NOT_IN_GROUPS = {"gae", "reinforce_plus_plus"}
#: a trajectory is compared with its own other steps too
WITHIN_A_TRAJECTORY = {"discounted_grpo", "gigpo", "graphgpo", "hgpo"}
each = pytest.mark.parametrize(("name", "options"), EVERY)
in_groups = pytest.mark.parametrize(("name", "options"), [one for one in EVERY if one[0] not in NOT_IN_GROUPS])
quick = settings(max_examples=20, deadline=None)

step = st.tuples(st.integers(NO_STATE, 3), st.sampled_from([0.0, 0.0, 1.0, -0.5, 0.1]), st.integers(0, 3))
trajectory = st.tuples(
    st.integers(0, 2),  # group
    st.booleans(),  # valid
    st.booleans(),  # reached its goal
    st.integers(NO_STATE, 5),  # final state
    st.lists(step, min_size=1, max_size=6),
)
batches = st.lists(trajectory, min_size=1, max_size=9)


def build(trajectories) -> Steps:
    """With everything that any estimator needs."""
    rows = [
        (group, number, state, reward, valid, tokens, goal, final)
        for number, (group, valid, goal, final, steps) in enumerate(trajectories)
        for state, reward, tokens in steps
    ]
    group, name, state, reward, valid, tokens, goal, final = (np.array(column) for column in zip(*rows, strict=True))
    return Steps(
        group,
        name,
        state,
        reward,
        valid,
        value=np.cos(np.arange(len(rows))),
        tokens=tokens,
        streams={"outcome": np.where(reward > 0, reward, 0.0), "penalty": np.where(reward < 0, reward, 0.0)},
        final_state=final,
        goal=goal,
        score_square=np.sin(np.arange(len(rows))) ** 2,
    )


def taken(steps: Steps, places) -> Steps:
    """The steps at these places, in that order."""
    arrays = {one.name: getattr(steps, one.name) for one in fields(Steps)}
    streams = {name: values[places] for name, values in arrays.pop("streams").items()}
    return Steps(**{name: None if one is None else one[places] for name, one in arrays.items()}, streams=streams)


def renamed(state):
    return np.where(state == NO_STATE, NO_STATE, state * 3 + 50)


def first_steps(steps: Steps):
    return np.unique(steps.trajectory, return_index=True)[1]


def test_every_estimator_is_tried():
    assert set(FURTHER) <= set(built_in())


@each
@quick
@given(batch=batches, seed=st.integers(0, 1000))
def test_order_of_trajectories_and_names_do_not_matter(name, options, batch, seed):
    steps = build(batch)
    total = estimate(name, steps, **options).total
    # Shuffles all steps, then puts those of each trajectory back in time order.
    order = np.random.default_rng(seed).permutation(len(steps))
    for one in np.unique(steps.trajectory):
        places = np.flatnonzero(steps.trajectory[order] == one)
        order[places] = np.sort(order[places])
    other = replace(
        steps,
        group=steps.group * 7 + 3,
        trajectory=1000 - steps.trajectory,
        state=renamed(steps.state),
        final_state=renamed(steps.final_state),
    )
    np.testing.assert_allclose(estimate(name, taken(other, order), **options).total, total[order], atol=1e-7)


@each
@quick
@given(batch=batches)
def test_invalid_trajectories_change_nothing(name, options, batch):
    steps = build(batch)
    valid = steps.valid
    unknown = np.where(valid, steps.reward, np.nan)
    with_invalid = estimate(name, replace(steps, reward=unknown), **options)
    alone = estimate(name, taken(steps, np.flatnonzero(valid)), **options)
    np.testing.assert_array_equal(with_invalid.total[valid], alone.total)
    np.testing.assert_array_equal(with_invalid.state_group_size[valid], alone.state_group_size)
    assert not with_invalid.total[~valid].any()
    assert not with_invalid.state_group_size[~valid].any()
    assert (alone.state_group_size >= 1).all()


@each
@quick
@given(batch=batches, outcomes=st.booleans())
def test_what_is_the_episodes_and_what_is_the_steps_make_the_whole(name, options, batch, outcomes):
    steps = build(batch)
    if outcomes:
        steps = replace(steps, success=steps.goal)
    result = estimate(name, steps, **options)  # refuses NaN itself
    weight = options.get("weight", 1.0) if name == "gigpo" else 1.0
    np.testing.assert_allclose(result.episode + weight * result.step, result.total, atol=1e-9)


@each
@pytest.mark.parametrize(
    "degenerate",
    [
        [(0, True, False, 2, [(0, 0.0, 2), (1, -0.5, 1)])],
        [(0, True, True, NO_STATE, [(0, 1.0, 2)])],
        [(0, True, True, NO_STATE, [(0, 1.0, 0)])] * 3,
        [(0, True, True, 1, [(0, 1.0, 2), (0, 0.1, 1)])] * 4,
        [(0, True, False, 1, [(0, 0.0, 2)]), (1, True, False, 1, [(0, -0.1, 2)])],
        [(0, False, False, 1, [(0, 1.0, 2)])] * 2,
        [(0, True, True, 1, [(0, 1.0, 2)]), (0, False, False, 1, [(0, 0.0, 2)]), (0, False, False, 1, [(0, 0.0, 2)])],
        [(0, True, False, NO_STATE, [(NO_STATE, 0.0, 1)]), (0, True, True, NO_STATE, [(NO_STATE, 1.0, 1)])],
        [(0, True, False, 0, [(0, 1e-300, 1)]), (0, True, True, 0, [(0, 0.0, 1)])],
        [(0, True, False, 0, [(0, -1e12, 1)]), (0, True, True, 0, [(0, 1e12, 1)])],
        [(0, True, False, 0, [(0, 0.1, 1)] * 3 + [(0, -0.3, 1)]), (0, True, True, 0, [(0, 0.1, 1), (0, -0.1, 1)])],
    ],
    ids=[
        "group of one",
        "one step",
        "equal, without tokens",
        "all equal",
        "groups of one",
        "all invalid",
        "one valid",
        "no state keys",
        "a difference that is none",
        "large rewards",
        "a mean that rounding leaves",
    ],
)
@pytest.mark.parametrize("outcomes", [False, True], ids=["reward", "outcome"])
def test_degenerate_groups_give_numbers(name, options, degenerate, outcomes):
    steps = build(degenerate)
    if outcomes:
        steps = replace(steps, success=steps.goal)
    result = estimate(name, steps, **options)
    for part in (result.total, result.episode, result.step):
        assert np.isfinite(part).all()
        assert np.abs(part).max() <= 1e4 * max(1.0, np.abs(steps.reward[steps.valid]).max(initial=0.0))


def won_and_lost(group: int, *lengths: int):
    """The first succeeds, all others fail."""
    return [
        (group, True, at == 0, 1, [(0, 0.0, 1)] * (n - 1) + [(1, float(at == 0), 1)]) for at, n in enumerate(lengths)
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in built_in() if "min_deviation" in defaults_of(name)] + [("grpo", {"deviation": "batch"})],
)
def test_a_least_deviation_keeps_differences_small(name, options):
    steps = build(won_and_lost(0, 2, 3, 2))
    published = estimate(name, steps, **options)
    small = estimate(name, steps, min_deviation=100.0, **options)
    part = "episode" if published.episode.any() else "step"
    assert 0 < np.abs(getattr(small, part)).max() < 0.02 * np.abs(getattr(published, part)).max()


def test_a_deviation_of_the_batch_over_steps():
    total = estimate("grpo", build(won_and_lost(0, 3, 1)), deviation="batch", row_statistics=True, epsilon=0.0).total
    np.testing.assert_allclose(total, [0.5, 0.5, 0.5, -1.5])  # 1, 1, 1, 0: mean 3/4, deviation 1/2


def test_whitened_by_trajectories_a_group_that_ended_alike_is_in_no_statistic():
    mixed = won_and_lost(0, 2, 2)
    alike = [(1, True, False, 1, [(0, reward, 1)]) for reward in (0.0, -0.5, 0.1, 0.0)]
    whole, alone = build([*mixed, *alike]), build(mixed)
    whole, alone = replace(whole, success=whole.goal), replace(alone, success=alone.goal)
    total = estimate("gdpo", whole, whiten="trajectories").total
    np.testing.assert_allclose(total[:4], estimate("gdpo", alone, whiten="trajectories").total)


@pytest.mark.parametrize("won", [True, False])
def test_without_groups_a_batch_of_one_outcome_has_nothing_whatever_its_rewards(won):
    steps = build([(0, True, won, 1, [(0, reward, 1)]) for reward in (1.0, 0.5, 0.9)])
    assert not estimate("reinforce_plus_plus", replace(steps, success=steps.goal)).total.any()
    assert estimate("reinforce_plus_plus", steps).total.any()


with_epsilon = [name for name in built_in() if "epsilon" in defaults_of(name)]


@pytest.mark.parametrize("name", with_epsilon)
def test_without_an_epsilon_a_group_without_spread_has_nothing(name):
    alike = [(0, True, True, 1, [(0, 0.1, 2), (1, 1.0, 1)])] * 3
    differ = [(1, True, won, 1, [(2, 0.0, 2), (3, float(won), 1)]) for won in (True, False)]
    steps = build([*alike, *differ])
    total = estimate(name, steps, epsilon=0.0).total  # refuses NaN itself
    assert total[steps.group == 1].any()
    if name not in {"gdpo", "graphgpo", "discounted_grpo"}:  # the batch's mean, distances, and steps in time
        assert not total[steps.group == 0].any()


@pytest.mark.parametrize("name", with_epsilon)
@pytest.mark.parametrize("epsilon", [-1e-6, float("inf")])
def test_an_epsilon_that_makes_no_sense_is_refused(name, epsilon):
    with pytest.raises(ValueError, match=f"epsilon is {epsilon:g}; it lies in"):
        estimate(name, build([(0, True, True, 1, [(0, 1.0, 2)])]), epsilon=epsilon)


@each
def test_no_steps(name, options):
    nothing = Steps([], [], [], [], [], [], None, [], {"outcome": [], "penalty": []}, [], [], [])
    assert len(estimate(name, nothing, **options).total) == 0


@pytest.mark.parametrize(
    ("name", "options"), [one for one in EVERY if one[0] not in NOT_IN_GROUPS | WITHIN_A_TRAJECTORY]
)
@quick
@given(batch=batches)
def test_a_group_of_one_has_nothing(name, options, batch):
    steps = build([(number, *one[1:]) for number, one in enumerate(batch)])
    assert not estimate(name, steps, **options).total.any()


@in_groups
@quick
@given(batch=batches)
def test_a_group_that_ended_alike_has_nothing_where_outcomes_gate(name, options, batch):
    steps = build(batch)
    won = steps.goal
    gated = estimate(name, replace(steps, success=won), **options)
    for group in np.unique(steps.group):
        members = steps.valid & (steps.group == group)
        if len(np.unique(won[members])) < 2:
            assert not gated.total[members].any()


@pytest.mark.parametrize(
    ("name", "options"),
    # Their scale is of all episodes of the batch.
    [one for one in EVERY if one[0] not in {*NOT_IN_GROUPS, "gpg"} and one[1].get("deviation") != "batch"],
)
@quick
@given(batch=batches)
def test_a_group_that_ended_alike_has_no_say_in_others_where_outcomes_gate(name, options, batch):
    steps = build(batch)
    steps = replace(steps, success=steps.goal)
    outcomes = [(group, steps.goal[steps.valid & (steps.group == group)]) for group in np.unique(steps.group)]
    mixed = np.isin(steps.group, [group for group, won in outcomes if len(np.unique(won)) == 2])
    alone = estimate(name, taken(steps, np.flatnonzero(mixed)), **options).total
    np.testing.assert_allclose(estimate(name, steps, **options).total[mixed], alone, atol=1e-7)


@quick
@given(batch=batches)
def test_without_groups_a_batch_that_ended_alike_has_nothing(batch):
    steps = build(batch)
    same = replace(steps, success=np.zeros(len(steps), dtype=bool), goal=None)
    assert not estimate("reinforce_plus_plus", same).total.any()
    # A critic says what was to be expected: outcomes gate nothing.
    np.testing.assert_array_equal(estimate("gae", same).total, estimate("gae", steps).total)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {}),
        ("grpo", {"normalization": "mean"}),
        ("grpo", {"deviation": "batch", "epsilon": 1e-4}),
        ("dr_grpo", {}),
        ("rloo", {}),
        ("maxrl", {}),
        ("gpg", {}),
        ("grpo_length_penalty", {"output": 0.3, "turns": 0.2}),
        ("gdpo", {"whiten": "none"}),
    ],
)
@quick
@given(batch=batches)
def test_advantages_of_a_group_sum_to_zero_over_trajectories(name, options, batch):
    steps = build(batch)
    total = estimate(name, steps, **options).total
    first = first_steps(steps)
    for group in np.unique(steps.group):
        members = first[(steps.group[first] == group) & steps.valid[first]]
        assert total[members].sum() == pytest.approx(0.0, abs=1e-7)


def weighted_by_tokens(steps: Steps, total):
    return total * steps.tokens


@pytest.mark.parametrize(
    ("name", "options", "key", "weighted"),
    [
        ("opo", {}, "group", weighted_by_tokens),
        ("grpo", {"row_statistics": True}, "group", None),
        ("discounted_grpo", {}, "group", None),
        ("graphgpo", {"episode_weight": 0.0}, "state", None),
        ("hgpo", {"history": 0, "normalization": "mean"}, "state", None),
    ],
)
@quick
@given(batch=batches)
def test_advantages_sum_to_zero_over_steps(name, options, key, weighted, batch):
    steps = build(batch)
    total = estimate(name, steps, **options).total
    values = weighted(steps, total) if weighted else total
    for group in np.unique(steps.group):
        members = steps.valid & (steps.group == group)
        if weighted and not steps.tokens[members].any():
            assert not total[members].any()
        for one in np.unique(getattr(steps, key)[members]):
            cell = members & (getattr(steps, key) == one)
            # Without a deviation or with the same one for the whole cell, whatever it is.
            assert values[cell].sum() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("per", ["token", "step"])
@quick
@given(batch=batches)
def test_whitened_advantages_of_a_batch_sum_to_zero(name, per, batch):
    steps = build(batch)
    total = estimate(name, steps, per=per).total
    weight = steps.tokens if per == "token" else np.ones(len(steps))
    weight = np.where(steps.valid, weight, 0)
    assert (weight * total).sum() == pytest.approx(0.0, abs=1e-6)
    if (np.abs(weight * total) > 1e-3).any():  # not what rounding leaves of a difference that is none
        assert (weight * total**2).sum() / (weight.sum() - 1) == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reinforce_plus_plus_baseline", {"per": "token"}),
        ("reinforce_plus_plus_baseline", {"per": "step"}),
        ("gdpo", {"whiten": "tokens"}),
        ("gdpo", {"whiten": "trajectories"}),
    ],
)
def test_rounding_moves_no_group_without_spread_off_zero(name, options):
    # Returns whose distances cancel out over the batch, all but for rounding; the last group ended alike.
    returns = [[1.0, -0.1, 0.3, 0.7], [1.0, 0.1, 0.9, 0.0], [0.7, 0.7, 0.7]]
    steps = build([(group, True, one > 0.5, 1, [(0, one, 2)]) for group, all_ in enumerate(returns) for one in all_])
    total = estimate(name, steps, **options).total
    assert not total[steps.group == 2].any()
    assert total[steps.group < 2].all()


@pytest.mark.parametrize(
    ("name", "absent", "said"),
    [
        ("opo", "tokens", "opo needs Steps.tokens, which is None; .*use dr_grpo or rloo"),
        ("grpo_length_penalty", "tokens", "use dr_grpo"),
        ("reinforce_plus_plus", "tokens", "set its option per to step"),
        ("reinforce_plus_plus_baseline", "tokens", "set its option per to step"),
        ("gdpo", "streams", "give rewards by name, or use grpo"),
        ("gdpo", "tokens", "set its option whiten to trajectories"),
        ("graphgpo", "goal", "say which trajectories succeeded, or use gigpo"),
        ("graphgpo", "final_state", "NO_STATE where it isn't known"),
        ("gae", "value", "which only a run has: recordings don't hold them"),
    ],
)
def test_what_is_not_there_is_named_with_the_remedy(name, absent, said):
    steps = build([(0, True, True, 1, [(0, 1.0, 2)]), (0, True, False, 1, [(0, 0.0, 2)])])
    with pytest.raises(ValueError, match=said):
        estimate(name, replace(steps, **{absent: None}))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("grpo", {"deviation": "batsh"}, "unknown deviation 'batsh'; known are group, batch"),
        ("grpo", {"deviation": "batch", "normalization": "mean"}, "take mean_std"),
        ("grpo_passk", {"normalization": "std"}, "unknown normalization 'std'"),
        ("gdpo", {"whiten": "steps"}, "unknown whiten 'steps'; known are tokens, trajectories, none"),
        ("gdpo", {"weights": "outcom=1"}, "unknown stream 'outcom'; did you mean 'outcome'"),
        ("gdpo", {"weights": "outcome"}, "'outcome' should be NAME=NUMBER"),
        ("gdpo", {"weights": "outcome=nan"}, "should be NAME=NUMBER"),
        ("gdpo", {"weights": "outcome=1, outcome=2"}, "outcome is named twice, at last by 'outcome=2'"),
        ("gdpo", {"weights": "outcome=0, penalty=0"}, "leaves nothing to learn from; give one of outcome, penalty"),
        ("grpo", {"deviation": "batch", "normalization": "std"}, "unknown normalization 'std'"),
        ("grpo", {"min_deviation": -0.1}, "min_deviation is -0.1; it lies in \\[0, inf\\)"),
        ("gigpo", {"weight": float("inf")}, "weight is inf; it lies in \\[0, 1e\\+06\\]"),
        ("gigpo", {"weight": -1.0}, "weight is -1"),
        ("graphgpo", {"goal_reward": -10.0}, "goal_reward is -10"),
        ("graphgpo", {"weight": 0.0, "episode_weight": 0.0}, "nothing is left to learn from"),
        ("grpo_length_penalty", {"output": float("inf")}, "output is inf"),
        ("reinforce_plus_plus", {"per": "tokens"}, "unknown per 'tokens'; known are token, step"),
        ("reinforce_plus_plus", {"gamma": 1.1}, "gamma is 1.1; it lies in \\[0, 1\\]"),
        ("hgpo", {"form": "papers"}, "unknown form 'papers'"),
        ("hgpo", {"history": -1}, "history is -1"),
        ("hgpo", {"form": "paper", "base": True}, "drop_zeros and base are of form 'code'"),
        ("graphgpo", {"omega": 2.0}, "omega is 2"),
        ("graphgpo", {"form": "distance"}, "known are code, paper, gain"),
        ("graphgpo", {"unknown_end": "drop"}, "known are left_out, dead_end"),
        ("gae", {"whiten": "all"}, "known are none, steps, tokens"),
        ("maxrl", {"epsilon": -1.0}, "epsilon is -1; it lies in"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, options, said):
    with pytest.raises(ValueError, match=said):
        estimate(name, build([(0, True, True, 1, [(0, 1.0, 2)])]), **options)
