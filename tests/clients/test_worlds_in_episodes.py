"""Episodes as a run plays them, over AndroidWorld's and OSWorld's protocols: from a slot to a record and a verdict."""

from contextlib import asynccontextmanager

import pytest
from androidworld_stub import AndroidWorldStub
from hostile import says, serving
from osworld_stub import IMPOSSIBLE, WRITE, ManagerStub
from phones import PATIENT
from scripted import AGENT, DONE, INFEASIBLE, Script, always, heard

from tapforge_envs import protocol as p
from tapforge_envs.clients.osworld import DIALECT
from tapforge_envs.protocol import Outcome, Reason, Task
from tapforge_envs.slots.managed import ManagedSlots
from tapforge_envs.slots.source import Verdict
from tapforge_envs.slots.table import Backoff
from tapforge_envs.slots.urls import UrlSlots, parse_urls
from tapforge_trainer.attempt import Attempt, AttemptRequest
from tapforge_trainer.records import Sampling
from tapforge_trainer.rollout.worker import RolloutWorker
from tapforge_trainer.tasks.files import read_task

TAPS = Task(suite="androidworld", template="TapSomeTimes", params={"task_idx": "0"}, max_steps=8)
HELLO = p.Type(text="hello")
QUICK = Backoff(first=0.01, cap=0.05)


async def play(slots, policy, task: Task):
    worker = RolloutWorker(AGENT, {"": policy})
    lease = await slots.acquire(deadline=60)
    attempt = Attempt("g000001", 1, 0, 0, 0, task, seed=1)
    result = await worker.play(AttemptRequest(attempt, Sampling(99)), lease)
    await slots.release(lease, result.verdict, result.why)
    await worker.close()
    return result


@asynccontextmanager
async def androidworld():
    stub = AndroidWorldStub()
    async with serving(stub.application()) as url:
        slots = UrlSlots(parse_urls([url], "list", "androidworld"), PATIENT, QUICK, protocol="androidworld")
        await slots.start()
        try:
            yield stub, slots
        finally:
            await slots.close()


@asynccontextmanager
async def osworld():
    stub = ManagerStub()
    async with serving(stub.application()) as url:
        addresses = parse_urls([f"{url}?workers=1"], "list", "osworld")
        slots = ManagedSlots(addresses, "osworld", DIALECT, PATIENT, QUICK)
        await slots.start()
        try:
            yield stub, slots
        finally:
            await slots.close()


async def test_a_task_of_androidworld_is_solved_by_who_reads_the_servers_goal():
    def taps(step, prompt, sampling):
        goal = heard(prompt)[1]
        if step == 0:
            return p.Drag(x=0, y=0, x2=1, y2=1)  # which the server has not
        return p.Tap(x=0.5, y=0.5) if step <= int(goal.split()[1]) else DONE

    async with androidworld() as (stub, slots):
        result = await play(slots, Script(taps), TAPS)
        record, wanted = result.record, stub.suite["TapSomeTimes"][0].wanted
        assert (record.reason, record.outcome, record.score) == (Reason.DONE, Outcome.SUCCESS, 1.0)
        assert record.task.goal == f"Tap {wanted} times." and record.task.key == TAPS.key
        assert "no drag" in record.steps[0].parse_error and record.steps[0].action is None
        assert [a["action_type"] for a in stub.executed] == ["click"] * wanted + ["status"]
        assert result.verdict is Verdict.CLEAN and stub.torn_down == [("TapSomeTimes", 0)]
        limit = await play(slots, always(p.Back()), TAPS)
        assert (limit.record.reason, limit.record.outcome) == (Reason.STEP_LIMIT, Outcome.FAILURE)


async def test_a_score_of_androidworld_that_is_none_is_no_sample():
    async with androidworld() as (stub, slots):
        stub.rough.plan["/task/score"] = [says('{"score": NaN}')]
        result = await play(slots, always(DONE), TAPS)
        assert (result.record.reason, result.record.outcome) == (Reason.JUDGE_ERROR, Outcome.INVALID)
        assert result.record.score is None and result.verdict is Verdict.DIRTY


@pytest.mark.parametrize(
    ("template", "policy", "reason", "outcome", "last"),
    [
        (WRITE, always(HELLO, DONE), Reason.DONE, Outcome.SUCCESS, "DONE"),
        (WRITE, always(HELLO, p.Answer(text="It is written.")), Reason.DONE, Outcome.SUCCESS, "DONE"),
        (WRITE, always(DONE), Reason.DONE, Outcome.FAILURE, "DONE"),
        (WRITE, always(HELLO, p.Terminate(status="failure")), Reason.DONE, Outcome.FAILURE, "FAIL"),
        (WRITE, always(INFEASIBLE), Reason.DECLARED_INFEASIBLE, Outcome.FAILURE, "FAIL"),
        # the file says nothing about it; the worker's configuration does
        (IMPOSSIBLE, always(INFEASIBLE), Reason.DECLARED_INFEASIBLE, Outcome.SUCCESS, "FAIL"),
        (IMPOSSIBLE, always(DONE), Reason.DONE, Outcome.FAILURE, "DONE"),
        # running out of steps is no way to solve it
        (IMPOSSIBLE, always(HELLO), Reason.STEP_LIMIT, Outcome.FAILURE, "pyautogui.write('hello', interval=0.02)"),
    ],
)
async def test_how_tasks_of_osworld_end(template, policy, reason, outcome, last):
    async with osworld() as (stub, slots):
        result = await play(slots, policy, read_task(template, "osworld", "here").model_copy(update={"max_steps": 3}))
        assert (result.record.reason, result.record.outcome) == (reason, outcome)
        assert result.record.task.goal in ("Write hello.", "Fly.") and result.verdict is Verdict.CLEAN
        ((worker, _),) = stub.workers.values()
        assert worker.machine.history[-1] == last


async def test_a_machine_that_breaks_in_an_episode_is_replaced_by_another():
    async with osworld() as (stub, slots):
        ((worker, _),) = stub.workers.values()
        worker.rough.plan["/step"] = [says('{"success": false, "message": "the VM is gone"}')]
        broken = await play(slots, always(HELLO, DONE), Task(suite="osworld", template=WRITE))
        assert (broken.record.outcome, broken.verdict) == (Outcome.INVALID, Verdict.DIRTY)
        well = await play(slots, always(HELLO, DONE), Task(suite="osworld", template=WRITE))
        assert well.record.outcome is Outcome.SUCCESS
        assert len(stub.made) == 2 and len(stub.workers) == 1
    assert not stub.workers
