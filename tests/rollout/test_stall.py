"""How long a loop stands still is seen, and costs no memory."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_trainer.rollout.stall import Histogram, StallMonitor


async def test_a_loop_that_is_held_is_seen_once():
    monitor = StallMonitor()
    await asyncio.sleep(0.05)
    time.sleep(0.3)  # noqa: ASYNC251 - it is what is looked for
    await asyncio.sleep(0.05)
    assert monitor.stalls().longest >= 0.3 - 0.03  # at most the distance of two wishes is missed
    assert monitor.stalls().longest == 0.0  # nothing has run since
    monitor.close()


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300), st.floats(0.01, 1.0))
def test_quantiles_are_right_to_five_percent(seconds, share):
    histogram = Histogram()
    for value in seconds:
        histogram.add(value)
    exact = sorted(seconds)[max(0, -int(-share * len(seconds) // 1) - 1)]
    assert histogram.longest == max(seconds)
    assert exact <= histogram.quantile(share) * (1 + 1e-9) <= max(exact * 1.0501, 1e-4 * 1.0001)


def test_nothing_seen_is_no_stall():
    assert Histogram().quantile(0.999) == 0.0
    assert pytest.approx(0.0) == Histogram().longest
