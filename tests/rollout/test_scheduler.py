"""Many episodes at once on real phones over real sockets: the staleness bound as a learner sees it, no waiting for the
slowest, deadlines, pauses, fixed lists, everything on disk before it is learned from."""

import asyncio
from dataclasses import replace

import pytest
from house import FEASIBLE, POOL, a_house, half_careless, run
from phones import PATIENT, put_forward, until
from scripted import DONE, GIVE_UP, Demonstrator, Held, Script, always, way

from tapforge_envs.clients.http import Deadlines
from tapforge_envs.protocol import Home, Outcome
from tapforge_envs.slots.source import Verdict
from tapforge_trainer.attempt import EpisodeLimits
from tapforge_trainer.recording.queue import RecordingQueue
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.recording.retention import Retention
from tapforge_trainer.records import Sampling
from tapforge_trainer.rollout.groups import GroupLimits
from tapforge_trainer.rollout.held_frames import FrameBudget
from tapforge_trainer.rollout.stats import by_length, rate_of
from tapforge_trainer.tasks.source import FixedTasks, TaskSource

HOUR = 3600.0
UNLIMITED = EpisodeLimits(episode_seconds=24 * HOUR)


def test_batches_come_in_issue_order_with_members_of_one_task_each(tmp_path):
    async def go():
        generator = Demonstrator(POOL, half_careless)
        async with a_house(generator, recorder=RecordingQueue(Recorder(tmp_path))) as house:
            expected = TaskSource(FixedTasks(tuple(POOL)), seed=1).take(6)
            seen = []
            for version in range(1, 4):
                batch = await house.scheduler.next_batch(2)
                seen += batch
                # What is learned from is on disk already.
                recorded = {g.id: g for g in Recording(tmp_path).groups()}
                assert [recorded[g.id] for g in batch] == batch
                generator.version = version
                house.scheduler.set_version(version)
            assert [g.order for g in seen] == [0, 1, 2, 3, 4, 5]
            assert [g.task for g in seen] == expected
            for group in seen:
                assert len(group.episodes) == 3
                assert {e.task.key for e in group.episodes} == {group.task.key}
                assert {e.group for e in group.episodes} == {group.id}
            outcomes = {e.outcome for g in seen for e in g.episodes}
            assert outcomes == {Outcome.SUCCESS, Outcome.FAILURE}
            recording = Recording(tmp_path)
            for group in seen:
                for step in (s for e in group.episodes for s in e.steps):
                    assert all(recording.frames.get(f) for f in step.frames)

    run(go())


def test_a_batch_has_its_frames_where_the_recording_has_none(tmp_path):
    async def go():
        retention = Retention("none")
        recorder = RecordingQueue(Recorder(tmp_path, retention))
        options = {"recorder": recorder, "frames_recorded": retention.rereadable}
        async with a_house(Demonstrator(POOL, half_careless), **options) as house:
            batch = await house.scheduler.next_batch()
            frames = house.scheduler.frames(batch)
            for episode in (e for g in batch for e in g.episodes):
                assert frames[episode.id].keys() == {name for s in episode.steps for name in s.frames}
        assert not any(Recording(tmp_path).is_complete(e) for e in Recording(tmp_path).episodes() if e.steps)

    run(go())


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_sample_is_older_than_the_bound(staleness):
    async def go():
        generator = Demonstrator(POOL)
        limits = GroupLimits(2, 2, staleness)
        async with a_house(generator, limits=limits) as house:
            for version in range(1, 5):
                batch = await house.scheduler.next_batch()
                for group in batch:
                    tokens = {v for e in group.episodes for s in e.steps for v in s.generation.versions}
                    assert min(tokens) >= group.version >= version - 1 - staleness
                if staleness == 0:
                    assert tokens == {version - 1}
                calls = generator.calls
                await asyncio.sleep(0.1)
                if staleness == 0:
                    assert generator.calls == calls, "on-policy nothing is played while the learner works"
                generator.version = version
                house.scheduler.set_version(version)
            ages = house.scheduler.stats().sample_age
            assert sum(ages.values()) == 8 and max(ages) <= staleness

    run(go())


