"""Calls that outlive the pass that began them."""

from __future__ import annotations

import asyncio

import pytest

from tapforge_operator.under_way import UnderWay


async def test_a_pass_ends_when_few_enough_of_its_calls_are_under_way():
    told: list[None] = []
    calls: UnderWay[int] = UnderWay(lambda: told.append(None))
    ends = [asyncio.Event() for _ in range(4)]
    for number, end in enumerate(ends):
        calls.begin(number, end.wait())
    ends[0].set()
    settled = asyncio.create_task(calls.end_pass(pending=2))
    await asyncio.sleep(0.05)
    assert not settled.done()  # three are under way
    ends[1].set()
    await settled
    assert sorted(calls) == [2, 3] and calls.turn == 1 and not told
    # What goes on is known to the next pass, which does not wait for it.
    ends[2].set()
    await asyncio.sleep(0.05)
    await calls.end_pass()
    assert sorted(calls) == [3] and len(told) == 1
    await calls.end()


async def test_what_a_call_raised_after_its_pass_comes_out_of_the_next_one():
    calls: UnderWay[int] = UnderWay(lambda: None)
    gate = asyncio.Event()

    async def fails() -> None:
        await gate.wait()
        raise ValueError("no room")

    calls.begin(1, fails())
    await calls.end_pass(pending=1)
    gate.set()
    await asyncio.sleep(0.05)
    with pytest.raises(ValueError, match="no room"):
        await calls.end_pass()
    await calls.end_pass()
