"""A rollout on phones that come and go: claims of a pool, over the broker's real messages."""

import asyncio
from contextlib import asynccontextmanager

from house import FEASIBLE, LIMITS, POOL, until
from house import run as bounded
from phones import phones
from scripted import AGENT, Demonstrator
from small_broker import POOL as NAME
from small_broker import Authority, SmallBroker

from tapforge_envs.protocol import Reason
from tapforge_envs.slots.broker import BrokerSlots
from tapforge_envs.slots.holdings import Pace
from tapforge_trainer.records import Sampling
from tapforge_trainer.rollout.recorder import Recorder, Recording
from tapforge_trainer.rollout.scheduler import Scheduler
from tapforge_trainer.tasks.source import FixedTasks, TaskSource


@asynccontextmanager
async def claiming(folder, generator, phones_there, wanted=3, ttl=3.0, **kw):
    """(broker, slots, scheduler); `phones_there` addresses are in the pool."""
    authority, broker = Authority(folder / "ca"), SmallBroker(ttl)
    await broker.put(*phones_there)
    async with broker.serving(authority):
        pace = Pace(ttl=30, wait=1, first=0.02, cap=0.2, start=3, close=3)
        slots = BrokerSlots(NAME, authority.access(broker.port), slots=wanted, pace=pace)
        await slots.start()
        source = TaskSource(FixedTasks(tuple(POOL)), seed=1)
        sampling = Sampling(max_tokens=99)
        scheduler = Scheduler(slots, AGENT, generator, sampling, tasks=source, groups=LIMITS, acquire_seconds=20, **kw)
        try:
            yield broker, slots, scheduler
        finally:
            await scheduler.close(5)
            await slots.close()
            assert not broker.held and not broker.broken


def test_phones_that_come_are_used_at_once(tmp_path):
    async def go():
        slow = Demonstrator(POOL, seconds=3600)  # no episode ends, so nothing else can start another one
        async with (
            phones(3) as server,
            claiming(tmp_path, slow, server.urls[:1]) as (broker, slots, scheduler),
        ):
            playing = asyncio.create_task(scheduler.run_fixed(FEASIBLE[:4]))
            await until(lambda: scheduler.running == 1)
            await broker.put(*server.urls[1:])
            await until(lambda: scheduler.running == 3)
            assert (slots.size, slots.usable, slots.counts().leased) == (3, 3, 3)
            playing.cancel()

    bounded(go())


def test_lost_and_recalled_phones_cost_a_rerun_and_no_episode(tmp_path):
    async def go():
        async with (
            phones(6) as server,
            claiming(
                tmp_path, Demonstrator(POOL, seconds=0.05), server.urls, recorder=Recorder(tmp_path / "rollout")
            ) as (broker, slots, scheduler),
        ):
            for version in range(1, 5):
                if version == 2:
                    await until(lambda: scheduler.running == 3)
                    lost, recalled, _ = sorted(broker.held)
                    broker.end(lost)
                    broker.recall(recalled)
                batch = await scheduler.next_batch()
                assert all(len(g.episodes) == 3 and all(e.valid for e in g.episodes) for g in batch)
                scheduler.set_version(version)
            await until(lambda: len(broker.given) >= 1)
            stats = scheduler.stats()
            assert set(stats.invalid) <= {"lease_lost"} and not scheduler.hazard.quarantined
            assert 0 < stats.busy_share <= 1
            assert {g.verdict for g in broker.given} == {"clean"}
            await until(lambda: slots.usable == 3)
        records = list(Recording(tmp_path / "rollout").episodes())
        assert all(e.reason is Reason.LEASE_LOST for e in records if not e.valid and e.outcome is not None)
        assert {e.slot for e in records} >= {"slot-0", "slot-3"}

    bounded(go(), 60)