def test_finished_slots_go_on_while_one_is_slow():
    async def go():
        # One of three slots takes an hour for every step, the others nothing.
        deadlines = replace(PATIENT, step=24 * HOUR)
        limits = GroupLimits(3, 2, 2)
        async with a_house(Demonstrator(POOL), count=3, limits=limits, deadlines=deadlines) as house:
            await house.server.set_faults(1, {"kind": "slow", "medianSeconds": HOUR})
            waiting = asyncio.create_task(house.scheduler.next_batch())
            rest = limits.capacity * limits.group_size - 1
            await until(lambda: house.scheduler.stats().episodes == rest)
            assert house.scheduler.running == 1 and not waiting.done(), "all but the slow one, and nothing else"
            await house.server.set_faults(1)
            house.scheduler.reclaim(house.server.url(1))
            assert [len(g.episodes) for g in await waiting] == [3, 3]

    run(go())


def test_zero_variance_groups_are_replaced_by_the_next_tasks(tmp_path):
    async def go():
        limits = GroupLimits(3, 2, 0, dynamic_sampling=True, max_rounds=2)
        recorder = RecordingQueue(Recorder(tmp_path))
        async with a_house(always(GIVE_UP), limits=limits, tasks=FEASIBLE, recorder=recorder) as house:
            batch = await house.scheduler.next_batch()
            # Nothing but failures: four groups (2 rounds of 2) are dropped, then the update takes what there is.
            assert house.scheduler.stats().dropped == {"uniform": 4}
            assert [g.order for g in batch] == [4, 5]
            # All 18 attempts count for success, not only the six that an update learns from.
            assert house.scheduler.stats().drawn == {"failure": 18}
            assert rate_of(house.scheduler.stats().drawn) == 0.0
            # The recorder writes behind the loop.
            await until(lambda: len(list(Recording(tmp_path).groups(dropped=True))) == 6)

    run(go())


def test_a_member_at_its_groups_deadline_is_left_out_and_its_slot_freed():
    async def go():
        limits = GroupLimits(3, 1, 0, deadline_seconds=HOUR)
        late = {"deadlines": replace(PATIENT, reset=48 * HOUR), "episodes": UNLIMITED}
        async with a_house(always(GIVE_UP), count=3, limits=limits, **late) as house:
            await house.server.set_faults(2, {"kind": "slow", "medianSeconds": 24 * HOUR})
            waiting = asyncio.create_task(house.scheduler.next_batch())
            await until(lambda: house.scheduler.stats().episodes == 2)
            assert house.scheduler.running == 1 and not waiting.done()
            put_forward(HOUR)
            (group,) = await waiting
            assert len(group.episodes) == 2
            assert house.scheduler.stats().group_sizes == {2: 1}
            await until(lambda: house.slots.counts().free == 3)
            stats = house.scheduler.stats()
            assert stats.stopped == {"cancelled": 1}, "a slow phone is not a sick one"
            assert by_length(stats.members) == {"group_deadline": {"0": 1}, "valid": {"1": 2}}

    run(go())


@pytest.mark.parametrize("how", ["model", "slots", "pause"])
def test_neither_the_model_nor_waiting_counts_against_a_groups_deadline(how):
    async def go():
        limits = GroupLimits(3, 1, 0, deadline_seconds=HOUR)
        far = {"deadlines": Deadlines(*[24 * HOUR] * 5), "episodes": UNLIMITED, "acquire_seconds": 24 * HOUR}
        generator = Held(lambda *a: GIVE_UP)
        # Three places, two slots: the third member begins later.
        async with a_house(generator, count=2, limits=limits, **far) as house:
            if how == "slots":
                lent = [await house.slots.acquire(1), await house.slots.acquire(1)]
            batch = asyncio.create_task(house.scheduler.next_batch())
            if how == "slots":
                await until(lambda: house.scheduler.waiting == 2)
            else:
                await until(lambda: generator.inside == 2)
            if how == "pause":
                draining = asyncio.create_task(house.scheduler.pause())
                await asyncio.sleep(0)
                generator.let_go.set()
                await draining
                assert house.scheduler.stats().episodes == 2
            put_forward(2 * HOUR)
            await asyncio.sleep(0.01)
            generator.let_go.set()
            if how == "slots":
                for lease in lent:
                    await house.slots.release(lease, Verdict.CLEAN)
            elif how == "pause":
                house.scheduler.resume()
            (group,) = await batch
            assert (group.order, len(group.episodes)) == (0, 3)

    run(go())


