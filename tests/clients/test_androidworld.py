"""The client of AndroidWorld's server, over real sockets against a stub of it (`androidworld_stub.py`)."""

import asyncio
import io
import json
import random
from contextlib import asynccontextmanager

import pytest
from androidworld_stub import AndroidWorldStub
from hostile import JUNK, cut_off, endless, mangled, redirect, says, serving
from phones import PATIENT, impatient, until
from PIL import Image

from tapforge_envs import protocol as p
from tapforge_envs.clients import androidworld
from tapforge_envs.clients.androidworld import AndroidWorldClient, request_of
from tapforge_envs.clients.http import new_session
from tapforge_envs.clients.phones import PhoneAddress, PhoneClients
from tapforge_envs.clients.pixels import frame_of_numbers
from tapforge_envs.protocol import EnvironmentFault, Reason, Task, UnknownTask, UnsupportedAction
from tapforge_trainer.agents import maiui
from tapforge_trainer.agents.coordinates import Plane

TASK = Task(suite="androidworld", template="TapSomeTimes", params={"task_idx": "1"})
TAP = p.Tap(x=0.5, y=0.5)


@asynccontextmanager
async def a_server(**size):
    stub = AndroidWorldStub(**size)
    async with serving(stub.application()) as url, new_session() as session:
        yield stub, AndroidWorldClient(url, session, PATIENT, "phone-0")


async def test_an_episode_from_reset_to_tear_down():
    async with a_server() as (stub, client):
        assert await client.health() == ""
        seen = await client.reset(TASK)
        wanted = stub.suite["TapSomeTimes"][1].wanted
        assert seen.goal == f"Tap {wanted} times."
        assert (seen.frame.width, seen.frame.height) == (8, 6)
        with Image.open(io.BytesIO(seen.frame.data)) as image:
            assert image.getpixel((0, 0)) == (0, 255, 7) and image.getpixel((7, 5)) == (0, 100, 10)
        assert (await client.evaluate()).value == 0
        for index in range(wanted):
            result = await client.step(TAP, index)
            assert not result.done
        with Image.open(io.BytesIO(result.observation.frame.data)) as image:
            assert image.getpixel((0, 0)) == (wanted, 255, 7)
        assert (await client.step(p.Terminate(status="success"), wanted)).done
        assert (await client.evaluate()).value == 1
        await client.close()
        await client.close()
        assert stub.torn_down == [("TapSomeTimes", 1)]
        assert stub.executed[0] == {"action_type": "click", "x": 4, "y": 3}
        assert stub.executed[-1] == {"action_type": "status", "goal_status": "complete"}
        assert stub.rough.seen[:6] == [
            "GET /health",
            "GET /suite/reinitialize?n_task_combinations=2&seed=42",
            "GET /task/goal?task_type=TapSomeTimes&task_idx=1",
            "POST /task/initialize?task_type=TapSomeTimes&task_idx=1",
            "POST /reset?go_home=true",
            "GET /screenshot?wait_to_stabilize=true",
        ]


async def test_the_same_task_is_the_same_after_others_and_after_a_broken_episode():
    async with a_server() as (stub, client):
        first = (await client.reset(TASK)).goal
        # nobody tears it down: initialized instances can't be initialized again, so the suite is made anew
        await client.reset(Task(suite="androidworld", template="TapSomeTimes", params={"task_idx": "7"}, seed=5))
        assert len(stub.suite["Browse"]) == 8
        assert (await client.reset(TASK)).goal == first


async def test_another_goal_than_the_tasks_is_a_fault_that_names_both():
    async with a_server() as (stub, client):
        with pytest.raises(EnvironmentFault, match=r"phone-0: goal of TapSomeTimes 1: .*'Tap .*'Dance.'.*different"):
            await client.reset(TASK.model_copy(update={"goal": "Dance."}))
        assert not any("initialize?task" in line for line in stub.rough.seen)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (TASK.model_copy(update={"template": "Nonsense"}), "suite has no task 'Nonsense'"),
        (TASK.model_copy(update={"params": {"task_idx": "-1"}}), "task_idx, 0 to 9999"),
        (TASK.model_copy(update={"params": {"task_idx": "1", "app": "Clock"}}), "task_idx, 0 to 9999"),
    ],
)
async def test_a_task_that_is_none_is_refused(task, words):
    async with a_server() as (_, client):
        with pytest.raises(UnknownTask, match=words):
            await client.reset(task)


