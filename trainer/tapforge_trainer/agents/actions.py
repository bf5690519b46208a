"""The mobile_use tool: how Qwen's phone agents write an action, and what it means here.

Rules:
- One table, `FORMS`, says which actions there are and which fields each one has. All of its fields are required and no
  others are allowed; the tool's schema for the system prompt is derived from it.
- Model coordinates are 0..999 on each side. v means the relative coordinate v / 999: 0 is the first pixel and 999 the
  last. `grid` is the way back, to the nearest integer. On sides of up to 998 pixels the centre of every pixel survives
  the round trip.
- `read_arguments` raises ValueError with a message that names the field and the value; nothing is guessed or clamped.
- `format_action` is the canonical answer. Text that holds a marker of the answer format is written with \\u escapes, so
  that a parser always finds the block's real borders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from pydantic import ValidationError

from tapforge_envs.protocol import (
    Action,
    Answer,
    AppSwitch,
    AskUser,
    Back,
    DoubleTap,
    Enter,
    Home,
    Key,
    LongPress,
    OpenApp,
    Swipe,
    Tap,
    Terminate,
    Type,
    Wait,
)

TOOL_NAME = "mobile_use"
#: the largest model coordinate: the last pixel of a side
SCALE = 999
#: the longest hold or wait
_MAX_SECONDS = 60
#: strings with a meaning in the answer format (the model may also have them as single tokens)
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|")


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of one action besides `action`, and what the model is told about it."""

    fields: tuple[str, ...]
    description: str


FORMS: dict[str, Form] = {
    "click": Form(("coordinate",), "tap the point"),
    "long_press": Form(("coordinate", "time"), "hold the point for some seconds"),
    "double_tap": Form(("coordinate",), "tap the point twice"),
    "swipe": Form(("coordinate", "coordinate2"), "stroke from the first point to the second"),
    "type": Form(("text",), "type the text into the focused field"),
    "key": Form(("text",), "press a hardware key, such as VOLUME_UP or DEL"),
    "open": Form(("text",), "open the app of this name"),
    "system_button": Form(("button",), "press a system button"),
    "wait": Form(("time",), "do nothing for some seconds"),
    "answer": Form(("text",), "tell the user the answer that was asked for; ends the task"),
    "ask_user": Form(("text",), "ask the user for something that only the user knows"),
    "terminate": Form(("status",), "end the task and say how it went"),
}

BUTTONS = ("Back", "Home", "Menu", "Enter")
STATUSES = ("success", "failure", "infeasible")

#: schema of every field that a form may name
_FIELD_SCHEMAS: dict[str, dict] = {
    "coordinate": {
        "type": "array",
        "description": f"[x, y]; x from 0 (left edge) to {SCALE} (right edge), y from 0 (top) to {SCALE} (bottom)",
    },
    "coordinate2": {"type": "array", "description": "[x, y] of the point where the stroke ends"},
    "text": {"type": "string", "description": "what to type, open, press, answer or ask"},
    "time": {"type": "number", "description": f"seconds, at most {_MAX_SECONDS}"},
    "button": {"type": "string", "enum": list(BUTTONS)},
    "status": {"type": "string", "enum": list(STATUSES)},
}


def tool_schema() -> dict:
    """The tool as a function signature, in the shape that Qwen's chat format expects."""
    needed_by: dict[str, list[str]] = {}
    for name, form in FORMS.items():
        for field in form.fields:
            needed_by.setdefault(field, []).append(name)
    properties: dict[str, dict] = {
        "action": {
            "type": "string",
            "enum": list(FORMS),
            "description": "\n".join(f"* {name}: {form.description}" for name, form in FORMS.items()),
        }
    }
    for field, actions in needed_by.items():
        schema = _FIELD_SCHEMAS[field]
        needed = "required by " + ", ".join(actions)
        text = f"{schema['description']}; {needed}" if "description" in schema else needed
        properties[field] = {**schema, "description": text}
    return {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": (
                "Operates a phone by touch. You see a picture of its screen. "
                f"Positions are given on a grid of {SCALE} by {SCALE}, whatever the size of the picture. "
                "An app may need a moment to open or to load; wait then. Aim at the middle of what you want to touch."
            ),
            "parameters": {"type": "object", "properties": properties, "required": ["action"]},
        },
    }


# --- reading ----------------------------------------------------------------------------------------------------------


def read_arguments(arguments: Mapping[str, object]) -> Action:
    """The action that decoded JSON arguments say. Raises ValueError that names what is wrong."""
    name = arguments.get("action")
    if not isinstance(name, str) or name not in FORMS:
        raise ValueError(f"unknown action {_short(name)}; known are {', '.join(FORMS)}")
    expected = FORMS[name].fields
    missing = [field for field in expected if field not in arguments]
    if missing:
        raise ValueError(f"action {name} lacks {', '.join(missing)}")
    if len(arguments) != len(expected) + 1:
        extra = [field for field in arguments if field != "action" and field not in expected]
        raise ValueError(f"action {name} has no field {', '.join(_short(field) for field in extra)}")
    try:
        return _build(name, arguments)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"action {name}: {where} {_short(first['input'])}: {first['msg']}") from error


