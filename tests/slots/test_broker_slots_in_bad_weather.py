"""Everything that can go wrong with claims, at once."""

import asyncio
import random

import pytest
from broker_lab import Lab, a_lab, play
from leased import on
from phones import phones, until
from small_broker import SmallBroker

from tapforge_envs.protocol import EnvironmentFault, Reason
from tapforge_envs.slots.broker import BrokerSlots
from tapforge_envs.slots.claimed import HeldClaim
from tapforge_envs.slots.source import Verdict


@pytest.mark.parametrize("seed", [1, 2])
async def test_episodes_in_bad_weather(tmp_path, seed):
    """Answers get lost, phones are recalled, lost and dirty, the broker restarts: no phone ever has two episodes, no
    episode ends on a phone that was not its own, and in the end nothing is left behind."""
    dice = random.Random(seed)
    playing: set[str] = set()
    ended = {"clean": 0, "dirty": 0, "lost": 0}
    ends = [True] * 25

    async def rollout(slots: BrokerSlots, lab: Lab) -> None:
        for _ in range(12):
            lease = await slots.acquire(100)
            uid = lab.broker.phones[lease.slot]
            assert lease.slot not in playing
            playing.add(lease.slot)
            mine = slots._serving[lease.slot].id
            verdict = Verdict.CLEAN
            try:
                for _ in range(dice.randint(1, 4)):
                    await play(lease, 1)
                    await asyncio.sleep(dice.random() * 0.1)
                await on(lease).close()
                # All calls answered: then the broker can't have given it to anybody else yet.
                assert uid.holder is None or uid.holder.id == mine
                if dice.random() < 0.15:
                    verdict = Verdict.DIRTY
            except EnvironmentFault as fault:
                assert fault.reason is Reason.LEASE_LOST
                verdict = Verdict.DIRTY
            playing.discard(lease.slot)
            ended["lost" if lease.life.lost else verdict.value] += 1
            await slots.release(lease, verdict)

    async def weather(lab: Lab) -> None:
        while True:
            await asyncio.sleep(0.03)
            held = sorted(lab.broker.held)
            what = dice.random()
            if what < 0.3:
                lab.broker.lost_answers.append(dice.choice(["acquire", "renew", "release"]))
            elif held and what < 0.6:
                lab.broker.recall(dice.choice(held))
            elif held and what < 0.75 and ends:
                # However slow the episodes are, the weather doesn't use up the phones.
                ends.pop()
                lab.broker.end(dice.choice(held))
            await lab.broker.put(*dice.sample(lab.server.urls, 1))

    async with a_lab(tmp_path, 0, ttl=0.9) as lab, phones(80) as server:
        lab.server = server
        await lab.broker.put(*server.urls[:3])
        spare = iter(server.urls[3:])

        async def put(*_: str) -> None:
            if url := next(spare, None):
                await SmallBroker.put(lab.broker, url)

        lab.broker.put = put  # type: ignore[method-assign]
        slots = lab.slots(3)
        left: dict[str, HeldClaim] = {}

        def leaves(claim: HeldClaim) -> None:
            left[claim.id] = claim
            BrokerSlots.left(slots, claim)

        slots.left = leaves  # type: ignore[method-assign]
        await slots.start()
        storm = asyncio.create_task(weather(lab))
        try:
            await asyncio.gather(*(rollout(slots, lab) for _ in range(3)))
        finally:
            storm.cancel()
            lab.broker.lost_answers.clear()
            await slots.close()
        # What we counted as over for want of an answer, the broker ends by itself, a little later.
        holders = [lab.broker.phones[slot].holder.id for slot in lab.broker.held]
        assert all(left[holder].life.over() for holder in holders)
        await until(lambda: not lab.broker.held)
        assert not lab.broker.broken
        assert sum(ended.values()) == 36 and ended["clean"]