async def test_the_servers_tasks():
    stub, clients = AndroidWorldStub(), PhoneClients()
    async with serving(stub.application()) as url:
        address = PhoneAddress("phone-0", url, PATIENT, protocol="androidworld")
        try:
            assert [t.template for t in await clients.tasks(address, 10)] == ["Browse", "TapSomeTimes"]
            (task,) = await clients.tasks(address, 1)
            assert (await clients.open(address).reset(task)).goal  # what is listed can be reset to
            stub.rough.plan["/suite/task_list"] = [says(json.dumps({"task_list": ["x"] * 100_000}))]
            with pytest.raises(EnvironmentFault, match="lists 100000 tasks"):
                await clients.tasks(address, 10)
        finally:
            await clients.close()


async def test_after_a_call_that_was_cut_off_the_phone_is_not_clean():
    async with a_server() as (stub, client):
        await client.reset(TASK)
        stub.rough.plan["/execute_action"] = [stub.rough.late]
        cut_off = asyncio.ensure_future(client.step(TAP, 0))
        await until(stub.rough.hung)
        cut_off.cancel()
        await asyncio.wait([cut_off])
        with pytest.raises(EnvironmentFault, match=r"step 0 \(tap\) was cut off"):
            await client.close()


@pytest.mark.parametrize(
    ("action", "request_body"),
    [
        (p.Tap(x=0, y=1), {"action_type": "click", "x": 0, "y": 199}),
        (p.DoubleTap(x=0.5, y=0.5), {"action_type": "double_tap", "x": 50, "y": 100}),
        (p.LongPress(x=0.5, y=0.5), {"action_type": "long_press", "x": 50, "y": 100}),
        (p.Scroll(direction="left"), {"action_type": "scroll", "direction": "left"}),
        # the finger goes up, what is below comes into view
        (p.Swipe(x=0.5, y=0.8, x2=0.5, y2=0.2), {"action_type": "scroll", "direction": "down"}),
        (p.Swipe(x=0.5, y=0.2, x2=0.5, y2=0.8), {"action_type": "scroll", "direction": "up"}),
        (p.Swipe(x=0.2, y=0.5, x2=0.8, y2=0.5), {"action_type": "scroll", "direction": "left"}),
        (p.Swipe(x=0.8, y=0.5, x2=0.2, y2=0.6), {"action_type": "scroll", "direction": "right"}),
        (p.Swipe(x=0.5, y=0, x2=0.5, y2=0.8), {"action_type": "swipe", "direction": "down"}),
        (p.Swipe(x=0.5, y=1, x2=0.5, y2=0.2), {"action_type": "swipe", "direction": "up"}),
        (p.Type(text="a b\n"), {"action_type": "input_text", "text": "a b"}),
        (p.Type(text="a\r\nb\n"), {"action_type": "input_text", "text": "a\nb"}),
        (p.Type(text="\n"), {"action_type": "keyboard_enter"}),
        (p.Type(text="what? 5*3"), {"action_type": "input_text", "text": "what? 5*3"}),
        (p.Key(name="enter"), {"action_type": "keyboard_enter"}),
        (p.Enter(), {"action_type": "keyboard_enter"}),
        (p.Home(), {"action_type": "navigate_home"}),
        (p.Back(), {"action_type": "navigate_back"}),
        (p.OpenApp(name=" Clock "), {"action_type": "open_app", "app_name": "Clock"}),
        (p.Wait(seconds=2), None),
        (p.Answer(text="œ"), {"action_type": "answer", "text": "œ"}),
        (p.Terminate(status="infeasible"), {"action_type": "status", "goal_status": "infeasible"}),
    ],
    ids=lambda value: getattr(value, "type", ""),
)
def test_what_the_server_is_sent(action, request_body):
    assert request_of(action, 100, 200)[0] == request_body


@pytest.mark.parametrize("place", ['"coordinate": [100, 300], ', '"coordinate": [900, 800], ', ""])
def test_a_swipe_of_mai_ui_keeps_its_way_and_loses_its_place(place):
    """The server strokes across the middle; the note says so, also to those who read the recording."""
    call = f'{{"name": "mobile_use", "arguments": {{"action": "swipe", {place}"direction": "up"}}}}'
    action = maiui.DIALECT.parse(f"<tool_call>\n{call}\n</tool_call>", Plane(maiui.DIALECT.coordinates, 1000, 2000))
    assert isinstance(action, p.Swipe) and action.y2 < action.y
    request, note = request_of(action, 1000, 2000)
    assert request == {"action_type": "scroll", "direction": "down"}
    assert note == "the server swipes across the middle of the screen, whatever the points"


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (p.Type(text="größe"), "ASCII only; it would drop 'öß'"),
        (p.Type(text="100%sure"), "as a space"),
        (p.Type(text="home is ~ here"), "'~' to the phone's shell"),
        (p.Type(text="3 * 4"), "shell"),
        (p.Type(text="{a,b}"), "shell"),
        (p.Type(text="[d]"), "shell"),
        (p.Type(text="/s*"), "shell"),
        (p.Type(text=""), "empty"),
        (p.Key(name="VOLUME_UP"), "no key 'VOLUME_UP'"),
        (p.OpenApp(name=" "), "open_app"),
        (p.Swipe(x=0.5, y=0.5, x2=0.5, y2=0.5), "is none"),
        (p.Drag(x=0, y=0, x2=1, y2=1), "no drag"),
        (p.AppSwitch(), "no app_switch"),
        (p.AskUser(text="which?"), "no ask_user"),
        (p.Hotkey(keys=("ctrl", "c")), "no hotkey"),
        (p.RightClick(x=0, y=0), "no right_click"),
    ],
    ids=lambda value: getattr(value, "type", ""),
)
async def test_what_the_server_cannot_do_is_refused_before_it_is_asked(action, words):
    async with a_server() as (stub, client):
        await client.reset(TASK)
        before = len(stub.rough.seen)
        with pytest.raises(UnsupportedAction, match=words):
            await client.step(action, 0)
        assert len(stub.rough.seen) == before


