"""The client of OSWorld's workers, over real sockets against a stub of them (`osworld_stub.py`)."""

import asyncio
import base64
import io
import json
import random
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hostile import cut_off, endless, mangled, png, png_bomb, redirect, says, serving
from osworld_stub import IMPOSSIBLE, WRITE, ManagerStub, WorkerStub
from phones import PATIENT, impatient, until
from PIL import Image

from tapforge_api.environment import Settle
from tapforge_envs import protocol as p
from tapforge_envs.clients.http import new_session
from tapforge_envs.clients.osworld import osworld, pause_of
from tapforge_envs.clients.phones import PhoneAddress, PhoneClients
from tapforge_envs.protocol import EnvironmentFault, Reason, Task, UnsupportedAction

TASK = Task(suite="osworld", template=WRITE)
FLY = Task(suite="osworld", template=IMPOSSIBLE)
HELLO = p.Type(text="hello")
DONE = p.Terminate(status="success")


@asynccontextmanager
async def a_worker():
    stub = WorkerStub()
    async with serving(stub.application()) as url, new_session() as session:
        yield stub, osworld(url, session, PATIENT, "vm-0", Settle())


async def test_an_episode_from_start_to_score():
    async with a_worker() as (stub, client):
        assert await client.health() == ""
        seen = await client.reset(TASK)
        assert (seen.goal, seen.feasible) == ("Write hello.", None)
        assert (seen.frame.width, seen.frame.height) == (64, 48)
        assert stub.starts[0]["vm_name"] == "Ubuntu.qcow2" and stub.starts[0]["action_space"] == "pyautogui"
        await client.step(p.Tap(x=1.0, y=0.5), 0)
        result = await client.step(HELLO, 1)
        assert not result.done
        with Image.open(io.BytesIO(result.observation.frame.data)) as image:
            assert image.getpixel((0, 0)) == (5, 9, 9)
        assert (await client.step(DONE, 2)).done
        assert (await client.evaluate()).value == 1
        await client.close()
        assert stub.machine.history == ["pyautogui.click(63, 24)", "pyautogui.write('hello', interval=0.02)", "DONE"]
        assert stub.pauses == [2.0, 2.0, 2.0]
        # the machine is started once, and kept for the next episode
        await client.reset(TASK)
        assert (len(stub.starts), stub.lost, stub.closed) == (1, 0, 0)


@pytest.mark.parametrize(
    ("task", "steps", "last", "score"),
    [
        # an answer is not sent: OSWorld judges the machine
        (TASK, (HELLO, p.Answer(text="It is written.")), "DONE", 1),
        (TASK, (p.Answer(text=""),), "DONE", 0),
        (FLY, (p.Answer(text="I can't."),), "DONE", 0),
        (TASK, (HELLO, p.Terminate(status="failure")), "FAIL", 0),
        (TASK, (HELLO, p.Terminate(status="infeasible")), "FAIL", 0),
        (FLY, (p.Terminate(status="infeasible"),), "FAIL", 1),
        (FLY, (DONE,), "DONE", 0),
        # the agent did not end it: DONE is sent before it is judged
        (TASK, (HELLO,), "DONE", 1),
        (FLY, (p.Wait(seconds=0),), "DONE", 0),
    ],
)
async def test_the_last_step_before_the_judge_says_how_it_ended(task, steps, last, score):
    async with a_worker() as (stub, client):
        seen = await client.reset(task)
        assert seen.feasible is None
        for index, action in enumerate(steps):
            await client.step(action, index)
        assert (await client.evaluate()).value == score
        assert stub.machine.history[-1] == last
        assert sum(word in ("DONE", "FAIL") for word in stub.machine.history) == 1


async def test_at_the_step_limit_nothing_is_said():
    async with a_worker() as (stub, client):
        await client.reset(TASK)
        await client.step(HELLO, 0)
        await client.close()
        assert stub.machine.history == ["pyautogui.write('hello', interval=0.02)"]


