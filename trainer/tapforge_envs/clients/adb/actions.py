"""An action as the shell line that carries it out on a phone. Pure.

1. What adb can't do, or must not do to a phone that is used unattended, is `UnsupportedAction` before anything runs.
2. Coordinates become pixels of the frame that was seen last.
3. A line is one call: where two commands belong together, the phone's shell joins them. None is longer than
   `MAX_LINE`, which old versions of adbd can take.

`input text` reads `%s` as a blank and can type what the phone's virtual keyboard has keys for: printable ASCII. Any
other text goes through ADBKeyboard (`keyboard.py`), which writes a line end into the field and presses nothing: line
ends are Enter by `input` with either.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Callable, Iterator
from string import ascii_uppercase, digits
from typing import Final

from ... import protocol as p

#: bytes; adbd took messages of 4096 bytes before Android 7
MAX_LINE: Final = 4000
#: Enter keys in one text: each piece between them is a call of its own, and a step has a deadline
MAX_ENTERS: Final = 24
#: characters of a text that are sent at once: 4 bytes each at most, and 4/3 of that in base64
_CHUNK: Final = 500

_DOUBLE_TAP: Final = "input tap {x} {y} && input tap {x} {y}"
_SWIPE_MS: Final = 250
_SCROLL_MS: Final = 500
_DRAG_MS: Final = 1500
#: of a side: what a scroll moves, and how near the finger comes to an edge, where a gesture of the system may begin
_SCROLL: Final = 0.5
_EDGE: Final = 0.08


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: the phone could not be woken again, or would leave adb
_REFUSED_KEYS: Final = _names("POWER SLEEP SOFT_SLEEP WAKEUP TV_POWER STB_POWER AVR_POWER CALL ENDCALL")
#: names of android.view.KeyEvent without KEYCODE_ that say something on a phone
KEYS: Final = (
    _names(
        "HOME BACK STAR POUND DPAD_UP DPAD_DOWN DPAD_LEFT DPAD_RIGHT DPAD_CENTER VOLUME_UP VOLUME_DOWN VOLUME_MUTE "
        "MUTE CAMERA FOCUS CLEAR COMMA PERIOD ALT_LEFT ALT_RIGHT SHIFT_LEFT SHIFT_RIGHT CTRL_LEFT CTRL_RIGHT META_LEFT "
        "META_RIGHT TAB SPACE SYM EXPLORER ENVELOPE ENTER NUMPAD_ENTER DEL FORWARD_DEL GRAVE MINUS EQUALS LEFT_BRACKET "
        "RIGHT_BRACKET BACKSLASH SEMICOLON APOSTROPHE SLASH AT PLUS MENU NOTIFICATION SEARCH ESCAPE PAGE_UP PAGE_DOWN "
        "MOVE_HOME MOVE_END INSERT FORWARD CAPS_LOCK SCROLL_LOCK NUM_LOCK BREAK SYSRQ APP_SWITCH ASSIST VOICE_ASSIST "
        "BRIGHTNESS_UP BRIGHTNESS_DOWN MEDIA_PLAY MEDIA_PAUSE MEDIA_PLAY_PAUSE MEDIA_STOP MEDIA_NEXT MEDIA_PREVIOUS "
        "MEDIA_REWIND MEDIA_FAST_FORWARD HEADSETHOOK ZOOM_IN ZOOM_OUT CONTACTS CALENDAR MUSIC CALCULATOR SETTINGS "
        "LANGUAGE_SWITCH COPY CUT PASTE REFRESH"
    )
    | frozenset(ascii_uppercase)
    | frozenset(digits)
    | frozenset(f"F{number}" for number in range(1, 13))
)


def command_of(action: p.Action, width: int, height: int) -> str:
    """The shell line of an action that touches the phone by gestures or keys, for a screen of that size in pixels.
    Raises UnsupportedAction for all others."""
    match action:
        case p.Tap(x=x, y=y):
            return f"input tap {p.pixel(x, width)} {p.pixel(y, height)}"
        case p.DoubleTap(x=x, y=y):
            return _DOUBLE_TAP.format(x=p.pixel(x, width), y=p.pixel(y, height))
        case p.LongPress(x=x, y=y, seconds=seconds):
            return _stroke("swipe", (x, y), (x, y), width, height, max(1, round(seconds * 1000)))
        case p.Swipe(x=x, y=y, x2=x2, y2=y2):
            return _stroke("swipe", (x, y), (x2, y2), width, height, _SWIPE_MS)
        case p.Drag(x=x, y=y, x2=x2, y2=y2):
            return _stroke("draganddrop", (x, y), (x2, y2), width, height, _DRAG_MS)
        case p.Scroll(direction=direction, x=x, y=y):
            start, end = _scrolled(direction, x, y)
            return _stroke("swipe", start, end, width, height, _SCROLL_MS)
        case p.Home():
            return "input keyevent KEYCODE_HOME"
        case p.Back():
            return "input keyevent KEYCODE_BACK"
        case p.AppSwitch():
            return "input keyevent KEYCODE_APP_SWITCH"
        case p.Enter():
            return "input keyevent KEYCODE_ENTER"
        case p.Key(name=name):
            return f"input keyevent KEYCODE_{_key(name)}"
    raise p.UnsupportedAction(f"{action.type}: a phone behind adb has no such action")


def _key(name: str) -> str:
    key = name.strip().upper().removeprefix("KEYCODE_")
    if key in _REFUSED_KEYS:
        raise p.UnsupportedAction(f"key {name!r} is not pressed on an unattended phone")
    if key not in KEYS:
        raise p.UnsupportedAction(f"key: a phone has no key {name!r}")
    return key


def _scrolled(direction: str, x: float, y: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """From where to where the finger moves, so that what lies in `direction` comes into view."""
    half = _SCROLL / 2
    middle = min(max(y if direction in ("up", "down") else x, _EDGE + half), 1 - _EDGE - half)
    first, second = middle + half, middle - half
    if direction in ("up", "left"):
        first, second = second, first
    return ((x, first), (x, second)) if direction in ("up", "down") else ((first, y), (second, y))


def _stroke(
    kind: str, start: tuple[float, float], end: tuple[float, float], width: int, height: int, milliseconds: int
) -> str:
    places = [p.pixel(start[0], width), p.pixel(start[1], height), p.pixel(end[0], width), p.pixel(end[1], height)]
    return f"input {kind} {' '.join(map(str, places))} {milliseconds}"


# --- text -------------------------------------------------------------------------------------------------------------


def needs_keyboard(text: str) -> bool:
    """Whether `input text` can't type it."""
    return any(not (" " <= c <= "~" or c in "\r\n\t") for c in text)


