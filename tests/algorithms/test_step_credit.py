"""HGPO and GraphGPO on cases worked out by hand: what outcomes gate, unknown ends, and how far credit reaches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tapforge_trainer.algorithms.graphgpo import graphgpo
from tapforge_trainer.algorithms.hgpo import hgpo
from tapforge_trainer.algorithms.steps import NO_STATE, Steps

OUT = 99  # a state that nobody leaves


def walks(*episodes: tuple[list[int], bool, int]) -> Steps:
    """One group: the states of each episode, whether it succeeded (reward 1 at its end), and where it ended."""
    rows = [
        (number, state, float(won and at == len(states) - 1), end, won)
        for number, (states, won, end) in enumerate(episodes)
        for at, state in enumerate(states)
    ]
    trajectory, state, reward, end, won = (np.array(column) for column in zip(*rows, strict=True))
    zeros = np.zeros(len(rows), dtype=int)
    return Steps(zeros, trajectory, state, reward, zeros == 0, final_state=end, goal=won)


def by_outcome(steps: Steps) -> Steps:
    return replace(steps, success=steps.goal)


# --- HGPO -------------------------------------------------------------------------------------------------------------

#: three come to state 2, two of these from 0
MEET = walks(([0, 2], True, OUT), ([0, 2], False, OUT), ([1, 2], True, OUT))


def test_levels_of_code_and_of_paper():
    options = {"normalization": "mean", "gamma": 1.0, "history": 1, "epsilon": 0.0}
    code = hgpo(MEET, form="code", **options).total
    paper = hgpo(MEET, form="paper", **options).total
    # State 2: 1, 0, 1 against 2/3; after 0, 2: 1, 0 against 1/2. Weights 2 and 3, and 1 and 2.
    np.testing.assert_allclose(code[[1, 3, 5]], [(2 / 3 + 3 / 2) / 5, (-4 / 3 - 3 / 2) / 5, 1 / 3])
    np.testing.assert_allclose(paper[[1, 3, 5]], [(1 / 3 + 1) / 3, (-2 / 3 - 1) / 3, (1 / 3) / 3])
    # First steps have one level in code; in the paper, what began alike is compared at each.
    np.testing.assert_allclose(code[[0, 2, 4]], [1 / 2, -1 / 2, 0.0])
    np.testing.assert_allclose(paper[[0, 2, 4]], [1 / 2, -1 / 2, 0.0])


def test_a_cell_that_ended_alike_is_no_level_where_outcomes_gate():
    # After 0, 2 both succeed, at different times: a level by reward, none by outcome.
    steps = walks(([0, 2], True, OUT), ([0, 2, 3], True, OUT), ([1, 2], False, OUT))
    options = {"normalization": "mean", "gamma": 0.5, "history": 1, "epsilon": 0.0}
    first = (1 - 1 / 2) / 1
    by_reward, gated = hgpo(steps, **options).total, hgpo(by_outcome(steps), **options).total
    assert gated[1] == pytest.approx(first)
    assert by_reward[1] == pytest.approx((2 * first + 3 * (1 - 3 / 4)) / 5)


def test_a_step_as_good_as_its_cell_is_told_so_unless_zeros_are_dropped():
    # In state 2: 1, 0 and, on the cell's mean, 0.5; the last two came the same way.
    steps = walks(([1, 2], True, OUT), ([0, 2], False, OUT), ([0, 2, 3], True, OUT))
    options = {"normalization": "mean", "gamma": 0.5, "history": 1, "epsilon": 0.0}
    finer = 0.5 - 0.25
    assert hgpo(steps, **options).total[5] == pytest.approx(3 * finer / 5)
    assert hgpo(steps, drop_zeros=True, **options).total[5] == pytest.approx(finer)


def test_the_episodes_level_has_weight_one():
    options = {"normalization": "mean", "gamma": 1.0, "history": 0, "epsilon": 0.0}
    result = hgpo(MEET, base=True, **options)
    np.testing.assert_allclose(result.total[1], (1 / 3 + 2 * (1 / 3)) / 3)
    np.testing.assert_allclose(result.episode[1], (1 / 3) / 3)


def test_the_episodes_level_is_none_in_a_group_of_one():
    steps = walks(([0, 0], True, OUT))  # one state twice: compared with itself over time
    options = {"normalization": "mean", "gamma": 0.5, "history": 0}
    np.testing.assert_array_equal(hgpo(steps, base=True, **options).total, hgpo(steps, **options).total)
    assert hgpo(steps, **options).total.any()


# --- GraphGPO ---------------------------------------------------------------------------------------------------------


def test_edges_are_worth_how_near_to_the_goal_they_lead():
    # 0 -> 1 -> goal; 0 -> 2 -> 0 -> nowhere
    steps = walks(([0, 1], True, NO_STATE), ([0, 2, 0], False, OUT))
    step = graphgpo(steps, normalization="mean", omega=0.5, goal_reward=1.0).step
    # From 0: to 1 (1 edge from the goal), to 2 (3: by way of 0), and out (4: one more than the farthest).
    worth = np.array([1 / 2, 1 / 8, 1 / 16])
    np.testing.assert_allclose(step[[0, 2, 4]], worth - worth.mean())
    assert not step[[1, 3]].any()  # alone


@pytest.mark.parametrize("signal", ["outcome", "reward"])
def test_where_it_is_unknown_where_a_failure_ended(signal):
    steps = walks(([0, 1], True, NO_STATE), ([0, 2, 0], False, NO_STATE))
    steps = by_outcome(steps) if signal == "outcome" else steps
    options = {"normalization": "mean", "omega": 0.5, "goal_reward": 1.0}
    left_out = graphgpo(steps, **options)
    np.testing.assert_allclose(left_out.step[[0, 2, 4]], [3 / 16, -3 / 16, 0.0])
    assert left_out.state_group_size.tolist() == [2, 1, 2, 1, 1]
    dead_end = graphgpo(steps, unknown_end="dead_end", **options)
    known = graphgpo(replace(steps, final_state=np.where(steps.goal, NO_STATE, OUT)), **options)
    np.testing.assert_array_equal(dead_end.step, known.step)
    assert dead_end.state_group_size.tolist() == [3, 1, 3, 1, 3]


def test_in_a_mixed_group_states_of_failures_alone_are_compared_too():
    # Both leave 1 and fail; one of them straight to 2, from where another got to the goal.
    steps = walks(([2], True, NO_STATE), ([1, 2], False, OUT), ([1, 3, 2], False, OUT))
    step = graphgpo(by_outcome(steps)).step
    assert step[1] > 0 > step[3]
    all_won = replace(steps, goal=np.ones(6, dtype=bool))
    assert graphgpo(all_won).step.any()
    assert not graphgpo(by_outcome(all_won)).total.any()


@pytest.mark.parametrize(("omega", "far", "credit"), [(0.1, 5, 0.707), (0.1, 9, 0.04), (0.9, 40, 0.707)])
def test_how_far_from_the_goal_credit_reaches(omega, far, credit):
    # One edge nearer against one that stays, `far` edges from the goal.
    road = list(range(far))
    steps = walks((road, True, NO_STATE), ([0], False, 0))
    assert graphgpo(steps, omega=omega).step[0] == pytest.approx(credit, abs=0.005)


def test_what_a_step_gained_is_the_same_at_any_distance():
    steps = walks(([0, 1, 2, 3, 4], True, NO_STATE), ([0, 0, 1, 1, 2, 2, 3, 3, 4], True, NO_STATE))
    step = graphgpo(steps, form="gain", normalization="mean", omega=0.5, goal_reward=1.0).step
    np.testing.assert_allclose(step[:4], (1 - 1 / 2) / 3)  # to go on is worth 1, to stay a half
