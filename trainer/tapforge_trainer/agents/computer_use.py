"""The computer_use tool: how Qwen's desktop agents write an action, and what it means here.

Rules:
- `key` takes a list of keys: one is pressed (`enter` is Enter), several are held together.
- `scroll` and `hscroll` count notches of the wheel in `pixels`: positive is up or right. The pointer stands at
  `coordinate`, or in the middle of the screen.
- A drag of Qwen's own tool begins where the pointer is, which no picture shows: here it begins at `coordinate` and ends
  at `coordinate2`. A left_click_drag with one point is a parse failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from tapforge_envs.clients.pyautogui_text import NOTCHES, key_name
from tapforge_envs.protocol import (
    Action,
    Answer,
    DoubleTap,
    Drag,
    Enter,
    Hotkey,
    Key,
    MiddleClick,
    Move,
    RightClick,
    Scroll,
    Tap,
    Terminate,
    TripleClick,
    Type,
    Wait,
)

from .coordinates import Plane, short
from .mobile_use import STATUSES, place_words, screen_words
from .tools import MAX_SECONDS, Arguments, Form, Tool, seconds

_MOST_NOTCHES = 100

FORMS: dict[str, Form] = {
    "left_click": Form(("coordinate",), "click the point"),
    "right_click": Form(("coordinate",), "click the point with the right button"),
    "middle_click": Form(("coordinate",), "click the point with the middle button"),
    "double_click": Form(("coordinate",), "click the point twice"),
    "triple_click": Form(("coordinate",), "click the point three times, which selects a line"),
    "mouse_move": Form(("coordinate",), "move the pointer to the point"),
    "left_click_drag": Form(("coordinate", "coordinate2"), "drag from the first point to the second"),
    "scroll": Form(("pixels",), "turn the wheel: up where positive, else down", ("coordinate",)),
    "hscroll": Form(("pixels",), "turn the wheel sideways: right where positive, else left", ("coordinate",)),
    "type": Form(("text",), "type the text"),
    "key": Form(("keys",), "press the keys together, in this order"),
    "wait": Form(("time",), "do nothing for some seconds"),
    "answer": Form(("text",), "tell the user the answer that was asked for; ends the task"),
    "terminate": Form(("status",), "end the task and say how it went"),
}

_CLICKS: dict[str, Callable[..., Action]] = {
    "left_click": Tap,
    "right_click": RightClick,
    "middle_click": MiddleClick,
    "double_click": DoubleTap,
    "triple_click": TripleClick,
    "mouse_move": Move,
}
_CLICK_NAMES = {kind: name for name, kind in _CLICKS.items()}


def description(plane: Plane) -> str:
    return (
        f"Operates a computer by mouse and keyboard. You see a picture of its screen. {screen_words(plane)}"
        "A program may need a moment to start or to load; wait then. Aim at the middle of what you want to click."
    )


def fields(plane: Plane) -> Mapping[str, dict]:
    return {
        "coordinate": {"type": "array", "description": place_words(plane)},
        "coordinate2": {"type": "array", "description": "[x, y] of the point where the drag ends"},
        "text": {"type": "string", "description": "what to type or to answer"},
        "keys": {"type": "array", "description": "names such as ctrl, shift, enter, f5, a"},
        "pixels": {"type": "number", "description": "notches of the wheel"},
        "time": {"type": "number", "description": f"seconds, at most {MAX_SECONDS}"},
        "status": {"type": "string", "enum": list(STATUSES)},
    }


def build(name: str, given: Arguments) -> Action:
    if name in _CLICKS:
        x, y = given.point()
        return _CLICKS[name](x=x, y=y)
    match name:
        case "left_click_drag":
            x, y = given.point()
            x2, y2 = given.point("coordinate2")
            return Drag(x=x, y=y, x2=x2, y2=y2)
        case "scroll":
            return _scroll(given, "up", "down")
        case "hscroll":
            return _scroll(given, "right", "left")
        case "type":
            return Type(text=given.text())
        case "key":
            return keys_action(given.values["keys"])
        case "wait":
            return Wait(seconds=given.number("time"))
        case "answer":
            return Answer(text=given.text())
        case "terminate":
            return given.choice("status", STATUSES)
    raise AssertionError(f"action {name} is in FORMS and not read here")


def _scroll(given: Arguments, positive: Literal["up", "right"], negative: Literal["down", "left"]) -> Action:
    turned = given.number("pixels", -1e6, 1e6)
    notches = min(_MOST_NOTCHES, round(abs(turned)))
    if not notches:
        raise ValueError(f"pixels {turned:g} turn the wheel by nothing")
    x, y = given.point() if given.has("coordinate") else (0.5, 0.5)
    return Scroll(direction=positive if turned > 0 else negative, x=x, y=y, notches=notches)


def keys_action(value: object) -> Action:
    """One key, or several together, of a list of names. Raises ValueError."""
    if not isinstance(value, list) or not 1 <= len(value) <= 8:
        raise ValueError(f"keys {short(value)} are not a list of 1 to 8 names")
    names = []
    for one in value:
        name = key_name(one) if isinstance(one, str) else None
        if name is None:
            raise ValueError(f"keys holds {short(one)}, which is not a key")
        names.append(name)
    if len(names) > 1:
        return Hotkey(keys=tuple(names))
    return Enter() if names[0] == "enter" else Key(name=names[0])


def arguments(action: Action, plane: Plane) -> dict[str, object] | None:
    if (name := _CLICK_NAMES.get(type(action))) is not None:
        place: Any = action
        return {"action": name, "coordinate": plane.at(place.x, place.y)}
    match action:
        case Drag():
            start, end = plane.at(action.x, action.y), plane.at(action.x2, action.y2)
            return {"action": "left_click_drag", "coordinate": start, "coordinate2": end}
        case Scroll():
            notches = action.notches or NOTCHES
            turned = notches if action.direction in ("up", "right") else -notches
            word = "scroll" if action.direction in ("up", "down") else "hscroll"
            return {"action": word, "pixels": turned, "coordinate": plane.at(action.x, action.y)}
        case Type():
            return {"action": "type", "text": action.text}
        case Key():
            return {"action": "key", "keys": [action.name]}
        case Hotkey():
            return {"action": "key", "keys": list(action.keys)}
        case Enter():
            return {"action": "key", "keys": ["enter"]}
        case Wait():
            return {"action": "wait", "time": seconds(action.seconds)}
        case Answer():
            return {"action": "answer", "text": action.text}
        case Terminate():
            return {"action": "terminate", "status": action.status}
    return None


COMPUTER_USE = Tool("computer_use", FORMS, build, arguments, description, fields)
