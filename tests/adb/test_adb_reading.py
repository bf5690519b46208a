"""What phones say, and what is said to them: windows, screenshots, gestures, text, names of apps. No sockets."""

import base64
import io
import random
import shlex

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from tapforge_envs import protocol as p
from tapforge_envs.clients.adb.actions import (
    MAX_ENTERS,
    MAX_LINE,
    command_of,
    input_text,
    keyboard_text,
    needs_keyboard,
)
from tapforge_envs.clients.adb.apps import component_in, package_of, packages_in, split_component
from tapforge_envs.clients.adb.screen import frame_in, is_black, may_be_black
from tapforge_envs.clients.adb.touch import override_size, touched_size
from tapforge_envs.clients.adb.windows import Windows, call_states, read_windows
from tapforge_envs.protocol import UnsupportedAction

ANDROID_13 = """\
WINDOW MANAGER POLICY STATE (dumpsys window policy)
    mSafeMode=false mSystemReady=true mSystemBooted=true
    KeyguardServiceDelegate
      showing=%(locked)s
      inputRestricted=false
      occluded=%(occluded)s
      secure=false
      dreaming=false
      systemIsReady=true
      currentUser=0
      screenState=SCREEN_STATE_ON
      interactiveState=INTERACTIVE_STATE_AWAKE
WINDOW MANAGER WINDOWS (dumpsys window windows)
  Window #0 Window{a1b2c3 u0 StatusBar}:
    mAttrs={(0,0)(fillx84) gr=TOP CENTER_VERTICAL sim={adjust=pan} ty=STATUS_BAR fmt=TRANSLUCENT
      fl=NOT_FOCUSABLE SPLIT_TOUCH HARDWARE_ACCELERATED
      pfl=COLOR_SPACE_AGNOSTIC}
    isOnScreen=true
    isVisible=true
  Window #1 Window{44aa55 u0 com.bank.app/com.bank.app.ui.Login}:
    mAttrs={(0,0)(fillxfill) sim={state=always_visible adjust=resize} ty=BASE_APPLICATION wanim=0x10302f8
      fl=LAYOUT_IN_SCREEN %(flags)s LAYOUT_INSET_DECOR
      pfl=NO_MOVE_ANIMATION}
    isOnScreen=true
    isVisible=true
  Window #2 Window{99ffee u0 com.other/com.other.Main}:
    mAttrs={(0,0)(fillxfill) ty=BASE_APPLICATION
      fl=LAYOUT_IN_SCREEN SECURE}
    isOnScreen=false
    isVisible=false
  mCurrentFocus=Window{44aa55 u0 com.bank.app/com.bank.app.ui.Login}
  mFocusedApp=ActivityRecord{1234 u0 com.bank.app/.ui.Login t12}
"""


def android_13(locked="false", occluded="false", flags=""):
    return ANDROID_13 % {"locked": locked, "occluded": occluded, "flags": flags}


def test_the_app_in_front():
    assert read_windows(android_13()) == Windows("com.bank.app", ".ui.Login", visible=frozenset({"com.bank.app"}))


@pytest.mark.parametrize(("display", "seen"), [("0", True), ("2", False)])
def test_a_window_on_another_display_is_not_on_the_phone(display, seen):
    here, there = (
        "    isOnScreen=false\n    isVisible=false",
        f"    mDisplayId={display} rootTaskId=1\n    isVisible=true",
    )
    assert here in android_13()
    assert ("com.other" in read_windows(android_13().replace(here, there)).visible) is seen


def test_a_secure_window_counts_when_it_is_in_front():
    assert read_windows(android_13(flags="SECURE")).secure
    assert not read_windows(android_13()).secure


