"""A rollout worker as a Ray actor, on real phones: the driver gets records and references, never pixels."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
from tiny_samples import Tiny

sys.path.append(str(Path(__file__).parent.parent.parent / "slots"))
from phones import PATIENT, phones, until

from tapforge_envs.clients.phones import PhoneAddress
from tapforge_envs.phone import catalog
from tapforge_envs.protocol import EnvironmentFault, Reason
from tapforge_envs.slots.lease_life import LeaseLife
from tapforge_envs.slots.source import Lease, Verdict
from tapforge_trainer.agents import make_agent
from tapforge_trainer.attempt import Attempt, AttemptRequest
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.judges.journal import VerdictJournal
from tapforge_trainer.records import EpisodeRecord, Sampling
from tapforge_trainer.rollout import actor, remote_players
from tapforge_trainer.rollout.actor import RayCarrier, no_rewarder, start_rollout_actor
from tapforge_trainer.rollout.remote_players import RemotePlayers, WorkerLost
from tapforge_trainer.rollout.worker_host import RewardTerms

pytestmark = pytest.mark.asyncio(loop_scope="session")
TASKS = catalog.tasks("quickstart", "train")


def request(number: int, steps: int = 8) -> AttemptRequest:
    task = TASKS.sample(0, number).model_copy(update={"max_steps": steps})
    attempt = Attempt(f"g{number:06}", number, 0, 0, 0, task, seed=number)
    return AttemptRequest(attempt, Sampling(64), policy="random")


def lease(server, slot: int = 0) -> Lease:
    name = f"phone-{slot}"
    return Lease(name, 1, PhoneAddress(name, server.url(slot), PATIENT), LeaseLife(name, math.inf))


@asynccontextmanager
async def players_on(tiny: Tiny, count: int = 1, rewarder=no_rewarder, journal=None, say=print):
    make = partial(
        make_agent,
        "qwen3-vl",
        tiny.folder,
        prompt="compact",
        history_images=1,
        history_steps=4,
        context_tokens=1024,
        response_tokens=64,
    )
    async with phones(2) as server:
        players = RemotePlayers(
            lambda _: start_rollout_actor(make, 120, cpus=0, make_rewarder=rewarder), count, journal=journal, say=say
        )
        await players.start()
        try:
            yield players, server
        finally:
            await players.close()


async def test_the_driver_gets_a_record_and_a_reference_to_the_frames(tiny: Tiny, ray_cluster: None) -> None:
    import ray

    async with players_on(tiny, 2) as (players, server):
        assert await players.health(lease(server).phone)
        results = await asyncio.gather(*(players.play(request(n), lease(server, n)) for n in range(2)))
        for result in results:
            assert result.record.valid and result.record.steps and result.verdict is Verdict.CLEAN
            assert isinstance(result.frames, ray.ObjectRef)
        # Whoever fetches them has all that the steps name, also after the worker is gone.
        await players.close()
        for result in results:
            frames = await result.frames
            assert {name for step in result.record.steps for name in step.frames} == set(frames)
            assert all(isinstance(frame, FittedFrame) for frame in frames.values())


async def test_an_actor_that_is_killed_costs_its_attempt_and_another_one_plays(tiny: Tiny, ray_cluster: None) -> None:
    async with players_on(tiny) as (players, server):
        await server.set_faults(0, {"kind": "hung"})
        playing = asyncio.create_task(players.play(request(0), lease(server)))
        await until(server.hung)
        carrier = players._workers[0].carrier
        os.kill(await carrier.process(), signal.SIGKILL)
        result = await playing
        assert (result.record.reason, result.verdict) == (Reason.CANCELLED, Verdict.DIRTY)
        again = await players.play(request(1), lease(server, 1))
        assert again.record.valid and players.metrics()["restarts"] == 1


def counting_screens():
    """In the place of a `Rewarder`: gives an episode the number of its screens, and says so. It travels by value."""

    def made(verdicts, say):
        from tapforge_trainer.judges.journal import Written
        from tapforge_trainer.judges.verdicts import Trajectory, Verdict
        from tapforge_trainer.records import EpisodeRewards

        class Counting:
            async def rewards(self, record, frames):
                screens = float(len(Trajectory.of(record, frames).screens))
                say(f"waiting for the count of {record.id}")
                if verdicts.get(record.id) is None:
                    verdict = Verdict(1.0, f"in process {os.getpid()}", (), 0, 1, 1, 0.0, "m")
                    verdicts.put(Written(record.id, "content", record.id, None, verdict))
                return EpisodeRewards({"count": (screens,)}, record.verified, record.reason, record.verified)

            async def close(self):
                pass

        return Counting()

    return made


async def test_any_worker_gives_rewards_from_frames_by_reference_also_after_the_one_that_played_died(
    tiny: Tiny, ray_cluster: None, tmp_path: Path
) -> None:
    journal = VerdictJournal(tmp_path / "verdicts.jsonl")
    said: list[str] = []
    async with players_on(tiny, 1, counting_screens(), journal, said.append) as (players, server):
        result = await players.play(replace(request(0), rewarded=True), lease(server))
        record = result.record
        assert record.awaits_rewards and record.last_frame is not None and not record.valid
        os.kill(await players._workers[0].carrier.process(), signal.SIGKILL)
        screens = (float(len(record.steps) + 1),)
        assert (await players.reward(record, result.frames)).streams == {"count": screens}
        assert players.metrics()["restarts"] == 1
        # Of a recording: read by the driver, which may be on another node.
        recorded = MappingProxyType(await result.frames)
        assert (await players.reward(record, recorded)).streams == {"count": screens}
        # What its judges said is in the driver's journal, and the one that asked last was told of it.
        await until(lambda: journal.of(record.id))
        (first,) = journal.of(record.id)
        os.kill(await players._workers[0].carrier.process(), signal.SIGKILL)
        await players.reward(record, recorded)
        await asyncio.sleep(2 * remote_players.EXCHANGE_SECONDS)
        assert journal.of(record.id) == (first,)
        assert f"waiting for the count of {record.id}" in said, "people read it where the driver is"
        await players.verdicts_written()
        assert len(VerdictJournal(tmp_path / "verdicts.jsonl")) == 1


async def test_screens_that_never_come_from_another_node_are_lost(monkeypatch) -> None:
    monkeypatch.setattr(actor, "_FETCH_SECONDS", 0.05)
    record = EpisodeRecord("e", "g", TASKS.sample(0, 0), 0, "s", 1, Reason.DONE, None, None, "", (), 0.0, 1.0)
    here = actor.RolloutActor(lambda: None, lambda agent: {}, no_rewarder)
    here._host = object()
    packed = await here.reward(pickle.dumps((record, RewardTerms())), [asyncio.get_running_loop().create_future()])
    found = pickle.loads(packed)  # noqa: S301 (ours)
    assert found.reason is Reason.VERDICT_MISSING and "its screens are lost" in found.message


async def test_what_is_wrong_with_a_phone_is_told_across_processes(tiny: Tiny, ray_cluster: None) -> None:
    async with players_on(tiny) as (players, server):
        await server.set_faults(0, {"kind": "error", "calls": ["step"]})
        broken = await players.play(request(0), lease(server))
        assert (broken.record.reason, broken.verdict) == (Reason.ENV_ERROR, Verdict.DIRTY)
        with pytest.raises(EnvironmentFault, match="no server answers"):
            await players.health(PhoneAddress("gone", "http://127.0.0.1:1", PATIENT))


async def test_what_is_lost_on_the_way_costs_an_attempt_and_what_was_raised_there_is_raised_here() -> None:
    from ray.exceptions import ActorUnavailableError, ObjectLostError, RayTaskError

    async def fails(error: Exception) -> None:
        raise error

    carrier = RayCarrier(None)
    for error in (ObjectLostError("ab" * 28, None, ""), ActorUnavailableError("the way is cut", b"0" * 16)):
        with pytest.raises(WorkerLost) as lost:
            await carrier._answer(fails(error), None)
        assert not lost.value.dead
    late = RayTaskError("play", "Traceback", TimeoutError("too late"), "worker", 1, "127.0.0.1").as_instanceof_cause()
    with pytest.raises(TimeoutError, match="^too late$"):
        await carrier._answer(fails(late), None)


async def test_others_get_a_turn_when_many_attempts_begin_at_once() -> None:
    calls: list[asyncio.Future] = []

    def remote(*_):
        calls.append(asyncio.get_running_loop().create_future())
        return calls[-1], "frames"

    carrier = RayCarrier(SimpleNamespace(play=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote))))
    playing = [asyncio.create_task(carrier.play(request(number), None)) for number in range(8)]
    seen = []
    async with asyncio.timeout(60):
        while len(calls) < 8:
            await asyncio.sleep(0)
            seen.append(len(calls))
    assert all(after - before <= 1 for before, after in pairwise([0, *seen]))
    for task in playing:
        task.cancel()
    await asyncio.gather(*playing, return_exceptions=True)
