"""A lost claim cuts its episode off, and whatever comes after it counts for nothing."""

import asyncio

import pytest
from broker_lab import TASK, a_lab, play
from leased import on
from phones import until
from small_broker import loop_time

from tapforge_envs.protocol import EnvironmentFault, Home, Reason
from tapforge_envs.slots.source import Verdict


async def test_a_claim_lost_in_mid_episode_cuts_it_off_and_its_end_changes_nothing(tmp_path):
    async with a_lab(tmp_path, 2) as lab, lab.claimed(1) as slots:
        lease = await slots.acquire(30)
        await on(lease).reset(TASK)
        await lab.server.set_faults(int(lease.slot[-1]), {"kind": "hung"})
        step = asyncio.create_task(on(lease).step(Home(), 0))
        await until(lab.server.hung)
        lab.broker.end(lease.slot)
        await lab.broker.hears()
        with pytest.raises(EnvironmentFault, match="the claim on it is lost: it expired") as caught:
            await step
        assert caught.value.reason is Reason.LEASE_LOST
        other = await slots.acquire(30)
        assert other.slot != lease.slot
        for call in (on(lease).evaluate(), on(lease).close(), on(lease).reset(TASK)):
            with pytest.raises(EnvironmentFault) as caught:
                await call
            assert caught.value.reason is Reason.LEASE_LOST
        await slots.release(lease, Verdict.CLEAN)
        assert (slots.size, slots.counts().leased) == (1, 1)
        await play(other)
        await slots.release(other, Verdict.CLEAN)
        assert not lab.broker.given, "a lost claim is not given back"


async def test_what_comes_after_the_end_of_a_claims_life_counts_for_nothing(tmp_path):
    """The machine slept: neither alarm nor renewal came in time, and the phone is somebody else's."""
    slept = 0.0

    def clock() -> float:
        return loop_time() + slept

    async with a_lab(tmp_path, 1) as lab, lab.claimed(1, clock=clock) as slots:
        lease = await slots.acquire(30)
        await on(lease).reset(TASK)
        await lab.server.set_faults(0, {"kind": "slow", "medianSeconds": 0.3, "sigma": 0})
        step = asyncio.create_task(on(lease).step(Home(), 0))
        await until(lambda: lab.server.slots[0].episode.results)  # it was done, and is not answered yet
        slept = 121.0
        with pytest.raises(EnvironmentFault, match="was not heard of for 120 s") as caught:
            await step
        assert caught.value.reason is Reason.LEASE_LOST
        with pytest.raises(EnvironmentFault):
            await on(lease).evaluate()
        await slots.release(lease, Verdict.CLEAN)
        assert slots.usable == 0
        lab.broker.end(lease.slot)  # it slept too


async def test_a_phone_that_is_claimed_again_while_the_old_claim_is_thought_to_live(tmp_path):
    async with a_lab(tmp_path, 1) as lab, lab.claimed(2) as slots:
        old = await slots.acquire(30)
        await on(old).reset(TASK)
        async with lab.broker.changed:  # an external URL: ended, and granted again after its rest
            lab.broker.phones["slot-0"].holder = None
            lab.broker.changed.notify_all()
        new = await slots.acquire(30)
        assert new.slot == old.slot and new.fence > old.fence
        await play(new)
        with pytest.raises(EnvironmentFault, match="fence 2 after 1"):
            await on(old).step(Home(), 0)
        await slots.release(old, Verdict.DIRTY)
        await on(new).step(Home(), 2)
        await slots.release(new, Verdict.CLEAN)
        assert (slots.size, slots.counts().free) == (1, 1)


async def test_the_phone_refuses_an_old_holder_that_nobody_told(tmp_path):
    """Its claim ended while it was stopped, and the slot was granted again: it goes on where it was, before the broker
    could tell it. The phone knows better, and its new holder notices nothing."""
    async with a_lab(tmp_path, 1) as lab, lab.claimed(1) as before:
        old = await before.acquire(30)
        await play(old)
        async with lab.broker.changed:
            lab.broker.phones["slot-0"].holder = None
        async with lab.claimed(1) as after:
            new = await after.acquire(30)
            assert new.slot == old.slot
            await on(new).reset(TASK)
            for call in (on(old).step(Home(), 2), on(old).reset(TASK), on(old).close()):
                with pytest.raises(EnvironmentFault, match="fence 1 is over: this phone has seen fence 2") as caught:
                    await call
                assert caught.value.reason is Reason.LEASE_LOST
            await before.release(old, Verdict.DIRTY, "its phone is lost")
            for index in range(3):
                await on(new).step(Home(), index)
            await after.release(new, Verdict.CLEAN)
            assert (after.size, after.counts().free) == (1, 1)
