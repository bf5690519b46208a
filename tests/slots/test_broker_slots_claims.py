"""Claims: as many as wanted, one episode at a time, renewed, and given back when they are recalled or at the end."""

import asyncio
from dataclasses import replace

import pytest
from broker_lab import PACE, TASK, a_lab, play
from leased import on
from phones import until

from tapforge_envs.protocol import Home
from tapforge_envs.slots.source import NoSlot, SlotError, Verdict

# --- claims -----------------------------------------------------------------------------------------------------------


async def test_no_more_than_wanted_are_claimed_and_each_serves_one_episode_at_a_time(tmp_path):
    async with a_lab(tmp_path, 3) as lab, lab.claimed(2, priority=7) as slots:
        await until(lambda: slots.usable == 2)
        assert (slots.size, slots.counts().free, len(lab.broker.held)) == (2, 2, 2)
        assert lab.broker.acquires[0].priority == 7
        a, b = await slots.acquire(1), await slots.acquire(1)
        assert {a.slot, b.slot} == lab.broker.held
        waiting = asyncio.create_task(slots.acquire(30))
        await asyncio.gather(play(a), play(b))
        assert not waiting.done() and slots.counts().leased == 2
        await slots.release(a, Verdict.CLEAN)
        again = await waiting
        assert again.slot == a.slot and again.fence > a.fence
        with pytest.raises(SlotError, match="returned before"):
            await slots.release(a, Verdict.CLEAN)
        await slots.release(again, Verdict.CLEAN)
        await slots.release(b, Verdict.CLEAN)
        assert len(lab.broker.acquires) <= 2, "nothing more is asked for"


async def test_phones_are_taken_as_they_come_free_and_who_waits_in_vain_learns_why(tmp_path):
    told = 0

    def tell() -> None:
        nonlocal told
        told += 1

    async with a_lab(tmp_path, 2) as lab:
        urls = [p.url for p in lab.broker.phones.values()]
        lab.broker.phones.clear()
        async with lab.claimed(2) as slots:
            stop_telling = slots.when_changed(tell)
            assert (slots.size, slots.usable) == (0, 0)
            with pytest.raises(NoSlot, match="0 of at most 2 phones of the pool 'phones'.*every phone is taken"):
                await slots.acquire(0.05)
            waiting = asyncio.create_task(slots.acquire(30))
            await lab.broker.put(urls[0])
            first = await waiting
            await play(first)
            assert (slots.size, slots.usable, told) == (1, 1, 1)
            stop_telling()
            await lab.broker.put(urls[1])
            assert (await slots.acquire(30)).slot == "slot-1"
            assert told == 1


async def test_recalled_phones_go_back_clean_at_the_end_of_their_episode_and_idle_ones_at_once(tmp_path):
    async with a_lab(tmp_path, 2) as lab, lab.claimed(2) as slots:
        await until(lambda: slots.usable == 2)
        lease = await slots.acquire(1)
        await play(lease)
        idle = next(iter(lab.broker.held - {lease.slot}))
        for slot in (lease.slot, idle):
            lab.broker.recall(slot)
        await lab.broker.hears()
        await until(lambda: lab.broker.given)
        assert [(g.id, g.verdict, g.episodes) for g in lab.broker.given] == [(f"{idle}-uid.1", "clean", 0)]
        await on(lease).step(Home(), 2)  # the episode goes on
        assert lab.broker.phones[lease.slot].holder.fence == 1
        await slots.release(lease, Verdict.CLEAN)
        await until(lambda: len(lab.broker.given) == 2)
        given = lab.broker.given[1]
        assert (given.id, given.verdict, given.episodes) == (f"{lease.slot}-uid.1", "clean", 1)
        # They may be asked for again: under another claim.
        again = await slots.acquire(30)
        assert lab.broker.phones[again.slot].holder.fence == 2
        await play(again)


async def test_a_recall_that_is_taken_back_is_forgotten(tmp_path):
    async with a_lab(tmp_path, 1) as lab, lab.claimed(1) as slots:
        lease = await slots.acquire(30)
        lab.broker.recall(lease.slot)
        await lab.broker.hears()
        await until(lambda: slots._serving[lease.slot].recalled)
        lab.broker.recalls.clear()
        await lab.broker.hears()
        await until(lambda: not slots._serving[lease.slot].recalled)
        await slots.release(lease, Verdict.CLEAN)
        assert (await slots.acquire(30)).slot == lease.slot
        assert not lab.broker.given


async def test_claims_are_renewed_in_one_call_with_their_episodes(tmp_path):
    async with a_lab(tmp_path, 3) as lab, lab.claimed(3) as slots:
        await until(lambda: slots.usable == 3)
        for _ in range(2):
            lease = await slots.acquire(1, avoid=frozenset({"slot-1", "slot-2"}))
            await play(lease, 1)
            await slots.release(lease, Verdict.CLEAN)
        await lab.broker.hears()
        assert lab.broker.episodes.get("slot-0-uid.1") == 2
        before = len(lab.broker.renewals)
        for _ in range(2):
            await lab.broker.hears()
        assert all(len(r.claims) == 3 for r in lab.broker.renewals[before:])
        assert len(lab.broker.held) == 3


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_close_gives_all_back_in_one_call(tmp_path):
    async with a_lab(tmp_path, 3) as lab:
        slots = lab.slots(3)
        await slots.start()
        await until(lambda: slots.usable == 3)
        lease = await slots.acquire(1)
        await on(lease).reset(TASK)
        waiting = asyncio.create_task(slots.acquire(30, avoid=frozenset({"slot-1", "slot-2"})))
        await asyncio.sleep(0)
        await slots.close()
        assert not lab.broker.held and lab.broker.calls.count("release") == 1
        verdicts = {g.id.split("-uid")[0]: g.verdict for g in lab.broker.given}
        assert verdicts == {"slot-0": "clean", "slot-1": "clean", "slot-2": "clean", lease.slot: "dirty"}
        if not waiting.done() or waiting.exception():
            with pytest.raises(SlotError, match="closed"):
                await waiting
        await slots.release(lease, Verdict.DIRTY)
        await slots.close()
        assert lab.broker.calls.count("release") == 1


async def test_close_ends_although_the_broker_is_away_and_says_what_is_left(tmp_path, caplog):
    async with a_lab(tmp_path, 1, up=False) as lab:
        async with lab.broker.serving(lab.authority):
            slots = lab.slots(1, pace=replace(PACE, close=0.5))
            await slots.start()
            await until(lambda: slots.usable == 1)
        await slots.close()
        assert "phones that could not be given back" in caplog.text and "slot-0" in caplog.text
