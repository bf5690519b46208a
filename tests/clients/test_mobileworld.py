"""The client of MobileWorld's and ClawGUI's server, over real sockets against the simulated phone that is like it."""

import asyncio
import base64
import json

import pytest
from aiohttp import web
from hostile import png, png_bomb, says
from mobileworld_house import NAMES, TAP, TASK, a_house
from phones import PATIENT, impatient, until

from tapforge_api.environment import Settle
from tapforge_envs import protocol as p
from tapforge_envs.clients.mobileworld_actions import MAX_ENTERS, device_action, device_actions
from tapforge_envs.clients.phones import PhoneAddress, PhoneClients, PhoneOptions
from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.device import Phone
from tapforge_envs.protocol import EnvironmentFault, Reason, UnsupportedAction


def drag(*ends: int) -> dict:
    return {"action_type": "drag", **dict(zip(("start_x", "start_y", "end_x", "end_y"), ends, strict=True))}


def plan_of(name: str, width: int, height: int):
    """What solves a task, step by step on a phone of one's own."""
    task = NAMES[name]
    phone = Phone(catalog.suite(task.suite).image, width, height)
    phone.begin(task.seed, catalog.rules_of(task))
    for action in demonstration(phone, catalog.template_of(task), task.params):
        yield action
        phone.act(action)


@pytest.mark.parametrize(("width", "height"), [(1080, 2400), (720, 1600), (96, 160)])
@pytest.mark.parametrize("suite", ["quickstart", "standard"])
async def test_plans_that_solve_tasks_of_the_phone_solve_them_through_the_server(suite, width, height):
    names = [name for name in NAMES.all if name.startswith(suite)][: 12 if width < 100 else 3]
    async with a_house(width, height) as house:
        for name in names:
            client = house.client()
            first = await client.reset(TASK.model_copy(update={"template": name}))
            assert first.goal == NAMES[name].goal
            assert (first.frame.width, first.frame.height) == (width, height)
            done = False
            for index, action in enumerate(plan_of(name, width, height)):
                assert not done
                done = (await client.step(action, index)).done
            assert done and (await client.evaluate()).value == 1, name
            await client.close()


async def test_an_episode_call_by_call():
    async with a_house() as house:
        client = house.client()
        assert await client.health() == ""
        await client.reset(TASK)
        await client.step(TAP, 0)
        assert (await client.evaluate()).value == 0
        assert (await client.step(p.Terminate(status="success"), 1)).done
        await client.close()
        await client.close()
        assert house.rough.seen == [
            "GET /health",
            "GET /init",
            "GET /init",
            "GET /task/goal?task_name=quickstart-train-1",
            "POST /task/init",
            "GET /screenshot?device=emulator-5554&return_b64=true&prefix=tapforge",
            "POST /step",
            "GET /screenshot?device=emulator-5554&return_b64=true&prefix=tapforge",
            "GET /task/eval",
            "POST /step",
            "POST /task/tear_down",
        ]
        assert not house.server.initialised


async def test_a_task_with_a_goal_keeps_it():
    async with a_house() as house:
        assert (await house.client().reset(TASK.model_copy(update={"goal": "Dance."}))).goal == ""
        assert not house.sent("/task/goal")


async def test_questions_are_answered_and_ask_user_is_told_what_the_user_said():
    async with a_house() as house:
        client = house.client()
        await client.reset(TASK)
        assert "nothing to add" in (await client.step(p.AskUser(text="Which?"), 0)).note
        with pytest.raises(UnsupportedAction, match="the server knows no app 'Nonesuch'"):
            await client.step(p.OpenApp(name="Nonesuch"), 1)
        house.rough.plan["/step"] = [says('{"result": ""}')]
        assert "no effect" in (await client.step(p.OpenApp(name="Clock"), 1)).note
        assert (await client.step(p.Wait(seconds=30), 2)).note == ""
        assert (await client.step(p.Answer(text="42"), 3)).done
        assert house.server.devices["emulator-5554"].answer == "42"


