"""Phones whose screen isn't one that lies still: several panels, a folded phone, one that is turned between a picture
and a touch, other sizes and densities, a cut-out, two apps on one screen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from adb_desk import Desk
from hypothesis import given
from hypothesis import strategies as st

from tapforge_api.environment import Adb
from tapforge_envs import protocol as p
from tapforge_envs.clients.adb.displays import Displays, read_displays
from tapforge_envs.clients.adb.wire import AdbServer
from tapforge_envs.phone.adbd.android import Android
from tapforge_envs.protocol import EnvironmentFault, Task

TASK = Task(suite="adb", template="by_hand", goal="whatever")
OUTER, INNER = "4619827677550801152", "4619827677550801153"


def viewport(fields: str, *, orientation: int = 0, size: str = "1080, 2400") -> str:
    return (
        f"DisplayViewport{{{fields}, orientation={orientation}, logicalFrame=Rect(0, 0 - {size}), "
        f"physicalFrame=Rect(0, 0 - {size}), deviceWidth=1, deviceHeight=1}}"
    )


def panel(id: str, state: str) -> str:
    modes = ", ".join("{id=1, width=1080, height=2400, fps=60.0, alternativeRefreshRates=[90.0]}" for _ in range(40))
    return (
        f'  DisplayDeviceInfo{{"Panel": uniqueId="local:{id}", 1080 x 2400, supportedModes [{modes}], rotation 0, '
        f"address {{port=0}}, state {state}, committedState ON, FLAG_SECURE}}\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Android 7: one line per viewport, and those that are not there
        (
            (
                f"  mDefaultViewport={viewport('valid=true, displayId=0', orientation=1, size='1920, 1080')}\n"
                f"  mExternalTouchViewport={viewport('valid=false, displayId=0', size='0, 0')}\n"
            ),
            Displays(turns=1, size=(1920, 1080)),
        ),
        # since Android 10: all in one line; a virtual display is no panel
        (
            "  mViewports=["
            + viewport(f"type=INTERNAL, valid=true, isActive=true, displayId=0, uniqueId='local:{OUTER}'")
            + ", "
            + viewport("type=VIRTUAL, valid=true, isActive=true, displayId=7, uniqueId='virtual:com.a,1,x,0'")
            + "]\n",
            Displays(0, (1080, 2400), OUTER, frozenset({OUTER})),
        ),
        # a fold: the other panel has no power
        (
            "  mViewports=["
            + viewport(f"type=INTERNAL, valid=true, isActive=false, displayId=2, uniqueId='local:{OUTER}'")
            + ", "
            + viewport(f"type=INTERNAL, valid=true, displayId=0, uniqueId='local:{INNER}'", size="2200, 2480")
            + "]\n"
            + panel(OUTER, "OFF")
            + panel(INNER, "ON"),
            Displays(0, (2200, 2480), INNER, frozenset({INNER, OUTER}), frozenset({OUTER})),
        ),
        # a fold that says of no panel that it draws on it
        (
            f"  mViewports=[{viewport('type=INTERNAL, valid=true, isActive=false, displayId=0')}]\n"
            + panel(OUTER, "OFF")
            + panel(INNER, "ON"),
            Displays(panels=frozenset({INNER, OUTER}), off=frozenset({OUTER})),
        ),
        ("Can't find service: display\n", Displays()),
        ("", Displays()),
    ],
)
def test_how_the_screen_lies_and_on_which_panel(text: str, expected: Displays) -> None:
    assert read_displays(text) == expected
    assert expected.camera == (expected.panel if len(expected.panels) > 1 else "")


PIECES = st.sampled_from(["DisplayViewport{", "}", "displayId=0", ", ", "valid=true", "logicalFrame=Rect(0, 0 - 9, 9)"])


@given(st.text(max_size=300) | st.lists(PIECES, max_size=40).map("".join))
def test_any_dump_is_read(text: str) -> None:
    assert isinstance(read_displays(text), Displays)


def test_no_dump_takes_longer_than_its_length() -> None:
    for piece in (
        "DisplayViewport{",
        "DisplayViewport{a=Rect(",
        'DisplayDeviceInfo{"x": uniqueId="local:',
        "local:1" * 9,
    ):
        assert read_displays(piece * 20_000).size is None


def test_what_is_not_known_was_not_moved() -> None:
    known = Displays(0, (1080, 2400), OUTER)
    assert not known.moved(Displays()) and not Displays().moved(known) and not known.moved(known)
    for now in (Displays(2, (1080, 2400), OUTER), Displays(0, (1080, 2400), INNER), Displays(0, (720, 1600), OUTER)):
        assert known.moved(now)
    for less in (Displays(size=(1080, 2400)), Displays(0), Displays(panel=OUTER)):
        assert not known.moved(less) and not less.moved(known), "what one of them doesn't say is held against nobody"


# --- through the real adb server --------------------------------------------------------------------------------------


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[p.Action]:
    done: list[p.Action] = []
    monkeypatch.setattr(Android, "act", lambda self, action: done.append(action) or "")
    return done


async def test_the_picture_is_of_the_panel_that_the_screen_is_drawn_on(desk: Desk) -> None:
    """`screencap` alone takes the first one, which is dark; also after the phone was folded in the episode."""
    daemon = await desk.phone()
    daemon.android.panels, daemon.android.panel = (OUTER, INNER), INNER
    phone = desk.client(daemon)
    seen = await phone.reset(TASK)
    assert seen.frame.data == daemon.android.screenshot(INNER).data != daemon.android.screenshot().data
    daemon.android.panel = OUTER
    seen = (await phone.step(p.Wait(seconds=0), 0)).observation
    assert seen.frame.data == daemon.android.screenshot(OUTER).data != daemon.android.screenshot(INNER).data


async def test_a_dark_panel_is_no_observation(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a phone doesn't say which panel it draws on, and where that one has no power."""
    daemon = await desk.phone()
    daemon.android.panels, daemon.android.panel = (OUTER, INNER), INNER
    lines: Callable[[str], str] = str
    real = AdbServer.shell

    async def shell(self: AdbServer, serial: str, command: str, limit: int = 8 << 20):
        result = await real(self, serial, command, limit)
        return type(result)(lines(result.stdout.decode()).encode(), result.stderr, result.status)

    monkeypatch.setattr(AdbServer, "shell", shell)
    lines = lambda text: text.replace("isActive=true", "isActive=false")  # noqa: E731
    with pytest.raises(EnvironmentFault, match=r"reset: its picture is black and it has several displays.*unfold it"):
        await desk.client(daemon).reset(TASK)
    lines = lambda text: text.replace("state ON", "state OFF")  # noqa: E731
    with pytest.raises(EnvironmentFault, match="reset: the display that it draws on is off"):
        await desk.client(daemon).reset(TASK)


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize(
    "action",
    [
        p.Tap(x=0.9, y=0.1),
        p.DoubleTap(x=0.9, y=0.1),
        p.LongPress(x=0.9, y=0.1),
        p.Swipe(x=0.9, y=0.1, x2=0.5, y2=0.5),
        p.Drag(x=0.9, y=0.1, x2=0.5, y2=0.5),
        p.Scroll(direction="down"),
    ],
    ids=lambda action: action.type,
)
async def test_a_phone_that_was_turned_since_its_picture_is_not_touched(
    desk: Desk, touched: list[p.Action], action: p.Action, turns: int
) -> None:
    """Also half a turn, after which the picture has the same size."""
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(TASK)
    touched.clear()
    daemon.android.rotation = turns
    result = await phone.step(action, 0)
    assert touched == [] and result.note.startswith("the screen was turned, folded or resized after its picture")
    size = daemon.android.size
    assert (result.observation.frame.width, result.observation.frame.height) == size
    result = await phone.step(action, 1)
    assert touched and result.note == ""


