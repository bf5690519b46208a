"""A broker that is away, or whose answers get lost, is asked again: nothing is claimed twice, or for ever."""

import asyncio
from dataclasses import replace

import pytest
from broker_lab import PACE, TASK, a_lab, environment, play
from leased import on
from phones import put_forward, until

from tapforge_envs.protocol import EnvironmentFault, Home, Reason
from tapforge_envs.slots.broker_calls import Access
from tapforge_envs.slots.claim_manager import Pace
from tapforge_envs.slots.source import NoSlot, SlotError, Verdict

# --- a broker that is away --------------------------------------------------------------------------------------------


async def test_an_outage_shorter_than_the_claims_life_is_not_felt(tmp_path):
    async with a_lab(tmp_path, 2, up=False) as lab:
        async with lab.broker.serving(lab.authority):
            slots = lab.slots(2)
            await slots.start()
            lease = await slots.acquire(30)
            await on(lease).reset(TASK)
        put_forward(41)  # a renewal is due
        await until(lambda: "can't be reached" in slots.describe())
        await on(lease).step(Home(), 0)
        async with lab.broker.serving(lab.authority):
            before = len(lab.broker.renewals)
            await until(lambda: len(lab.broker.renewals) > before)
            await on(lease).step(Home(), 1)
            await slots.release(lease, Verdict.CLEAN)
            await until(lambda: "can't" not in slots.describe())
            assert slots.usable == 2 and all(p.fence == 1 for p in lab.broker.phones.values())
            await slots.close()
            assert not lab.broker.held


async def test_an_outage_of_a_quarter_of_an_hour_costs_no_claim(tmp_path):
    """On Pods a holder goes on through silence, until a leader says that a claim is lost."""
    async with a_lab(tmp_path, 3, up=False) as lab:
        lab.broker.lasting = False
        async with lab.broker.serving(lab.authority):
            slots = lab.slots(3)
            await slots.start()
            lease = await slots.acquire(30)
            await on(lease).reset(TASK)
        for step in range(9):
            put_forward(100)
            await until(lambda: "can't be reached" in slots.describe())
            await on(lease).step(Home(), step)
            another = await slots.acquire(30)
            await play(another)
            await slots.release(another, Verdict.CLEAN)
            assert slots.size == 3
        spoilt = lab.broker.phones[lease.slot]
        spoilt.holder, spoilt.gone = None, True
        async with lab.broker.serving(lab.authority):
            await until(lambda: slots.size == 2)
            with pytest.raises(EnvironmentFault, match="the claim on it is lost") as caught:
                await on(lease).step(Home(), 9)
            assert caught.value.reason is Reason.LEASE_LOST
            await slots.release(lease, Verdict.DIRTY)
            await slots.close()
            assert not lab.broker.held and not lab.broker.broken


async def test_renewals_list_what_is_ours_and_which_requests_are_answered(tmp_path):
    async with a_lab(tmp_path, 3) as lab, lab.claimed(2) as slots:
        lab.broker.renewals.clear()
        put_forward(41)
        await until(lambda: lab.broker.renewals)
        newest, asked = lab.broker.renewals[-1], lab.broker.acquires
        assert {held.id.rpartition("-uid.")[0] for held in newest.claims} == lab.broker.held
        assert slots.size == 2 and newest.settled == asked[-1].number == len({ask.request for ask in asked})
        assert {ask.session for ask in asked} == {newest.session} and newest.session


async def test_after_its_hold_every_claim_is_lost_before_the_broker_ends_it(tmp_path):
    async with a_lab(tmp_path, 4, up=False) as lab:
        async with lab.broker.serving(lab.authority):
            slots = lab.slots(2)
            await slots.start()
            lease = await slots.acquire(30)
            claim = slots._serving[lease.slot]
            await on(lease).reset(TASK)
        put_forward(120)
        await until(lambda: slots.size == 0)
        assert claim.alive_until <= lab.broker.ends[claim.id]
        with pytest.raises(EnvironmentFault, match="was not heard of for 120 s") as caught:
            await on(lease).step(Home(), 0)
        assert caught.value.reason is Reason.LEASE_LOST
        await slots.release(lease, Verdict.DIRTY)
        await until(lambda: "can't be reached" in slots.describe())
        with pytest.raises(NoSlot, match="0 of at most 2 phones.*can't be reached"):
            await slots.acquire(0.01)
        await until(lambda: not lab.broker.held)
        async with lab.broker.serving(lab.authority):
            await play(await slots.acquire(30))
            await slots.close()
            assert not lab.broker.held and not lab.broker.broken