@pytest.mark.parametrize(
    ("action", "sent"),
    [
        (p.Tap(x=0, y=1), {"action_type": "click", "x": 0, "y": 199}),
        (p.DoubleTap(x=0.5, y=0.5), {"action_type": "double_tap", "x": 50, "y": 100}),
        (p.LongPress(x=0.5, y=0.5), {"action_type": "long_press", "x": 50, "y": 100}),
        (p.Swipe(x=0.1, y=0.8, x2=0.1, y2=0.2), drag(10, 160, 10, 40)),
        (p.Drag(x=0, y=0, x2=1, y2=1), drag(0, 0, 99, 199)),
        # what is below comes into view: the finger goes up
        (p.Scroll(direction="down"), drag(50, 140, 50, 60)),
        (p.Scroll(direction="up", y=0.9), drag(50, 120, 50, 199)),
        (p.Scroll(direction="right"), drag(70, 100, 30, 100)),
        (p.Scroll(direction="left"), drag(30, 100, 70, 100)),
        (p.Type(text="größe ü\n"), {"action_type": "input_text", "text": "größe ü\n"}),
        (p.Type(text=" "), {"action_type": "input_text", "text": " "}),
        (p.OpenApp(name="Clock"), {"action_type": "open_app", "app_name": "Clock"}),
        (p.Answer(text=""), {"action_type": "answer", "text": ""}),
        (p.AskUser(text="Who?"), {"action_type": "ask_user", "text": "Who?"}),
        (p.Terminate(status="success"), {"action_type": "status", "goal_status": "complete"}),
        (p.Terminate(status="infeasible"), {"action_type": "status", "goal_status": "infeasible"}),
        (p.Home(), {"action_type": "navigate_home"}),
        (p.Back(), {"action_type": "navigate_back"}),
        (p.Enter(), {"action_type": "keyboard_enter"}),
        (p.Key(name="KEYCODE_ENTER"), {"action_type": "keyboard_enter"}),
        (p.Key(name="back"), {"action_type": "navigate_back"}),
        (p.Wait(seconds=7), {"action_type": "wait"}),
    ],
    ids=lambda value: getattr(value, "type", ""),
)  # fmt: skip
async def test_what_is_sent_and_the_server_takes_it(action, sent):
    assert device_action(action, 100, 200) == sent
    async with a_house() as house:
        client = house.client()
        await client.reset(TASK)
        await client.step(action, 0)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (p.Type(text=""), "no empty text"),
        (p.OpenApp(name=" "), "no empty text"),
        (p.AskUser(text=""), "no empty text"),
        (p.Key(name="VOLUME_UP"), "no key 'VOLUME_UP'"),
        (p.AppSwitch(), "no action 'app_switch'"),
        (p.Move(x=0, y=0), "no action 'move'"),
        (p.RightClick(x=0, y=0), "no action 'right_click'"),
        (p.Hotkey(keys=("ctrl", "c")), "no action 'hotkey'"),
    ],
    ids=lambda value: getattr(value, "type", ""),
)
async def test_what_the_server_refuses_is_refused_before_it_is_asked(action, words):
    async with a_house() as house:
        client = house.client()
        await client.reset(TASK)
        before = len(house.rough.seen)
        with pytest.raises(UnsupportedAction, match=words):
            await client.step(action, 0)
        assert len(house.rough.seen) == before


# --- time -------------------------------------------------------------------------------------------------------------


async def test_a_late_step_is_sent_once_and_a_fault():
    async with a_house() as house:
        client = house.client()
        await client.reset(TASK)
        house.rough.plan["/step"] = [house.rough.late]
        with pytest.raises(EnvironmentFault, match=r"phone-0: step 0 \(tap\): no answer within") as caught:
            await impatient(client.step(TAP, 0), house.hung)
        assert caught.value.reason is Reason.DEADLINE and house.sent("/step") == 1