def input_text(text: str) -> list[str]:
    """The lines that type a text of printable ASCII, line ends and tabs. Raises UnsupportedAction."""
    return _lines(text, _by_keys)


def keyboard_text(text: str) -> list[str]:
    """The lines by which ADBKeyboard types a text of any script. Raises UnsupportedAction."""
    return _lines(text, _broadcasts)


def _lines(text: str, typed: Callable[[str], Iterator[str]]) -> list[str]:
    strokes = p.keystrokes(text)
    if (enters := sum(isinstance(stroke, p.Enter) for stroke in strokes)) > MAX_ENTERS:
        raise p.UnsupportedAction(f"type: {enters} line ends; at most {MAX_ENTERS} are pressed in one step on a phone")
    return [
        line
        for stroke in strokes
        for line in (typed(stroke.text) if isinstance(stroke, p.Type) else ("input keyevent KEYCODE_ENTER",))
    ]


def _by_keys(text: str) -> Iterator[str]:
    for part in _parts(text):
        yield "input keyevent KEYCODE_TAB" if part == "\t" else f"input text {_quoted(part)}"


def _parts(text: str) -> Iterator[str]:
    """What is typed at once: tabs by themselves, and `%` apart from an `s` after it: together they are a blank."""
    part = ""
    for c in text:
        if c == "\t" or (part.endswith("%") and c == "s") or len(part) >= _CHUNK:
            if part:
                yield part
            part = ""
        if c == "\t":
            yield c
        else:
            part += c
    if part:
        yield part


def _quoted(part: str) -> str:
    # Blanks as %s: the `input` script of older phones splits its arguments again.
    return shlex.quote(part.replace(" ", "%s"))


def _broadcasts(text: str) -> Iterator[str]:
    for at in range(0, len(text), _CHUNK):
        chunk = base64.b64encode(text[at : at + _CHUNK].encode("utf-8", "replace")).decode()
        yield f"am broadcast -a ADB_INPUT_B64 --es msg {chunk}"