def test_a_reclaimed_slot_is_left_and_its_episode_played_again():
    async def go():
        generator = Script(lambda *a: Home(), seconds=0.05)
        async with a_house(generator, count=2, limits=GroupLimits(2, 1, 0)) as house:
            batch = asyncio.create_task(house.scheduler.next_batch())
            await until(lambda: house.scheduler.running == 2)
            house.scheduler.reclaim(house.server.url(0))
            (group,) = await batch
            assert len(group.episodes) == 2
            stats = house.scheduler.stats()
            assert stats.stopped == {"reclaimed": 1} and stats.reruns == 0
            assert sorted(e.id[-2:] for e in group.episodes) == [".0", ".1"]

    run(go())


def test_while_paused_no_answer_is_asked_for_and_afterwards_everything_goes_on():
    async def go():
        generator = Demonstrator(POOL, seconds=0.01)
        async with a_house(generator) as house:
            batch = asyncio.create_task(house.scheduler.next_batch())
            await until(lambda: generator.inside)
            await house.scheduler.pause()
            assert generator.inside == 0
            calls = generator.calls
            await asyncio.sleep(0.1)
            assert generator.calls == calls
            house.scheduler.resume()
            assert len(await batch) == 2

    run(go())


def test_draining_plays_episodes_to_their_end_so_that_none_sees_two_versions():
    async def go():
        generator = Demonstrator(POOL, seconds=0.01)
        async with a_house(generator, limits=GroupLimits(2, 2, 1)) as house:
            seen = []
            for version in range(1, 5):
                seen += await house.scheduler.next_batch()
                await house.scheduler.pause()
                assert house.scheduler.running == 0 and house.slots.counts().leased == 0
                generator.version = version
                house.scheduler.set_version(version)
                house.scheduler.resume()
            for episode in (e for g in seen for e in g.episodes):
                assert len({v for s in episode.steps for v in s.generation.versions}) == 1

    run(go())


def test_a_fixed_list_is_played_in_full_and_returned_in_order():
    async def go():
        async with a_house(Demonstrator(POOL)) as house:
            await house.server.set_faults(0, {"kind": "error", "probability": 0.3})
            episodes = await house.scheduler.run_fixed(POOL, repeats=2)
            assert [e.task for e in episodes] == [t for t in POOL for _ in range(2)]
            assert all(e.outcome is Outcome.SUCCESS for e in episodes if e.valid)
            assert sum(e.valid for e in episodes) >= 20
            assert house.source.state == 0, "no training task was drawn"

    run(go())


def test_a_fixed_list_has_its_own_sampling_and_policy_and_interrupts_training():
    async def go():
        trainer = Demonstrator(POOL, seconds=0.01)
        asked: list[Sampling] = []

        def answer(step, prompt, sampling):
            asked.append(sampling)
            return GIVE_UP

        async with a_house(trainer, policies={"quitter": Script(answer)}) as house:
            await house.scheduler.next_batch()
            episodes = await house.scheduler.run_fixed(FEASIBLE, sampling=Sampling(7, 0.0), policy="quitter")
            assert {e.outcome for e in episodes} == {Outcome.FAILURE}
            assert {(s.max_tokens, s.temperature) for s in asked} == {(7, 0.0)}
            house.scheduler.set_version(1)
            assert len(await house.scheduler.next_batch()) == 2

    run(go())


def test_time_in_which_slots_are_lent_counts_neither_as_busy_nor_as_idle():
    async def go():
        async with a_house(always(GIVE_UP)) as house:
            await house.scheduler.run_fixed(FEASIBLE)
            await house.scheduler.pause()
            before = house.scheduler.stats()
            await asyncio.sleep(0.1)
            after = house.scheduler.stats()
            assert (after.elapsed, after.slot_seconds) == (before.elapsed, before.slot_seconds)
            house.scheduler.resume()
            await asyncio.sleep(0.02)
            assert house.scheduler.stats().elapsed > before.elapsed

    run(go())