async def test_a_task_init_that_is_late_keeps_the_phone_sick_until_it_ended():
    async with a_house() as house:
        go_on = asyncio.Event()

        async def slowly(request: web.Request) -> web.StreamResponse:
            house.rough.hanging += 1
            await go_on.wait()
            return await house.server.task_init(request) and web.json_response("OK")

        house.rough.plan["/task/init"] = [slowly]
        with pytest.raises(EnvironmentFault, match="/task/init of 'quickstart-train-1': no answer within") as caught:
            await impatient(house.client().reset(TASK), house.hung)
        assert caught.value.reason is Reason.DEADLINE
        for call in (house.client().health, house.client().close, lambda: house.client().reset(TASK)):
            with pytest.raises(EnvironmentFault, match="/task/init of 'quickstart-train-1'.* still runs there"):
                await call()
        assert house.sent("/task/init") == 1
        go_on.set()
        memory = house.phones.of(house.url)
        await until(lambda: memory.unfinished is None or memory.unfinished.done())
        assert await house.client().health() == ""
        await house.client().reset(TASK)
        assert house.sent("/task/init") == 2
        assert house.sent("/task/tear_down") == 1, "what was set up late is torn down first"


@pytest.mark.parametrize("path", ["/step", "/task/eval", "/task/tear_down"])
async def test_what_is_late_never_acts_in_the_next_episode(path):
    """The phone is sick until the server carried it out: nobody resets it before."""
    async with a_house() as house:
        go_on = asyncio.Event()

        async def slowly(request: web.Request) -> web.StreamResponse:
            house.rough.hanging += 1
            await go_on.wait()
            return web.json_response({"device": "a", "action": {}, "result": "OK", "score": 0.0})

        client = house.client()
        await client.reset(TASK)
        house.rough.plan[path] = [slowly]
        call = {"/step": lambda: client.step(TAP, 0), "/task/eval": client.evaluate, "/task/tear_down": client.close}
        with pytest.raises(EnvironmentFault, match="may still be carried out") as caught:
            await impatient(call[path](), house.hung)
        assert caught.value.reason is Reason.DEADLINE
        for again in (house.client().health, house.client().close, lambda: house.client().reset(TASK)):
            with pytest.raises(EnvironmentFault, match="which was given up, still runs there"):
                await again()
        assert house.sent(path) == 1
        go_on.set()
        memory = house.phones.of(house.url)
        await until(lambda: memory.unfinished is None or memory.unfinished.done())
        assert await house.client().health() == ""
        await house.client().reset(TASK)


async def test_a_server_that_was_started_anew_is_well_whatever_the_old_one_did():
    async with a_house() as house:
        house.rough.plan["/task/init"] = [house.rough.hang]
        with pytest.raises(EnvironmentFault):
            await impatient(house.client().reset(TASK), house.hung)
        house.server.start_anew()
        assert await house.client().health() == ""
        await house.client().reset(TASK)
        assert not house.sent("/task/tear_down")


@pytest.mark.parametrize("path", ["/init", "/task/goal", "/task/init", "/screenshot"])
async def test_a_reset_that_hangs_anywhere_ends_by_its_deadline(path):
    async with a_house() as house:
        house.rough.plan[path] = [house.rough.hang]
        with pytest.raises(EnvironmentFault, match="within") as caught:
            await impatient(house.client().reset(TASK), house.hung)
        assert caught.value.reason is Reason.DEADLINE


@pytest.mark.parametrize("path", ["/step", "/screenshot", "/task/init"])
async def test_after_a_call_that_was_cut_off_the_phone_is_not_given_back_clean(path):
    async with a_house() as house:
        client = house.client()
        if path != "/task/init":
            await client.reset(TASK)
        house.rough.plan[path] = [house.rough.hang]
        call = asyncio.ensure_future(client.step(TAP, 0) if path != "/task/init" else client.reset(TASK))
        await until(house.hung)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(EnvironmentFault, match="may still be carried out|still runs there"):
            await client.close()