async def test_keys_are_pressed_however_a_phone_lies(desk: Desk, touched: list[p.Action]) -> None:
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(TASK)
    touched.clear()
    daemon.android.rotation = 1
    result = await phone.step(p.Back(), 0)
    assert [action.type for action in touched] == ["back"] and "the screen was turned: it is 800x360" in result.note


async def test_a_picture_of_before_a_turn_is_taken_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(TASK)
    real, pictures = AdbServer.exec_out, 0

    async def late(self: AdbServer, serial: str, command: str, limit: int):
        nonlocal pictures
        pictures += 1
        found = await real(self, serial, command, limit)
        if pictures == 1:
            daemon.android.rotation = 1
        return found

    monkeypatch.setattr(AdbServer, "exec_out", late)
    seen = (await phone.step(p.Wait(seconds=0), 0)).observation
    assert pictures == 2 and (seen.frame.width, seen.frame.height) == (800, 360)


async def test_pictures_that_lie_otherwise_are_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A phone that doesn't turn its pictures: a touch by one would land elsewhere."""
    daemon = await desk.phone()
    upright = daemon.android.screenshot()
    daemon.android.rotation = 1
    monkeypatch.setattr(Android, "screenshot", lambda self, panel="": upright)
    with pytest.raises(EnvironmentFault, match=r"reset: its pictures lie otherwise .*user-rotation lock"):
        await desk.client(daemon).reset(TASK)


async def test_a_size_that_is_set_in_the_episode_counts_at_once(desk: Desk, touched: list[p.Action]) -> None:
    """As the screen resolution in a phone's settings does."""
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(TASK)
    touched.clear()
    daemon.android.override = (720, 1600)
    assert "was not touched" in (await phone.step(p.Tap(x=0.9, y=0.1), 0)).note
    await phone.step(p.Tap(x=0.9, y=0.1), 1)
    assert [(tap.x, tap.y) for tap in touched] == [pytest.approx((0.9, 0.1), abs=0.005)]
    daemon.android.override = (720, 1440)  # of another shape, as one without the stripe of a cut-out has
    with pytest.raises(EnvironmentFault, match=r"its screen counts 720x1440 .* wm size reset"):
        await phone.step(p.Wait(seconds=0), 2)


async def test_another_density_moves_no_touch(desk: Desk, touched: list[p.Action]) -> None:
    daemon = await desk.phone()
    phone = desk.client(daemon)
    await phone.reset(TASK.model_copy(update={"params": {"setup": "wm density reset"}}))
    touched.clear()
    await phone.step(p.Tap(x=0.9, y=0.1), 0)
    assert [(tap.x, tap.y) for tap in touched] == [pytest.approx((0.9, 0.1), abs=0.005)]


async def test_a_reset_ends_what_shares_the_screen(desk: Desk) -> None:
    """The home key leaves one half of a split screen; an app that is to be kept is kept there."""
    daemon = await desk.phone()
    daemon.android.beside = "dev.tapforge.mail"
    options = Adb(force_stop_third_party=False, keep=("dev.tapforge.mail",))
    await desk.client(daemon, options).reset(TASK)
    assert daemon.android.beside
    seen = await desk.client(daemon, Adb(force_stop_third_party=False)).reset(TASK)
    assert daemon.android.beside == "" and seen.app == "dev.tapforge.home"