async def test_a_late_step_is_executed_once_and_a_fault():
    async with a_server() as (stub, client):
        await client.reset(TASK)
        stub.rough.plan["/execute_action"] = [stub.rough.late]
        with pytest.raises(EnvironmentFault, match=r"phone-0: step 0 \(tap\): no answer within") as caught:
            await impatient(client.step(TAP, 0), stub.rough.hung)
        assert caught.value.reason is Reason.DEADLINE
        assert stub.taps == 1 and len(stub.executed) == 1


@pytest.mark.parametrize("path", ["/suite/reinitialize", "/task/goal", "/task/initialize", "/reset", "/screenshot"])
async def test_a_reset_that_hangs_anywhere_ends_by_its_deadline(path):
    async with a_server() as (stub, client):
        stub.rough.plan[path] = [stub.rough.hang]
        with pytest.raises(EnvironmentFault, match="no answer within") as caught:
            await impatient(client.reset(TASK), stub.rough.hung)
        assert caught.value.reason is Reason.DEADLINE


@pytest.mark.parametrize("score", ["NaN", "-0.1", "1.01", "9" * 400, "1e999", "null", '"1"', "[1]"])
async def test_a_score_that_is_none_is_a_fault(score):
    async with a_server() as (stub, client):
        await client.reset(TASK)
        stub.rough.plan["/task/score"] = [says(f'{{"score": {score}}}')]
        with pytest.raises(EnvironmentFault, match="phone-0: evaluate: .*'score' must be a number from 0 to 1"):
            await client.evaluate()
        stub.rough.plan["/task/score"] = [says('{"score": true}')]
        assert (await client.evaluate()).value == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"pixels":[]}', "no row"),
        ('{"pixels":[[]]}', "no row"),
        ('{"pixels":[[[]]]}', "not lists of 1 lists of three"),
        ('{"pixels":[[1,2,3]]}', "no row"),
        ('{"pixels":[1,[[1,2,3]]]}', "not lists"),
        ('{"pixels":[[[1,2,3],[1,2]]]}', "not lists of 2 lists of three"),
        ('{"pixels":[[[1,2,3]],[[1,2,3],[4,5,6]]]}', "not lists of 1 lists of three"),
        ('{"pixels":[[[1,2,256]]]}', "256"),
        ('{"pixels":[[[1,2,1000]]]}', "none from 0 to 255"),
        ('{"pixels":[[[1,2,01]]]}', "none from 0 to 255"),
        ('{"pixels":[[[1,2,-1]]]}', "not lists"),
        ('{"pixels":[[[1,,3]]]}', "without three numbers"),
        ('{"pixels":[[[1,2,3]4,[1,2,3]]]}', "three numbers"),
        ('{"pixels":[5[[1,2,]]]}', "not lists"),
        ('{"pixels":[[[1,2,3]]', "does not end"),
        ('{"screen":[[[1,2,3]]]}', "does not begin"),
        ("", "does not begin"),
        ('{"pixels":[[[1,2,3]]]]}', "not lists|instead of a comma"),
        ('{"pixels":[[[1,2,3]][[1,2,3]]]}', "not lists|instead of a comma"),
    ],
)
def test_numbers_that_are_no_screen(body, words):
    with pytest.raises(ValueError, match=words):
        frame_of_numbers(body.encode())