# --- what survives a lease --------------------------------------------------------------------------------------------


async def test_a_task_that_nobody_tore_down_is_torn_down_before_the_next():
    async with a_house() as house:
        await house.client().reset(TASK)
        await house.client().reset(TASK.model_copy(update={"template": "quickstart-train-2"}))
        assert [line for line in house.rough.seen if "tear_down" in line or "task/init" in line] == [
            "POST /task/init",
            "POST /task/tear_down",
            "POST /task/init",
        ]
        assert house.server.initialised == {"quickstart-train-2"}


async def test_a_tear_down_that_fails_is_asked_for_once():
    async with a_house() as house:
        await house.client().reset(TASK)
        house.rough.plan["/task/tear_down"] = [says("no", 500)]
        with pytest.raises(EnvironmentFault, match=r"task/tear_down: 'quickstart-train-1' answered 500: no"):
            await house.client().close()
        await house.client().close()
        assert house.sent("/task/tear_down") == 1


async def test_an_emulator_that_died_of_its_snapshots_is_named():
    async with a_house() as house:
        for _ in range(41):
            client = house.client()
            await client.reset(TASK)
            await client.close()
        house.rough.plan["/task/init"] = [says('{"detail": "Device is not healthy"}', 500)]
        with pytest.raises(EnvironmentFault, match="task number 42 there.* about 64 .*recycle its container"):
            await house.client().reset(TASK)


# --- health -----------------------------------------------------------------------------------------------------------


async def test_ok_of_a_server_that_was_never_asked_proves_nothing():
    async with a_house(serials=()) as house:
        with pytest.raises(EnvironmentFault, match=r"phone-0: init: answered 500: .*Device is not healthy"):
            await house.client().health()


@pytest.mark.parametrize(("variant", "status"), [("mobileworld", 200), ("redroid", 503)])
async def test_a_sick_phone_is_named_and_one_beside_it_is_well(variant, status):
    async with a_house(variant=variant, serials=("a", "b")) as house:
        assert await house.client("?device=a").health() == ""
        assert await house.client("?device=b").health() == ""
        house.server.registered["b"] = False
        with pytest.raises(EnvironmentFault, match=rf"answered {status}: .*device 'b' is sick"):
            await house.client("?device=b").health()
        assert await house.client("?device=a").health() == ""


async def test_phones_behind_one_server_are_used_by_their_serial():
    async with a_house(serials=("a", "b")) as house:
        one, other = house.client("?device=a"), house.client("?device=b")
        await one.reset(TASK)
        await other.reset(TASK.model_copy(update={"template": "quickstart-train-2"}))
        await one.step(p.Answer(text="from a"), 0)
        assert [house.server.devices[name].answer for name in "ab"] == ["from a", ""]
        assert await house.client("?device=a").health() == ""


async def test_without_a_serial_it_is_the_servers_own_phone():
    async with a_house() as house:
        house.rough.plan["/init"] = [says('{"device": "redroid:5555", "viewport_size": [96, 160]}')]
        with pytest.raises(EnvironmentFault, match="Device is not healthy"):
            await house.client().reset(TASK)
        assert "redroid:5555" in house.server.registered


# --- screens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["[null, null]", "null"])
async def test_without_a_viewport_the_frame_says_the_size(size):
    async with a_house() as house:
        house.rough.plan["/init"] = [says(f'{{"device": "emulator-5554", "viewport_size": {size}}}')]
        frame = (await house.client().reset(TASK)).frame
        assert (frame.width, frame.height) == (96, 160)


