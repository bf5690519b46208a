"""What goes wrong with phones: each is a fault that names the slot, the call and the remedy. Through Debian's real adb
server, as far as the phone can be made to do it."""

import asyncio
import io
import random
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from adb_desk import Desk
from lying_adb import ended, hostile, packet, refused, said
from PIL import Image

from tapforge_api.environment import Adb, Settle
from tapforge_envs import protocol as p
from tapforge_envs.clients.adb.client import AdbClient, AdbPhones
from tapforge_envs.clients.http import Deadlines
from tapforge_envs.clients.phones import PhoneAddress, PhoneClients, PhoneOptions
from tapforge_envs.phone.adbd.android import Android
from tapforge_envs.phone.adbd.daemon import Service, Stream
from tapforge_envs.phone.adbd.files import Files
from tapforge_envs.phone.adbd.keys import Keys
from tapforge_envs.phone.adbd.services import find
from tapforge_envs.protocol import EnvironmentFault, Reason, Task
from tapforge_envs.slots.source import SlotError, Verdict
from tapforge_envs.slots.urls import UrlSlots, parse_urls

TASK = Task(suite="adb", template="by_hand", goal="whatever")
SOON = Deadlines(health=2.0, reset=4.0, step=2.0, evaluate=2.0, close=2.0)


