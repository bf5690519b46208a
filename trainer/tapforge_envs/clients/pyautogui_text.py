"""PyAutoGUI programs: from an action to the text that OSWorld executes, and from a model's text to actions.

- `program_of` builds text from typed actions only: numbers and quoted literals, never raw text.
  It fits behind "import pyautogui; import time; pyautogui.FAILSAFE = False; " on one line, where OSWorld puts it.
- `actions_of` reads a model's text as syntax and executes nothing: calls of a closed list with literal arguments become
  actions; everything else is a ValueError that names it. What is read back from a program is the action it came from.
- Pixels mean the middle of the pixel, so that every pixel of a screen survives both ways.
- `pyautogui_typing.py` has how a text is typed.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .. import protocol as p
from ..protocol import UnsupportedAction, pixel
from .model_code import statements
from .pyautogui_typing import typing_program

#: notches of the wheel when an action doesn't say, and for a page
NOTCHES: Final = 5
_PAGE: Final = 10
#: a model's program, in characters
MAX_TEXT: Final = 20_000

#: OSWorld's words beside programs
WAIT, DONE, FAIL = "WAIT", "DONE", "FAIL"

#: keys by PyAutoGUI's names; printable ASCII characters besides
KEYS: Final = frozenset((
    "alt", "altleft", "altright", "backspace", "capslock", "ctrl", "ctrlleft", "ctrlright", "delete", "down", "end",
    "enter", "esc", "home", "insert", "left", "menu", "numlock", "pagedown", "pageup", "pause", "printscreen",
    "right", "scrolllock", "shift", "shiftleft", "shiftright", "space", "tab", "up", "win", "winleft", "winright",
    "volumedown", "volumemute", "volumeup",
)) | frozenset(f"f{n}" for n in range(1, 25))  # fmt: skip
#: what others call them
_ALIASES: Final = {
    "return": "enter", "escape": "esc", "control": "ctrl", "cmd": "win", "command": "win", "super": "win",
    "meta": "win", "windows": "win", "option": "alt", "del": "delete", "ins": "insert", "page_up": "pageup",
    "pgup": "pageup", "page_down": "pagedown", "pgdn": "pagedown", "arrowup": "up", "arrowdown": "down",
    "arrowleft": "left", "arrowright": "right", "caps_lock": "capslock", "prtsc": "printscreen",
    "print_screen": "printscreen", "arrow_up": "up", "arrow_down": "down", "arrow_left": "left", "arrow_right": "right",
    "prior": "pageup", "next": "pagedown", "back_space": "backspace", "opt": "alt", "scroll_lock": "scrolllock",
    "num_lock": "numlock", "spacebar": "space", "kp_enter": "enter", "\n": "enter", "\r": "enter", "\t": "tab",
    " ": "space",
    **{
        f"{word}{side}": f"{key}{where}"
        for key, words in (
            ("ctrl", ("ctrl", "control")), ("shift", ("shift",)), ("alt", ("alt", "option")),
            ("win", ("win", "meta", "super", "cmd", "command")),
        )
        for word in words
        for side, where in (
            ("_l", "left"), ("_r", "right"), ("_left", "left"), ("_right", "right"), ("left", "left"),
            ("right", "right"),
        )
    },
}  # fmt: skip


def key_name(name: str) -> str | None:
    """PyAutoGUI's name of a key, None for what is not a key."""
    if len(name) == 1 and "!" <= name <= "~":
        return name.lower()
    low = name.lower() if name.strip() == "" else name.strip().lower()
    low = _ALIASES.get(low, low)
    return low if low in KEYS else None


# --- actions to programs ----------------------------------------------------------------------------------------------