def test_wrong_use_is_said():
    async def go():
        async with a_house(always(DONE)) as house:
            with pytest.raises(ValueError, match="groups_per_update = 2"):
                await house.scheduler.next_batch(3)
            with pytest.raises(ValueError, match="at least once"):
                await house.scheduler.run_fixed(POOL, repeats=0)

    run(go())


def test_the_busy_share_says_what_slots_did():
    async def go():
        def after_a_while(*_):
            put_forward(20)  # against which the time between two episodes is nothing
            return GIVE_UP

        async with a_house(Script(after_a_while), count=4, concurrency=2, episodes=UNLIMITED) as house:
            await house.scheduler.run_fixed(FEASIBLE, repeats=2)
            stats = house.scheduler.stats()
            assert 0.2 < stats.busy_share <= 0.5, "two of four slots were allowed to work"
            assert stats.episodes == 2 * len(FEASIBLE) == stats.env_steps
            span = house.scheduler.stats().since(stats)
            assert span.episodes == 0 and span.busy_seconds < stats.busy_seconds

    run(go())


def test_the_demonstrator_of_these_tests_knows_its_way():
    assert all(len(way(t)) >= 1 for t in POOL) and len(FEASIBLE) >= 6


class Elsewhere:
    """Plays as a worker in another process does: what it returns of frames is a reference."""

    def __init__(self, worker):
        self.worker = worker

    async def play(self, request, lease):
        result = await self.worker.play(request, lease)
        return replace(result, frames=("a reference to the frames of", result.record.id))

    def stop(self, episode, reason):
        self.worker.stop(episode, reason)

    async def verdicts_written(self):
        await self.worker.verdicts_written()


def test_references_to_frames_are_held_until_their_update_is_over():
    async def go():
        async with a_house(Demonstrator(POOL), limits=GroupLimits(2, 2, 0)) as house:
            scheduler = house.scheduler
            scheduler._player = Elsewhere(scheduler._player)
            batch = await scheduler.next_batch()
            episodes = [e.id for g in batch for e in g.episodes]
            assert scheduler.frames(batch) == {name: ("a reference to the frames of", name) for name in episodes}
            scheduler.put_back(batch, {episodes[0]})
            again = await scheduler.next_batch()
            assert [g.id for g in again] == [g.id for g in batch]
            held = scheduler.frames(again)
            assert len(held) == 4 and episodes[0] not in held and set(episodes[1:]) < set(held)
            scheduler.set_version(1)
            assert scheduler.frames(again) == {}

    run(go())


def test_frames_of_this_process_are_held_where_the_recording_does_not_have_them():
    async def go():
        for recorded in (True, False):
            kw = {"frames_recorded": lambda group, recorded=recorded: recorded}
            async with a_house(Demonstrator(POOL), limits=GroupLimits(2, 1, 0), **kw) as house:
                batch = await house.scheduler.next_batch()
                held = house.scheduler.frames(batch)
                assert len(held) == (0 if recorded else 2)
                for episode in batch[0].episodes if held else ():
                    assert {name for step in episode.steps for name in step.frames} == set(held[episode.id])

    run(go())


class Heavy(Elsewhere):
    """Whose episodes bring a MiB of frames each."""

    async def play(self, request, lease):
        return replace(await super().play(request, lease), frame_bytes=1 << 20)


def test_no_group_is_begun_for_whose_frames_there_is_no_memory_but_the_next_update_is():
    async def go():
        for mib, groups in ((100, 4), (7, 3), (5, 2), (0.1, 2)):
            budget = FrameBudget(int(mib * (1 << 20)), first_guess=1 << 20)
            async with a_house(Demonstrator(POOL), limits=GroupLimits(2, 1, 3), frame_budget=budget) as house:
                scheduler = house.scheduler
                scheduler._player = Heavy(scheduler._player)
                for version in range(1, 3):
                    batch = await scheduler.next_batch()
                    await until(lambda scheduler=scheduler: not scheduler.running)
                    begun = scheduler.buffer.under_way
                    assert begun == groups, mib
                    assert scheduler.frames(batch)
                    scheduler.set_version(version)

    run(go())