async def test_a_phone_that_vanishes_in_the_middle_of_an_episode(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(TASK)
    await daemon.stop()
    with pytest.raises(EnvironmentFault, match=r"desk/1: step 0 \(home\): .*(adb doesn't know it|it is offline)"):
        await phone.step(p.Home(), 0)
    with pytest.raises(EnvironmentFault, match="desk/1: health: "):
        await phone.health()


@pytest.mark.parametrize("call", ["step", "evaluate"])
async def test_a_phone_that_was_booted_again_is_not_acted_on_nor_judged(desk: Desk, call: str):
    """It shows a fresh home screen, as if the agent had done nothing."""
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(TASK.model_copy(update={"params": {"check": "true"}}))
    await phone.step(p.Home(), 0)
    daemon.android.files = Files()
    with pytest.raises(EnvironmentFault, match="it was booted again") as caught:
        await (phone.step(p.Back(), 1) if call == "step" else phone.evaluate())
    assert caught.value.reason is Reason.ENV_ERROR
    await phone.reset(TASK)
    await phone.step(p.Home(), 0)


async def test_a_phone_that_vanishes_while_it_is_asked(desk: Desk):
    begun = asyncio.Event()

    async def hangs(android: Android, stream: Stream) -> None:
        begun.set()
        await asyncio.Event().wait()

    daemon = await desk.phone(find=lambda name: hangs if name == "exec:screencap -p" else find(name))
    reset = asyncio.create_task(desk.client(daemon).reset(TASK))
    await asyncio.wait_for(begun.wait(), 30)
    await daemon.stop()
    with pytest.raises(EnvironmentFault, match=r"desk/1: reset: .*(adb doesn't know it|it is offline)"):
        await reset


async def test_a_connection_that_broke_is_made_again_by_the_next_reset(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(TASK)
    for _ in range(5):
        await daemon.drop()
        await phone.reset(TASK)
    await desk.adb("disconnect", f"127.0.0.1:{daemon.port}")
    await phone.reset(TASK)


async def test_a_phone_that_has_not_allowed_this_computer(desk: Desk):
    daemon = await desk.phone(keys=Keys())
    with pytest.raises(EnvironmentFault, match="desk/1: health: it hasn't allowed this computer: unlock it"):
        await desk.client(daemon).health()


async def test_a_lock_screen_with_a_pin(desk: Desk):
    daemon = await desk.phone()
    daemon.android.pin = "1234"
    daemon.android.sleep()
    with pytest.raises(EnvironmentFault, match="desk/1: reset: its lock screen stays: remove PIN"):
        await desk.client(daemon).reset(TASK)


async def test_a_phone_that_locks_itself_or_turns_its_screen_off(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    for happens, words in (
        (daemon.android.sleep, "its screen is off: keep it plugged in"),
        (lambda: setattr(daemon.android, "locked", True), "its lock screen is in front"),
    ):
        await phone.reset(TASK)
        happens()
        with pytest.raises(EnvironmentFault, match=rf"desk/1: step 0 \(wait\): {words}"):
            await phone.step(p.Wait(seconds=0), 0)


async def test_a_call(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(TASK)
    daemon.android.call = True
    with pytest.raises(EnvironmentFault, match=r"step 0 \(wait\): it has an incoming call \(com.android.dialer\)"):
        await phone.step(p.Wait(seconds=0), 0)
    with pytest.raises(EnvironmentFault, match="reset: it has an incoming call"):
        await phone.reset(TASK)


async def test_what_may_not_be_photographed_is_a_fault_and_not_a_black_frame(desk: Desk):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(TASK)
    daemon.android.secure = True
    with pytest.raises(EnvironmentFault, match=r"dev.tapforge.home forbids screenshots \(FLAG_SECURE\)"):
        await phone.step(p.Wait(seconds=0), 0)
    daemon.android.secure = False
    await phone.step(p.Wait(seconds=0), 1)


async def test_a_phone_that_is_turned_is_used_as_it_lies(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(TASK)
    daemon.android.rotation = 1
    result = await phone.step(p.Wait(seconds=0), 0)
    assert (result.observation.frame.width, result.observation.frame.height) == (800, 360)
    assert result.note == "the screen was turned: it is 800x360 pixels now"
    done: list[p.Action] = []
    monkeypatch.setattr(Android, "act", lambda self, action: done.append(action) or "")
    await phone.step(p.Tap(x=0.9, y=0.1), 1)
    assert (done[0].x, done[0].y) == pytest.approx((720.5 / 800, 36.5 / 360))


async def test_touches_reach_what_is_seen_where_another_size_was_set(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    daemon = await desk.phone()
    phone = desk.client(daemon)
    seen = await phone.reset(TASK.model_copy(update={"params": {"setup": "wm size 720x1600"}}))
    assert (seen.frame.width, seen.frame.height) == (360, 800)
    done: list[p.Action] = []
    monkeypatch.setattr(Android, "act", lambda self, action: done.append(action) or "")
    await phone.step(p.Tap(x=0.9, y=0.1), 0)
    daemon.android.rotation = 1
    await phone.step(p.Wait(seconds=0), 1)
    await phone.step(p.Tap(x=0.9, y=0.1), 2)
    for tap in done:
        assert (tap.x, tap.y) == pytest.approx((0.9, 0.1), abs=0.005)
    assert len(done) == 2
    daemon.android.override = (720, 720)
    with pytest.raises(EnvironmentFault, match="desk/1: reset: its screen counts 720x720 .* wm size reset"):
        await phone.reset(TASK)
    daemon.android.override = None
    await phone.reset(TASK)


# --- sick services, through the real adb server -----------------------------------------------------------------------


def _serving(name: str, service: Service) -> Callable[[str], Service | None]:
    return lambda asked: service if asked.startswith(name) else find(asked)


def _writing(data: bytes) -> Service:
    async def write(android: Android, stream: Stream) -> None:
        await stream.write(data)

    return write


async def _endless(android: Android, stream: Stream) -> None:
    while True:
        await stream.write(b"\x00" * 65536)


async def _silent(android: Android, stream: Stream) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("service", "words"),
    [
        (_writing(b""), "screencap: it wrote nothing"),
        (_writing(b"/system/bin/sh: screencap: inaccessible or not found\n"), "inaccessible or not found"),
        (_writing(b"\x89PNG\r\n\x1a\n" + b"\x00" * 4000), "garbled|wrong checksum"),
        (_writing(b"\x89PNG\r\n\x1a\n"), "ends in the middle"),
        (_endless, "wrote more than 67108864 bytes"),
    ],
)
async def test_no_screenshot_is_no_observation(desk: Desk, service: Service, words: str):
    daemon = await desk.phone(find=_serving("exec:screencap", service))
    with pytest.raises(EnvironmentFault, match=rf"desk/1: reset: .*({words})"):
        await desk.client(daemon, deadlines=replace(SOON, reset=60.0)).reset(TASK)


async def test_frames_whose_pixels_are_noise_are_no_observation_however_they_are_waited_for(desk: Desk):
    """Every checksum is right; only decoding tells."""
    chance = random.Random(1)

    async def noise(android: Android, stream: Stream) -> None:
        await stream.write(_broken_png(chance.randbytes(60_000)))

    daemon = await desk.phone(find=_serving("exec:screencap", noise))
    for settle in (Settle(mode="none"), Settle(max_seconds=1.0)):
        phone = AdbClient(f"127.0.0.1:{daemon.port}", desk.phones, Deadlines(), "desk/1", Adb(), settle)
        if settle.mode == "none":
            await phone.reset(TASK)  # whoever decodes it finds out
            continue
        with pytest.raises(EnvironmentFault, match=r"desk/1: reset: frame of \d+ bytes can't be decoded"):
            await phone.reset(TASK)


def _broken_png(pixels: bytes) -> bytes:
    def part(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)

    head = (360).to_bytes(4) + (800).to_bytes(4) + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", pixels) + part(b"IEND", b"")


async def test_a_step_during_which_another_episode_began_has_no_result(desk: Desk):
    daemon = await desk.phone()
    older, newer = desk.client(daemon), desk.client(daemon)
    await older.reset(TASK)
    step = asyncio.create_task(older.step(p.Wait(seconds=10), 0))
    await newer.reset(TASK)
    with pytest.raises(EnvironmentFault) as caught:
        await step
    assert caught.value.reason is Reason.LEASE_LOST


async def test_a_shell_that_hangs_ends_at_the_deadline(desk: Desk):
    sick = False
    daemon = await desk.phone(find=lambda name: _silent if sick and "input keyevent" in name else find(name))
    phone = desk.client(daemon, deadlines=replace(SOON, reset=60.0, step=1.0))
    await phone.reset(TASK)
    sick = True
    with pytest.raises(EnvironmentFault, match=r"desk/1: step 0 \(home\): not done within 1 s") as caught:
        await phone.step(p.Home(), 0)
    assert caught.value.reason is Reason.DEADLINE


async def test_a_screen_without_a_ui_tree_is_no_fault_of_the_phone(desk: Desk):
    async def never_idle(android: Android, stream: Stream) -> None:
        await stream.write(packet(2, b"ERROR: could not get idle state.\n") + packet(3, b"\x01"))

    daemon = await desk.phone(find=lambda name: never_idle if "uiautomator" in name else find(name))
    phone = desk.client(daemon, Adb(ui_tree=True))
    assert (await phone.reset(TASK)).ui_tree is None
    result = await phone.step(p.Home(), 0)
    assert result.observation.ui_tree is None
    assert result.note == "no UI tree: ERROR: could not get idle state."


async def test_output_of_a_check_is_bounded(desk: Desk):
    daemon = await desk.phone(find=_serving("shell,v2,raw:yes", _endless))
    phone = desk.client(daemon)
    await phone.reset(TASK.model_copy(update={"params": {"check": "yes"}}))
    with pytest.raises(EnvironmentFault) as caught:
        await phone.evaluate()
    assert caught.value.reason is Reason.JUDGE_ERROR
    await phone.health()  # what was cut off ended, and holds nobody up


async def test_an_agent_can_not_make_its_own_episode_invalid_by_waiting(desk: Desk):
    """The half of the deadline that it leaves is for the picture, which takes seconds on a busy machine."""
    daemon = await desk.phone()
    phone = desk.client(daemon, deadlines=replace(SOON, reset=60.0, step=24.0))
    await phone.reset(TASK)
    await phone.step(p.Wait(seconds=60), 0)


# --- as slots of a run ------------------------------------------------------------------------------------------------


@pytest.fixture
def here(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """The adb server of the test is the one that this process would use."""
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(desk.adb.port))
    monkeypatch.delenv("ADB_SERVER_SOCKET", raising=False)
    return desk


def _slots(*addresses: str) -> UrlSlots:
    listed = parse_urls(addresses, "phones.txt", "adb")
    options = PhoneOptions(settle=Settle(mode="none"), adb=Adb(keyboard="input"))
    return UrlSlots(listed, Deadlines(), protocol="adb", options=options)


async def test_auto_leases_every_device_that_is_attached(here: Desk):
    daemons = [await here.phone(), await here.phone()]
    serials = {f"127.0.0.1:{daemon.port}" for daemon in daemons}
    for serial in serials:
        await here.adb("connect", serial)
    slots, clients = _slots("auto"), PhoneClients()
    await slots.start()
    leases = [await slots.acquire(5.0), await slots.acquire(5.0)]
    assert {lease.slot for lease in leases} == serials
    for lease in leases:
        phone = clients.open(lease.phone)
        await phone.reset(TASK)
        await phone.close()
        await slots.release(lease, Verdict.CLEAN)
    await clients.close()
    await slots.close()


async def test_auto_with_nothing_attached_is_an_error(here: Desk, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SlotError, match="phones.txt:1: auto: no phone can be used"):
        await _slots("auto").start()
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", "1")
    with pytest.raises(SlotError, match=r"phones.txt:1: auto: no adb server at 127.0.0.1:1 .*start-server"):
        await _slots("auto").start()
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", "many")
    with pytest.raises(SlotError, match="'many' is not a port"):
        await _slots("auto").start()


async def test_one_phone_under_two_names_is_refused(here: Desk):
    daemon = await here.phone()
    again = await here.phone(android=daemon.android)
    with pytest.raises(SlotError, match=r"phones.txt:1 .* and phones.txt:2 .* are the same"):
        await _slots(f"127.0.0.1:{daemon.port}", f"127.0.0.1:{again.port}").start()


async def test_a_dead_phone_is_named_and_the_others_are_used(here: Desk):
    daemon = await here.phone()
    gone = await here.phone()
    await gone.stop()
    slots = _slots(f"127.0.0.1:{daemon.port}", f"127.0.0.1:{gone.port}")
    await slots.start()
    assert "Connection refused" in slots.describe()
    lease = await slots.acquire(5.0)
    assert lease.slot == f"127.0.0.1:{daemon.port}"
    await slots.close()


async def test_a_variable_that_names_no_server_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", "many")
    clients = PhoneClients()
    with pytest.raises(EnvironmentFault, match="'many' is not a port"):
        await clients.health(PhoneAddress("R58", "R58", protocol="adb"))


# --- a server that lies -----------------------------------------------------------------------------------------------

_DEVICES = said("R58 device usb:1-1\n")


def _png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 8), (90, 120, 30)).save(out, "PNG")
    return out.getvalue()


def _well(**others: bytes) -> dict[str, bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]]:
    return {
        "host:devices-l": _DEVICES,
        "exec:screencap": b"OKAY" + _png(),
        "shell,v2": ended(),
        "shell,v2,raw:getprop": ended(0, b"R58\n1\nboot\n"),
        **others,
    }


def _client(server: object) -> AdbClient:
    return AdbClient("R58", AdbPhones(server), SOON, "desk/1", Adb(keyboard="input"), Settle(mode="none"))


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("R58 unauthorized\n", "hasn't allowed this computer"),
        ("R58 offline\n", "it is offline: plug it in again"),
        ("R58 no permissions (user in plugdev group); see [http://...]\n", "udev"),
        ("R58 recovery\n", "its state is 'recovery'"),
        ("R59 device\n", "adb doesn't know it"),
        ("", "adb doesn't know it"),
    ],
)
async def test_states_of_a_phone_on_usb(devices: str, words: str):
    async with hostile(_well(**{"host:devices-l": said(devices)})) as server:
        with pytest.raises(EnvironmentFault, match=f"desk/1: health: .*{words}"):
            await _client(server).health()