async def test_a_late_step_is_carried_out_once_and_a_fault():
    async with a_worker() as (stub, client):
        await client.reset(TASK)
        stub.rough.plan["/step"] = [stub.rough.late]
        with pytest.raises(EnvironmentFault, match=r"vm-0: step 0 \(type\): no answer within") as caught:
            await impatient(client.step(HELLO, 0), stub.rough.hung)
        assert caught.value.reason is Reason.DEADLINE
        assert stub.machine.text == "hello"


async def test_after_a_call_that_was_cut_off_the_machine_is_not_clean():
    async with a_worker() as (stub, client):
        await client.reset(TASK)
        stub.rough.plan["/step"] = [stub.rough.late]
        cut_off = asyncio.ensure_future(client.step(HELLO, 0))
        await until(stub.rough.hung)
        cut_off.cancel()
        await asyncio.wait([cut_off])
        with pytest.raises(EnvironmentFault, match=r"step 0 \(type\) was cut off"):
            await client.close()


@pytest.mark.parametrize("url", ["http://a:1#2", "http://a:1?workers=2"])
async def test_a_managers_address_is_made_by_a_run(url):
    async with new_session() as session:
        with pytest.raises(EnvironmentFault, match="made by a run"):
            osworld(url, session, PATIENT, "vm-0", Settle())


async def test_a_late_start_is_not_repeated():
    async with a_worker() as (stub, client):
        stub.rough.plan["/start"] = [stub.rough.late]
        with pytest.raises(EnvironmentFault, match="vm-0: start: no answer"):
            await impatient(client.reset(TASK), stub.rough.hung)
        await client.reset(TASK)
        assert (len(stub.starts), stub.lost) == (1, 0)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Task(suite="osworld", template="os/nothing"), "the worker has no such task: .*No such file"),
        (Task(suite="osworld", template="os"), "DOMAIN/EXAMPLE_ID"),
        (Task(suite="osworld", template="os/../secret"), "DOMAIN/EXAMPLE_ID"),
        (Task(suite="osworld", template=WRITE, params={"app": "x"}), "DOMAIN/EXAMPLE_ID"),
        (Task(suite="osworld", template="os/judgeless"), "without a function that judges"),
        (Task(suite="osworld", template="os/speechless"), "'instruction' is None"),
        (Task(suite="osworld", template=WRITE, goal="Dance."), "'Write hello.'.*'Dance.'"),
    ],
)
async def test_a_task_that_is_none_is_refused_before_a_machine_is_reset(task, words):
    async with a_worker() as (stub, client):
        with pytest.raises(EnvironmentFault, match=f"vm-0: reset.*{words}"):
            await client.reset(task)
        assert "POST /reset" not in stub.rough.seen and not stub.starts


@pytest.mark.parametrize(
    "action",
    [p.Swipe(x=0, y=0, x2=1, y2=1), p.AskUser(text="Who?"), p.OpenApp(name="Files"), p.Key(name="VOLUME"), p.Home()],
    ids=lambda action: action.type,
)
async def test_what_a_desktop_does_not_have_is_refused_before_it_is_asked(action):
    async with a_worker() as (stub, client):
        await client.reset(TASK)
        with pytest.raises(UnsupportedAction):
            await client.step(action, 0)
        assert not stub.machine.history


def test_the_pause_is_the_runs():
    assert [pause_of(Settle(mode=m)) for m in ("adaptive", "none")] == [2.0, 0.0]
    assert pause_of(Settle(mode="fixed", fixedSeconds=0.5)) == 0.5


@pytest.mark.parametrize("metric", ["NaN", "-1", "2", "9" * 400, "null", '"1"', "1e999"])
async def test_a_score_that_is_none_is_a_fault(metric):
    async with a_worker() as (stub, client):
        await client.reset(TASK)
        await client.step(DONE, 0)
        stub.rough.plan["/evaluate"] = [says(f'{{"metric": {metric}, "success": true}}')]
        with pytest.raises(EnvironmentFault, match="vm-0: evaluate: 'metric'"):
            await client.evaluate()