def test_a_lock_screen_counts_unless_something_lies_over_it():
    assert read_windows(android_13(locked="true")).locked
    assert not read_windows(android_13(locked="true", occluded="true")).locked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Android 7: flags as bits, the focus without an app
        (
            (
                "  Window #3 Window{b3f3 u0 com.x/com.x.A}:\n"
                "    mAttrs=WM.LayoutParams{(0,0)(fillxfill) sim=#20 ty=1 fl=#81812100 fmt=-3}\n"
                "    mHasSurface=true isReadyForDisplay()=true\n"
                "  mCurrentFocus=Window{b3f3 u0 com.x/com.x.A}\n"
                "    mShowingLockscreen=false mShowingDream=false\n"
            ),
            Windows("com.x", ".A", secure=True, visible=frozenset({"com.x"})),
        ),
        # a dialog or the shade is in front: the app is the focused one
        (
            (
                "  mCurrentFocus=Window{1 u0 NotificationShade}\n"
                "  mFocusedApp=AppWindowToken{2 token=Token{3 ActivityRecord{4 u0 com.y/com.y.B t5}}}\n"
            ),
            Windows("com.y", "NotificationShade"),
        ),
        ("  mFocusedApp=ActivityRecord{4 u0 com.y/.B t5}\n", Windows("com.y", ".B")),
        ("  mCurrentFocus=null\n  mFocusedApp=null\n", Windows()),
        ("    mShowingLockscreen=true mShowingDream=false\n", Windows(locked=True)),
        ("  interactiveState=INTERACTIVE_STATE_SLEEP\n", Windows(asleep=True)),
        ("    mAwake=false mScreenOnEarly=false\n", Windows(asleep=True)),
        # a second display that is off, and a keyboard that shows: neither says anything of the phone
        ("    mAwake=true\n    mAwake=false\n", Windows()),
        ("  interactiveState=INTERACTIVE_STATE_AWAKE\n    mAwake=false\n", Windows()),
        ("  ImeController\n    showing=true\n", Windows()),
        ("", Windows()),
        ("Can't find service: window", Windows()),
    ],
)
def test_other_versions_and_nothing(text, expected):
    assert read_windows(text) == expected


def test_calls_over_all_sim_cards():
    assert call_states("  Phone Id=0\n    mCallState=0\n  Phone Id=1\n    mCallState=1\n") == {0, 1}
    assert call_states("nothing") == frozenset()
    assert read_windows("mCurrentFocus=Window{1 u0 com.android.dialer/com.android.incallui.InCallActivity}").shows_call


@pytest.mark.parametrize(
    "text",
    [
        "fl=" + "LAYOUT_IN_SCREEN " * 5000 + "}",
        "  Window #1 Window{1 u0 a.b/c}:\n"
        + "  fl=AAAA BBBB CCCC DDDD EEEE FFFF GGGG HHHH IIII JJJJ KKKK LLLL!\n" * 3000,
        "  mFocusedApp=" + "a." * 100_000,
        "  mCurrentFocus=Window{" + "1" * 200_000,
        "KeyguardServiceDelegate\n" + "  \n" * 100_000,
        "Window #" + "1" * 200_000,
    ],
)
def test_no_dump_takes_longer_than_its_length(text):
    """An expression that backtracks would not come back from these."""
    assert read_windows(text).app is None


@given(st.text(max_size=400) | st.lists(st.sampled_from(ANDROID_13.splitlines()), max_size=30).map("\n".join))
def test_any_dump_is_read(text):
    assert isinstance(read_windows(text), Windows)
    call_states(text)


# --- screenshots ------------------------------------------------------------------------------------------------------


def png(width=40, height=90, colour=(200, 30, 30), bar=None):
    image = Image.new("RGB", (width, height), colour)
    if bar:
        image.paste(bar, (0, 0, width, height // 20))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_the_picture_is_found_between_warnings():
    frame = frame_in(b"WARNING: linker: unused DT entry\n[Warning] 2 displays\n" + png() + b"\nclosed\n")
    assert (frame.data, frame.width, frame.height) == (png(), 40, 90)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (b"", "wrote nothing"),
        (b"/system/bin/sh: screencap: not found\n", "not found"),
        (png()[:-20], "ends in the middle"),
        (png()[:20], "ends in the middle"),
        (png()[:60] + bytes([png()[60] ^ 255]) + png()[61:], "wrong checksum"),
        (b"x" * 100_000 + png(), "no PNG"),
    ],
)
def test_what_is_no_whole_picture_is_named(output, words):
    with pytest.raises(ValueError, match=words):
        frame_in(output)


