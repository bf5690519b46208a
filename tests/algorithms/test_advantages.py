"""Properties of grpo, rloo and gigpo that hold for any batch, and the refusal of arrays that make no sense. What every
estimator promises: `test_every_estimator.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tapforge_trainer.algorithms.group_statistics import compare, discounted_to_go
from tapforge_trainer.algorithms.registry import estimate
from tapforge_trainer.algorithms.steps import NO_STATE, Steps

VARIANTS = [
    ("grpo", {"normalization": "mean_std"}),
    ("grpo", {"normalization": "mean"}),
    ("grpo", {"normalization": "mean_std", "row_statistics": True}),
    ("rloo", {}),
    ("gigpo", {"normalization": "mean_std"}),
    ("gigpo", {"normalization": "mean", "gamma": 0.9, "weight": 0.5}),
    ("gigpo", {"normalization": "mean", "row_statistics": True}),
]
quick = settings(max_examples=25, deadline=None)
in_groups = pytest.mark.parametrize(("name", "options"), VARIANTS)

trajectory = st.tuples(
    st.integers(0, 2),  # group
    st.booleans(),  # valid
    st.lists(st.tuples(st.integers(NO_STATE, 3), st.sampled_from([0.0, 0.0, 1.0, -0.5, 0.1])), min_size=1, max_size=6),
)
batches = st.lists(trajectory, min_size=1, max_size=9)


def build(trajectories) -> Steps:
    rows = [(g, t, state, reward, valid) for t, (g, valid, steps) in enumerate(trajectories) for state, reward in steps]
    return Steps(*(np.array(column) for column in zip(*rows, strict=True)))


@in_groups
@quick
@given(batch=batches, reward=st.sampled_from([0.0, 0.1, 1.0, -3.3]))
def test_group_without_variance_gives_exactly_zero(name, options, batch, reward):
    # One and the same reward at the end of trajectories of one length: nothing to tell apart, even after discounting.
    steps = build([(group, valid, [(0, 0.0), (0, reward)]) for group, valid, _ in batch])
    steps = replace(steps, state=np.tile([0, 1], len(batch)))
    assert not estimate(name, steps, **options).total.any()


@in_groups
@quick
@given(batch=batches, success=st.lists(st.booleans(), min_size=9, max_size=9))
def test_only_what_ended_differently_is_compared(name, options, batch, success):
    steps = build(batch)
    won = np.array(success)[steps.trajectory]
    result = estimate(name, replace(steps, success=won), **options)
    for group in np.unique(steps.group):
        members = steps.valid & (steps.group == group)
        if len(np.unique(won[members])) < 2:
            assert not result.total[members].any()
        for state in np.unique(steps.state):
            same = members & (steps.state == state)
            if len(np.unique(won[same])) < 2:
                assert not result.step[same].any()
    # Groups in which both outcomes occur have the episode advantages that they had without outcomes.
    mixed = [g for g in np.unique(steps.group) if len(np.unique(won[steps.valid & (steps.group == g)])) == 2]
    kept = np.isin(steps.group, mixed)
    np.testing.assert_array_equal(result.episode[kept], estimate(name, steps, **options).episode[kept])


@in_groups
@quick
@given(batch=batches, scale=st.floats(0.5, 20), shift=st.floats(-5, 5))
@example(batch=[(0, True, [(0, -0.5), (0, 0.1)]), (0, True, [(0, 0.1), (0, -0.5)])], scale=1.0, shift=1.0)
def test_scaling_and_shifting_rewards(name, options, batch, scale, shift):
    steps = build(batch)
    if options.get("normalization") == "mean_std":
        # Small beside every real spread, large beside what rounding leaves of a spread that is none (1e-16).
        options = options | {"epsilon": 1e-9}
    total = estimate(name, steps, **options).total
    scaled = estimate(name, replace(steps, reward=steps.reward * scale), **options).total
    expected = total if options.get("normalization") == "mean_std" else total * scale
    np.testing.assert_allclose(scaled, expected, rtol=1e-4, atol=1e-4)
    # The same bonus to every trajectory, on its last step, changes no episode advantage.
    last = np.zeros(len(steps), dtype=bool)
    last[[np.flatnonzero(steps.trajectory == t)[-1] for t in np.unique(steps.trajectory)]] = True
    shifted = estimate(name, replace(steps, reward=steps.reward + shift * last), **options)
    np.testing.assert_allclose(shifted.episode, estimate(name, steps, **options).episode, atol=1e-4)


@quick
@given(values=st.lists(st.sampled_from([0.0, 1.0, -0.1, 0.3, 0.7]), min_size=2, max_size=12), least=st.booleans())
def test_a_comparison_is_one_formula_to_the_last_bit(values, least):
    """A run that goes on after an update of tapforge has the advantages that it would have had."""
    values, label, least = np.array(values), np.zeros(len(values), dtype=np.int64), 0.1 * least
    distance = values - np.bincount(label, values) / len(values)
    deviation = np.sqrt(np.bincount(label, distance**2) / (len(values) - 1))
    expected = distance / (np.maximum(deviation, least) + 1e-6) if len(set(values)) > 1 else 0.0 * values
    np.testing.assert_array_equal(compare(values, label, 1, "mean_std", 1e-6, least, None), expected)


@quick
@given(batch=batches)
def test_steps_without_a_state_have_no_step_advantage(batch):
    steps = build(batch)
    result = estimate("gigpo", steps, normalization="mean_std")
    keyless = (steps.state == NO_STATE) & steps.valid
    assert not result.step[keyless].any()
    assert (result.state_group_size[keyless] == 1).all()
    blind = estimate("gigpo", replace(steps, state=np.full(len(steps), NO_STATE)), normalization="mean_std")
    np.testing.assert_array_equal(blind.total, estimate("grpo", steps, normalization="mean_std").total)


@quick
@given(batch=batches)
def test_state_groups_do_not_cross_groups(batch):
    steps = build(batch)
    sizes = estimate("gigpo", steps).state_group_size
    for i in np.flatnonzero(steps.valid):
        if steps.state[i] != NO_STATE:
            same = steps.valid & (steps.group == steps.group[i]) & (steps.state == steps.state[i])
            assert sizes[i] == same.sum()


def test_step_credit_tells_steps_of_one_trajectory_apart():
    # All start in state 0; one goes right (state 1, success), two go wrong (state 2).
    steps = build([(0, True, [(0, 0), (1, 1)]), (0, True, [(0, 0), (2, 0)]), (0, True, [(0, 0), (2, 0)])])
    result = estimate("gigpo", steps, normalization="mean", gamma=0.9)
    np.testing.assert_allclose(result.step, [0.6, 0, -0.3, 0, -0.3, 0], atol=1e-12)
    np.testing.assert_array_equal(result.state_group_size, [3, 1, 3, 2, 3, 2])


@quick
@given(
    values=st.lists(st.floats(-10, 10), max_size=70),
    labels=st.lists(st.integers(0, 3), min_size=70, max_size=70),
    discount=st.floats(0, 1),
)
def test_discounted_sums_equal_the_recursion(values, labels, discount):
    labels = np.array(labels[: len(values)], dtype=np.int64)
    expected, running = [0.0] * len(values), dict.fromkeys(range(4), 0.0)
    for i in reversed(range(len(values))):
        running[labels[i]] = values[i] + discount * running[labels[i]]
        expected[i] = running[labels[i]]
    np.testing.assert_allclose(discounted_to_go(np.array(values, dtype=float), labels, discount), expected, atol=1e-9)


def test_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match="one entry per step"):
        Steps([0], [0, 1], [0], [0.0], [True])
    with pytest.raises(ValueError, match="reward of step 1 is nan"):
        Steps([0, 0], [0, 1], [0, 0], [0.0, np.nan], [True, True])
    with pytest.raises(ValueError, match="trajectory 5 has steps in two groups"):
        estimate("grpo", Steps([0, 1], [5, 5], [0, 0], [0.0, 1.0], [True, True]))
    with pytest.raises(ValueError, match="trajectory 5 is valid at some steps"):
        estimate("grpo", Steps([0, 0], [5, 5], [0, 0], [0.0, 1.0], [True, False]))
    with pytest.raises(ValueError, match="trajectory 5 succeeded at some steps"):
        estimate("grpo", Steps([0, 0], [5, 5], [0, 0], [0.0, 1.0], [True, True], success=[True, False]))
    pair = Steps([0, 0], [0, 0], [0, 0], [0.0, 1.0], [True, True])
    with pytest.raises(ValueError, match="reward 'outcome' of step 1 is inf"):
        replace(pair, streams={"outcome": [0.0, np.inf]})
    with pytest.raises(ValueError, match="shapes are .*'streams outcome': \\(1,\\)"):
        replace(pair, streams={"outcome": [0.0]})
    with pytest.raises(ValueError, match="step 1 has -2 response tokens"):
        replace(pair, tokens=[0, -2])
    with pytest.raises(ValueError, match="trajectory 0 has two final states"):
        replace(pair, final_state=[1, 2])
    with pytest.raises(ValueError, match="trajectory 0 reached its goal at some steps only"):
        replace(pair, goal=[True, False])
    with pytest.raises(ValueError, match="trajectory 0 succeeded by `success` or by `goal`, not by both"):
        replace(pair, success=[True, True], goal=[False, False])
    one = Steps([0], [0], [0], [1.0], [True])
    with pytest.raises(ValueError, match="gamma is 1.5"):
        estimate("gigpo", one, gamma=1.5)
    with pytest.raises(ValueError, match="unknown normalization 'std'"):
        estimate("gigpo", one, normalization="std")
    with pytest.raises(ValueError, match="critic"):
        estimate("gae", one)
