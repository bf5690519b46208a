"""`input`, `screencap`, `uiautomator`, `wm`: the screen and what touches it.

Coordinates are pixels of the screen as it is turned now. A touch outside of it reaches no app, and prints nothing.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from typing import Final

from PIL import Image

from tapforge_envs import protocol as p
from tapforge_envs.phone.adbd.android import Android
from tapforge_envs.phone.adbd.result import Result, failed, said

#: a finger that stays this long presses long, milliseconds; one that moves this long drags
_LONG_PRESS_MS: Final = 500
_DRAG_MS: Final = 1000
#: of the shorter side: a finger that moves less than this hasn't moved
_SLOP: Final = 0.01
_MAX_TEXT: Final = 10_000
_DENSITY: Final = 420
#: what screencap says before a picture where it has to choose
_WHICH: Final = (
    b"[Warning] Multiple displays were found, but no display id was specified! Defaulting to the first display found.\n"
)
_SIZE: Final = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", re.ASCII)
#: numbers of Android's KeyEvent
_KEYS: Final = {
    "HOME": 3, "BACK": 4, "CALL": 5, "ENDCALL": 6, "STAR": 17, "POUND": 18, "DPAD_UP": 19, "DPAD_DOWN": 20,
    "DPAD_LEFT": 21, "DPAD_RIGHT": 22, "DPAD_CENTER": 23, "VOLUME_UP": 24, "VOLUME_DOWN": 25, "POWER": 26,
    "CAMERA": 27, "COMMA": 55, "PERIOD": 56, "TAB": 61, "SPACE": 62, "ENTER": 66, "DEL": 67, "GRAVE": 68,
    "MINUS": 69, "EQUALS": 70, "LEFT_BRACKET": 71, "RIGHT_BRACKET": 72, "BACKSLASH": 73, "SEMICOLON": 74,
    "APOSTROPHE": 75, "SLASH": 76, "AT": 77, "PLUS": 81, "MENU": 82, "NOTIFICATION": 83, "SEARCH": 84, "ESCAPE": 111,
    "FORWARD_DEL": 112, "MOVE_HOME": 122, "MOVE_END": 123, "VOLUME_MUTE": 164, "APP_SWITCH": 187, "SLEEP": 223,
    "WAKEUP": 224,
    **{str(digit): 7 + digit for digit in range(10)},
    **{chr(ord("A") + number): 29 + number for number in range(26)},
}  # fmt: skip
_NAMES: Final = {number: name for name, number in _KEYS.items()}
_TYPED: Final = {
    "STAR": "*", "POUND": "#", "COMMA": ",", "PERIOD": ".", "GRAVE": "`", "MINUS": "-", "EQUALS": "=",
    "LEFT_BRACKET": "[", "RIGHT_BRACKET": "]", "BACKSLASH": "\\", "SEMICOLON": ";", "APOSTROPHE": "'", "SLASH": "/",
    "AT": "@", "PLUS": "+", "SPACE": " ",
    **{str(digit): str(digit) for digit in range(10)},
    **{chr(ord("A") + number): chr(ord("a") + number) for number in range(26)},
}  # fmt: skip
_SOURCES: Final = ("touchscreen", "keyboard", "mouse", "touchpad", "stylus", "gamepad", "dpad", "joystick")


def input_(android: Android, words: Sequence[str], stdin: bytes) -> Result:
    words = list(words)
    if words and words[0] in _SOURCES:
        words = words[1:]
    if words[:1] == ["-d"]:
        words = words[2:]
    match words:
        case ["text", text]:
            return _text(android, text)
        case ["keyevent", *keys] if keys:
            for key in keys:
                if not key.startswith("--"):
                    press(android, key)
            return Result()
        case ["motionevent", phase, x, y] if (at := _numbers(x, y)) is not None:
            return _motion(android, phase.upper(), at[0], at[1])
    places = _numbers(*words[1:])
    match words[:1], places:
        case ["tap"], [left, top]:
            touch(android, left, top, left, top, 0)
        case ["swipe" | "draganddrop" as kind, *_], [left, top, x2, y2, *rest] if len(rest) < 2:
            touch(android, left, top, x2, y2, rest[0] if rest else 300, drag=kind == "draganddrop")
        case _:
            return failed(f"Error: Invalid arguments for command: {words[0] if words else ''}", 255)
    return Result()


def touch(android: Android, x: float, y: float, x2: float, y2: float, ms: float, *, drag: bool = False) -> None:
    """One finger, from down to up."""
    (x, y), (x2, y2) = android.shown_at(x, y), android.shown_at(x2, y2)
    width, height = android.size
    if not (0 <= x < width and 0 <= y < height) or not android.awake:
        return
    far = math.hypot(x2 - x, y2 - y) > _SLOP * min(width, height)
    if android.locked and not android.call:
        if far and y2 < y:
            android.dismiss_keyguard()
        return
    at, to = (_relative(x, width), _relative(y, height)), (_relative(x2, width), _relative(y2, height))
    if far and (drag or ms >= _DRAG_MS):
        android.act(p.Drag(x=at[0], y=at[1], x2=to[0], y2=to[1]))
    elif far:
        android.act(p.Swipe(x=at[0], y=at[1], x2=to[0], y2=to[1]))
    elif ms >= _LONG_PRESS_MS:
        android.act(p.LongPress(x=at[0], y=at[1], seconds=min(60.0, ms / 1000)))
    else:
        android.act(p.Tap(x=at[0], y=at[1]))


def press(android: Android, key: str) -> None:
    """A key by its number or name; one that isn't known does nothing, as on a phone."""
    name = _NAMES.get(int(key), "") if key.isascii() and key.isdecimal() and len(key) < 5 else key
    name = name.upper().removeprefix("KEYCODE_")
    match name:
        case "POWER":
            android.sleep() if android.awake else android.wake()
        case "SLEEP":
            android.sleep()
        case "WAKEUP":
            android.wake()
        case "ENDCALL" if android.call:
            android.call = False
        case "MENU" if android.locked:
            android.dismiss_keyguard()
        case "ENTER" if android.locked:
            android.enter_pin()
        case _ if android.locked and name in _TYPED:
            android.typed_pin = (android.typed_pin + _TYPED[name])[-32:]
        case "HOME":
            android.act(p.Home())
        case "BACK" | "ESCAPE":
            android.act(p.Back())
        case "APP_SWITCH":
            android.act(p.AppSwitch())
        case "ENTER" | "DPAD_CENTER":
            android.act(p.Enter())
        case _ if name in _TYPED:
            android.act(p.Type(text=_TYPED[name]))
        case "DEL" | "VOLUME_UP" | "VOLUME_DOWN":
            android.act(p.Key(name=name))


