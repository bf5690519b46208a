"""Sick phones, poisonous tasks, dead engines and full disks: survived and counted, or said by name; never a hang."""

import asyncio
import errno
import json
import os

import pytest
from house import FEASIBLE, LIMITS, POOL, a_house, run
from phones import PATIENT, put_forward, until
from scripted import AGENT, DONE, GIVE_UP, Demonstrator, Held, Script, always

from tapforge_envs.protocol import Outcome, Reason
from tapforge_envs.slots.processes import ProcessSlots, ServerCommand
from tapforge_envs.slots.source import NoSlot, Verdict
from tapforge_envs.slots.table import Backoff
from tapforge_trainer.recording.queue import RecordingQueue
from tapforge_trainer.recording.reader import Recording, RecordingError
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.records import Sampling
from tapforge_trainer.rollout.groups import GroupLimits
from tapforge_trainer.rollout.scheduler import RolloutError, Scheduler
from tapforge_trainer.rollout.worker import RolloutWorker
from tapforge_trainer.tasks.source import FixedTasks, TaskSource


def test_broken_phones_are_counted_re_run_elsewhere_and_in_no_group(tmp_path):
    async def go():
        async with a_house(Demonstrator(POOL), recorder=RecordingQueue(Recorder(tmp_path))) as house:
            for slot, kind in ((0, "half"), (1, "lying_health")):
                await house.server.set_faults(slot, {"kind": kind})
            for version in range(1, 60):
                batch = await house.scheduler.next_batch()
                assert all(e.valid for g in batch for e in g.episodes)
                house.scheduler.set_version(version)
                if house.slots.counts().quarantines:
                    break
            stats = house.scheduler.stats()
            assert not house.source.quarantined, "sick phones accuse no task"
            assert stats.invalid["env_error"] >= 2 and stats.reruns >= 2
            broke: dict[tuple[str, str], set[str]] = {}
            again = 0
            for e in Recording(tmp_path).episodes():
                slots = broke.setdefault((e.group, e.id.split(".")[1]), set())
                assert e.slot not in slots, "played again on a slot where it broke before"
                again += bool(slots)
                if e.outcome is Outcome.INVALID:
                    slots.add(e.slot)
            assert again >= 2
            assert house.slots.counts().quarantines >= 1

    run(go())


def test_a_re_run_waits_for_another_slot_even_when_the_broken_one_is_back():
    async def go():
        async with a_house(Demonstrator(POOL), count=2) as house:
            await house.server.set_faults(0, {"kind": "error", "calls": ["evaluate"]})
            other = await house.slots.acquire(1, avoid=frozenset({house.server.url(0)}))
            playing = asyncio.create_task(house.scheduler.run_fixed(FEASIBLE[:1]))
            await until(lambda: house.scheduler.stats().episodes == 1)
            await until(lambda: house.slots.counts().free == 1)
            await asyncio.sleep(0.05)
            assert house.scheduler.stats().episodes == 1 and not playing.done()
            for _ in range(3):  # however long the other one is in use
                put_forward(house.acquire_seconds + 1)
                await asyncio.sleep(0.01)
            await house.slots.release(other, Verdict.CLEAN)
            (episode,) = await playing
            assert (episode.slot, episode.attempt, episode.valid) == (house.server.url(1), 1, True)

    run(go())


def test_attempts_that_wait_are_withdrawn_when_the_fleet_shrinks():
    async def go():
        generator = Held(lambda *a: GIVE_UP)
        async with a_house(generator, count=2, limits=GroupLimits(4, 1, 0)) as house:
            await house.server.set_faults(1, {"kind": "hung", "calls": ["reset"]})
            batch = asyncio.create_task(house.scheduler.next_batch())
            await until(lambda: house.server.hung() and generator.held)
            put_forward(PATIENT.reset + 1)
            # One is played again elsewhere, and one waits for the phone to get well; which it doesn't.
            await until(lambda: house.slots.usable == 1)
            assert (house.scheduler.running, house.scheduler.waiting) == (1, 1)
            generator.let_go.set()
            (group,) = await batch
            assert len(group.episodes) == 4 and {e.slot for e in group.episodes} == {house.server.url(0)}
            assert len({e.seed for e in group.episodes}) == 4

    run(go())


def test_a_phone_that_hangs_delays_nobody_else():
    async def go():
        async with a_house(Demonstrator(POOL), count=3) as house:
            await house.server.set_faults(2, {"kind": "hung", "calls": ["reset"]})
            waiting = asyncio.create_task(house.scheduler.next_batch())
            rest = LIMITS.capacity * LIMITS.group_size - 1
            await until(lambda: house.server.hung() and house.scheduler.stats().episodes == rest)
            put_forward(PATIENT.reset + 1)
            await waiting
            await house.scheduler.next_batch()
            assert house.scheduler.stats().invalid == {"deadline": 1}

    run(go())