def _build(name: str, arguments: Mapping[str, object]) -> Action:
    match name:
        case "click":
            x, y = _point(arguments, "coordinate")
            return Tap(x=x, y=y)
        case "long_press":
            x, y = _point(arguments, "coordinate")
            return LongPress(x=x, y=y, seconds=_number(arguments, "time"))
        case "double_tap":
            x, y = _point(arguments, "coordinate")
            return DoubleTap(x=x, y=y)
        case "swipe":
            x, y = _point(arguments, "coordinate")
            x2, y2 = _point(arguments, "coordinate2")
            return Swipe(x=x, y=y, x2=x2, y2=y2)
        case "type":
            return Type(text=_text(arguments))
        case "key":
            return Key(name=_text(arguments))
        case "open":
            return OpenApp(name=_text(arguments))
        case "wait":
            return Wait(seconds=_number(arguments, "time"))
        case "answer":
            return Answer(text=_text(arguments))
        case "ask_user":
            return AskUser(text=_text(arguments))
        case "system_button":
            return _button(arguments["button"])
        case "terminate":
            return _terminate(arguments["status"])
    raise AssertionError(f"action {name} is in FORMS and not read here")


def _button(button: object) -> Action:
    match button:
        case "Back":
            return Back()
        case "Home":
            return Home()
        case "Menu":
            return AppSwitch()
        case "Enter":
            return Enter()
    raise ValueError(f"unknown button {_short(button)}; known are {', '.join(BUTTONS)}")


def _terminate(status: object) -> Action:
    match status:
        case "success":
            return Terminate(status="success")
        case "failure":
            return Terminate(status="failure")
        case "infeasible":
            return Terminate(status="infeasible")
    raise ValueError(f"unknown status {_short(status)}; known are {', '.join(STATUSES)}")


def _point(arguments: Mapping[str, object], field: str) -> tuple[float, float]:
    value = arguments[field]
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{field} {_short(value)} is not [x, y]")
    return relative(value[0], field), relative(value[1], field)


def relative(value: object, field: str = "coordinate") -> float:
    """Model coordinate -> relative. Raises ValueError for anything but a number from 0 to 999."""
    if _is_number(value) and 0 <= value <= SCALE:
        return value / SCALE
    raise ValueError(f"{field} holds {_short(value)}, which is no number from 0 to {SCALE}")


def _number(arguments: Mapping[str, object], field: str) -> float:
    value = arguments[field]
    if _is_number(value) and 0 <= value <= _MAX_SECONDS:
        return float(value)
    raise ValueError(f"{field} {_short(value)} is no number from 0 to {_MAX_SECONDS}")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(arguments: Mapping[str, object]) -> str:
    value = arguments["text"]
    if isinstance(value, str):
        return value
    raise ValueError(f"text {_short(value)} is no string")


def _short(value: object) -> str:
    """A value for an error message: printable, of bounded length, and without recursion into what a model wrote."""
    if isinstance(value, list) and len(value) <= 4 and not any(isinstance(item, list | dict) for item in value):
        return f"[{', '.join(_short(item) for item in value)}]"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a very large integer"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- writing ----------------------------------------------------------------------------------------------------------


def grid(x: float) -> int:
    """Relative -> the nearest model coordinate."""
    return round(x * SCALE)


def write_arguments(action: Action) -> dict[str, object]:
    """The canonical arguments. Raises ValueError for an action that mobile_use has no word for."""
    match action:
        case Tap():
            return {"action": "click", "coordinate": [grid(action.x), grid(action.y)]}
        case LongPress():
            point = [grid(action.x), grid(action.y)]
            return {"action": "long_press", "coordinate": point, "time": _seconds(action.seconds)}
        case DoubleTap():
            return {"action": "double_tap", "coordinate": [grid(action.x), grid(action.y)]}
        case Swipe():
            start, end = [grid(action.x), grid(action.y)], [grid(action.x2), grid(action.y2)]
            return {"action": "swipe", "coordinate": start, "coordinate2": end}
        case Type():
            return {"action": "type", "text": action.text}
        case Key():
            return {"action": "key", "text": action.name}
        case OpenApp():
            return {"action": "open", "text": action.name}
        case Wait():
            return {"action": "wait", "time": _seconds(action.seconds)}
        case Answer():
            return {"action": "answer", "text": action.text}
        case AskUser():
            return {"action": "ask_user", "text": action.text}
        case Terminate():
            return {"action": "terminate", "status": action.status}
        case Back():
            return {"action": "system_button", "button": "Back"}
        case Home():
            return {"action": "system_button", "button": "Home"}
        case AppSwitch():
            return {"action": "system_button", "button": "Menu"}
        case Enter():
            return {"action": "system_button", "button": "Enter"}
    raise ValueError(f"{TOOL_NAME} has no word for the action {action.type!r}; use one of {', '.join(FORMS)}")


def _seconds(value: float) -> int | float:
    return int(value) if value.is_integer() else value


def format_action(action: Action) -> str:
    """The canonical answer text. Raises ValueError for an action that mobile_use has no word for."""
    body = json.dumps({"name": TOOL_NAME, "arguments": write_arguments(action)}, ensure_ascii=False)
    if "<" in body and any(marker in body for marker in MARKERS):
        body = body.replace("<", "\\u003c")  # only strings hold a "<"
    if "\ufffd" in body:
        body = body.replace("\ufffd", "\\ufffd")  # raw, it is what broken bytes decode to
    return f"<tool_call>\n{body}\n</tool_call>"


#: one short word per action, for histories of few tokens
_WORDS = {
    "tap": "click",
    "long_press": "press",
    "double_tap": "double",
    "open_app": "open",
    "app_switch": "menu",
    "ask_user": "ask",
    "terminate": "stop",
}


def short_name(action: Action | None) -> str:
    """The action in one word; None, an answer that could not be parsed, is "invalid"."""
    return "invalid" if action is None else _WORDS.get(action.type, action.type)
