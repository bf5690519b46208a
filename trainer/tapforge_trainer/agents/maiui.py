"""MAI-UI: phones, with a mobile_use tool of its own fields. Built on Qwen3-VL.

- Coordinates are 0..999 on each side. A box of four numbers means its middle, as MAI-UI's own agent reads it.
- An answer is <thinking>...</thinking> and one call. The thinking variants open the answer themselves and close it with
  </think>: what stands before the last end of reasoning never becomes an action.
- Every earlier answer is a turn of its own, reasoning included; the oldest screens go.
- `swipe` names the way the finger goes, from `coordinate` or from the middle of the screen, over 0.4 of that side; as a
  stroke of ours it is a swipe. `drag` has two points.
- Buttons and statuses are written small. `fail` is failure; `infeasible` is more than MAI-UI has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from tapforge_envs.protocol import (
    Action,
    Answer,
    AppSwitch,
    AskUser,
    Back,
    DoubleTap,
    Drag,
    Enter,
    Home,
    LongPress,
    OpenApp,
    Swipe,
    Tap,
    Terminate,
    Type,
    Wait,
)

from .coordinates import Plane
from .dialect import Dialect
from .mobile_use import place_words, screen_words
from .parsing import ParseFailure, parse_framed_call
from .qwen3vl import GRID
from .tools import Arguments, Form, Tool

#: of a side, that a swipe goes
_STROKE: Final = 0.4
_POINT: Final = ("coordinate",)

FORMS: Final[dict[str, Form]] = {
    "click": Form(_POINT, "tap the point"),
    "long_press": Form(_POINT, "hold the point for a second"),
    "double_click": Form(_POINT, "tap the point twice"),
    "type": Form(("text",), "type the text into the focused field"),
    "swipe": Form(("direction",), "stroke that way, from the point or the middle", _POINT),
    "drag": Form(("start_coordinate", "end_coordinate"), "drag from one point to the other"),
    "open": Form(("text",), "open the app of this name"),
    "system_button": Form(("button",), "press a system button"),
    "wait": Form((), "wait for the screen to change"),
    "answer": Form(("text",), "tell the user the answer that was asked for; ends the task"),
    "ask_user": Form(("text",), "ask the user for something that only the user knows"),
    "terminate": Form(("status",), "end the task and say how it went"),
}
#: names that its agent's prompts have for the same
_ALIASES: Final = {"AWAKE": "open", "INFO": "ask_user", "double_tap": "double_click"}

_BUTTONS: Final[dict[str, Action]] = {"back": Back(), "home": Home(), "menu": AppSwitch(), "enter": Enter()}
_STATUSES: Final[dict[str, Action]] = {
    "success": Terminate(status="success"),
    "fail": Terminate(status="failure"),
    "infeasible": Terminate(status="infeasible"),
}
_WAYS: Final = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


def _description(plane: Plane) -> str:
    return f"Operates a phone by touch. You see a picture of its screen. {screen_words(plane)}"


def _fields(plane: Plane) -> Mapping[str, dict]:
    place = {"type": "array", "description": place_words(plane)}
    return {
        "coordinate": place,
        "start_coordinate": place,
        "end_coordinate": place,
        "text": {"type": "string", "description": "what to type, open, answer or ask"},
        "direction": {"type": "string", "enum": list(_WAYS)},
        "button": {"type": "string", "enum": list(_BUTTONS)},
        "status": {"type": "string", "enum": list(_STATUSES)},
    }


def _point(given: Arguments, field: str = "coordinate") -> tuple[float, float]:
    value = given.values[field]
    if isinstance(value, list) and len(value) == 4:
        x1, y1 = given.plane.place(value[0], value[1], field)
        x2, y2 = given.plane.place(value[2], value[3], field)
        return (x1 + x2) / 2, (y1 + y2) / 2
    return given.point(field)


def _build(name: str, given: Arguments) -> Action:
    match name:
        case "click":
            x, y = _point(given)
            return Tap(x=x, y=y)
        case "long_press":
            x, y = _point(given)
            return LongPress(x=x, y=y)
        case "double_click":
            x, y = _point(given)
            return DoubleTap(x=x, y=y)
        case "type":
            return Type(text=given.text())
        case "swipe":
            x, y = _point(given) if given.has("coordinate") else (0.5, 0.5)
            return stroke(x, y, given.choice("direction", _WAYS))
        case "drag":
            x, y = _point(given, "start_coordinate")
            x2, y2 = _point(given, "end_coordinate")
            return Drag(x=x, y=y, x2=x2, y2=y2)
        case "open":
            return OpenApp(name=given.text())
        case "system_button":
            return given.choice("button", _BUTTONS)
        case "wait":
            return Wait()
        case "answer":
            return Answer(text=given.text())
        case "ask_user":
            return AskUser(text=given.text())
        case "terminate":
            return given.choice("status", _STATUSES)
    raise AssertionError(f"action {name} is in FORMS and not read here")


def stroke(x: float, y: float, way: tuple[int, int]) -> Swipe:
    """From the place, as far as the screen goes."""
    x2 = min(1.0, max(0.0, x + _STROKE * way[0]))
    y2 = min(1.0, max(0.0, y + _STROKE * way[1]))
    return Swipe(x=x, y=y, x2=x2, y2=y2)


def way_of(action: Swipe) -> str | None:
    """The direction of a stroke that `stroke` makes from the same place; None of another one."""
    return next((name for name, way in _WAYS.items() if stroke(action.x, action.y, way) == action), None)


def _arguments(action: Action, plane: Plane) -> dict[str, object] | None:
    match action:
        case Tap():
            return {"action": "click", "coordinate": plane.at(action.x, action.y)}
        case LongPress(seconds=1.0):
            return {"action": "long_press", "coordinate": plane.at(action.x, action.y)}
        case DoubleTap():
            return {"action": "double_click", "coordinate": plane.at(action.x, action.y)}
        case Type():
            return {"action": "type", "text": action.text}
        case Swipe() if (way := way_of(action)) is not None:
            return {"action": "swipe", "direction": way, "coordinate": plane.at(action.x, action.y)}
        case Drag():
            start, end = plane.at(action.x, action.y), plane.at(action.x2, action.y2)
            return {"action": "drag", "start_coordinate": start, "end_coordinate": end}
        case OpenApp():
            return {"action": "open", "text": action.name}
        case Wait(seconds=1.0):
            return {"action": "wait"}
        case Answer():
            return {"action": "answer", "text": action.text}
        case AskUser():
            return {"action": "ask_user", "text": action.text}
        case Terminate():
            return {"action": "terminate", "status": "fail" if action.status == "failure" else action.status}
    button = next((name for name, pressed in _BUTTONS.items() if pressed == action), None)
    return None if button is None else {"action": "system_button", "button": button}


TOOL: Final = Tool("mobile_use", FORMS, _build, _arguments, _description, _fields, _ALIASES)
_PLANE: Final = Plane(GRID, GRID.largest + 1, GRID.largest + 1)


def _system(plane: Plane, written: bool) -> str:
    shown = "" if written else "\n\n# Tool\n" + json.dumps(TOOL.schema(plane), ensure_ascii=False)
    return (
        "You operate a phone for the user. You are given the task and what was seen and done so far, and decide on the "
        f"next action.{shown}\n\n# Answer\n\nThink first, between <thinking> and </thinking>: a short plan, and the "
        "next action in one sentence. Then call the function once, as JSON between tags:\n"
        '<thinking>\n...\n</thinking>\n<tool_call>\n{"name": "mobile_use", "arguments": {"action": ..., ...}}\n'
        "</tool_call>"
    )


def parse(text: str, plane: Plane) -> Action | ParseFailure:
    """Reasoning ends with </thinking> or </think>; the call stands after it."""
    return parse_framed_call(text, TOOL, plane, conclusion=False)


DIALECT: Final = Dialect(
    "mai-ui",
    GRID,
    _system,
    parse,
    TOOL.format,
    schema=TOOL.schema,
    history="all",
    spoken=str.strip,
    task=lambda goal, lines: goal,
)
