"""Episodes that await their rewards: their phones are free, their groups wait, and a crash asks again."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from house import LIMITS, POOL, a_house, half_careless, run
from phones import until
from scripted import Demonstrator

from tapforge_envs.protocol import Outcome, Reason
from tapforge_trainer.frames.frame import FrameError
from tapforge_trainer.judges.verdicts import Trajectory
from tapforge_trainer.recording.frames import RecordedFrames
from tapforge_trainer.recording.queue import RecordingQueue
from tapforge_trainer.recording.reader import FRAMES, Recording
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.records import EpisodeRewards
from tapforge_trainer.rollout.scheduler import RolloutError
from tapforge_trainer.telemetry.progress import Progress, kept, resumed


class Asked:
    """In the place of a `Rewarder`: says after `gate` what `verdict` says of an episode."""

    def __init__(self, verdict=lambda record: True):
        self.verdict = verdict
        self.gate = asyncio.Event()
        self.asked: Counter[str] = Counter()

    async def rewards(self, record, frames):
        self.asked[record.id] += 1
        assert len(Trajectory.of(record, frames).screens) == len(record.steps) + 1
        await self.gate.wait()
        said = self.verdict(record)
        outcome = Outcome.INVALID if said is None else Outcome.SUCCESS if said else Outcome.FAILURE
        reason = Reason.VERDICT_MISSING if said is None else record.reason
        value = None if said is None else float(said)
        streams = {"judge": (*(0.0,) * (len(record.steps) - 1), value)}
        message = "401 the key is refused" if said is None else ""
        return EpisodeRewards(streams, outcome, reason, record.outcome, message=message, usage={"requests": 1})

    async def close(self):
        pass


def test_phones_are_free_and_groups_wait_until_the_verdicts_are_there(tmp_path):
    async def go():
        asked = Asked(lambda record: record.seed % 2)
        async with a_house(
            Demonstrator(POOL, half_careless),
            recorder=RecordingQueue(Recorder(tmp_path)),
            rewarder=asked,
            rewarded=True,
            verified=False,
        ) as house:
            batch = asyncio.create_task(house.scheduler.next_batch())
            # Every episode that the bound allows has been played, though nothing was judged.
            most = LIMITS.capacity * LIMITS.group_size
            await until(lambda: len(asked.asked) == most and house.slots.counts().leased == 0)
            assert not batch.done() and house.scheduler.stats().episodes == 0
            asked.gate.set()
            groups = await batch
            assert house.scheduler.rewards.usage["requests"] >= 6
        for group in groups:
            for episode in group.episodes:
                assert (episode.outcome is Outcome.SUCCESS) == bool(episode.seed % 2)
                assert episode.valid and episode.rewards is not None and episode.score is None
        recorded = {episode.id: episode for episode in Recording(tmp_path).episodes()}
        assert all(recorded[e.id] == e for group in groups for e in group.episodes)
        assert set(asked.asked.values()) == {1}

    run(go())


def test_an_episode_without_a_verdict_leaves_its_group_and_is_not_played_again():
    async def go():
        asked = Asked(lambda record: None if record.id.split(".")[1] == "1" else True)
        asked.gate.set()
        async with a_house(Demonstrator(POOL), rewarder=asked, rewarded=True) as house:
            groups = await house.scheduler.next_batch()
            stats = house.scheduler.stats()
        assert {len(group.episodes) for group in groups} == {2}
        assert stats.invalid == {"verdict_missing": stats.episodes // 3}
        assert stats.reruns == 0
        assert house.scheduler.rewards.missing == stats.episodes // 3

    run(go())


def test_after_a_crash_what_was_played_is_asked_about_and_not_played_again(tmp_path):
    async def go():
        asked = Asked()
        parts = {"rewarder": asked, "rewarded": True, "verified": False}
        async with a_house(Demonstrator(POOL), recorder=RecordingQueue(Recorder(tmp_path)), **parts) as house:
            batch = asyncio.create_task(house.scheduler.next_batch())
            await until(lambda: len(asked.asked) >= 6)
            unfinished = house.scheduler.buffer.unfinished()
            state, order = house.source.state, house.scheduler.buffer.next_order
            batch.cancel()
        played = {episode.id for group in unfinished for episode in group.awaiting}
        assert len(played) >= 6
        found = Recording(tmp_path).find(played)
        kept = [replace(g, awaiting=tuple(found[e.id] for e in g.awaiting)) for g in unfinished]
        again = Asked()
        again.gate.set()
        async with a_house(
            Demonstrator(POOL),
            recorder=RecordingQueue(Recorder(tmp_path)),
            resumed=kept,
            order=order,
            state=state,
            prefix="again-",
            recorded=lambda episode: RecordedFrames(tmp_path / FRAMES, episode.frames),
            frames_recorded=lambda group: False,
            rewarder=again,
            rewarded=True,
            verified=False,
        ) as house:
            groups = [*await house.scheduler.next_batch()]
            held = house.scheduler.frames(groups)
        assert played <= set(again.asked)
        assert not played & held.keys()  # they are in the recording; in memory they would count as 0 bytes
        entered = [episode.id for group in groups for episode in group.episodes]
        assert len(entered) == len(set(entered)) == 6
        assert played & set(entered)
        lines = Counter(episode.id for episode in Recording(tmp_path).episodes())
        assert all(lines[name] == 1 for name in played)

    run(go())


def test_nothing_is_asked_about_a_measurement():
    async def go():
        asked = Asked()
        async with a_house(Demonstrator(POOL), rewarder=asked, rewarded=True, verified=False) as house:
            records = await house.scheduler.run_fixed(POOL[:3])
        assert all(record.valid and not record.awaits_rewards for record in records)
        assert not asked.asked

    run(go())


def test_what_breaks_while_rewards_are_asked_for_ends_the_rollout():
    def broken(record):
        raise ValueError("a reward of mine")

    async def go():
        asked = Asked(broken)
        asked.gate.set()
        async with a_house(Demonstrator(POOL), rewarder=asked, rewarded=True) as house:
            try:
                await house.scheduler.next_batch()
            except ValueError as error:
                assert str(error) == "a reward of mine"
            else:
                raise AssertionError("the run went on")

    run(go())


def test_an_episode_whose_recorded_screens_are_damaged_has_no_verdict_and_ends_no_run():
    """Raised, the error would come again in every session that takes the checkpoint up."""

    def damaged(record):
        if record.id.split(".")[1] == "1":
            raise FrameError("frame 0123 is damaged")
        return True

    async def go():
        asked = Asked(damaged)
        asked.gate.set()
        async with a_house(Demonstrator(POOL), rewarder=asked, rewarded=True) as house:
            groups = await house.scheduler.next_batch()
            assert "its screens are lost: frame 0123 is damaged" in house.scheduler.rewards.last_missing
        assert {len(group.episodes) for group in groups} == {2}

    run(go())


def test_after_a_crash_an_episode_without_a_verdict_is_not_played_again(tmp_path):
    """Its phone did well: whether it had none before the checkpoint, or between that and the crash."""

    async def go():
        asked = Asked(lambda record: None if record.id.split(".")[1] == "1" else True)
        parts = {"rewarder": asked, "rewarded": True, "recorder": RecordingQueue(Recorder(tmp_path))}
        async with a_house(Demonstrator(POOL), **parts) as house:
            batch = asyncio.create_task(house.scheduler.next_batch())
            most = LIMITS.capacity * LIMITS.group_size
            await until(lambda: len(asked.asked) == most)
            before = kept(house.scheduler.buffer.unfinished())
            state, order = house.source.state, house.scheduler.buffer.next_order
            house.scheduler._pump = lambda: None  # what is consumed makes room for nothing
            batch.cancel()
            asked.gate.set()
            await until(lambda: house.scheduler.rewards.answered == most)
            after = kept(house.scheduler.buffer.unfinished())
        assert [len(group["unjudged"]) for group in before] == [0] * 4
        assert [len(group["unjudged"]) for group in after] == [1] * 4
        for unfinished in (before, after):
            again = Asked()
            again.gate.set()
            async with a_house(
                Demonstrator(POOL),
                resumed=resumed(Progress(unfinished=unfinished), tmp_path),
                order=order,
                state=state,
                prefix="again-",
                rewarder=again,
                rewarded=True,
            ) as house:
                groups = await house.scheduler.next_batch()
                assert not again.asked and {len(group.episodes) for group in groups} == {2}

    run(go())


def test_where_every_verdict_is_missing_the_run_says_what_the_judge_said():
    async def go():
        asked = Asked(lambda record: None)
        asked.gate.set()
        async with a_house(Demonstrator(POOL), rewarder=asked, rewarded=True) as house:
            with pytest.raises(RolloutError, match=r"look at the phones, and at the judge; .*: 401 the key is refused"):
                await house.scheduler.next_batch()

    run(go())


def test_an_episode_that_ends_while_the_rollout_closes_is_asked_about_by_the_next_session():
    async def go():
        asked = Asked()
        async with a_house(Demonstrator(POOL), rewarder=asked, rewarded=True) as house:
            slots, release = house.slots, house.slots.release
            at_the_end, goes_on = asyncio.Event(), asyncio.Event()

            async def held(*lease):
                at_the_end.set()
                await goes_on.wait()
                await release(*lease)

            slots.release = held
            batch = asyncio.create_task(house.scheduler.next_batch())
            await at_the_end.wait()
            closing = asyncio.create_task(house.scheduler.close(60))
            await asyncio.sleep(0)
            goes_on.set()
            await closing
            batch.cancel()
            await asyncio.sleep(0)
            assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("rewards ")] == []

    run(go())