async def test_a_phone_that_is_still_booting():
    async with hostile(_well(**{"shell,v2,raw:getprop": ended(0, b"R58\n\nboot\n")})) as server:
        with pytest.raises(EnvironmentFault, match="desk/1: health: it is still booting"):
            await _client(server).health()


async def test_emulators_without_serial_numbers_of_their_own_are_told_apart_by_address():
    async with hostile(_well(**{"shell,v2,raw:getprop": ended(0, b"EMULATOR33X4X9X0\n1\nboot\n")})) as server:
        assert await _client(server).health() == "EMULATOR33X4X9X0@R58/boot"


async def test_whatever_a_phone_says_is_an_observation_a_score_or_a_fault():
    """1,500 episodes in which one kind of answer, or all, are noise, changed, cut off, too much or refused."""
    chance = random.Random(11)
    real = _well(
        **{
            "shell,v2,raw:dumpsys window": ended(
                0, b"  mCurrentFocus=Window{1 u0 com.a/com.a.B}\ntapforge-boot\n\nboot\n"
            ),
            "shell,v2,raw:pm list": ended(0, b"package:com.a\n"),
            "shell,v2,raw:check": ended(0, b"yes\n"),
        }
    )
    answers = dict(real)
    task = TASK.model_copy(update={"params": {"check": "check", "expect": "yes"}})
    actions = (p.Home(), p.OpenApp(name="com.a"), p.Type(text="x y"), p.Answer(text=""))
    outcomes: dict[str, int] = {}

    def damaged(answer: bytes) -> bytes:
        data = bytearray(answer)
        match chance.randrange(6):
            case 0:
                return refused(chance.choice(["device offline", "device 'R58' not found", "closed", "", "\x00\xff"]))
            case 1:
                return bytes(data[: chance.randrange(len(data) + 1)])
            case 2:
                return b"OKAY" + chance.randbytes(chance.randrange(200))
            case 3:
                return b"OKAY" + packet(1, chance.randbytes(300)) + packet(3, bytes([chance.randrange(256)]))
            case 4:
                return bytes(data) + chance.randbytes(50)
            case _:
                for _ in range(chance.randrange(1, 5)):
                    data[chance.randrange(len(data))] = chance.randrange(256)
                return bytes(data)

    async with hostile(answers) as server:
        for number in range(1500):
            broken = chance.sample(sorted(real), chance.choice([0, 1, 1, 2, len(real)]))
            server_answers = {name: damaged(real[name]) if name in broken else real[name] for name in real}
            server.answers.clear()
            server.answers.update({"host:transport:": b"OKAY", **server_answers})
            phone = _client(server)
            try:
                await phone.reset(task)
                for index, action in enumerate(actions):
                    await phone.step(action, index)
                value = (await phone.evaluate()).value
                assert value in (0.0, 1.0)
                outcomes["score"] = outcomes.get("score", 0) + 1
            except EnvironmentFault as fault:
                assert str(fault).startswith("desk/1: "), number
                assert len(str(fault)) < 1500
                outcomes[fault.reason] = outcomes.get(fault.reason, 0) + 1
    assert outcomes["score"] > 300
    assert outcomes[Reason.ENV_ERROR] > 300
    assert outcomes[Reason.JUDGE_ERROR] > 10