def program_of(action: p.Action, width: int, height: int) -> str:
    """What OSWorld's `/step` is sent on a screen of that size. Raises UnsupportedAction."""

    def at(x: float, y: float) -> str:
        return f"{pixel(x, width)}, {pixel(y, height)}"

    match action:
        case p.Tap():
            return f"pyautogui.click({at(action.x, action.y)})"
        case p.RightClick():
            return f"pyautogui.click({at(action.x, action.y)}, button='right')"
        case p.MiddleClick():
            return f"pyautogui.click({at(action.x, action.y)}, button='middle')"
        case p.DoubleTap():
            return f"pyautogui.doubleClick({at(action.x, action.y)})"
        case p.TripleClick():
            return f"pyautogui.tripleClick({at(action.x, action.y)})"
        case p.Move():
            return f"pyautogui.moveTo({at(action.x, action.y)})"
        case p.Drag():
            start, end = at(action.x, action.y), at(action.x2, action.y2)
            return f"pyautogui.moveTo({start}); pyautogui.dragTo({end}, duration=1.0, button='left')"
        case p.Scroll():
            return _wheel(action, at(action.x, action.y))
        case p.Type():
            return typing_program(action.text)
        case p.Enter():
            return "pyautogui.press('enter')"
        case p.Key():
            return f"pyautogui.press({_key(action.name)})"
        case p.Hotkey():
            return f"pyautogui.hotkey({', '.join(map(_key, action.keys))})"
        case p.Wait():
            return WAIT
        case p.Answer() | p.Terminate(status="success"):  # OSWorld has no answers: it judges what is on the machine
            return DONE
        case p.Terminate():
            return FAIL
    raise UnsupportedAction(f"a desktop behind PyAutoGUI has no {action.type}")


def _wheel(action: p.Scroll, place: str) -> str:
    notches = action.notches or NOTCHES
    if action.direction in ("left", "right"):
        return f"pyautogui.hscroll({-notches if action.direction == 'left' else notches}, {place})"
    return f"pyautogui.scroll({-notches if action.direction == 'down' else notches}, {place})"


def _key(name: str) -> str:
    known = key_name(name)
    if known is None:
        raise UnsupportedAction(f"PyAutoGUI has no key {name!r:.80}")
    if known == "<":
        raise UnsupportedAction("the key '<' types '>' on X11; use the hotkey shift + ,")
    return repr(known)


# --- programs to actions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """What the coordinates of a model mean: the size of the screen in pixels that it counts in, or None for a model
    that writes numbers from 0 to 1."""

    size: tuple[int, int] | None = None

    def relative(self, value: float, side: int) -> float:
        """Raises ValueError outside the screen."""
        if self.size is None:
            if not 0 <= value <= 1:
                raise ValueError(f"the coordinate {value:g} is not between 0 and 1")
            return value
        pixels = self.size[side]
        if not 0 <= value < pixels:
            raise ValueError(f"the coordinate {value:g} is not on a side of {pixels} pixels")
        return min(1.0, (math.floor(value) + 0.5) / pixels)


#: parameters of each call in their order; those that change nothing that an action can say are taken and left
_IGNORED: Final = frozenset(("duration", "interval", "pause", "tween", "logScreenshot", "_pause", "mouseDownUp"))
_AT: Final = ("x", "y")
_SIGNATURES: Final[Mapping[str, tuple[str, ...]]] = {
    "click": (*_AT, "clicks", "interval", "button", "duration"),
    "leftClick": (*_AT, "interval", "duration"),
    "rightClick": (*_AT, "interval", "duration"),
    "middleClick": (*_AT, "interval", "duration"),
    "doubleClick": (*_AT, "interval", "button", "duration"),
    "tripleClick": (*_AT, "interval", "button", "duration"),
    "moveTo": (*_AT, "duration", "tween"),
    "dragTo": (*_AT, "duration", "tween", "button", "from_coord", "to_coord"),
    "scroll": ("clicks", *_AT, "page"),
    "vscroll": ("clicks", *_AT, "page"),
    "hscroll": ("clicks", *_AT, "page"),
    "write": ("message", "interval"),
    "typewrite": ("message", "interval"),
    "press": ("keys", "presses", "interval"),
    "hotkey": (),
}
_CLICKS: Final[Mapping[str, tuple[int, str]]] = {
    "click": (1, "left"),
    "leftClick": (1, "left"),
    "rightClick": (1, "right"),
    "middleClick": (1, "middle"),
    "doubleClick": (2, "left"),
    "tripleClick": (3, "left"),
}
#: (clicks, button) -> the action
_CLICK_ACTIONS: Final[Mapping[tuple[int, str], Callable[..., p.Action]]] = {
    (1, "left"): p.Tap,
    (2, "left"): p.DoubleTap,
    (3, "left"): p.TripleClick,
    (1, "right"): p.RightClick,
    (1, "middle"): p.MiddleClick,
}


def actions_of(text: str, scale: Scale) -> list[p.Action]:
    """The actions that a model's program means, in their order; `WAIT`, `DONE` and `FAIL` too. Raises ValueError."""
    word = text.strip()
    if len(text) > MAX_TEXT:
        raise ValueError(f"a program of {len(text)} characters; {MAX_TEXT} are allowed")
    match word.upper():
        case "WAIT":
            return [p.Wait()]
        case "DONE":
            return [p.Terminate(status="success")]
        case "FAIL":
            return [p.Terminate(status="infeasible")]
    reader = _Reader(scale)
    for statement in statements(word):
        reader.read(statement)
    return reader.finished()


