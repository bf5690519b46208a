"""The clock by which claims end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tapforge_operator.broker.renewals import RunningClock


class Machine:
    def __init__(self) -> None:
        self.time = 5000.0

    def __call__(self) -> float:
        return self.time


def test_it_runs_with_the_operator():
    machine = Machine()
    clock = RunningClock(1.0, machine)
    for _ in range(40):
        machine.time += 0.25
        clock.tick()
    assert clock.now() == 10.0
    machine.time += 0.5
    assert clock.now() == 10.5


def test_time_in_which_the_process_stood_still_does_not_count():
    machine = Machine()
    clock = RunningClock(1.0, machine)
    machine.time += 3600
    assert clock.now() == 1.0
    clock.tick()
    assert clock.now() == 1.0
    machine.time += 0.5
    assert clock.now() == 1.5


@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), max_size=30))
def test_it_never_goes_back_nor_runs_ahead(steps):
    machine = Machine()
    clock = RunningClock(1.0, machine)
    last, real = clock.now(), machine.time
    for change, tick in steps:
        machine.time += change
        now = clock.tick() if tick else clock.now()
        assert last <= now <= machine.time - real + 1e-6
        last = now
