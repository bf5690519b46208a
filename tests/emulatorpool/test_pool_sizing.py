"""How many slots a pool should have, over time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import NOW, decide, gone, pool, ready

from tapforge_api.pool import EmulatorPoolStatus
from tapforge_operator.broker.types import Held
from tapforge_operator.emulatorpool.scaling import size
from tapforge_operator.emulatorpool.state import History, Observed


def scaled(**scaling: int) -> dict:
    return {"scaling": {"maxReplicas": 20, "idleSeconds": 300, **scaling}}


FRESH = History(status=EmulatorPoolStatus(observed_generation=1))


@pytest.mark.parametrize(
    ("scaling", "claimed", "waiting", "wanted", "desired"),
    [
        ({}, 0, 0, 0, 0),
        ({"minReplicas": 3}, 0, 0, 0, 3),
        ({"warmSpares": 2}, 0, 0, 0, 0),
        ({"warmSpares": 2}, 4, 0, 0, 6),
        ({"warmSpares": 2}, 4, 3, 0, 9),
        ({"warmSpares": 2}, 4, 3, 12, 14),
        ({"warmSpares": 0}, 0, 0, 5, 5),
        ({"warmSpares": 2}, 19, 0, 0, 20),
        ({"minReplicas": 8, "warmSpares": 1}, 2, 0, 0, 8),
    ],
)
def test_a_pool_is_as_large_as_it_is_claimed_and_asked_for(
    scaling: dict, claimed: int, waiting: int, wanted: int, desired: int
) -> None:
    of = pool(**scaled(**scaling))
    assert size(of, Observed(waiting=waiting, wanted=wanted), claimed, claimed, FRESH, NOW).desired == desired


def test_replicas_are_taken_as_they_are() -> None:
    of = pool(replicas=7)
    assert size(of, Observed(waiting=50, wanted=50), 50, 50, FRESH, NOW).desired == 7


def test_an_idle_pool_shrinks_to_nothing_and_wakes_at_once() -> None:
    of = pool(**scaled(warmSpares=1))
    slots = [ready(of, i) for i in range(4)]
    held = {slot.uid: Held("run") for slot in slots[:3]}
    busy = decide(of, slots, held=held, wanted=3)
    assert busy.quiet
    idle = decide(of, slots, busy.history, NOW + 10)
    assert idle.quiet, "the run may come back"
    assert idle.requeue_after == pytest.approx(300)
    asleep = decide(of, slots, idle.history, NOW + 10 + 300)
    assert set(gone(asleep).values()) == {"ScaleIn"}
    assert len(asleep.deletes) == 4
    nothing = decide(of, [], asleep.history, NOW + 1000)
    assert nothing.quiet
    assert nothing.status.desired_replicas == 0
    awake = decide(of, [], nothing.history, NOW + 2000, wanted=2)
    assert len(awake.creates) == 3


def test_a_restart_keeps_the_size_for_as_long_as_an_idle_slot_is_kept() -> None:
    of = pool(**scaled())
    slots = [ready(of, i) for i in range(6)]
    for history in (History.of(EmulatorPoolStatus(observed_generation=1, desired_replicas=6)), History()):
        first = decide(of, slots, history)
        assert first.quiet
        assert first.requeue_after == pytest.approx(300)
        assert len(decide(of, slots, first.history, NOW + 300).deletes) == 6


def test_more_than_the_largest_size_is_said() -> None:
    of = pool(**scaled(maxReplicas=4))
    made = decide(of, [ready(of, i) for i in range(2)], wanted=10)
    assert made.status.desired_replicas == 4
    reconciling = next(c for c in made.status.conditions if c.type == "Reconciling")
    assert "7 more are asked for than maxReplicas allows" in reconciling.message


def test_claimed_slots_are_never_beyond_need() -> None:
    of = pool(**scaled(warmSpares=0))
    slots = [ready(of, i) for i in range(5)]
    held = {slot.uid: Held("run") for slot in slots[1:3]}
    made = decide(of, slots, FRESH, held=held)
    assert set(gone(made)) == {"uid-0", "uid-3", "uid-4"}
    assert not made.revoke


@given(
    steps=st.lists(
        st.tuples(st.floats(0, 400), st.integers(0, 30)),
        min_size=1,
        max_size=60,
    ),
    least=st.integers(0, 5),
    spares=st.integers(0, 5),
)
def test_the_size_is_the_largest_need_of_the_idle_time(steps: list[tuple[float, int]], least: int, spares: int) -> None:
    of = pool(**scaled(minReplicas=least, warmSpares=spares))
    history, now = FRESH, NOW
    needed: list[tuple[float, int]] = []  # (until when, how many)
    for wait, wanted in steps:
        now += wait
        need = min(20, max(least, wanted + spares if wanted else 0))
        if needed:
            needed[-1] = (now, needed[-1][1])
        needed.append((now, need))
        found = size(of, Observed(wanted=wanted), 0, 0, history, now)
        expected = max(n for until, n in needed if now - until < 300)
        assert found.desired == expected
        assert (found.shrinks_at is None) == (found.desired == need)
        assert found.needs is not None
        assert len(found.needs) <= 21
        history = replace(history, needs=found.needs)


@given(jump=st.sampled_from([-1e6, -10.0]))
def test_a_clock_that_is_set_back_keeps_no_slot_longer_than_idle_seconds(jump: float) -> None:
    of = pool(**scaled())
    slots = [ready(of, i) for i in range(6)]
    busy = decide(of, slots, FRESH, wanted=5)
    idle = decide(of, slots, busy.history, NOW + jump)
    assert idle.quiet
    assert len(decide(of, slots, idle.history, NOW + jump + 301).deletes) == 6