@pytest.mark.parametrize(
    ("screenshot", "words"),
    [
        (None, "instead of base64"),
        ("%%%", "not base64"),
        (base64.b64encode(b"GIF89a").decode(), "neither PNG nor JPEG"),
        (base64.b64encode(png(4, 4)[:-5]).decode(), "half a PNG"),
        (base64.b64encode(png_bomb()).decode(), "is not a screen"),
    ],
)
async def test_a_screenshot_that_is_none_is_a_fault(screenshot, words):
    async with a_worker() as (stub, client):
        stub.rough.plan["/reset"] = [says(json.dumps({"obs": {"screenshot": screenshot}, "success": True}))]
        with pytest.raises(EnvironmentFault, match=f"vm-0: reset: the screenshot is none: .*{words}"):
            await client.reset(TASK)


@pytest.mark.parametrize("path", ["/", "/get_task_config", "/reset", "/step", "/evaluate"])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (endless, "longer than"),
        (cut_off, "connection broke"),
        (redirect("http://127.0.0.1:1/"), "answered 307"),
        (says("Internal Server Error", 500), "answered 500"),
        (says("[" * 100_000), "not JSON"),
        (says('{"success": false, "message": "the VM is gone"}'), "the VM is gone|info"),
        (says("[1, 2]"), "not an object|info"),
    ],
    ids=["endless", "cut off", "redirect", "500", "deep", "failed", "list"],
)
async def test_what_is_no_answer_is_a_fault(path, answer, words):
    async with a_worker() as (stub, client):
        stub.rough.plan[path] = [answer]
        with pytest.raises(EnvironmentFault, match=words) as caught:
            await client.health()
            await client.reset(TASK)
            await client.step(HELLO, 0)
            await client.step(DONE, 1)
            await client.evaluate()
        assert len(str(caught.value)) < 1000
        assert len([line for line in stub.rough.seen if line.endswith(" " + path)]) == 1


async def test_a_manager_is_no_worker():
    async with serving(ManagerStub().application()) as url, new_session() as session:
        with pytest.raises(EnvironmentFault, match=r"'OSWorld env manager', not a worker: .*\?workers=NUMBER"):
            await osworld(url, session, PATIENT, "vm-0", Settle()).health()


async def fuzzed(seed: int, count: int) -> int:
    """Episodes in which every answer may be wrong; returns how many wrong answers were sent."""
    rng, wrong = random.Random(seed), 0

    def mangle(path: str, body: bytes):
        nonlocal wrong
        if rng.random() < 0.75:
            return None
        wrong += 1
        status = rng.choice((200,) * 12 + (201, 204, 404, 422, 500))
        body = b"" if status == 204 else mangled(rng, body)
        return web.Response(body=body, status=status, headers={"Content-Type": "application/json"})

    async with a_worker() as (stub, client):
        stub.rough.mangle = mangle
        while wrong < count:
            stub.rough.seen.clear()
            calls = (
                client.health,
                lambda: client.reset(TASK),
                lambda: client.step(HELLO, 0),
                lambda: client.step(DONE, 1),
                client.evaluate,
                client.close,
            )
            for call in calls:
                try:
                    answer = await call()
                except EnvironmentFault as fault:
                    assert str(fault).startswith("vm-0: ") and len(str(fault)) < 1000
                    break
                observation = answer.observation if isinstance(answer, p.StepResult) else answer
                if isinstance(observation, p.Observation):
                    frame = observation.frame
                    assert 0 < frame.width * frame.height <= 40_000_000
                if isinstance(answer, p.Score):
                    assert 0 <= answer.value <= 1
            # whatever came back, nothing was asked twice
            assert stub.rough.seen.count("POST /step") <= 2
            assert stub.lost == 0
    return wrong


async def test_wrong_answers_are_named_faults_or_right_after_all():
    assert await fuzzed(seed=1, count=1500) >= 1500


async def test_runs_open_it_by_its_name():
    async with serving(WorkerStub().application()) as url:
        clients = PhoneClients()
        address = PhoneAddress("vm-0", url, PATIENT, protocol="osworld")
        try:
            assert await clients.health(address) == ""
            assert (await clients.open(address).reset(TASK)).goal == "Write hello."
        finally:
            await clients.close()