def test_a_thousand_garbled_pictures_are_refused_or_whole():
    chance = random.Random(3)
    good = png()
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(data))
            data[at : at + chance.randrange(4)] = chance.randbytes(chance.randrange(4))
        try:
            frame = frame_in(bytes(data))
        except ValueError:
            continue
        Image.open(io.BytesIO(frame.data)).load()


def test_black_is_black_between_the_bars():
    assert is_black(frame_in(png(colour=(0, 0, 0))))
    assert is_black(frame_in(png(colour=(0, 0, 0), bar=(255, 255, 255))))
    assert not is_black(frame_in(png(colour=(0, 9, 0))))
    assert may_be_black(frame_in(png(1080, 2400, (0, 0, 0))))
    noise = Image.frombytes("RGB", (300, 600), random.Random(1).randbytes(300 * 600 * 3))
    out = io.BytesIO()
    noise.save(out, "PNG")
    assert not may_be_black(frame_in(out.getvalue()))


# --- actions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "line"),
    [
        (p.Tap(x=0.5, y=0.5), "input tap 540 1200"),
        (p.Tap(x=1.0, y=1.0), "input tap 1079 2399"),
        (p.DoubleTap(x=0, y=0), "input tap 0 0 && input tap 0 0"),
        (p.LongPress(x=0.1, y=0.1, seconds=1.5), "input swipe 108 240 108 240 1500"),
        (p.Swipe(x=0.5, y=0.8, x2=0.5, y2=0.2), "input swipe 540 1920 540 480 250"),
        (p.Drag(x=0.5, y=0.8, x2=0.5, y2=0.2), "input draganddrop 540 1920 540 480 1500"),
        (p.Scroll(direction="down"), "input swipe 540 1800 540 600 500"),
        (p.Scroll(direction="up"), "input swipe 540 600 540 1800 500"),
        (p.Scroll(direction="right"), "input swipe 810 1200 270 1200 500"),
        (p.Scroll(direction="left"), "input swipe 270 1200 810 1200 500"),
        (p.Scroll(direction="down", x=0.2, y=1.0), "input swipe 216 2208 216 1008 500"),
        (p.Home(), "input keyevent KEYCODE_HOME"),
        (p.Back(), "input keyevent KEYCODE_BACK"),
        (p.AppSwitch(), "input keyevent KEYCODE_APP_SWITCH"),
        (p.Enter(), "input keyevent KEYCODE_ENTER"),
        (p.Key(name="volume_up"), "input keyevent KEYCODE_VOLUME_UP"),
        (p.Key(name="KEYCODE_DEL"), "input keyevent KEYCODE_DEL"),
    ],
)
def test_actions_as_shell_lines(action, line):
    assert command_of(action, 1080, 2400) == line


@pytest.mark.parametrize(
    "action",
    [
        p.Key(name="POWER"),
        p.Key(name="sleep"),
        p.Key(name="NO_SUCH_KEY"),
        p.Key(name="DEL; reboot"),
        p.Key(name=""),
        p.AskUser(text="?"),
        p.RightClick(x=0.5, y=0.5),
        p.Move(x=0.5, y=0.5),
        p.Hotkey(keys=("CTRL", "C")),
    ],
)
def test_what_a_phone_has_not_or_must_not_do_is_refused(action):
    with pytest.raises(UnsupportedAction):
        command_of(action, 1080, 2400)


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ("Physical size: 1080x2400\n", None),
        ("Physical size: 1080x2400\r\nOverride size: 720x1600\r\n", (720, 1600)),
        ("Physical size: 1080x2400\nOverride size: 0x0\n", None),
        ("/system/bin/sh: wm: not found\n", None),
    ],
)
def test_the_size_that_was_set(said, size):
    assert override_size(said) == size


