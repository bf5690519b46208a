"""The end of a lease's life, while calls are under way."""

import asyncio

import pytest

from tapforge_envs.protocol import EnvironmentFault, Reason
from tapforge_envs.slots.lease_life import LeaseLife


def loop_time() -> float:
    return asyncio.get_running_loop().time()


async def slow_to_go(asked: asyncio.Event, gone: asyncio.Event) -> None:
    """A call that takes a while to be cut off."""
    try:
        await asyncio.Event().wait()
    finally:
        asked.set()
        await gone.wait()


@pytest.mark.parametrize("then", [lambda life: life.extend(loop_time() + 99), lambda life: life.lose("so be it")])
async def test_what_is_heard_while_a_call_is_being_cut_off_is_taken_in(then):
    life, asked, gone = LeaseLife("phone", loop_time() + 0.01, clock=loop_time), asyncio.Event(), asyncio.Event()
    call = asyncio.create_task(life.within(slow_to_go(asked, gone)))
    await asked.wait()
    then(life)
    gone.set()
    with pytest.raises(EnvironmentFault) as fault:
        await call
    assert fault.value.reason is Reason.LEASE_LOST


async def test_all_calls_under_a_lost_claim_are_cut_off_and_none_is_let_go_again():
    life = LeaseLife("phone", loop_time() + 99, clock=loop_time)
    calls = [asyncio.create_task(life.within(asyncio.Event().wait())) for _ in range(3)]
    await asyncio.sleep(0)
    life.lose("somebody else has it")
    life.extend(loop_time() + 999)
    async with asyncio.timeout(30):
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all("somebody else has it" in str(end) for end in ends)
