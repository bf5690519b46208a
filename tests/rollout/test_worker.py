"""What the driver relies on from whoever plays: verdicts on phones, the steps of what was stopped, ends of lives."""

import asyncio

import pytest
from phones import PATIENT, phones, put_forward, until
from scripted import AGENT, DONE, TASKS, Demonstrator, Held, always

from tapforge_envs.clients.phones import PhoneAddress
from tapforge_envs.protocol import Outcome, Reason
from tapforge_envs.slots.lease_life import LeaseLife
from tapforge_envs.slots.source import Lease, Verdict
from tapforge_trainer.attempt import Attempt, AttemptRequest
from tapforge_trainer.records import Sampling
from tapforge_trainer.rollout.worker import RolloutWorker

TASK = TASKS.sample(0, 0)


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def request(policy: str = "") -> AttemptRequest:
    return AttemptRequest(Attempt("g000001", 1, 0, 0, 0, TASK, seed=1), Sampling(99), policy=policy)


def lease(server, **life) -> Lease:
    return Lease("phone-0", 1, PhoneAddress("phone-0", server.url(), PATIENT), LeaseLife("phone-0", **life))


async def test_a_phone_is_left_clean_or_dirty_as_its_episode_ended():
    worker = RolloutWorker(AGENT, {"": Demonstrator([TASK])})
    async with phones() as server:
        solved = await worker.play(request(), lease(server))
        assert (solved.record.outcome, solved.verdict, solved.why) == (Outcome.SUCCESS, Verdict.CLEAN, "")
        await server.set_faults(0, {"kind": "error", "calls": ["evaluate"]})
        broken = await worker.play(request(), lease(server))
        assert (broken.record.reason, broken.verdict) == (Reason.JUDGE_ERROR, Verdict.DIRTY)
        assert "evaluate" in broken.why
        assert worker.steps == {}
    await worker.close()


async def test_a_phone_that_has_no_such_task_is_well_and_says_so():
    """Nothing was begun on it: no strike for the phone, and none for the next one that is asked."""
    worker = RolloutWorker(AGENT, {"": Demonstrator([TASK])})
    unknown = TASK.model_copy(update={"template": "no-such-template"})
    mute = TASK.model_copy(update={"goal": ""})
    async with phones() as server:
        for task in (unknown, mute):
            asked = AttemptRequest(Attempt("g000001", 1, 0, 0, 0, task, seed=1), Sampling(99))
            result = await worker.play(asked, lease(server))
            assert (result.record.reason, result.record.outcome) == (Reason.ENV_ERROR, Outcome.INVALID)
            assert result.unknown_task and result.verdict is Verdict.UNPROVEN and not result.record.steps
        assert "says a goal" in result.record.message
        assert (await worker.play(request(), lease(server))).record.outcome is Outcome.SUCCESS
    await worker.close()


async def test_a_stopped_attempt_returns_its_steps_and_others_go_on():
    generator = Held(lambda *a: DONE, steps=0)
    worker = RolloutWorker(AGENT, {"": generator, "quick": always(DONE)})
    async with phones() as server:
        playing = asyncio.create_task(worker.play(request(), lease(server)))
        await until(lambda: generator.held)
        assert worker.steps == {request().attempt.episode: 0}
        with pytest.raises(ValueError, match="is being played already"):
            await worker.play(request(), lease(server))
        worker.stop("another", Reason.CANCELLED)
        worker.stop(request().attempt.episode, Reason.RECLAIMED)
        stopped = await playing
        assert (stopped.record.reason, stopped.record.outcome) == (Reason.RECLAIMED, None)
        assert stopped.verdict is Verdict.UNPROVEN, "it says nothing of the phone"
        assert (await worker.play(request("quick"), lease(server))).record.valid
    await worker.close()


async def test_after_the_end_of_a_lease_no_call_begins_and_a_running_one_is_cut_off():
    worker = RolloutWorker(AGENT, {"": Demonstrator([TASK])})
    async with phones() as server:
        await server.set_faults(0, {"kind": "hung", "calls": ["reset"]})
        ended = lease(server, ends=loop_time() + 30, clock=loop_time)
        playing = asyncio.create_task(worker.play(request(), ended))
        await until(server.hung)
        ended.life.extend(loop_time() + 50)
        put_forward(31)
        await asyncio.sleep(0)
        assert not playing.done(), "its life was made longer"
        put_forward(20)
        result = await playing
        assert (result.record.reason, result.verdict) == (Reason.LEASE_LOST, Verdict.DIRTY)
        late = await worker.play(request(), ended)
        assert late.record.reason is Reason.LEASE_LOST and server.hung() == 1
    await worker.close()
