"""The adb client through Debian's real adb server to the simulated phone: what it would do with a phone on a desk."""

import asyncio
import shlex
import xml.etree.ElementTree as ET

import pytest
from adb_desk import Desk

from tapforge_api.environment import Adb, AppName
from tapforge_envs import protocol as p
from tapforge_envs.clients.adb.client import AdbClient, AdbPhones
from tapforge_envs.clients.adb.wire import AdbServer, ServerAddress
from tapforge_envs.phone import catalog
from tapforge_envs.phone.adbd.android import ADB_KEYBOARD, LATIN_KEYBOARD, Android
from tapforge_envs.phone.adbd.daemon import Daemon
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.screen import center
from tapforge_envs.protocol import EnvironmentFault, Task, UnsupportedAction


def task(**params: str) -> Task:
    return Task(suite="adb", template="by_hand", params=params, goal="whatever")


SETTINGS = task(app="dev.tapforge.settings")


def touch(daemon: Daemon, id: str) -> p.Tap:
    x, y = center(daemon.android.phone.screen().find(id).box)
    return p.Tap(x=x, y=y)


# --- reset ------------------------------------------------------------------------------------------------------------


async def test_a_reset_ends_on_the_home_screen_with_a_frame_of_the_phone(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    seen = await phone.reset(task())
    assert (seen.frame.width, seen.frame.height) == (360, 800)
    assert seen.frame.data == daemon.android.screenshot().data
    assert (seen.app, seen.window, seen.ui_tree) == ("dev.tapforge.home", ".MainActivity", None)
    await phone.close()


async def test_the_tasks_app_is_in_front_after_a_reset(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    for app in ("dev.tapforge.settings", "dev.tapforge.settings/.MainActivity"):
        seen = await phone.reset(task(app=app))
        assert (seen.app, seen.window) == ("dev.tapforge.settings", ".MainActivity")
    for app, words in (("nonsense", "neither a package"), ("com.nobody", "nothing to start"), ("com.a/.B", "did not")):
        with pytest.raises(EnvironmentFault, match=words):
            await phone.reset(task(app=app))


async def test_a_reset_wakes_and_unlocks_the_phone_and_stops_the_app_in_front(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(SETTINGS)
    daemon.android.phone.state["nav"].update(page="network", stack=[""])
    daemon.android.sleep()
    seen = await phone.reset(task())
    assert daemon.android.awake and not daemon.android.locked
    assert seen.app == "dev.tapforge.home"
    seen = await phone.reset(SETTINGS)
    assert daemon.android.phone.state["nav"] == {"app": "settings", "page": "", "stack": []}


async def test_setup_lines_run_in_order_and_each_has_to_work(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    lines = "echo one > /sdcard/log\n\necho two >> /sdcard/log\nsettings put global wifi_on 0"
    await phone.reset(task(setup=lines))
    assert daemon.android.files.read("/sdcard/log") == b"one\ntwo\n"
    assert daemon.android.phone.state["apps"]["settings"]["wifi"] is False
    with pytest.raises(EnvironmentFault, match=r"desk/1: reset: `cat /sdcard/none` ended with 1: .*No such file"):
        await phone.reset(task(setup="true\ncat /sdcard/none\ntouch /sdcard/never"))
    with pytest.raises(OSError, match="No such file"):
        daemon.android.files.read("/sdcard/never")


async def test_data_of_apps_is_deleted_only_when_asked(desk: Desk):
    daemon = await desk.phone()
    fresh = dict(daemon.android.phone.state["apps"]["notes"])
    changed = {**fresh, "notes": []}
    daemon.android.phone.state["apps"]["notes"] = changed
    await desk.client(daemon).reset(task())
    assert daemon.android.phone.state["apps"]["notes"]["notes"] == []
    await desk.client(daemon, Adb(clear_data=("dev.tapforge.notes",))).reset(task())
    assert daemon.android.phone.state["apps"]["notes"]["notes"] == fresh["notes"]
    with pytest.raises(EnvironmentFault, match="com.nobody"):
        await desk.client(daemon, Adb(clear_data=("com.nobody",))).reset(task())


async def test_what_a_reset_does_is_what_the_options_say(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    daemon = await desk.phone()
    lines: list[str] = []
    real = AdbServer.shell

    async def shell(self, serial, command, limit=8 * 1024 * 1024):
        lines.append(command)
        return await real(self, serial, command, limit)

    monkeypatch.setattr(AdbServer, "shell", shell)
    everything = Adb(do_not_disturb=True, force_stop=("dev.tapforge.mail",), clear_data=("dev.tapforge.notes",))
    await desk.client(daemon, everything).reset(task())
    text = "\n".join(lines)
    for done in (
        "svc power stayon true",
        "KEYCODE_WAKEUP",
        "set_dnd on",
        "statusbar collapse",
        "pm clear dev.tapforge",
    ):
        assert done in text
    assert "am force-stop dev.tapforge.mail" in text
    assert "adbkeyboard" not in next(line for line in lines if "force-stop" in line)
    lines.clear()
    nothing = Adb(
        unlock=False, stay_awake=False, collapse_notifications=False, force_stop_third_party=False, keyboard="input"
    )
    await desk.client(daemon, nothing).reset(task())
    text = "\n".join(lines)
    for left in ("svc", "WAKEUP", "dismiss", "statusbar", "set_dnd", "pm list packages -3", "pm clear", "ime "):
        assert left not in text


# --- actions ----------------------------------------------------------------------------------------------------------


async def test_every_gesture_and_key_arrives_as_what_it_is(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(task())
    done: list[p.Action] = []
    monkeypatch.setattr(Android, "act", lambda self, action: done.append(action) or "")
    sent = [
        p.Tap(x=0.5, y=0.5),
        p.DoubleTap(x=0.5, y=0.5),
        p.LongPress(x=0.5, y=0.5, seconds=0.8),
        p.LongPress(x=0.5, y=0.5, seconds=60),
        p.Swipe(x=0.5, y=0.8, x2=0.5, y2=0.2),
        p.Drag(x=0.5, y=0.8, x2=0.5, y2=0.2),
        p.Scroll(direction="down"),
        p.Scroll(direction="left"),
        p.Key(name="VOLUME_UP"),
        p.Home(),
        p.Back(),
        p.AppSwitch(),
        p.Enter(),
        p.Wait(seconds=0.01),
    ]
    for index, action in enumerate(sent):
        await phone.step(action, index)
    kinds = ["tap", "tap", "tap", "long_press", "long_press", "swipe", "drag", "swipe", "swipe", "key"]
    assert [a.type for a in done] == [*kinds, "home", "back", "app_switch", "enter"]
    assert (done[0].x, done[0].y) == pytest.approx((180.5 / 360, 400.5 / 800))
    assert [a.seconds for a in done if isinstance(a, p.LongPress)] == [0.8, 5.0]
    down, left = [a for a in done if isinstance(a, p.Swipe)][1:]
    assert down.y > down.y2 and down.x == pytest.approx(down.x2)
    assert left.x < left.x2 and left.y == pytest.approx(left.y2)


async def test_steps_change_the_phone_and_show_it(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    first = await phone.reset(task())
    name = daemon.android.phone.state["apps"]["home"]["order"][0]
    result = await phone.step(touch(daemon, f"app:{name}"), 0)
    assert result.observation.app == f"dev.tapforge.{name}"
    assert result.observation.frame.data == daemon.android.screenshot().data != first.frame.data
    assert not result.done
    assert (await phone.step(p.Home(), 1)).observation.app == "dev.tapforge.home"


async def test_apps_are_opened_by_name_package_or_the_name_that_the_run_gives(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon, Adb(apps=(AppName(name="The Post", package="dev.tapforge.mail"),)))
    await phone.reset(task())
    for index, (name, app) in enumerate(
        [("Settings", "settings"), ("dev.tapforge.notes", "notes"), ("the post", "mail"), ("CALENDAR", "calendar")]
    ):
        result = await phone.step(p.OpenApp(name=name), index)
        assert (result.observation.app, result.note) == (f"dev.tapforge.{app}", "")
    result = await phone.step(p.OpenApp(name="No Such; reboot"), 9)
    assert result.observation.app == "dev.tapforge.calendar"
    assert "no app 'No Such; reboot'" in result.note


async def test_final_actions_end_without_touching_the_phone(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    first = await phone.reset(task())
    await daemon.stop()
    for action in (p.Answer(text="42"), p.Terminate(status="failure")):
        result = await phone.step(action, 0)
        assert result.done and result.observation is first


async def test_what_a_phone_has_not_is_refused_before_anything_is_done(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    first = await phone.reset(task())
    for action in (p.RightClick(x=0.5, y=0.5), p.Hotkey(keys=("CTRL", "A")), p.AskUser(text="?"), p.Key(name="POWER")):
        with pytest.raises(UnsupportedAction, match=action.type):
            await phone.step(action, 0)
    assert daemon.android.awake
    assert (await phone.step(p.Wait(seconds=0), 0)).observation.frame.data == first.frame.data


# --- text -------------------------------------------------------------------------------------------------------------

SCRIPTS = {
    "latin": "Grüße, \"quoted\" $HOME 'it's' 100% & more; rm -rf /",
    "chinese": "你好 世界。",
    "emoji": "👩‍👩‍👧 🎉 ok",
    "arabic": "مرحبا بالعالم",
    "devanagari": "नमस्ते दुनिया",
}


async def _title(desk: Desk, options: Adb) -> tuple[AdbClient, Daemon]:
    """A phone with the cursor in a text field."""
    daemon = await desk.phone()
    phone = desk.client(daemon, options)
    await phone.reset(task(app="dev.tapforge.notes"))
    await phone.step(touch(daemon, "add"), 0)
    await phone.step(touch(daemon, "field:title"), 1)
    return phone, daemon


def _written(daemon: Daemon) -> str:
    return daemon.android.phone.screen().find("field:title").text


@pytest.mark.parametrize("script", SCRIPTS)
async def test_any_script_is_typed_by_adb_keyboard(desk: Desk, script: str):
    phone, daemon = await _title(desk, Adb())
    assert daemon.android.default_keyboard == ADB_KEYBOARD
    await phone.step(p.Type(text=SCRIPTS[script]), 2)
    assert _written(daemon) == SCRIPTS[script]
    await phone.close()
    assert daemon.android.default_keyboard == LATIN_KEYBOARD


async def test_ascii_is_typed_by_input_text_where_there_is_no_adb_keyboard(desk: Desk):
    phone, daemon = await _title(desk, Adb(keyboard="input"))
    assert daemon.android.default_keyboard == LATIN_KEYBOARD
    text = 'it\'s "100%" & <50% of $HOME; `ls` | *?\\ (a) #b ~c %s %%s !'
    await phone.step(p.Type(text=text), 2)
    assert _written(daemon) == text
    with pytest.raises(UnsupportedAction, match="ADBKeyboard"):
        await phone.step(p.Type(text="ü"), 3)
    assert _written(daemon) == text


async def test_adb_keyboard_that_is_asked_for_has_to_be_there(desk: Desk):
    daemon = await desk.phone()
    daemon.android.keyboard = False
    with pytest.raises(EnvironmentFault, match=r"desk/1: reset: ADBKeyboard is not installed .*adb install"):
        await desk.client(daemon, Adb(keyboard="adb")).reset(task())
    phone = desk.client(daemon)
    await phone.reset(task())
    with pytest.raises(UnsupportedAction, match="not ASCII"):
        await phone.step(p.Type(text="日本"), 0)


async def test_a_keyboard_that_somebody_changed_is_set_again(desk: Desk):
    phone, daemon = await _title(desk, Adb())
    daemon.android.default_keyboard = LATIN_KEYBOARD
    await phone.step(p.Type(text="日本"), 2)
    assert _written(daemon) == "日本"


async def test_an_input_method_that_an_episode_left_behind_is_put_back_at_the_end_of_the_process(desk: Desk):
    daemon = await desk.phone()
    await desk.client(daemon).reset(task())  # breaks, and is not closed
    again = desk.client(daemon)
    await again.reset(task())
    assert daemon.android.default_keyboard == ADB_KEYBOARD
    await desk.phones.close()
    assert daemon.android.default_keyboard == LATIN_KEYBOARD


# --- what is seen and judged ------------------------------------------------------------------------------------------


async def test_the_ui_tree_comes_when_it_is_asked_for(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon, Adb(ui_tree=True))
    seen = await phone.reset(SETTINGS)
    tree = ET.fromstring(seen.ui_tree)
    assert {node.get("package") for node in tree.iter("node")} >= {"dev.tapforge.settings"}


async def test_checks_of_a_task_judge_it(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    off = {"check": "settings get global wifi_on", "expect": "^0$"}
    await phone.reset(task(setup="settings put global wifi_on 1", **off))
    assert (await phone.evaluate()).value == 0.0
    await asyncio.wait_for(desk.adb("-s", phone._device.serial, "shell", "settings put global wifi_on 0"), 30)
    assert (await phone.evaluate()).value == 1.0
    for check, value in (("true", 1.0), ("false", 0.0), ("grep -q x /dev/null || false", 0.0)):
        await phone.reset(task(check=check))
        assert (await phone.evaluate()).value == value
    await phone.reset(task(check="echo anything; false", expect="any"))
    assert (await phone.evaluate()).value == 1.0


async def test_an_answer_is_judged_by_its_expression_and_the_check(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    for params, answer, value in (
        ({"answer": r"\b42\b"}, "it is 42.", 1.0),
        ({"answer": r"\b42\b"}, "it is 421", 0.0),
        ({"answer": "42", "check": "false"}, "42", 0.0),
        ({"answer": "42", "check": "true"}, "42", 1.0),
    ):
        await phone.reset(task(**params))
        await phone.step(p.Answer(text=answer), 0)
        assert (await phone.evaluate()).value == value
    await phone.reset(task(answer="."))
    await phone.step(p.Terminate(status="success"), 0)
    assert (await phone.evaluate()).value == 0.0


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "nothing judges it"),
        ({"expect": "x"}, "no params.check"),
        ({"check": "nosuch"}, "ended with 127"),
        ({"check": "exit 2"}, "ended with 2"),
        ({"check": "echo x", "expect": "("}, "not a regular expression"),
        ({"check": "echo x", "expect": "x" * 1001}, "1001 characters"),
    ],
)
async def test_a_task_without_a_verdict_gets_none(desk: Desk, params: dict[str, str], words: str):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(task(**params))
    with pytest.raises(EnvironmentFault, match=words) as caught:
        await phone.evaluate()
    assert caught.value.reason is p.Reason.JUDGE_ERROR


async def test_a_task_of_the_simulated_phone_is_set_solved_and_judged(desk: Desk):
    """A quickstart task from its setup line to its score, by the demonstrator's actions."""
    daemon = await desk.phone(width=96, height=160)
    phone = desk.client(daemon)
    tasks = (catalog.tasks("quickstart", "train").sample(7, number) for number in range(100))
    for inner in [one for one in tasks if one.feasible][:4]:
        # The home key at the end of a reset is part of it: the demonstration begins from there.
        outer = task(
            setup=f"am broadcast -a tapforge.RESET --es task {shlex.quote(inner.model_dump_json())}",
            check="am broadcast -a tapforge.FINISH --es status success >/dev/null; getprop tapforge.score",
            expect=r"^1\.0$",
        )
        await phone.reset(outer)
        actions = demonstration(daemon.android.phone, catalog.template_of(inner), inner.params)
        for index, action in enumerate(actions):
            await phone.step(action, index)
        assert (await phone.evaluate()).value == 1.0, inner
        await phone.reset(outer)
        assert (await phone.evaluate()).value == 0.0, inner


async def test_no_server_is_named_with_the_command_that_starts_one(desk: Desk):
    phone = AdbClient("R58", AdbPhones(AdbServer(ServerAddress(port=1))), slot="R58")
    with pytest.raises(EnvironmentFault, match=r"R58: health: no adb server at 127.0.0.1:1 .*start-server"):
        await phone.health()


async def test_health_tells_phones_and_their_boots_apart(desk: Desk):
    one, other = await desk.phone(), await desk.phone()
    first = await desk.client(one).health()
    assert first == await desk.client(one).health()
    assert first != await desk.client(other).health()


async def test_an_older_episode_on_the_same_phone_has_lost_its_lease(desk: Desk):
    daemon = await desk.phone()
    older, newer = desk.client(daemon), desk.client(daemon)
    await older.reset(task())
    await newer.reset(task())
    with pytest.raises(EnvironmentFault) as caught:
        await older.step(p.Home(), 0)
    assert caught.value.reason is p.Reason.LEASE_LOST
    await older.close()  # nothing of its phone any more
    await newer.step(p.Home(), 0)