def _text(android: Android, text: str) -> Result:
    if not text.isascii():
        # `input` looks each character up in the virtual keyboard's map, and trips over those that aren't there
        return failed(
            "Exception occurred while executing 'text':\njava.lang.NullPointerException: Attempt to get length of null "
            "array\n\tat com.android.server.input.InputShellCommand.sendText(InputShellCommand.java:298)",
            255,
        )
    text = text.replace("%s", " ")[:_MAX_TEXT]
    if android.awake and android.locked:
        android.typed_pin = (android.typed_pin + text)[-32:]
    elif text:
        android.act(p.Type(text=text))
    return Result()


def _motion(android: Android, phase: str, x: float, y: float) -> Result:
    if phase not in ("DOWN", "MOVE", "UP", "CANCEL"):
        return failed(f"Error: Invalid arguments for command: motionevent {phase}", 255)
    if phase == "DOWN":
        android.down = (x, y)
    elif phase != "MOVE":
        start, android.down = android.down, None
        if start is not None and phase == "UP":
            touch(android, *start, x, y, 0)
    return Result()


def _numbers(*words: str) -> list[float] | None:
    try:
        found = [float(word) for word in words]
    except ValueError:
        return None
    return found if all(math.isfinite(n) for n in found) else None


def _relative(at: float, size: int) -> float:
    """The middle of a pixel; a finger that leaves the screen is at its edge."""
    return (min(max(math.floor(at), 0), size - 1) + 0.5) / size


# --- what is seen -----------------------------------------------------------------------------------------------------


def screencap(android: Android, words: Sequence[str], stdin: bytes) -> Result:
    options = [word for word in words if word.startswith("-")]
    names = [word for word in words if not word.startswith("-") and not word.isdecimal()]
    ids = [word for option, word in pairwise(words) if option == "-d"]
    if ids and ids[0] not in android.panels:
        return failed(f"Display Id '{ids[0]}' is not valid.", 1)
    data = android.screenshot(*ids[:1]).data
    if "-p" not in options and not (names and names[0].endswith(".png")):
        data = _raw(data)
    said_before = _WHICH if len(android.panels) > 1 and not ids else b""
    if not names:
        return Result(data, said_before)
    android.files.write(names[0], data)
    return Result(err=said_before)


def _raw(data: bytes) -> bytes:
    """Width, height, format (RGBA_8888), colour space (sRGB), then the pixels."""
    with Image.open(BytesIO(data)) as picture:
        return struct.pack("<4I", picture.width, picture.height, 1, 1) + picture.convert("RGBA").tobytes()


def uiautomator(android: Android, words: Sequence[str], stdin: bytes) -> Result:
    if words[:1] != ["dump"]:
        return failed("Usage: uiautomator dump [--compressed] [file]")
    names = [word for word in words[1:] if not word.startswith("--")]
    place = names[0] if names else "/sdcard/window_dump.xml"
    if not android.awake:
        return Result(err=b"ERROR: null root node returned by UiTestAutomationBridge.\n")
    tree = android.tree()
    if place in ("/dev/tty", "/dev/stdout", "/proc/self/fd/1"):
        return said(f"{tree}UI hierchary dumped to: {place}")
    android.files.write(place, tree.encode())
    return said(f"UI hierchary dumped to: {place}")


def wm(android: Android, words: Sequence[str], stdin: bytes) -> Result:
    match list(words):
        case ["size"]:
            own = f"Physical size: {android.slot.width}x{android.slot.height}"
            return said(f"{own}\nOverride size: {'{}x{}'.format(*android.override)}" if android.override else own)
        case ["size", "reset"]:
            android.override = None
            return Result()
        case ["size", wanted] if (size := _SIZE.fullmatch(wanted)) is not None:
            android.override = (int(size[1]), int(size[2]))
            return Result()
        case ["density"]:
            return said(f"Physical density: {_DENSITY}")
        case ["density", "reset"]:
            return Result()
        case ["dismiss-keyguard"]:
            android.dismiss_keyguard()
            return Result()
        case ["user-rotation", "lock", turn] if turn in ("0", "1", "2", "3"):
            android.rotation = int(turn)
            return Result()
        case ["user-rotation", "free"] | ["set-user-rotation", "free"]:
            return Result()
        case ["set-user-rotation", "lock", turn] if turn in ("0", "1", "2", "3"):
            android.rotation = int(turn)
            return Result()
    return failed(f"Error: the simulated phone has no `wm {' '.join(words)}`", 255)