@pytest.mark.parametrize(("width", "height"), [(1, 1), (3, 2), (640, 300), (8192, 20), (9, 8192)])
def test_numbers_are_the_pixels(width, height):
    rng = random.Random(width)
    rows = [[[rng.choice((0, 7, 10, 99, 100, 255)) for _ in range(3)] for _ in range(width)] for _ in range(height)]
    frame = frame_of_numbers(json.dumps({"pixels": rows}, separators=(",", ":")).encode())
    with Image.open(io.BytesIO(frame.data)) as image:
        assert image.size == (width, height) == (frame.width, frame.height)
        assert list(image.get_flattened_data()) == [tuple(pixel) for row in rows for pixel in row]


async def test_a_screen_as_large_as_a_phones_is_read_beside_the_loop():
    async with a_server(width=1080, height=2400) as (_, client):
        frame = (await client.reset(TASK)).frame
        assert (frame.width, frame.height) == (1080, 2400)


@pytest.mark.parametrize("path", ["/health", "/task/goal", "/task/initialize", "/screenshot", "/task/score"])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (endless, "longer than"),
        (cut_off, "connection broke"),
        (redirect("http://127.0.0.1:1/"), "answered 307"),
        (says("Internal Server Error", 500), "answered 500"),
        (says("[" * 100_000), "not JSON|does not begin"),
    ],
    ids=["endless", "cut off", "redirect", "500", "deep"],
)
async def test_what_is_no_answer_is_a_fault(path, answer, words):
    async with a_server() as (stub, client):
        stub.rough.plan[path] = [answer]
        with pytest.raises(EnvironmentFault, match=words) as caught:
            await client.health()
            await client.reset(TASK)
            await client.evaluate()
        assert len(str(caught.value)) < 1000
        assert len([line for line in stub.rough.seen if line.split(" ")[1].startswith(path)]) == 1


async def fuzzed(seed: int, count: int) -> int:
    """Episodes in which every answer may be wrong; returns how many wrong answers were sent."""
    rng, wrong = random.Random(seed), 0

    def mangle(path: str, body: bytes):
        nonlocal wrong
        if rng.random() < 0.75:
            return None
        wrong += 1
        status = rng.choice((200,) * 12 + (201, 204, 404, 422, 500))
        return says_now(b"" if status == 204 else mangled(rng, body), status)

    async with a_server() as (stub, client):
        stub.rough.mangle = mangle
        while wrong < count:
            stub.rough.seen.clear()
            stub.executed.clear()
            for call in (
                client.health,
                lambda: client.reset(TASK),
                lambda: client.step(TAP, 0),
                lambda: client.step(p.Back(), 1),
                client.evaluate,
                client.close,
            ):
                try:
                    answer = await call()
                except EnvironmentFault as fault:
                    assert str(fault).startswith("phone-0: ") and len(str(fault)) < 1000
                    break
                observation = answer.observation if isinstance(answer, p.StepResult) else answer
                if isinstance(observation, p.Observation):
                    with Image.open(io.BytesIO(observation.frame.data)) as image:
                        assert image.convert("RGB").size == (observation.frame.width, observation.frame.height)
                if isinstance(answer, p.Score):
                    assert 0 <= answer.value <= 1
            # whatever came back, nothing was asked twice
            assert sum("execute" in line for line in stub.rough.seen) <= 2
            assert sum("initialize?task" in line for line in stub.rough.seen) <= 1
    return wrong


def says_now(body: bytes, status: int):
    from aiohttp import web

    return web.Response(body=body, status=status, headers={"Content-Type": "application/json"})


async def test_wrong_answers_are_named_faults_or_right_after_all():
    assert await fuzzed(seed=1, count=1500) >= 1500


async def test_every_kind_of_junk_in_every_field():
    async with a_server() as (stub, client):
        await client.reset(TASK)
        for junk in JUNK:
            for path, field in (("/task/goal", "goal"), ("/task/initialize", "status"), ("/screenshot", "pixels")):
                stub.rough.plan[path] = [says(f'{{"{field}": {junk}}}')]
                if path == "/task/goal" and junk.startswith('"') and len(junk) > 2:
                    continue  # any text is a goal
                with pytest.raises(EnvironmentFault):
                    await client.reset(TASK)
                stub.rough.plan.clear()


async def test_runs_open_it_by_its_name():
    stub = AndroidWorldStub()
    async with serving(stub.application()) as url:
        clients = PhoneClients()
        address = PhoneAddress("phone-0", url, PATIENT, protocol="androidworld")
        try:
            assert await clients.health(address) == ""
            assert (await clients.open(address).reset(TASK)).goal
        finally:
            await clients.close()


async def test_while_it_works_its_health_waits():
    async with a_server() as (stub, client):
        async with stub._busy:
            waiting = asyncio.ensure_future(client.health())
            await asyncio.sleep(0.01)
            assert not waiting.done()
        assert await waiting == ""


def test_limits_leave_room_for_the_largest_phone():
    assert androidworld.SCREEN_LIMIT > 13 * 1080 * 2400