class _Reader:
    """Statement by statement. The pointer is remembered: a drag begins where the last move went."""

    def __init__(self, scale: Scale):
        self._scale = scale
        self._actions: list[p.Action] = []
        self._pointer: tuple[float, float] | None = None

    def finished(self) -> list[p.Action]:
        if not self._actions:
            raise ValueError("the program does nothing")
        return self._actions

    def read(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import(names=names) if all(n.name in ("pyautogui", "time") and not n.asname for n in names):
                pass
            case ast.Expr(value=ast.Constant(value=str())):  # a comment as a string
                pass
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) as call):
                if module == "time" and name == "sleep":
                    self._wait(_number(_bind(call, ("seconds",)), "seconds"))
                elif module == "pyautogui" and name in _SIGNATURES:
                    self._call(name, call)
                else:
                    raise ValueError(f"{module:.40}.{name:.40} is not a call that is allowed")
            case _:
                raise ValueError(f"{type(statement).__name__} is not allowed: only calls of pyautogui are")

    def _add(self, action: p.Action) -> None:
        self._actions.append(action)

    def _wait(self, seconds: float) -> None:
        if not 0 <= seconds <= 60:
            raise ValueError(f"time.sleep({seconds:g}): 0 to 60 seconds are allowed")
        self._add(p.Wait(seconds=seconds))

    def _call(self, name: str, call: ast.Call) -> None:
        given = {} if name == "hotkey" else _bind(call, _SIGNATURES[name])
        if name == "hotkey":
            self._add(p.Hotkey(keys=_keys(call)))
        elif name in ("write", "typewrite"):
            text = _text(given, "message")
            if len(text) > 10_000:
                raise ValueError(f"a text of {len(text)} characters; 10000 are allowed")
            self._add(p.Type(text=text))
        elif name == "press":
            self._press(given)
        elif name in ("scroll", "vscroll", "hscroll"):
            self._scroll(name, given)
        elif name == "moveTo":
            self._move(self._place(given))
        elif name == "dragTo":
            self._drag(given)
        else:
            self._click(name, given)

    def _move(self, place: tuple[float, float] | None) -> None:
        if place is None:
            raise ValueError("moveTo needs x and y")
        self._pointer = place
        self._add(p.Move(x=place[0], y=place[1]))

    def _click(self, name: str, given: Mapping[str, Any]) -> None:
        clicks, button = _CLICKS[name]
        clicks = int(_number(given, "clicks", float(clicks)))
        button = _text(given, "button", button)
        button = {"primary": "left", "secondary": "right"}.get(button, button)
        kind, place = _CLICK_ACTIONS.get((clicks, button)), self._place(given) or self._pointer
        if kind is None:
            raise ValueError(f"{name}: {clicks} clicks of {button!r:.20} are not an action")
        if place is None:
            raise ValueError(f"{name} needs x and y, or a moveTo before it")
        self._forget_move()
        self._pointer = place
        self._add(kind(x=place[0], y=place[1]))

    def _drag(self, given: Mapping[str, Any]) -> None:
        start, end = self._pointer, self._place(given)
        if "from_coord" in given or "to_coord" in given:
            start, end = self._place({"x": given.get("from_coord")}), self._place({"x": given.get("to_coord")})
        if start is None or end is None or _text(given, "button", "left") not in ("left", "primary"):
            raise ValueError("dragTo needs the left button, a place and moveTo before it, or from_coord and to_coord")
        self._forget_move()
        self._pointer = end
        self._add(p.Drag(x=start[0], y=start[1], x2=end[0], y2=end[1]))

    def _forget_move(self) -> None:
        """A move that only led to what follows is part of it."""
        if self._actions and isinstance(self._actions[-1], p.Move):
            self._actions.pop()

    def _scroll(self, name: str, given: Mapping[str, Any]) -> None:
        """By notches, or by a part of a page: `page`, and what is less than one notch."""
        if "clicks" in given and "page" in given:
            raise ValueError(f"{name} takes clicks or page, not both")
        clicks = _number(given, "page" if "page" in given else "clicks")
        if not clicks:
            raise ValueError(f"{name}({clicks:g}) turns the wheel by nothing")
        turned = abs(clicks) * (_PAGE if "page" in given or abs(clicks) < 1 else 1)
        notches = min(100, max(1, round(turned)))
        place = self._place(given) or self._pointer or (0.5, 0.5)
        if name == "hscroll":
            self._add(p.Scroll(direction="left" if clicks < 0 else "right", x=place[0], y=place[1], notches=notches))
        else:
            self._add(p.Scroll(direction="down" if clicks < 0 else "up", x=place[0], y=place[1], notches=notches))

    def _press(self, given: Mapping[str, Any]) -> None:
        keys = given.get("keys")
        names = keys if isinstance(keys, list) else [keys]
        times = _number(given, "presses", 1.0)
        if not 1 <= times <= 20 or not 1 <= len(names) <= 20:
            raise ValueError(f"press: {len(names)} keys {times:g} times; 1 to 20 are allowed")
        for name in [_known(n) for n in names] * int(times):
            self._add(p.Enter() if name == "enter" else p.Key(name=name))

    def _place(self, given: Mapping[str, Any]) -> tuple[float, float] | None:
        if isinstance(given.get("x"), tuple | list) and "y" not in given and len(given["x"]) == 2:
            given = {"x": given["x"][0], "y": given["x"][1]}
        if given.get("x") is None and given.get("y") is None:
            return None
        x, y = _number(given, "x"), _number(given, "y")
        return self._scale.relative(x, 0), self._scale.relative(y, 1)