@pytest.mark.parametrize("body", [b'{"reason": "NotLeader", "message": "another replica leads"}', b"<html>"])
async def test_a_broker_that_says_not_now_is_asked_again(tmp_path, body):
    async with a_lab(tmp_path, 1) as lab:
        for call in ("acquire", "renew", "release"):
            lab.broker.refusing[call] = (503, body)
        slots = lab.slots(1)
        starting = asyncio.create_task(slots.start())
        await until(lambda: lab.broker.calls.count("acquire") >= 3)
        lab.broker.refusing.clear()
        await starting
        lease = await slots.acquire(30)
        lab.broker.refusing["release"] = (503, body)
        await slots.release(lease, Verdict.DIRTY)
        await until(lambda: lab.broker.calls.count("release") >= 3)
        assert slots.size == 1, "not given back yet, so nothing else is asked for"
        lab.broker.refusing.clear()
        await until(lambda: lab.broker.given)
        await slots.close()
        assert not lab.broker.held


async def test_at_the_start_a_broker_that_stays_away_is_an_error(tmp_path):
    async with a_lab(tmp_path, 1) as lab:
        access = Access.of({**environment(lab, tmp_path), "TAPFORGE_BROKER_URL": "https://127.0.0.1:1"})
        slots = lab.slots(1, access=access, pace=replace(PACE, start=600))
        starting = asyncio.create_task(slots.start())
        await until(lambda: "can't be reached" in slots.describe())
        put_forward(600)
        with pytest.raises(SlotError, match="no phones within 600 s: the broker at .*:1/ can't be reached"):
            await starting


# --- lost answers -----------------------------------------------------------------------------------------------------


async def test_an_acquire_whose_answer_is_lost_is_asked_again_by_its_name(tmp_path):
    async with a_lab(tmp_path, 3) as lab:
        lab.broker.lost_answers = ["acquire", "acquire"]
        async with lab.claimed(2) as slots:
            await until(lambda: slots.usable == 2)
            assert len(lab.broker.held) == 2
            assert len({a.request for a in lab.broker.acquires[:3]}) == 1


async def test_lost_answers_to_renewals_and_releases(tmp_path):
    async with a_lab(tmp_path, 3) as lab:
        lab.broker.lost_answers = ["renew", "renew", "release"]
        async with lab.claimed(2) as slots:
            lease = await slots.acquire(30)
            await slots.release(lease, Verdict.DIRTY, "the test says so")
            await lab.broker.hears()
            await until(lambda: not lab.broker.lost_answers and slots.usable == 2)
            assert [g.id for g in lab.broker.given] == [f"{lease.slot}-uid.1"], "given back once, whatever was heard"


async def test_what_was_granted_in_the_moment_of_the_end_is_given_back_too(tmp_path):
    async with a_lab(tmp_path, 2) as lab:
        urls = [p.url for p in lab.broker.phones.values()]
        lab.broker.phones.clear()
        slots = lab.slots(2, pace=replace(PACE, wait=60))
        await slots.start()
        await until(lambda: lab.broker.calls.count("acquire") == 2)
        lab.broker.lost_answers = ["acquire"]
        await lab.broker.put(urls[0])
        await until(lambda: not lab.broker.lost_answers)
        assert lab.broker.held == {"slot-0"}
        await slots.close()
        assert not lab.broker.held and [g.verdict for g in lab.broker.given] == ["clean"]


# --- how often it is asked --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", range(12))
def test_pauses_grow_to_a_cap_and_obey_the_broker(failures):
    pace = Pace(first=0.5, cap=30.0)
    grown = 0.0 if not failures else min(30.0, 0.5 * 2 ** (failures - 1))
    for _ in range(50):
        assert grown / 2 <= pace.pause(failures) <= grown
        assert pace.pause(failures, asked=7.0) >= 7.0
        assert pace.pause(failures, asked=1e9) == 30.0
        assert pace.pause(failures, cap=2.0) <= 2.0
