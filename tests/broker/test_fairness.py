"""Who gives slots back to whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_operator.broker.scheduling import Demand, preemptions, shares, within_reach


def demands(*rows):
    """(name, priority, held, wanted) each."""
    return [Demand((name, priority), held, wanted) for name, priority, held, wanted in rows]


@pytest.mark.parametrize(
    ("rows", "coming", "expected"),
    [
        # one has all, another one wants: half each
        ([("a", 0, 8, 0), ("b", 0, 0, 8)], 0, {"a": 4}),
        # no more than is wanted
        ([("a", 0, 8, 0), ("b", 0, 0, 3)], 0, {"a": 3}),
        # what comes free anyway is not asked for
        ([("a", 0, 8, 0), ("b", 0, 0, 8)], 3, {"a": 2}),
        ([("a", 0, 4, 0), ("b", 0, 0, 4)], 4, {}),
        # from the one that has too much only
        ([("a", 0, 6, 0), ("b", 0, 2, 0), ("c", 0, 0, 9)], 0, {"a": 3}),
        ([("a", 0, 5, 0), ("b", 0, 4, 0), ("c", 0, 0, 9)], 0, {"a": 2, "b": 1}),
        # an uneven rest is no reason
        ([("a", 0, 3, 9), ("b", 0, 2, 9)], 0, {}),
        ([("a", 0, 2, 9), ("b", 0, 2, 9), ("c", 0, 1, 9)], 0, {}),
        # more than there are runs
        ([("a", 0, 2, 0), ("b", 0, 0, 1), ("c", 0, 0, 1), ("d", 0, 0, 1)], 0, {"a": 1}),
        # priority takes all, and is never asked for the sake of less
        ([("a", 0, 8, 0), ("b", 5, 0, 6)], 0, {"a": 6}),
        ([("a", 5, 8, 0), ("b", 0, 0, 6)], 0, {}),
        # the lowest gives first
        ([("a", 0, 4, 0), ("b", 1, 4, 0), ("c", 2, 0, 6)], 0, {"a": 4, "b": 2}),
        # nobody wants: nobody gives
        ([("a", 0, 8, 0), ("b", 0, 0, 0)], 0, {}),
        ([], 5, {}),
    ],
)
def test_who_is_asked(rows, coming, expected):
    asked = preemptions(demands(*rows), coming)
    assert {claimant[0]: count for claimant, count in asked.items()} == expected


demanding = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6).map(
    lambda rows: demands(*[(f"run-{k}", *row) for k, row in enumerate(rows)])
)


@given(demanding, st.integers(0, 10))
def test_shares_are_max_min_fair_by_priority(some, coming):
    capacity = sum(s.held for s in some) + coming
    fair = shares(capacity, some)
    demand = {s.claimant: s.held + s.wanted for s in some}
    assert sum(fair.values()) == min(capacity, sum(demand.values()))
    for one in some:
        assert 0 <= fair[one.claimant] <= demand[one.claimant]
        for other in some:
            short = fair[one.claimant] < demand[one.claimant]
            if short and other.priority == one.priority:
                assert fair[other.claimant] <= fair[one.claimant] + 1
            if short and other.priority < one.priority:
                assert fair[other.claimant] == 0


@given(demanding, st.integers(0, 10))
def test_what_is_asked_for_helps_and_ends(some, coming):
    asked = preemptions(some, coming)
    fair = shares(sum(s.held for s in some) + coming, some)
    missing = {s.claimant: max(0, fair[s.claimant] - s.held) for s in some}
    assert sum(asked.values()) == max(0, sum(missing.values()) - coming)
    for one in some:
        assert asked.get(one.claimant, 0) <= max(0, one.held - fair[one.claimant])
    # Given back and handed on, nothing is asked any more: no ping-pong.
    pot = sum(asked.values()) + coming
    after = []
    for one in some:
        gets = min(missing[one.claimant], pot)
        pot -= gets
        gave = asked.get(one.claimant, 0)
        after.append(Demand(one.claimant, one.held - gave + gets, one.wanted + gave - gets))
    assert not preemptions(after, pot)


@pytest.mark.parametrize(
    ("wanted", "priority", "held", "free", "reach"),
    [
        (4, 0, {}, 3, 3),
        (4, 0, {("other", 0): 8}, 0, 4),  # its share, which is more than it wants
        (2, 0, {("other", 0): 8}, 0, 2),
        (8, 0, {("other", 0): 8}, 0, 4),
        (8, 0, {("other", 0): 8}, 6, 7),
        (8, 0, {("other", 5): 8}, 0, 0),
        (8, 0, {("other", 5): 8}, 3, 3),
        (8, 5, {("other", 0): 8}, 0, 8),
        (4, 0, {("me", 0): 2, ("me", 1): 1, ("other", 5): 8}, 1, 4),  # its own count, at whatever priority
    ],
)
def test_what_a_claimant_can_have_now(wanted, priority, held, free, reach):
    assert within_reach(("me", priority), wanted, held, free) == reach
