"""A scheduler on real phones: the parts that its tests put together."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass

from phones import PATIENT, Phones, bounded, phones
from scripted import AGENT, TASKS

from tapforge_envs.slots.table import Backoff
from tapforge_envs.slots.urls import UrlSlots, parse_urls
from tapforge_trainer.records import Sampling
from tapforge_trainer.rollout.groups import GroupLimits
from tapforge_trainer.rollout.scheduler import Scheduler
from tapforge_trainer.rollout.worker import RolloutWorker
from tapforge_trainer.tasks.source import FixedTasks, TaskSource

POOL = [TASKS.sample(0, i) for i in range(12)]
FEASIBLE = [t for t in POOL if t.feasible]
SOON = Backoff(first=0.02, cap=0.1, strikes=4, quarantine=0.5)
LIMITS = GroupLimits(group_size=3, groups_per_update=2, max_staleness=1, max_reruns=2, deadline_seconds=600)


@dataclass
class House:
    server: Phones
    slots: UrlSlots
    scheduler: Scheduler
    source: TaskSource
    acquire_seconds: float


@asynccontextmanager
async def a_house(generator, count=4, limits=LIMITS, tasks=POOL, deadlines=PATIENT, **kw):
    async with phones(count) as server:
        slots = UrlSlots(parse_urls(server.urls, "phones"), deadlines, SOON)
        await slots.start()
        source = TaskSource(FixedTasks(tuple(tasks)), seed=1, state=kw.pop("state", 0))
        acquire_seconds = kw.pop("acquire_seconds", 100)
        rewarder = kw.pop("rewarder", None)
        worker = RolloutWorker(AGENT, {"": generator, **kw.pop("policies", {})}, rewarder=rewarder)
        scheduler = Scheduler(
            slots,
            worker,
            Sampling(max_tokens=99),
            tasks=source,
            groups=limits,
            acquire_seconds=acquire_seconds,
            **kw,
        )
        try:
            yield House(server, slots, scheduler, source, acquire_seconds)
        finally:
            await scheduler.close(60)
            assert slots.counts().leased == 0, "every lease was returned"
            await slots.close()
            await worker.close()


def half_careless(sampling: Sampling) -> bool:
    return sampling.seed % 5 == 0


def run(coroutine):
    async def ends():
        with bounded():
            await coroutine

    asyncio.run(ends())
