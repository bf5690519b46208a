"""A rollout on phones that come and go: claims of a pool, over the broker's real messages."""

import asyncio
from contextlib import asynccontextmanager

from house import FEASIBLE, LIMITS, POOL, run
from phones import PATIENT, a_port, phones, until
from scripted import AGENT, Demonstrator
from small_broker import POOL as NAME
from small_broker import Authority, SmallBroker, loop_time

from tapforge_envs.protocol import Reason
from tapforge_envs.slots.broker import BrokerSlots
from tapforge_envs.slots.claim_manager import Pace
from tapforge_trainer.recording.queue import RecordingQueue
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.records import Sampling
from tapforge_trainer.rollout.scheduler import Scheduler
from tapforge_trainer.rollout.worker import RolloutWorker
from tapforge_trainer.tasks.source import FixedTasks, TaskSource


@asynccontextmanager
async def claiming(folder, generator, phones_there, wanted=3, **kw):
    """(broker, slots, scheduler); `phones_there` addresses are in the pool."""
    authority = Authority(folder / "ca")
    with a_port() as port:
        broker = SmallBroker(120, port)
        await broker.put(*phones_there)
        async with broker.serving(authority):
            pace = Pace(wait=1, answer=60, first=0.02, cap=0.2, close=60)
            slots = BrokerSlots(
                NAME, authority.access(port), slots=wanted, deadlines=PATIENT, pace=pace, clock=loop_time
            )
            await slots.start()
            source = TaskSource(FixedTasks(tuple(POOL)), seed=1)
            sampling = Sampling(max_tokens=99)
            worker = RolloutWorker(AGENT, {"": generator})
            scheduler = Scheduler(slots, worker, sampling, tasks=source, groups=LIMITS, acquire_seconds=600, **kw)
            try:
                yield broker, slots, scheduler
            finally:
                await scheduler.close(60)
                await slots.close()
                await worker.close()
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

    run(go())


def test_lost_and_recalled_phones_cost_a_rerun_and_no_episode(tmp_path):
    async def go():
        async with (
            phones(6) as server,
            claiming(
                tmp_path,
                Demonstrator(POOL, seconds=0.05),
                server.urls,
                recorder=RecordingQueue(Recorder(tmp_path / "rollout")),
            ) as (broker, slots, scheduler),
        ):
            for version in range(1, 5):
                if version == 2:
                    await until(lambda: scheduler.running == 3)
                    lost, recalled, _ = sorted(broker.held)
                    broker.end(lost)
                    broker.recall(recalled)
                    await broker.hears()
                    await until(lambda: "slot-3" in broker.held)
                batch = await scheduler.next_batch()
                assert all(len(g.episodes) == 3 and all(e.valid for e in g.episodes) for g in batch)
                scheduler.set_version(version)
            await until(lambda: len(broker.given) >= 1)
            stats = scheduler.stats()
            assert set(stats.invalid) <= {"lease_lost"} and not scheduler.faults.quarantined
            assert 0 < stats.busy_share <= 1
            assert {g.verdict for g in broker.given} == {"clean"}
            await until(lambda: slots.usable == 3)
        records = list(Recording(tmp_path / "rollout").episodes())
        assert all(e.reason is Reason.LEASE_LOST for e in records if not e.valid and e.outcome is not None)
        assert {e.slot for e in records} >= {"slot-0", "slot-3"}

    run(go())
