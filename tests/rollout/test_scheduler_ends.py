"""A rollout that is closed, cancelled or taken up again loses and repeats nothing."""

import asyncio

import pytest
from house import POOL, a_house, half_careless, run
from phones import until
from scripted import Demonstrator, Held

from tapforge_envs.protocol import Home, Reason
from tapforge_trainer.recording.queue import RecordingQueue
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.rollout.groups import GroupLimits
from tapforge_trainer.rollout.scheduler import RolloutError
from tapforge_trainer.tasks.source import FixedTasks, TaskSource


def test_closing_in_the_middle_keeps_steps_and_says_what_is_unfinished(tmp_path):
    async def go():
        generator = Held(lambda *a: Home(), steps=1)
        async with a_house(
            generator, recorder=RecordingQueue(Recorder(tmp_path)), limits=GroupLimits(3, 2, 1)
        ) as house:
            waiting = asyncio.create_task(house.scheduler.next_batch())
            await until(lambda: generator.held == 4)
            await house.scheduler.close(60)
            with pytest.raises(RolloutError, match="closed"):
                await waiting
            assert house.slots.counts().leased == 0
            stopped = [e for e in Recording(tmp_path).episodes() if e.reason is Reason.CANCELLED]
            assert [len(e.steps) for e in stopped] == [1, 1, 1, 1]
            assert [r.order for r in house.scheduler.buffer.unfinished()] == list(
                range(house.scheduler.buffer.next_order)
            )

    run(go())


def test_a_run_is_taken_up_where_it_was_closed(tmp_path):
    async def go():
        async with a_house(
            Demonstrator(POOL, half_careless, seconds=0.004), recorder=RecordingQueue(Recorder(tmp_path))
        ) as house:
            first = await house.scheduler.next_batch()
            await until(lambda: any(r.episodes for r in house.scheduler.buffer.unfinished()))
            await house.scheduler.close(60)
            unfinished = house.scheduler.buffer.unfinished()
            state, order = house.source.state, house.scheduler.buffer.next_order
        async with a_house(
            Demonstrator(POOL, half_careless),
            resumed=unfinished,
            order=order,
            state=state,
            prefix="again-",
            recorder=RecordingQueue(Recorder(tmp_path)),
        ) as house:
            second = await house.scheduler.next_batch()
            house.scheduler.set_version(1)
            third = await house.scheduler.next_batch()
        together = [*first, *second, *third]
        assert [g.order for g in together] == [0, 1, 2, 3, 4, 5]
        assert [g.task for g in together] == TaskSource(FixedTasks(tuple(POOL)), seed=1).take(6)
        kept = {e.id for r in unfinished for e in r.episodes}
        assert kept and kept <= {e.id for g in together for e in g.episodes}
        for group in together:
            assert len({e.seed for e in group.episodes}) == 3, "no member was played twice"
            assert {e.group for e in group.episodes} == {group.id}
        recorded = list(Recording(tmp_path).groups())
        assert all(group in recorded for group in together)

    run(go())


def test_a_caller_that_is_cancelled_loses_no_batch(tmp_path):
    async def go():
        async with a_house(Demonstrator(POOL), recorder=RecordingQueue(Recorder(tmp_path))) as house:
            seen = []
            for version in range(1, 4):
                # Asked and cancelled again and again, as by a loop that also waits for a signal.
                while True:
                    waiting = asyncio.create_task(house.scheduler.next_batch())
                    await asyncio.wait([waiting], timeout=0.003)
                    waiting.cancel()
                    await asyncio.wait([waiting])
                    if not waiting.cancelled():
                        break
                seen += waiting.result()
                house.scheduler.set_version(version)
            assert [g.order for g in seen] == list(range(6))

    run(go())
