"""Intervals of success rates: known values, and how they behave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapforge_envs.protocol import Outcome
from tapforge_trainer.statistics import by_template, gain, success_of, wilson

quick = settings(max_examples=30, deadline=None)
counts = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)],
)
def test_wilson_against_published_values(successes, episodes, low, high):
    interval = wilson(successes, episodes)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-4)


@quick
@given(counts)
def test_wilson_holds_the_rate_and_shrinks(count):
    successes, episodes = count
    interval = wilson(successes, episodes)
    assert 0.0 <= interval.low <= successes / episodes <= interval.high <= 1.0
    ten_fold = wilson(successes * 10, episodes * 10)
    assert ten_fold.high - ten_fold.low < interval.high - interval.low
    mirrored = wilson(episodes - successes, episodes)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((interval.low, interval.high))


def test_no_episodes_no_interval():
    assert wilson(0, 0) is None
    assert success_of([]).rate is None
    with pytest.raises(ValueError, match="3 successes of 2"):
        wilson(3, 2)


def test_templates_that_agree_within_themselves_widen_the_interval():
    # 10 templates of 20 episodes, each wholly solved or wholly failed: 10 facts, not 200.
    agreeing = [(f"t{t}", t < 6) for t in range(10) for _ in range(20)]
    mixed = [(f"t{t}", i < 12) for t in range(10) for i in range(20)]
    wide, narrow = by_template(agreeing), by_template(mixed)
    plain = wilson(120, 200)
    assert wide.high - wide.low > 3 * (plain.high - plain.low)
    assert narrow == plain


def test_certainty_is_never_claimed():
    everything = by_template([(f"t{t}", True) for t in range(10) for _ in range(5)])
    assert everything == wilson(50, 50)
    assert everything.low < 0.95
    assert by_template([("only", True), ("only", False)]) is None


def test_clustered_interval_covers_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(5)
    covered = 0
    for run in range(200):
        rates = random.beta(3, 2, size=20)  # over all templates: 0.6
        episodes = [(f"t{t}", bool(x)) for t, rate in enumerate(rates) for x in random.random(10) < rate]
        interval = by_template(episodes, seed=run, draws=500)
        covered += interval.low <= 0.6 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


@quick
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30), st.integers(0, 9))
def test_same_seed_same_interval_in_any_order(episodes, seed):
    assert by_template(episodes, seed=seed) == by_template(episodes[::-1], seed=seed)


def test_invalid_episodes_count_as_attempted_only():
    episodes = (
        [("a", Outcome.SUCCESS)] * 6 + [("b", Outcome.FAILURE)] * 2 + [("c", Outcome.INVALID)] * 2 + [("a", None)]
    )
    success = success_of(episodes)
    assert (success.successes, success.valid, success.invalid, success.attempted) == (6, 8, 2, 10)
    assert (success.rate, success.rate_attempted) == (0.75, 0.6)
    assert success.templates == 2
    assert success.interval == wilson(6, 8)
    assert success.interval_attempted == wilson(6, 10)


def test_gain_is_paired_by_task():
    before = {
        ("a", "1"): [False, True],
        ("a", "2"): [False],
        ("b", "1"): [True],
        ("b", "2"): [False],
        ("c", "1"): [True],
    }
    after = {("a", "1"): [True, True], ("a", "2"): [True], ("b", "1"): [True], ("b", "2"): [False], ("d", "1"): [False]}
    result = gain(before, after)
    assert result.tasks == 4
    assert result.difference == pytest.approx(1.5 / 4)
    assert result.interval.low <= result.difference <= result.interval.high
    assert gain(before, {("d", "1"): [True]}) is None
    assert gain({("a", "1"): [False]}, {("a", "1"): [True]}).interval is None