@pytest.mark.parametrize(
    ("frame", "override", "size"),
    [
        ((1080, 2400), None, (1080, 2400)),
        ((1080, 2400), (1080, 2400), (1080, 2400)),
        ((2400, 1080), (1080, 2400), (2400, 1080)),
        ((1080, 2400), (720, 1600), (720, 1600)),
        ((2400, 1080), (720, 1600), (1600, 720)),
        ((1440, 3120), (1080, 2340), (1080, 2340)),
        ((1080, 2408), (720, 1605), (720, 1605)),
        ((1080, 2400), (1080, 1920), None),
    ],
)
def test_touches_count_in_the_size_that_was_set(frame, override, size):
    shown = p.Frame(b"", "", frame[0], frame[1])
    if size is not None:
        assert touched_size(shown, override) == size
        return
    with pytest.raises(ValueError, match="counts 1080x1920 and its pictures have 1080x2400 pixels.*wm size reset"):
        touched_size(shown, override)


def typed(lines):
    """What a phone makes of `input` lines: a shell's words, then %s as a blank."""
    text = ""
    for line in lines:
        assert len(line.encode()) <= MAX_LINE
        match shlex.split(line):
            case ["input", "text", words]:
                text += words.replace("%s", " ")
            case ["input", "keyevent", key]:
                text += {"KEYCODE_ENTER": "\n", "KEYCODE_TAB": "\t"}[key]
            case ["am", "broadcast", "-a", "ADB_INPUT_B64", "--es", "msg", words]:
                text += base64.b64decode(words).decode()
                assert "\n" not in base64.b64decode(words).decode()
            case other:
                raise AssertionError(other)
    return text


@given(
    st.lists(st.sampled_from([chr(c) for c in range(32, 127)] + ["\n", "\t", "%s", "%%s"]), max_size=600).map("".join)
)
def test_ascii_arrives_as_it_was_written(text):
    assert not needs_keyboard(text)
    assume(text.count("\n") <= MAX_ENTERS)
    assert typed(input_text(text)) == text


@given(st.text(max_size=1500))
def test_any_script_arrives_through_the_keyboard(text):
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    assume(text.count("\n") <= MAX_ENTERS)
    assert typed(keyboard_text(text)) == text


@pytest.mark.parametrize("lines", [input_text, keyboard_text])
def test_a_line_end_is_enter_with_either_keyboard(lines):
    for end in ("\n", "\r\n", "\r"):
        assert lines(f"rain{end}")[1:] == ["input keyevent KEYCODE_ENTER"]
        assert typed(lines(f"a{end}{end}b")) == "a\n\nb"
    with pytest.raises(UnsupportedAction, match="line ends"):
        lines("a\n" * (MAX_ENTERS + 1))


@pytest.mark.parametrize("text", ["ä", "日本", "🙂", "a\x00", "\x7f", "\u00a0"])
def test_what_input_can_not_type_needs_the_keyboard(text):
    assert needs_keyboard(text)


# --- apps -------------------------------------------------------------------------------------------------------------

INSTALLED = frozenset({"com.android.settings", "org.wikipedia", "com.a.notes", "com.b.notes", "com.google.android.gm"})


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("Settings", "com.android.settings"),
        (" gmail ", "com.google.android.gm"),
        ("mail", "com.google.android.gm"),
        ("Wikipedia", "org.wikipedia"),
        ("org.wikipedia", "org.wikipedia"),
        ("My Notes", "com.b.notes"),
        ("notes", None),
        ("camera", None),
        ("gone", None),
        ("", None),
        ("wiki", None),
        ("x; reboot", None),
    ],
)
def test_names_of_apps(name, package):
    named = {"my notes": "com.b.notes", "gone": "com.gone"}
    assert package_of(name, INSTALLED, named) == package


def test_listings():
    assert packages_in("package:com.a.b\npackage:com.x; reboot\nWARNING\npackage:c.d\n") == {"com.a.b", "c.d"}
    assert component_in("priority=0 preferredOrder=0\ncom.a/.Main\n") == "com.a/.Main"
    assert component_in("No activity found\n") is None
    assert component_in("") is None
    assert split_component("com.a.b") == ("com.a.b", "")
    assert split_component("com.a.b/.Main") == ("com.a.b", ".Main")
    assert split_component("com.a.b/.Main; reboot") is None
    assert split_component("nothing") is None