async def test_another_size_than_the_viewports_is_a_fault_and_a_turned_screen_is_none():
    async with a_house() as house:
        house.rough.plan["/init"] = [says('{"device": "emulator-5554", "viewport_size": [1080, 2400]}')]
        with pytest.raises(EnvironmentFault, match="screen is 96x160 pixels, /init said 1080x2400"):
            await house.client().reset(TASK)
        house.rough.plan["/init"] = [says('{"device": "emulator-5554", "viewport_size": [160, 96]}')]
        client = house.client()
        await client.reset(TASK)
        turned = base64.b64encode(png(160, 96)).decode()
        house.rough.plan["/screenshot"] = [says(json.dumps({"b64_png": "data:image/png;base64," + turned}))]
        assert (await client.step(TAP, 0)).observation.frame.width == 160
        house.rough.plan["/screenshot"] = [says(json.dumps({"b64_png": base64.b64encode(png(160, 97)).decode()}))]
        with pytest.raises(EnvironmentFault, match="screen is 160x97 pixels, before it was 160x96"):
            await client.step(TAP, 1)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('""', "expected the picture"),
        ("null", "expected the picture"),
        ("7", "expected the picture"),
        ('"%%%"', "expected the picture in 'b64_png'"),
        ('"AAAA"', "neither PNG nor JPEG"),
        (json.dumps(base64.b64encode(png(96, 160)[:-9]).decode()), "half a PNG"),
        (json.dumps(base64.b64encode(png_bomb()).decode()), "not a screen"),
    ],
)
async def test_what_is_no_picture(value, words):
    async with a_house() as house:
        house.rough.plan["/screenshot"] = [says(f'{{"device": "emulator-5554", "path": "/x", "b64_png": {value}}}')]
        with pytest.raises(EnvironmentFault, match=f"phone-0: screenshot: .*{words}"):
            await house.client().reset(TASK)


# --- faults of the simulated phone ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"kind": "error"}, r"step 0 \(tap\): answered 500"),
        ({"kind": "error", "calls": ["reset"]}, "task/init: .*answered 500"),
        ({"kind": "error", "calls": ["evaluate"]}, "evaluate: answered 500"),
        ({"kind": "half"}, "half a PNG"),
        ({"kind": "wrong_size"}, "screen is 48x80 pixels, before it was 96x160"),
        ({"kind": "lying_health"}, "Device is not healthy"),
        ({"kind": "lost_task"}, "evaluate: answered 500"),
        ({"kind": "hung"}, "no answer within"),
        ({"kind": "hung", "calls": ["reset"]}, "/task/init of .*: no answer within"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
async def test_a_sick_phone_is_a_fault_in_words(fault, words):
    async with a_house(faults=[fault]) as house:
        client = house.client()

        async def episode():
            assert await client.health() == ""
            await client.reset(TASK)
            await client.step(TAP, 0)
            await client.evaluate()

        with pytest.raises(EnvironmentFault, match=words):
            await impatient(episode(), house.hung)


async def test_runs_open_it_by_its_name_and_settle_as_they_say():
    async with a_house() as house:
        clients = PhoneClients()
        options = PhoneOptions(settle=Settle(min_seconds=0, quiet_seconds=0.05, unchanged_seconds=0.05))
        address = PhoneAddress("phone-0", house.url, PATIENT, protocol="mobileworld", options=options)
        try:
            assert await clients.health(address) == ""
            phone = clients.open(address)
            await phone.reset(TASK)
            before = house.sent("/screenshot")
            await phone.step(p.OpenApp(name="Clock"), 0)
            assert house.sent("/screenshot") > before + 1
            assert clients.open(address) is not phone, "one client for each lease"
            await clients.open(address).close()
            assert house.sent("/task/tear_down") == 1
        finally:
            await clients.close()


def test_line_ends_are_enter_between_pieces_of_a_text():
    enter = {"action_type": "keyboard_enter"}
    a, b = ({"action_type": "input_text", "text": text} for text in ("größe", "b"))
    assert device_actions(p.Type(text="größe\n"), 100, 200) == [a, enter]
    assert device_actions(p.Type(text="größe\r\n\nb"), 100, 200) == [a, enter, enter, b]
    with pytest.raises(UnsupportedAction, match="line ends"):
        device_actions(p.Type(text="\n" * (MAX_ENTERS + 1)), 100, 200)