def _bind(call: ast.Call, names: Sequence[str]) -> dict[str, Any]:
    """Arguments by name, their values literals."""
    if len(call.args) > len(names):
        raise ValueError(f"{len(call.args)} arguments; {', '.join(names)} are there")
    given = {name: _literal(value) for name, value in zip(names, call.args, strict=False)}
    for keyword in call.keywords:
        # names that models write for a call's only text or key
        name = {"text": "message", "key": "keys", "button": "keys" if "keys" in names else "button"}.get(
            keyword.arg or "", keyword.arg
        )
        if name in given or name is None or (name not in names and name not in _IGNORED):
            raise ValueError(f"{keyword.arg!s:.40} is not an argument here, or comes twice")
        given[name] = _literal(keyword.value)
    return given


def _keys(call: ast.Call) -> tuple[str, ...]:
    values = [_literal(a) for a in call.args]
    values += [_literal(k.value) for k in call.keywords if k.arg not in _IGNORED]
    if len(values) == 1 and isinstance(values[0], list | tuple):
        values = list(values[0])
    # "ctrl+c" as one key is what some models write
    parts = [
        part for v in values for part in (v.split("+") if isinstance(v, str) and len(v) > 2 and "+" in v[1:-1] else [v])
    ]
    if not 1 <= len(parts) <= 8:
        raise ValueError(f"hotkey: {len(parts)} keys; 1 to 8 are allowed")
    return tuple(_known(part) for part in parts)


def _known(name: object) -> str:
    found = key_name(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"{name!r:.60} is not a key")
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"an argument is not a literal but {type(node).__name__}") from error


def _number(given: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = given.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        raise ValueError(f"{name} is {value!s:.40}, which is not a number")
    return float(value)


def _text(given: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = given.get(name, default)
    if isinstance(value, list) and all(isinstance(v, str) and len(v) == 1 for v in value):
        value = "".join(value)
    if not isinstance(value, str) or any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError(f"{name} is not text")
    return value