def test_a_task_that_no_phone_has_is_quarantined_and_no_phone_is_blamed():
    async def go():
        bad = FEASIBLE[0].model_copy(update={"template": "no_such_template"})
        tasks = [bad, *FEASIBLE[1:3]]
        async with a_house(always(DONE), tasks=tasks, count=4, limits=GroupLimits(2, 1, 0, max_reruns=3)) as house:
            await house.scheduler.run_fixed(tasks[1:], repeats=4)  # every slot has shown that it is healthy
            for version in range(1, 7):
                batch = await house.scheduler.next_batch()
                assert bad.key not in {g.task.key for g in batch}
                house.scheduler.set_version(version)
            assert list(house.source.quarantined) == [bad.key]
            assert "unknown template" in house.source.quarantined[bad.key]
            assert not any("unknown template" in view.why for view in house.slots.views())
            assert house.scheduler.stats().dropped == {"quarantined": 1}

    run(go())


def test_servers_that_crash_under_load_are_replaced_and_only_cost_invalid_episodes():
    async def go():
        faults = [{"kind": "crashed", "probability": 0.02}, {"kind": "half", "probability": 0.02}]
        command = ServerCommand(arguments=("--faults", json.dumps(faults)))
        slots = ProcessSlots(6, 2, command, PATIENT, Backoff(first=0.05, cap=0.2, strikes=100))
        await slots.start()
        worker = RolloutWorker(AGENT, {"": Demonstrator(POOL, seconds=0.005)})
        scheduler = Scheduler(
            slots,
            worker,
            Sampling(max_tokens=99),
            tasks=TaskSource(FixedTasks(tuple(POOL)), seed=1),
            groups=GroupLimits(3, 2, 1, max_reruns=20),
        )
        try:
            version = 0
            while slots.replaced < 2 and version < 100:
                batch = await scheduler.next_batch()
                assert all(e.valid and len(g.episodes) == 3 for g in batch for e in g.episodes)
                version += 1
                scheduler.set_version(version)
            stats = scheduler.stats()
            assert slots.replaced >= 2 and stats.invalid["env_error"] >= 2
            assert stats.reruns >= stats.invalid["env_error"] - slots.size
        finally:
            await scheduler.close(60)
            await slots.close()
            await worker.close()

    run(go())


def test_episodes_that_stay_invalid_are_returned_as_such():
    async def go():
        async with a_house(Demonstrator(POOL), count=2) as house:
            for slot in (0, 1):
                await house.server.set_faults(slot, {"kind": "error", "calls": ["evaluate"]})
            (episode,) = await house.scheduler.run_fixed(FEASIBLE[:1])
            assert (episode.outcome, episode.reason, episode.attempt) == (Outcome.INVALID, Reason.JUDGE_ERROR, 2)
            assert house.scheduler.stats().reruns == 2

    run(go())


def test_when_no_phone_is_left_the_wait_ends_with_their_ailments():
    async def go():
        async with a_house(Demonstrator(POOL), count=2, acquire_seconds=0.5) as house:
            for slot in (0, 1):
                await house.server.set_faults(slot, {"kind": "hung", "calls": ["reset"]})
            waiting = asyncio.create_task(house.scheduler.next_batch())
            await until(lambda: house.server.hung() == 2)
            put_forward(PATIENT.reset + 1)
            with pytest.raises(NoSlot) as caught:
                await waiting
            assert house.server.url(0) in str(caught.value)

    run(go())


def test_phones_that_spoil_every_episode_end_the_run():
    async def go():
        limits = GroupLimits(2, 1, 0, max_reruns=0)
        async with a_house(Demonstrator(FEASIBLE), count=4, limits=limits, tasks=FEASIBLE) as house:
            for slot in range(4):
                await house.server.set_faults(slot, {"kind": "error", "probability": 1.0, "calls": ["evaluate"]})
            with pytest.raises((RolloutError, NoSlot), match="judge_error|evaluate"):
                await house.scheduler.next_batch()

    run(go())


def test_a_dead_engine_is_raised_by_whoever_waits():
    async def go():
        def dead(*_):
            raise ConnectionResetError("the engine is gone")

        async with a_house(Script(dead)) as house:
            with pytest.raises(ConnectionResetError):
                await house.scheduler.next_batch()
            with pytest.raises(ConnectionResetError):
                await house.scheduler.run_fixed(POOL[:1])

    run(go())


def test_a_full_disk_ends_the_run_and_keeps_what_was_recorded(tmp_path, monkeypatch):
    async def go():
        async with a_house(Demonstrator(POOL), recorder=RecordingQueue(Recorder(tmp_path))) as house:
            await house.scheduler.next_batch()
            before = len(list(Recording(tmp_path).episodes()))

            def full(*_):
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(os, "pwrite", full)
            house.scheduler.set_version(1)
            with pytest.raises(RecordingError, match="no space left for"):
                for version in range(2, 9):
                    await house.scheduler.next_batch()
                    house.scheduler.set_version(version)
            monkeypatch.undo()
            assert len(list(Recording(tmp_path).episodes())) >= before >= 6

    run(go())
